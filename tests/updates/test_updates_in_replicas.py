"""Weights, pauses and sleep of engines in processes: all of them or none, and deaths in between change no token."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, AsyncLLM, EngineDeadError
from nanovllm.serving.replicas.messages import Obeyed, Ready
from nanovllm.serving.replicas.pool_updates import MAX_IMAGES, PoolUpdates
from nanovllm.serving.replicas.process_updates import pickled
from nanovllm.serving.replicas.replica_queue import ReplicaQueue
from nanovllm.serving.replicas.weight_images import Image, SentImage, mapped
from tests.support.layer_kinds import own_answer
from tests.support.llms import comes_true, generate, greedy, token_ids
from tests.support.replicas import REPLICAS, kill, process_ids, wait_until_up
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

pytestmark = pytest.mark.usefixtures("programs_are_forked")

NUM_TOKENS = 10
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
LONG = greedy(60, ignore_eos=True)
PROMPTS = random_prompts(4, low=20, high=60, seed=8)


@pytest.fixture(scope="module")
def models():
    """Three models of one shape and other weights."""
    return [tiny_model(num_layers=1, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), num_layers=1)


@pytest.fixture(scope="module")
def pool(folder):
    with LLM(folder, **REPLICAS) as llm:
        yield llm


@pytest.fixture
def llm(pool, models):
    """Two replicas with the first weights, which are up whatever the test before has killed."""
    for replica in pool._engine.replicas:
        replica._num_deaths = 0
    wait_until_up(pool)
    pool.update_weights(models[0].state_dict())
    yield pool
    pool.wake()
    pool.resume_generation()


def answers(model, prompts=PROMPTS, count=NUM_TOKENS):
    return [own_answer(model, prompt, count) for prompt in prompts]


def test_every_replica_has_the_new_weights_and_no_prefix_of_the_old_ones_is_found(llm, models):
    for model in (models[1], models[2], models[0]):
        llm.update_weights(lambda model=model: model.state_dict().items(), version="new")
        outputs = generate(llm, PROMPTS * 2, GREEDY)
        assert {repr(output.outputs[0].weight_versions) for output in outputs} == {"[(0, 'new')]"}
        assert token_ids(outputs) == answers(model) * 2
        assert not any(output.num_cached_tokens for output in outputs[:4])
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(model)


def test_a_killed_replica_starts_again_with_the_new_weights(llm, models):
    llm.update_weights(models[1].state_dict())
    some = {name: tensor for name, tensor in models[2].state_dict().items() if "mlp" in name}
    llm.update_weights(some, version="some")
    mixed = tiny_model(num_layers=1, seed=1)
    mixed.load_state_dict(some, strict=False)
    for index in range(2):
        kill(llm, index)
    wait_until_up(llm)
    for _ in range(2):
        outputs = generate(llm, PROMPTS * 2, GREEDY)
        assert token_ids(outputs) == answers(mixed) * 2
        assert {repr(output.outputs[0].weight_versions) for output in outputs} == {"[(0, 'some')]"}


@pytest.mark.costly
@pytest.mark.parametrize("call", ["check_weights", "update_weights"])
@pytest.mark.parametrize("dying", [[0], [0, 1]], ids=["one", "both"])
def test_a_replica_that_dies_in_an_update_starts_again_with_the_new_weights(call, dying, llm, models, monkeypatch):
    fleet = llm._engine._fleet
    send = fleet.send
    killed = []

    def send_and_kill(replica, message):
        if getattr(message, "call", "") == call and replica.index in {*dying} - {*killed}:
            killed.append(replica.index)
            kill(llm, replica.index)
        send(replica, message)

    monkeypatch.setattr(fleet, "send", send_and_kill)
    streams = [llm.stream(prompt, greedy(400, ignore_eos=True)) for prompt in PROMPTS]
    heads = [next(stream).outputs[0].token_ids for stream in streams]
    llm.update_weights(models[1].state_dict())
    assert sorted(killed) == dying
    assert call == "check_weights" or llm._engine.requests
    counts = {request.new.request_id: len(request.samples[0].token_ids) for request in llm._engine.requests.values()}
    for prompt, head, stream in zip(PROMPTS, heads, streams, strict=True):
        *_, last = stream
        count = counts.get(last.request_id, 400)  # one that has ended is not there
        tokens = last.outputs[0].token_ids
        assert tokens[: len(head)] == head and len(tokens) == 400
        assert count == 400 or tokens[count:] == own_answer(models[1], prompt + tokens[:count], 400 - count)
    wait_until_up(llm)
    assert token_ids(generate(llm, PROMPTS * 2, GREEDY)) == answers(models[1]) * 2


@pytest.mark.costly
@pytest.mark.parametrize("keep_kv", [False, True])
def test_streams_have_each_token_of_one_set_and_all_later_ones_of_the_new(keep_kv, folder, models):
    """The new head flips every draw: the most likely token becomes the least likely one."""
    flipped = tiny_model(num_layers=1)
    with torch.no_grad():
        flipped.lm_head.weight.neg_()
    prompts = random_prompts(16, low=5, high=60, seed=2)

    def counts(pool):
        return [len(pool.requests[str(number)].samples[0].token_ids) for number in range(16)]

    async def run():
        async with AsyncLLM(folder, **REPLICAS) as llm:

            async def answered(number):
                params = greedy(300, ignore_eos=True)
                stream = llm.generate(prompts[number], params, request_id=str(number), output_kind="delta")
                whole, *later = [each async for each in stream]
                for output in later:
                    whole.extend(output)
                return whole.outputs[0]

            tasks = [asyncio.ensure_future(answered(number)) for number in range(16)]
            while (await llm.stats()).num_output_tokens < 200:
                await asyncio.sleep(0)
            before = await llm.inspect(counts)
            await llm.update_weights({"lm_head.weight": flipped.lm_head.weight}, keep_kv=keep_kv, version="flipped")
            return before, await llm.inspect(counts), await asyncio.gather(*tasks)

    firsts, lasts, found = asyncio.run(run())
    assert max(lasts) < 300 and sum(firsts) > 100
    for prompt, first, last, output in zip(prompts, firsts, lasts, found, strict=True):
        tokens = output.token_ids
        with torch.no_grad():
            old, new = (model(torch.tensor([prompt + tokens])).logits[0].argmax(-1) for model in (models[0], flipped))
        of_old, of_new = (
            [draws[len(prompt) - 1 + at] == token for at, token in enumerate(tokens)] for draws in (old, new)
        )
        num_old = sum(of_old)
        assert first <= num_old <= last
        runs = [run for run in ((0, None), (num_old, "flipped")) if run[0] < num_old or run[1]]
        assert output.weight_versions == runs
        assert of_old == [True] * num_old + [False] * (300 - num_old) and of_new == [not each for each in of_old]


def test_a_bad_update_raises_as_in_one_process_and_changes_no_replica(llm, folder, models):
    good = models[1].state_dict()
    bad = [
        good | {"model.layers.9.x": torch.zeros(2)}, good | {"lm_head.weight": good["lm_head.weight"][:-1]},
        good | {"lm_head.weight": good["lm_head.weight"].int()}, good | {"lm_head.weight": [1.0]}, {},
    ]  # fmt: skip
    (prefix,) = random_prompts(1, low=60, high=60, seed=3)
    generate(llm, prefix, GREEDY)
    with LLM(folder, skip_tokenizer_init=True) as one:
        for weights in bad:
            found = []
            for each in (one, llm):
                with pytest.raises((TypeError, ValueError)) as error:
                    each.update_weights(weights)
                found.append((error.type, str(error.value)))
            assert found[0] == found[1]

    def failing():
        yield from good.items()
        raise OSError("the trainer is gone")

    with pytest.raises(OSError, match="trainer is gone"):
        llm.update_weights(failing)
    assert generate(llm, prefix, GREEDY)[0].num_cached_tokens > 0
    assert token_ids(generate(llm, PROMPTS * 2, GREEDY)) == answers(models[0]) * 2
    assert len(llm._engine.updates.images) == 1


def test_tied_weights_have_the_last_value_under_either_name(tmp_path):
    """After a restart too, though the value before came under the other name."""
    folder = save_tiny(tmp_path, "qwen3", num_layers=1, tie_word_embeddings=True)
    models = [tiny_model("qwen3", num_layers=1, seed=seed, tie_word_embeddings=True) for seed in range(3)]
    with LLM(folder, **REPLICAS) as llm:
        llm.update_weights({"lm_head.weight": models[1].lm_head.weight})
        llm.update_weights({"model.embed_tokens.weight": models[2].lm_head.weight})
        models[0].load_state_dict({"lm_head.weight": models[2].lm_head.weight}, strict=False)
        assert len(llm._engine.updates.images) == 1
        kill(llm, 0)
        wait_until_up(llm)
        assert token_ids(generate(llm, PROMPTS * 2, GREEDY)) == answers(models[0]) * 2


# --------------------------------------------------------------------------------------------------- pauses and sleep


def test_a_pause_outlives_a_death_and_requests_of_the_dead_replica_wait(folder, models):
    async def run():
        async with AsyncLLM(folder, **REPLICAS) as llm:
            streams = [llm.generate(prompt, LONG) for prompt in PROMPTS]
            for stream in streams:
                await anext(stream)
            await llm.pause_generation()
            assert await llm.is_paused()
            await llm.inspect(lambda pool: setattr(pool._fleet, "_stall_seconds", 0.2))  # a pause is no stall
            silent = asyncio.get_running_loop().time() + 1.0
            while asyncio.get_running_loop().time() < silent:
                await asyncio.sleep(0.05)
            assert llm.heartbeat().age < 1.5
            assert not any(replica.num_restarts for replica in llm.replicas())
            count = (await llm.stats()).num_output_tokens
            for replica in llm.replicas():
                os.kill(replica.process_id, signal.SIGKILL)
            while [(each.state, each.num_restarts) for each in llm.replicas()] != [("up", 1)] * 2:
                await asyncio.sleep(0.01)
            later = asyncio.ensure_future(last_of(llm.generate(PROMPTS[0], GREEDY)))
            while len(await llm.inspect(lambda pool: list(pool.requests))) < 5:
                await asyncio.sleep(0.01)
            assert (await llm.stats()).num_output_tokens == count and not later.done()
            await llm.resume_generation()
            assert await later == own_answer(models[0], PROMPTS[0], NUM_TOKENS)
            return [await last_of(stream) for stream in streams]

    assert asyncio.run(run()) == answers(models[0], count=60)


async def last_of(stream):
    return [output async for output in stream][-1].outputs[0].token_ids


def resident_bytes(process_id):
    return 4096 * int(Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1])


def test_sleep_gives_the_memory_of_every_process_back(folder, models):
    num_bytes = 2**27
    options = REPLICAS | {"num_kv_blocks": None, "kv_cache_memory_bytes": num_bytes}
    with LLM(folder, **options) as llm:
        llm.sleep()
        lows = [resident_bytes(process_id) for process_id in process_ids(llm)]
        llm.wake()
        for low, process_id in zip(lows, process_ids(llm), strict=True):
            comes_true(lambda low=low, own=process_id: resident_bytes(own) > low + 0.9 * num_bytes)  # while idle
        assert llm.is_asleep is False
        llm.sleep()
        assert llm.is_asleep
        for low, process_id in zip(lows, process_ids(llm), strict=True):
            assert resident_bytes(process_id) < low + 0.1 * num_bytes
        with pytest.raises(RuntimeError, match=r"asleep .* call wake\(\)"):
            generate(llm, PROMPTS, GREEDY)
        with pytest.raises(ValueError, match=r"level is 3; it must be 1, .* or 2"):
            llm.sleep(3)
        llm.update_weights(models[1].state_dict())
        llm.wake()
        assert token_ids(generate(llm, PROMPTS * 2, GREEDY)) == answers(models[1]) * 2


def test_requests_of_a_replica_that_dies_asleep_wait_in_the_other_one(llm, models):
    """Streams of this thread are refused meanwhile, and those of another one wait."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(generate(llm, PROMPTS, greedy(300, ignore_eos=True))))
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    thread.start()
    comes_true(lambda: llm.stats().num_running == 5)
    llm.sleep()
    with pytest.raises(RuntimeError, match=r"asleep .* call wake\(\)"):
        list(stream)
    before = sum(replica.num_restarts for replica in llm.replicas())
    for index in range(2):
        kill(llm, index)
    wait_until_up(llm)
    assert llm.is_asleep and not found
    llm._engine.step()  # has sent the requests to the replicas, which sleep
    llm.wake()
    thread.join()
    assert sum(replica.num_restarts for replica in llm.replicas()) == before + 2
    assert token_ids(found) == answers(models[0], count=300)


def test_an_engine_process_is_updated_and_goes_on_with_the_new_weights_after_its_death(folder):
    rounded = {name: tensor.bfloat16() for name, tensor in tiny_model(num_layers=1, seed=1).state_dict().items()}
    model = tiny_model(num_layers=1)
    model.load_state_dict(rounded)
    options = {name: value for name, value in REPLICAS.items() if name != "data_parallel_size"}

    async def run():
        async with AsyncLLM(folder, engine_process=True, **options) as llm:
            stream = llm.generate(PROMPTS[0], greedy(300, ignore_eos=True))
            await anext(stream)
            await llm.update_weights(rounded)
            tokens = (await anext(stream)).outputs[0].token_ids
            os.kill(llm.replicas()[0].process_id, signal.SIGKILL)
            await llm.sleep()
            with pytest.raises(RuntimeError, match="asleep"):
                await llm.submit(PROMPTS[:1], GREEDY)
            assert llm.is_asleep
            await llm.wake()
            count = await llm.inspect(lambda pool: [len(each.samples[0].token_ids) for each in pool.requests.values()])
            assert len(tokens) <= count[0] < 300
            return count[0], await last_of(stream), await last_of(llm.generate(PROMPTS[1], GREEDY))

    count, streamed, later = asyncio.run(run())
    assert streamed[count:] == own_answer(model, PROMPTS[0] + streamed[:count], 300 - count)
    assert later == own_answer(model, PROMPTS[1], NUM_TOKENS)


# ------------------------------------------------------------------------------------------ orders, without processes


class Fleet:
    """Two replicas that are up, and what is sent to them."""

    def __init__(self):
        self.replicas = [ReplicaQueue(0), ReplicaQueue(1)]
        self.up = self.replicas[:]
        self.sent, self.unread = [], []

    def send(self, replica, message):
        for each in (self.sent, self.unread):
            each.append((replica.index, message))

    def take(self):
        sent, self.sent = self.sent, []
        return [(index, order.call) for index, order in sent]


READY = Ready({}, None, "", None)


def opened(answer=lambda index, order: Obeyed(order.number)):
    """Updates of such a fleet: while they wait, each replica that has an order answers so."""
    fleet = Fleet()

    def advance():
        while fleet.unread:
            index, order = fleet.unread.pop(0)
            updates.handle(fleet.replicas[index], answer(index, order))

    updates = PoolUpdates(fleet, advance)
    return updates, fleet


def tensors(*names, size=8):
    return {name: torch.full((size,), float(number)) for number, name in enumerate(names)}


def kept(updates):
    return [[name for name, _ in mapped(image.sent())] for image in updates.images]


def test_an_update_that_one_replica_refuses_is_written_by_none():
    refusal = pickled(ValueError("no such name"))
    updates, fleet = opened(lambda index, order: Obeyed(order.number, refusal if index else None))
    with pytest.raises(ValueError, match="no such name"):
        updates.update_weights(tensors("a"), keep_kv=False)
    assert fleet.take() == [(0, "check_weights"), (1, "check_weights")] and not updates.images


def test_a_replica_that_comes_up_gets_weights_pause_and_sleep():
    updates, fleet = opened()
    updates.update_weights(tensors("a", "b"), keep_kv=False)
    updates.update_weights(tensors("c"), keep_kv=True)
    updates.pause_generation()
    updates.sleep(2)
    fleet.take()
    updates.handle(fleet.replicas[1], READY)
    assert [order.level for _, order in fleet.sent][-1] == 2
    assert fleet.take() == [(1, call) for call in ("update_weights", "update_weights", "pause_generation", "sleep")]
    updates.resume_generation()
    updates.update_weights(tensors("a"), keep_kv=False)  # brings the weights of level 2 back
    fleet.take()
    updates.handle(fleet.replicas[1], READY)
    assert fleet.sent[-1][1].level == 1
    updates.wake()
    fleet.take()
    updates.handle(fleet.replicas[1], READY)
    assert fleet.take() == [(1, "update_weights")] * 3


def test_images_are_kept_until_a_replica_that_comes_up_has_read_them():
    updates, fleet = opened()
    updates.update_weights(tensors("a"), keep_kv=False)
    advance, late = updates._advance, []

    def comes_up_late():
        if not late:  # once the check was sent
            fleet.unread.clear()
            late.append(fleet.replicas[1])
            updates.handle(fleet.replicas[0], Obeyed(updates._number))
            updates.handle(fleet.replicas[1], None)
            updates.handle(fleet.replicas[1], READY)
            return
        if fleet.unread[0][1].number < 0:
            late.extend([name for name, _ in mapped(fleet.unread[0][1].image)])
        advance()

    updates._advance = comes_up_late
    updates.update_weights(tensors("a"), keep_kv=False)
    assert late == [fleet.replicas[1], "a"]
    updates.handle(fleet.replicas[1], READY)
    updates.handle(fleet.replicas[1], None)  # died again, and is not waited for
    fleet.unread.clear()
    updates._advance = advance
    updates.update_weights(tensors("a"), keep_kv=False)


def test_the_weights_that_are_kept_are_each_the_last_and_none_twice():
    updates, _ = opened(lambda index, order: Obeyed(order.number, names=["tied"] if order.call[:5] == "check" else []))
    updates.update_weights(tensors("a", "b", "tied"), keep_kv=False)
    updates.update_weights({"b": torch.full((8,), 9.0)}, keep_kv=False)
    assert kept(updates) == [["a"], ["b"]]
    for number in range(3 * MAX_IMAGES):
        updates.update_weights(tensors(f"n{number % 20}", "b"), keep_kv=False)
        assert len(updates.images) <= MAX_IMAGES
    names = [name for image in kept(updates) for name in image]
    assert len(names) == len({*names}) == 22
    assert sum(image.num_bytes for image in updates.images) < 22 * 64 + 64 * len(updates.images)
    values = dict(named for image in updates.images for named in mapped(image.sent()))
    assert torch.equal(values["b"], torch.ones(8)) and torch.equal(values["n3"], torch.zeros(8))


def test_a_replica_that_cannot_wake_lets_the_others_sleep_on():
    failed = pickled(torch.OutOfMemoryError("others have it"))
    updates, fleet = opened(
        lambda index, order: Obeyed(order.number, failed if (index, order.call) == (1, "wake") else None)
    )
    updates.sleep(1)
    with pytest.raises(torch.OutOfMemoryError, match="others have it"):
        updates.wake()
    assert updates.level == 1 and fleet.take()[-2:] == [(0, "sleep"), (1, "sleep")]


def test_a_fleet_that_has_failed_ends_an_update():
    updates, fleet = opened()
    fleet.up = []

    def advance():
        raise EngineDeadError("all replicas died")

    updates._advance = advance
    with pytest.raises(EngineDeadError):
        updates.update_weights(tensors("a"), keep_kv=False)
    assert not updates.images and not fleet.sent


def test_an_image_has_each_tensor_and_cannot_be_changed():
    shared = torch.arange(40, dtype=torch.bfloat16).view(5, 8)
    given = [
        ("shared", shared), ("again", shared), ("turned", shared.t()), ("scalar", torch.tensor(3.5)),
        ("nothing", torch.empty(0, 4)), ("flags", torch.tensor([True, False])),
        ("grad", torch.ones(3, requires_grad=True)),
        *((f"made {number}", torch.full((3,), number)) for number in range(5)),
    ]  # fmt: skip
    image = Image(iter(given))
    found = mapped(image.sent())
    assert [name for name, _ in found] == [name for name, _ in given]
    for (_, own), (_, tensor) in zip(found, given, strict=True):
        assert own.dtype == tensor.dtype and own.shape == tensor.shape and torch.equal(own, tensor)
    offsets = {tensor.name: tensor.offset for tensor in image.tensors}
    assert offsets["shared"] == offsets["again"] != offsets["turned"]
    found[0][1].zero_()  # a reader's own copy
    assert torch.equal(dict(mapped(image.sent()))["shared"], shared)
    for change, arguments in ((os.ftruncate, [0]), (os.pwrite, [b"x", 0])):
        with pytest.raises(PermissionError):
            change(image._file, *arguments)
    path = image.sent().path
    del image
    with pytest.raises(OSError):
        mapped(SentImage(path, []))
    assert torch.equal(found[3][1], torch.tensor(3.5))  # a mapping outlives the file's end in the front
