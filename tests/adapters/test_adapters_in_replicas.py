"""Adapters of replicas: each process reads them, and the front says which its requests mean and how long they live."""

import functools
import gc
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.features.adapters.loading import Adapter
from nanovllm.features.adapters.salts import AdapterSalt
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.messages import (
    AdapterLoaded,
    Add,
    DropAdapter,
    LoadAdapter,
    Ready,
    SentRequest,
    decode_to_engine,
    encode,
)
from nanovllm.serving.replicas.pool_adapters import PoolAdapters
from nanovllm.serving.replicas.replica_queue import ReplicaQueue
from nanovllm.serving.replicas.routing import round_robin
from tests.support.adapter_files import save_adapter
from tests.support.llms import comes_true, generate, greedy
from tests.support.replicas import (
    OPTIONS,
    answers,
    busiest,
    completions,
    kill,
    one_engine,
    shared_pool,
    tiny_folder,
    wait_until_up,
)
from tests.support.tiny_models import random_prompts, tiny_model

pytestmark = pytest.mark.usefixtures("programs_are_forked")

LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
SEEDED = SamplingParams(seed=3, max_tokens=60, top_p=0.9, frequency_penalty=0.5, ignore_eos=True)


def save(folder, seed, **options):
    """Save an adapter of the tiny model; returns its folder."""
    return Path(save_adapter(folder, tiny_model(), seed=seed, **options))


@functools.cache
def folders():
    """Folders of adapters, which no test changes."""
    root = Path(tempfile.mkdtemp(prefix="nanovllm-adapters-"))
    return {name: save(root / name, seed) for seed, name in enumerate("abc", start=1)}


@functools.cache
def expected_engine():
    """One engine with all adapters."""
    llm = one_engine()
    for name, folder in folders().items():
        llm.load_adapter(name, folder)
    return llm


def whole(prompts, params, adapter):
    return answers(expected_engine(), prompts, params, adapter=adapter)


@pytest.fixture
def llm():
    """Both replicas up, no memory of earlier deaths, and two adapters loaded."""
    llm = shared_pool()
    for each in llm._engine.replicas:
        each._num_deaths = 0
    for name in "ab":
        llm.load_adapter(name, folders()[name])
    yield llm
    for name in llm.adapters:
        llm.unload_adapter(name)


def read(stream, count):
    return [next(stream) for _ in range(count)]


def assert_whole(outputs, prompt, adapter, params=LONG):
    assert completions(outputs[-1:]) == whole([prompt], params, adapter)


def lost(digest):
    """A salt of an adapter that no front has loaded."""
    return AdapterSalt(Adapter("lost", "/lost", digest, 4, {}), "")


def is_dropped(llm, digest):
    """Whether both replicas refuse a request of an adapter."""
    gc.collect()
    llm._engine.step()
    outputs = generate(llm, random_prompts(2, seed=50), greedy(1), cache_salt=lost(digest))
    return all("no adapter with digest" in (output.error or "") for output in outputs)


# ------------------------------------------------------------------------------------------------------- two replicas


def test_mixed_requests_get_what_one_engine_gives(llm):
    prompts, names = random_prompts(9, seed=1), ["a", "b", None] * 3
    params = [replace(one, max_tokens=30) for one in (LONG, SEEDED, SEEDED, LONG) * 3][:9]
    got = answers(llm, prompts, params, adapter=names)
    assert got == whole(prompts, params, names)
    plain = whole(prompts, params, None)
    assert [left == right for left, right in zip(got, plain, strict=True)] == [name is None for name in names]
    assert llm.adapters.keys() == {"a", "b"} and not llm.adapters["a"].factors
    assert llm.adapters["a"].digest == expected_engine().adapters["a"].digest and llm.adapters["a"].rank == 8


def test_a_relative_path_is_read_where_the_front_is(llm, monkeypatch):
    monkeypatch.chdir(folders()["a"].parent)
    adapter = llm.load_adapter("near", "a")
    assert adapter.path == str(folders()["a"]) and adapter.digest == llm.adapters["a"].digest


def test_requests_of_an_adapter_return_to_their_prefix_and_find_no_blocks_of_another(llm):
    llm.reset_prefix_cache()
    prompt = random_prompts(1, low=96, high=96, seed=8)[0]
    tails = random_prompts(4, seed=9)

    def hits(adapter):
        return [generate(llm, prompt + tail, greedy(2), adapter=adapter)[0].num_cached_tokens for tail in tails]

    assert [hits(adapter) for adapter in ("a", "b", None)] == [[0, 96, 96, 96]] * 3
    assert min(hits("a")) >= 96  # and some of the tails


@pytest.mark.full
def test_an_unload_disturbs_no_stream_and_the_name_may_mean_other_bytes(llm):
    prompts = random_prompts(4, seed=2)
    digest = llm.adapters["a"].digest
    streams = [llm.stream(prompt, LONG, adapter="a") for prompt in prompts]
    outputs = [read(stream, 3) for stream in streams]
    llm.unload_adapter("a")
    with pytest.raises(ValueError, match="no adapter is named 'a'"):
        llm.unload_adapter("a")
    with pytest.raises(ValueError, match="no adapter is named 'a'"):
        generate(llm, prompts, LONG, adapter="a")
    llm.load_adapter("a", folders()["b"])
    assert answers(llm, prompts, SEEDED, adapter="a") == whole(prompts, SEEDED, "b")
    for prompt, stream, shown in zip(prompts, streams, outputs, strict=True):
        assert_whole([*shown, *stream], prompt, "a")
    del streams, stream
    comes_true(lambda: is_dropped(llm, digest))
    assert answers(llm, prompts, SEEDED, adapter=["a", "b", None, "b"]) == whole(prompts, SEEDED, ["b", "b", None, "b"])


def test_equal_bytes_stay_as_long_as_one_name_has_them(llm, tmp_path):
    llm.load_adapter("twin", save(tmp_path / "twin", 1))
    digest = llm.adapters["twin"].digest
    llm.unload_adapter("a")
    assert not is_dropped(llm, digest)
    prompts = random_prompts(2, seed=3)
    assert answers(llm, prompts, SEEDED, adapter="twin") == whole(prompts, SEEDED, "a")
    llm.unload_adapter("twin")
    comes_true(lambda: is_dropped(llm, digest))


def test_streams_of_adapters_go_on_token_for_token_though_a_replica_is_killed(llm):
    prompts = random_prompts(8, low=40, high=40, seed=4)
    params, names = [LONG, SEEDED] * 4, ["a", "a", "b", "b", None, "b", "a", None]
    streams = [llm.stream(*each, adapter=name) for *each, name in zip(prompts, params, names, strict=True)]
    outputs = [read(stream, 3) for stream in streams]
    kill(llm, busiest(llm))
    ends = [[*shown, *stream][-1] for shown, stream in zip(outputs, streams, strict=True)]
    assert completions(ends) == whole(prompts, params, names)
    assert any(end.metrics.num_preemptions for end in ends)
    wait_until_up(llm)
    assert answers(llm, prompts, params, adapter=names) == whole(prompts, params, names)


def test_an_unloaded_adapter_of_a_stream_is_read_again_by_replicas_that_start_again(llm):
    prompts = random_prompts(4, seed=5)
    streams = [llm.stream(prompt, LONG, adapter="a") for prompt in prompts]
    outputs = [read(stream, 2) for stream in streams]
    llm.unload_adapter("a")
    for index in (0, 1):
        kill(llm, index)
    for prompt, stream, shown in zip(prompts, streams, outputs, strict=True):
        assert_whole([*shown, *stream], prompt, "a")
    wait_until_up(llm)
    assert answers(llm, prompts, SEEDED, adapter="b") == whole(prompts, SEEDED, "b")


@pytest.mark.parametrize("change", ["other bytes", "gone"])
def test_a_folder_that_changes_before_a_restart_ends_requests_of_its_adapter_alone(llm, tmp_path, monkeypatch, change):
    monkeypatch.setattr(llm._engine, "_route", round_robin())
    folder = save(tmp_path / "changing", 3)
    llm.load_adapter("changing", folder)
    if change == "gone":
        folder.rename(tmp_path / "elsewhere")
    else:
        save(folder, 2)
    kill(llm, 0)
    wait_until_up(llm)
    prompts, names = random_prompts(8, seed=6), ["changing", "b", None, "changing"] * 2
    outputs = generate(llm, prompts, SEEDED, adapter=names)
    expected = whole(prompts, SEEDED, ["c", "b", None, "c"] * 2)
    said = "has changed since it was loaded" if change == "other bytes" else "cannot be read"
    for index, (output, answer) in enumerate(zip(outputs, expected, strict=True)):
        if index in (0, 4):  # in the replica that has started again
            assert output.outputs[0].finish_reason == "error" and not output.outputs[0].token_ids
            assert said in output.error and "changing" in output.error
        else:
            assert completions([output]) == [answer]
    if change == "other bytes":
        llm.load_adapter("changing", folder)
        assert answers(llm, prompts, SEEDED, adapter="changing") == whole(prompts, SEEDED, "b")


@pytest.mark.parametrize(
    ("break_folder", "message"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be read"),
        (lambda folder: save(folder, 4, rank=65), "has rank 65, and max_lora_rank is 64"),
    ],
)
def test_a_bad_folder_changes_nothing(llm, tmp_path, break_folder, message):
    break_folder(folder := save(tmp_path / "bad", 4))
    before = llm.adapters
    stream = llm.stream(prompt := random_prompts(1, seed=7)[0], LONG, adapter="a")
    outputs = read(stream, 3)
    for name in ("a", "new"):
        with pytest.raises(ValueError, match=message):
            llm.load_adapter(name, folder)
    assert llm.adapters == before
    assert_whole([*outputs, *stream], prompt, "a")
    assert answers(llm, [prompt], SEEDED, adapter="a") == whole([prompt], SEEDED, "a")


def test_an_adapter_that_a_replica_lacks_ends_the_request_and_no_other(llm):
    salts = ["", lost("0" * 32), "mine", lost("1" * 32)]
    for kind in ("generate", "stream"):
        prompts = random_prompts(4, seed=10)
        if kind == "generate":
            outputs = generate(llm, prompts, greedy(5), cache_salt=salts)
        else:
            outputs = [list(llm.stream(p, greedy(5), cache_salt=s))[-1] for p, s in zip(prompts, salts, strict=True)]
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"] * 2
        assert f"no adapter with digest {'1' * 32} is loaded" in outputs[3].error
        assert not outputs[3].outputs[0].token_ids and not llm._engine.requests


# ------------------------------------------------------------------------------------------------ one engine process


async def test_an_engine_process_loads_unloads_and_resumes_with_the_adapter_after_its_death():
    prompt, streamed = random_prompts(2, seed=11)
    async with AsyncLLM(tiny_folder(), engine_process=True, **OPTIONS) as llm:
        adapter = await llm.load_adapter("a", folders()["a"])
        assert llm.adapters == {"a": adapter}
        with pytest.raises(ValueError, match="cannot be read"):
            await llm.load_adapter("b", folders()["a"] / "nowhere")
        del adapter
        stream = llm.generate(streamed, LONG, adapter="a", output_kind="delta")
        outputs = [await anext(stream) for _ in range(5)]
        await llm.load_adapter("b", folders()["b"])
        await llm.unload_adapter("a")
        kill_one(llm)
        async for output in stream:
            outputs.append(output)
        tokens = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
        assert tokens == whole([streamed], LONG, "a")[0][0][1]
        answer = [output async for output in llm.generate(prompt, SEEDED, adapter="b")][-1]
        assert completions([answer]) == whole([prompt], SEEDED, "b")
        assert llm.adapters.keys() == {"b"}


def kill_one(llm):
    os.kill(llm.replicas()[0].process_id, signal.SIGKILL)


# ------------------------------------------------------------------------------------------ orders, without processes


class Fleet:
    """Two replicas that are up, and what is sent to them."""

    def __init__(self):
        self.replicas = [ReplicaQueue(0), ReplicaQueue(1)]
        self.up = self.replicas[:]
        self.sent = []

    def send(self, replica, message):
        self.sent.append((replica.index, message))

    def take(self, kind):
        found = [(index, message) for index, message in self.sent if isinstance(message, kind)]
        self.sent.clear()
        return found


def load(fleet, adapters, *turns):
    """Load an adapter; in each turn of waiting some (replica, message) are handled."""
    pending = iter(turns)

    def advance():
        for index, message in next(pending):
            if isinstance(message, AdapterLoaded):
                message.number = next(sent.number for _, sent in fleet.sent if is_new(sent))
            adapters.handle(fleet.replicas[index], message)

    return adapters.load("a", "/folder", advance)


def is_new(message):
    """Whether it is the order of a new adapter, not of one that a replica has lost."""
    return isinstance(message, LoadAdapter) and message.digest is None


def said(digest="d1", error=None):
    return AdapterLoaded(-1, digest, 4, error)


def both(*messages):
    return list(enumerate(messages or (said(), said())))


READY = Ready({}, None, "", None)


def test_if_one_replica_fails_the_other_forgets_the_adapter():
    adapters = PoolAdapters(fleet := Fleet())
    with pytest.raises(ValueError, match=r"^no room$"):
        load(fleet, adapters, [(0, said())], [(1, said("", "no room"))])
    assert fleet.take(DropAdapter) == [(0, DropAdapter("d1")), (1, DropAdapter("d1"))]
    assert load(fleet, adapters, both()).digest == "d1"


def test_replicas_that_read_different_bytes_forget_both():
    adapters = PoolAdapters(fleet := Fleet())
    with pytest.raises(ValueError, match="replicas read different bytes of the adapter 'a' from /folder"):
        load(fleet, adapters, both(said("d1"), said("d2")))
    assert {message.digest for _, message in fleet.take(DropAdapter)} == {"d1", "d2"}


def test_bytes_that_another_adapter_has_are_dropped_with_the_last_one():
    adapters = PoolAdapters(fleet := Fleet())
    kept = load(fleet, adapters, both())
    fleet.sent.clear()
    with pytest.raises(ValueError, match="no room"):
        load(fleet, adapters, both(said(), said("", "no room")))
    assert fleet.take(DropAdapter) == []
    load(fleet, adapters, both())
    adapters.drop_unused()
    assert fleet.take(DropAdapter) == []
    del kept
    adapters.drop_unused()
    assert len(fleet.take(DropAdapter)) == 2


def test_bytes_that_are_loaded_again_while_they_are_collected_are_not_dropped():
    adapters = PoolAdapters(fleet := Fleet())
    gone = [load(fleet, adapters, both())]
    fleet.sent.clear()

    class Collects(list):
        def __iter__(self):
            gone.clear()
            adapters.drop_unused()
            return super().__iter__()

    assert load(fleet, adapters, Collects(both())).digest == "d1"
    assert fleet.take(DropAdapter) == []


def test_a_replica_that_dies_while_it_loads_is_not_waited_for():
    adapters = PoolAdapters(fleet := Fleet())
    assert load(fleet, adapters, [(0, said())], [(1, None)]).rank == 4
    fleet.sent.clear()
    with pytest.raises(ValueError, match="every replica died while it loaded the adapter 'a' from /folder"):
        load(fleet, adapters, both(None, None))


def test_a_replica_that_comes_up_gets_every_adapter_and_the_one_that_is_loaded():
    adapters = PoolAdapters(fleet := Fleet())
    kept = load(fleet, adapters, both())
    fleet.sent.clear()
    fleet.up = []
    loaded = load(fleet, adapters, [], [(0, READY)], [(0, said("d2"))])
    assert [message.digest for _, message in fleet.take(LoadAdapter)] == [kept.digest, None]
    del loaded
    adapters.handle(fleet.replicas[0], READY)
    assert [message.digest for _, message in fleet.take(LoadAdapter)] == [kept.digest]


def test_an_answer_after_an_interrupted_load_is_undone():
    adapters = PoolAdapters(fleet := Fleet())
    with pytest.raises(StopIteration):
        load(fleet, adapters)
    ((_, order), _) = fleet.take(LoadAdapter)
    adapters.handle(fleet.replicas[1], AdapterLoaded(order.number, "d1", 4))
    adapters.drop_unused()
    assert len(fleet.take(DropAdapter)) == 2


def test_a_salt_is_sent_as_plain_text():
    sent = SentRequest.from_new(NewRequest("x", [1], SamplingParams(), cache_salt=lost("2" * 32)), 0, None)
    assert type(sent.cache_salt) is str
    (request,) = decode_to_engine(encode(Add([sent]))).requests
    assert request.cache_salt == str(lost("2" * 32))
