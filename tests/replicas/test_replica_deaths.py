"""A replica that dies costs nobody a token: its requests go on in the other, and it is started again."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from nanovllm import LLM, EngineDeadError, SamplingParams
from nanovllm.errors import EngineClosedError, ModelLoadError
from nanovllm.models.source import stored_files
from nanovllm.outputs import OutputKind
from nanovllm.serving.replicas import fleet, opening, pool, replica
from tests.support.llms import comes_true, submit
from tests.support.replicas import (
    ENDLESS,
    OPTIONS,
    REPLICAS,
    answers,
    assert_as_one_engine,
    busiest,
    completions,
    is_alive,
    kill,
    one_engine,
    process_ids,
    send_signal,
    shared_pool,
    tiny_folder,
    wait_until_up,
)
from tests.support.tiny_models import random_prompts, save_tiny, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("programs_are_forked")

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=60, top_p=0.9, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=60, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=60, n=3, stop=["xq"], min_tokens=20),
]


@pytest.fixture
def llm():
    """Both replicas up, and no memory of earlier deaths."""
    llm = shared_pool()
    for each in llm._engine.replicas:
        each._num_deaths = 0
    return llm


def refuse_start(fleet):
    raise ModelLoadError("another model")


def interrupt(*_):
    raise KeyboardInterrupt


def whole(prompts, params):
    return answers(one_engine(), prompts, params)


def assert_whole(outputs, prompt, params=PARAMS[0]):
    """Check that a stream ended with what one engine gives."""
    assert completions(outputs[-1:]) == whole([prompt], params)


def assert_grows_by_single_tokens(outputs):
    for before, after in itertools.pairwise(outputs):
        for left, right in zip(before.outputs, after.outputs, strict=False):
            assert right.text.startswith(left.text) and right.token_ids[: len(left.token_ids)] == left.token_ids
            assert len(right.token_ids) - len(left.token_ids) <= 1


def test_streams_show_every_token_once_though_a_replica_is_killed(llm):
    prompts = random_prompts(8, low=40, high=40, seed=1)
    params = [replace(one, max_tokens=110) for one in PARAMS * 2]  # on a busy machine shorter ones end before the death
    streams = [llm.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    outputs = [[next(stream) for _ in range(3)] for stream in streams]
    moved = [request.new.request_id for request in llm._engine.replicas[0].requests.values()]
    kill(llm, 0)
    for shown, stream in zip(outputs, streams, strict=True):
        shown += stream
        assert_grows_by_single_tokens(shown)
    assert completions([shown[-1] for shown in outputs]) == whole(prompts, params)
    assert 0 < len(moved) < 8 and any(shown[-1].metrics.num_preemptions for shown in outputs)
    for shown in outputs:
        before, after = shown[0].metrics, shown[-1].metrics
        assert after.num_preemptions <= (shown[0].request_id in moved)  # it may have ended before
        assert after.first_token_time == before.first_token_time
        assert after.max_itl >= max(output.metrics.max_itl or 0.0 for output in shown)


def test_deltas_and_final_outputs_lose_nothing_though_a_replica_is_killed(llm):
    prompts, params = random_prompts(8, low=40, high=40, seed=2), PARAMS * 2
    engine, ids = llm._engine, process_ids(llm)
    outputs = {str(number): [] for number in range(8)}
    for number in range(8):
        kind = OutputKind.DELTA if number < 4 else OutputKind.FINAL
        submit(engine, str(number), prompts[number], params[number], output_kind=kind)
    num_steps = 0
    while engine.requests:
        engine.step()
        num_steps += 1
        for output in engine.outputs:
            outputs[output.request_id].append(output)
        engine.outputs.clear()
        if num_steps == 20:
            kill(llm, 1)
    for number, each in enumerate(outputs.values()):
        if number >= 4:
            assert len(each) == 1
        for later in each[1:]:
            each[0].extend(later)
    assert completions([each[0] for each in outputs.values()]) == whole(prompts, params)
    wait_until_up(llm)
    assert process_ids(llm)[0] == ids[0] and process_ids(llm)[1] != ids[1]
    assert_as_one_engine(llm, prompts, params)


@pytest.mark.full
def test_exactly_once_in_a_storm_of_aborts_and_a_death(llm):
    """Streams begun, read, closed and killed at random: each is a prefix of one engine's answer."""
    choice = random.Random(5)
    prompts = random_prompts(4, seed=23)
    params = [PARAMS[0], PARAMS[1], SamplingParams(seed=8, max_tokens=30), PARAMS[3]]
    expected = {(p, q): whole([prompts[p]], params[q])[0] for p in range(4) for q in range(4)}
    streams = []  # answer, stream, and what it has shown
    for turn in range(250):
        if len(streams) < 6:
            p, q = choice.choice(list(expected))
            streams.append((expected[p, q], llm.stream(prompts[p], params[q]), []))
        answer, stream, shown = entry = choice.choice(streams)
        output = next(stream, None)
        if output is None:
            assert completions(shown[-1:]) == [answer]
            streams.remove(entry)
            continue
        shown.append(output)
        assert_grows_by_single_tokens(shown[-2:])  # a stream shows one step at a time
        for completion in output.outputs:
            assert completion.token_ids == answer[completion.index][1][: len(completion.token_ids)]
        if choice.random() < 0.03:
            stream.close()
            streams.remove(entry)
        if turn == 100:
            kill(llm, choice.randrange(2))
    for _, stream, _ in streams:
        stream.close()
    assert not llm._engine.requests and not any(r.num_running for r in llm.replicas())


def test_sigterm_leaves_a_replica_at_work(llm):
    """A service manager signals every process of a service; the front decides when each ends."""
    ids, prompt = process_ids(llm), random_prompts(1, seed=24)[0]
    stream = llm.stream(prompt, PARAMS[0])
    outputs = [next(stream)]
    for index in (0, 1):
        send_signal(llm, index, signal.SIGTERM)
        send_signal(llm, index, signal.SIGINT)
    outputs += stream
    assert_whole(outputs, prompt)
    assert process_ids(llm) == ids


def test_a_stopped_replica_holds_up_its_own_requests_alone(llm):
    prompts = random_prompts(3, seed=25)
    stream = llm.stream(prompts[0], PARAMS[0])
    outputs = [next(stream) for _ in range(5)]
    stopped = busiest(llm)
    send_signal(llm, stopped, signal.SIGSTOP)
    try:
        other = SamplingParams(temperature=0.0, max_tokens=20)
        # The stopped replica has one request already, so the least loaded is the other one.
        assert_as_one_engine(llm, prompts[1], other)
        begin = time.monotonic()
        late = [llm.stream(prompt, ENDLESS, timeout=0.3) for prompt in prompts[1:]]
        assert {list(one)[-1].outputs[0].finish_reason for one in late} == {"timeout"}
        assert time.monotonic() - begin < 30.0
    finally:
        send_signal(llm, stopped, signal.SIGCONT)
    outputs += stream
    assert_whole(outputs, prompts[0])


def test_a_replica_that_is_silent_for_long_is_killed_and_its_requests_move(llm, monkeypatch):
    monkeypatch.setattr(llm._engine._fleet, "_stall_seconds", 2.0)
    prompt = random_prompts(1, seed=26)[0]
    stream = llm.stream(prompt, PARAMS[0])
    outputs = [next(stream) for _ in range(5)]
    stopped = busiest(llm)
    before = process_ids(llm)[stopped]
    send_signal(llm, stopped, signal.SIGSTOP)
    outputs += stream
    assert_whole(outputs, prompt)
    comes_true(lambda: not is_alive(before))


def test_requests_that_only_wait_behind_such_a_request_get_their_tokens(llm):
    """Its neighbours die with it repeatedly, before any has a token."""
    engine, prompts = llm._engine, random_prompts(6, seed=37)
    params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=0)
    engine.add(
        engine.input_processor.process_one("poison", prompts[0], params),
        *(engine.input_processor.process_one(f"good {n}", prompt, params) for n, prompt in enumerate(prompts)),
    )
    found, last, begin = {}, -1, time.monotonic()
    while engine.requests and time.monotonic() < begin + 60.0:
        request = engine.requests.get("poison")
        if request is not None and request.replica is not None and request.placement != last:
            last = request.placement
            kill(llm, request.replica)
        engine.step()
        found |= {output.request_id: output for output in engine.outputs}
        engine.outputs.clear()
    poison = found.pop("poison")
    assert poison.error.endswith("3 replicas died with it before they gave it a token")
    assert (poison.error_kind, poison.finished, poison.outputs[0].finish_reason) == ("internal", True, "error")
    assert completions([found[f"good {n}"] for n in range(6)]) == whole(prompts, params)


@pytest.mark.usefixtures("llm")  # no start of another pool's replica is refused
@pytest.mark.parametrize("is_refused", [False, True], ids=["deaths", "refused starts"])
def test_replicas_that_die_again_and_again_are_given_up(monkeypatch, is_refused):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("nowhere")])  # scripts have such entries
    monkeypatch.setattr(replica, "BACKOFF_SECONDS", (0.0,) if is_refused else ())
    if is_refused:
        monkeypatch.setattr(fleet.Fleet, "_check_files", refuse_start)
    monkeypatch.setattr(LLM, "_build_engine", staticmethod(opening.open_pool))
    with LLM(tiny_folder(), **OPTIONS) as llm:
        prompt, ids = random_prompts(1, seed=28)[0], process_ids(llm)
        stream = llm.stream(prompt, PARAMS[0])
        next(stream)
        kill(llm, 0)
        with pytest.raises(EngineDeadError, match="all 1 replicas died"):
            list(stream)
        assert [one.state for one in llm.replicas()] == ["failed"]
        with pytest.raises(EngineDeadError):
            llm.generate(prompt, PARAMS[0], use_tqdm=False)
    assert not any(map(is_alive, ids))


def test_closing_ends_every_process_and_every_call(monkeypatch):
    monkeypatch.setattr(LLM, "_build_engine", staticmethod(opening.open_pool))
    llm = LLM(tiny_folder(), **OPTIONS)
    assert llm.stats().num_blocks == llm.config.num_kv_blocks - 1  # of replicas that ran no step yet
    stream, ids = llm.stream([1, 2], ENDLESS), process_ids(llm)
    next(stream)
    llm.close()
    assert not any(map(is_alive, ids))
    for call in (lambda: list(stream), lambda: llm.generate([1], use_tqdm=False)):
        with pytest.raises(EngineClosedError):
            call()
    llm.close()


FRONT = """
import sys, time
from nanovllm.serving.replicas.opening import open_pool
from tests.support.replicas import OPTIONS
pool = open_pool(sys.argv[1], None, None, OPTIONS | {"tensor_parallel_size": 2})
for replica in pool.replicas:
    print(replica.status.process_id, *[worker.process_id for worker in replica._workers], end=" ")
print(flush=True)
time.sleep(100)
"""


def test_no_process_outlives_its_front():
    """Neither a replica nor its other ranks."""
    command = [sys.executable, "-c", FRONT, tiny_folder()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        ids = [int(word) for word in front.stdout.readline().split()]
        assert len(ids) == 2 and all(map(is_alive, ids))
        front.kill()
        comes_true(lambda: not any(map(is_alive, ids)), 20.0)


def test_a_replica_that_dies_while_nobody_calls_is_started_again(llm):
    ids = process_ids(llm)
    kill(llm, 1)
    comes_true(lambda: llm.replicas()[1].state == "up" and process_ids(llm)[1] != ids[1])
    assert process_ids(llm)[0] == ids[0]
    prompts = random_prompts(4, seed=29)
    assert_as_one_engine(llm, prompts, PARAMS[0])


def test_only_files_that_are_there_and_shown_are_a_models(tmp_path):
    folder = save_tiny(tmp_path / "model")
    names = set(stored_files(folder))
    (Path(folder) / "gone.json").symlink_to(tmp_path / "nothing")
    (Path(folder) / ".editor.json").write_text("{}")
    assert {"config.json", "model.safetensors"} <= names == set(stored_files(folder))
    assert stored_files("someone/some-model") == {}


@pytest.mark.full
def test_a_replica_is_not_started_again_with_another_model_than_the_others(llm, caplog):
    """Answers move between replicas; the others go on with the model that they have."""
    weights = Path(tiny_folder()) / "model.safetensors"
    state, prompts = weights.stat(), random_prompts(4, seed=31)
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    try:
        kill(llm, 0)
        comes_true(lambda: "model.safetensors" in caplog.text)
        said = f"in {tiny_folder()} has changed since the others were started, by its size or time. Put it back"
        assert said in caplog.text
        assert llm.replicas()[0].state == "restarting"
        assert_as_one_engine(llm, prompts, PARAMS[0])
    finally:
        os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    wait_until_up(llm)
    assert_as_one_engine(llm, prompts, PARAMS[0])


@pytest.mark.full
def test_a_replica_with_another_revision_of_a_hub_model_is_ended(tmp_path, monkeypatch, caplog):
    """The hub's `main` moves between two starts."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))  # read once, by this process
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    old, new = "0" * 40, "1" * 40
    main = tmp_path / "models--own--tiny" / "refs" / "main"
    main.parent.mkdir(parents=True)
    for revision in (new, old):
        save_tiny(main.parent.parent / "snapshots" / revision)
        main.write_text(revision)
    with LLM("own/tiny", tokenizer=tiny_tokenizer(), **REPLICAS) as llm:
        (first,) = llm.generate([[5, 6, 7]], PARAMS[0], use_tqdm=False)
        main.write_text(new)
        kill(llm, 0)
        comes_true(
            lambda: f"it has loaded 'own/tiny:{new}:torch.float32', and the others 'own/tiny:{old}" in caplog.text
        )
        assert completions(llm.generate([[5, 6, 7]], PARAMS[0], use_tqdm=False)) == completions([first])
        main.write_text(old)
        wait_until_up(llm)


@pytest.mark.usefixtures("llm")  # no report of another pool is interrupted
def test_an_error_while_messages_are_taken_ends_the_pool(monkeypatch):
    """A second Ctrl-C acts at once: some received reports are lost."""
    monkeypatch.setattr(LLM, "_build_engine", staticmethod(opening.open_pool))
    with LLM(tiny_folder(), **OPTIONS) as llm:
        monkeypatch.setattr(pool.ReplicaPool, "_handle_report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]], use_tqdm=False)
        with pytest.raises(EngineDeadError, match="these replicas are dead"):
            llm.generate([[1, 2]], use_tqdm=False)


def test_a_forgotten_pool_is_looked_after_no_longer():
    class Pool:
        num_looks = 0

        def tend(self):
            Pool.num_looks += 1
            return True

    before, forgotten = set(threading.enumerate()), Pool()
    opening.start_keeper(forgotten)
    (thread,) = set(threading.enumerate()) - before
    comes_true(lambda: Pool.num_looks > 0)
    del forgotten
    thread.join(10.0)
    assert not thread.is_alive()
