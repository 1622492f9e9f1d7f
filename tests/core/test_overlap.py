"""Overlap: a step is scheduled and launched before the one before it is read; answers are the same.

On a CPU a launched step is done at once, but all the bookkeeping is the same: tokens that the host does not know yet,
wasted rows, blocks that fill while they are in flight.
"""

import functools

import pytest
import torch

from nanovllm.features.engine_config import EngineConfig
from tests.support import llms
from tests.support.llms import generate, greedy
from tests.support.overlap import requests
from tests.support.tiny_models import tiny_model

POOLS = {"roomy pool": {}, "tiny pool": {"num_kv_blocks": 17, "max_model_len": 230, "max_num_batched_tokens": 80}}


def open_llm(model=None, **options):
    return llms.open_llm(model, **({"overlap": True} | options))


def answers(llm, prompts, params):
    outputs = generate(llm, prompts, params)
    assert_idle_and_whole(llm)
    return [
        (o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].stop_reason, o.error)
        for o in outputs
    ]


def assert_idle_and_whole(llm):
    llms.assert_idle_and_whole(llm)
    assert len(llm._engine.scheduler.in_flight) == len(llm._engine._in_flight) == 0


@functools.cache
def expected(pool):
    with open_llm(overlap=False, **POOLS[pool]) as llm:
        return answers(llm, *requests())


@pytest.fixture
def llm():
    with open_llm() as llm:
        yield llm


@pytest.mark.costly
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_overlapped_steps_give_the_same_answers_as_steps_one_by_one(pool, family):
    model = tiny_model(family)
    with open_llm(model, overlap=False, **POOLS[pool]) as llm:
        one_by_one = answers(llm, *requests())
    with open_llm(model, **POOLS[pool]) as llm:
        assert answers(llm, *requests()) == one_by_one
        if pool == "tiny pool":
            assert llm.stats().num_preemptions > 0
        assert answers(llm, *requests()) == one_by_one, "with a warm cache"
        assert llm.stats().prefix_cache_hits > 0


def test_the_requests_end_in_every_way():
    reasons = {(reason, type(stop)) for _, _, reason, stop, _ in expected("roomy pool")}
    assert reasons == {("length", type(None)), ("stop", int), ("stop", str)}


def test_every_step_is_launched_before_the_one_before_is_read(monkeypatch):
    events = []
    with open_llm() as llm:
        runner = llm._engine.model_runner
        execute, scheduler = runner.execute, llm._engine.scheduler
        update = scheduler.update
        monkeypatch.setattr(runner, "execute", lambda batch: events.append(("launch", batch.step_id)) or execute(batch))
        monkeypatch.setattr(
            scheduler, "update", lambda batch, *drawn: events.append(("read", batch.step_id)) or update(batch, *drawn)
        )
        generate(llm, [[5, 6, 7]], greedy(6))
    # The token of step 6 is its last by length, so no step is launched for nothing.
    launches = [("launch", 1), *(event for n in range(1, 6) for event in (("launch", n + 1), ("read", n))), ("read", 6)]
    assert events == launches


def test_a_request_that_stops_wastes_at_most_one_row_and_its_extra_token_never_shows(llm):
    params = greedy(60)
    (whole,) = answers(llm, [[5, 6, 7]], params)
    stop = whole[0][20]
    before = llm.stats()
    seen = list(llm.stream([5, 6, 7], greedy(60, stop_token_ids=(stop,))))
    after = llm.stats()
    first = whole[0].index(stop)
    assert seen[-1].outputs[0].token_ids == whole[0][: first + 1]
    assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, first + 2))
    assert after.num_output_tokens - before.num_output_tokens == first + 1
    assert after.num_steps - before.num_steps <= first + 2
    assert_idle_and_whole(llm)


def test_an_aborted_neighbour_changes_nothing():
    params = greedy(30)
    with open_llm() as llm:
        (alone,) = answers(llm, [[5, 6, 7]], params)
    with open_llm() as llm:
        neighbour = llm.stream([8] * 33, params)
        stream = llm.stream([5, 6, 7], params)
        seen = [next(stream)]
        next(neighbour)
        seen.append(next(stream))
        neighbour.close()
        seen += stream
        assert seen[-1].outputs[0].token_ids == alone[0]
        assert_idle_and_whole(llm)


def test_a_request_whose_logits_are_not_finite_ends_and_its_neighbour_goes_on():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[99] = float("nan")
    params = greedy(20)
    with open_llm(model) as llm:
        (alone,) = answers(llm, [[5, 6, 7]], params)
        bad, good = answers(llm, [[4, 99, 3] * 20, [5, 6, 7]], params)
        assert bad[2] == "error" and "not finite" in bad[4]
        assert good == alone
        assert answers(llm, [[4, 99, 3] * 20], params)[0][2] == "error"  # and nothing of it was found again


def test_weights_that_change_between_tokens_of_a_stream_count_from_the_next_token_on():
    """Also for the step that was in flight when they changed."""
    model, prompt = tiny_model(), [5, 6, 7, 8]
    with open_llm(model) as llm:
        stream = llm.stream(prompt, greedy(20))
        seen = [next(stream) for _ in range(4)][-1].outputs[0].token_ids
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flip(0))
        *_, last = stream
    with open_llm(model) as llm:
        (rest,) = answers(llm, [prompt + seen], greedy(20 - len(seen)))
    assert last.outputs[0].token_ids == seen + rest[0]


def test_blocks_that_fill_while_in_flight_are_found_afterwards(llm):
    (first,) = answers(llm, [[5] * 20], greedy(45, ignore_eos=True))
    turn = [5] * 20 + first[0] + [9, 9]
    (output,) = generate(llm, [turn], greedy(2))
    assert output.num_cached_tokens == (20 + 45 - 1) // 16 * 16


def test_overlap_is_the_default_on_a_gpu_only():
    config = EngineConfig()
    assert config.resolve_limits("cuda", 1024).overlap
    assert not config.resolve_limits("cpu", 1024).overlap
    assert EngineConfig(overlap=True).resolve_limits("cpu", 1024).overlap
    with pytest.raises(TypeError, match="overlap"):
        EngineConfig(overlap="yes")  # type: ignore[arg-type]
