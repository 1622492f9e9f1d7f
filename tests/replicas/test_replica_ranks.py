"""Replicas of two ranks each: they give the tokens of one engine, and each dies and restarts alone and whole."""

import os
import signal
import time

import pytest

from nanovllm import LLM, SamplingParams, UnsupportedModelError
from tests.support.adapter_files import merged, save_adapter
from tests.support.equality import NUM_NEW_TOKENS, model, prompts, reference
from tests.support.layer_kinds import own_answer
from tests.support.llms import comes_true, generate, greedy, token_ids
from tests.support.replicas import (
    OPTIONS,
    answers,
    assert_as_one_engine,
    completions,
    is_alive,
    one_engine,
    tiny_folder,
    wait_until_up,
)
from tests.support.tiny_models import random_prompts, tiny_model

pytestmark = pytest.mark.usefixtures("programs_are_forked")

BOTH = OPTIONS | {"data_parallel_size": 2, "tensor_parallel_size": 2}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=40, top_p=0.9, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=40, n=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def pools():
    pools = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def llm(pools):
    """The pool of this file: a new one if a test has closed the last."""
    if not pools or pools[-1]._engine is None:
        pools.append(LLM(tiny_folder(), **BOTH))
    return pools[-1]


def ranks_of(llm, index):
    """Processes of a replica: its first rank and the others."""
    replica = llm._engine.replicas[index]
    return [replica.status.process_id, *(worker.process_id for worker in replica._workers)]


def is_whole(llm, index, before):
    """Whether a replica is up again, in processes that are all new."""
    return llm.replicas()[index].state == "up" and not set(ranks_of(llm, index)) & set(before)


def test_tokens_equal_those_of_transformers(llm):
    wait_until_up(llm)
    restarts = [replica.num_restarts for replica in llm.replicas()]
    assert len({*ranks_of(llm, 0), *ranks_of(llm, 1)}) == 4
    batch = prompts()[:8]
    found = token_ids(generate(llm, batch, greedy(NUM_NEW_TOKENS)))
    assert found == [reference(model("llama"), prompt) for prompt in batch]
    assert [replica.num_restarts for replica in llm.replicas()] == restarts


@pytest.mark.full
def test_adapters_are_loaded_in_every_replica_of_several_ranks(llm, tmp_path):
    path = save_adapter(tmp_path / "a", tiny_model())
    llm.load_adapter("a", path)
    prompts = random_prompts(8, low=3, high=40, seed=3)
    names = ["a", None] * 4
    models = {"a": merged(tiny_model(), path), None: tiny_model()}
    found = token_ids(generate(llm, prompts, greedy(8, ignore_eos=True), adapter=names))
    assert found == [own_answer(models[name], prompt, 8) for prompt, name in zip(prompts, names, strict=True)]
    llm.unload_adapter("a")


def test_a_rank_killed_under_load_ends_its_replica_alone_whose_requests_move(llm):
    wait_until_up(llm)
    own, other = ranks_of(llm, 0), ranks_of(llm, 1)
    batch, params = random_prompts(6, low=40, high=40, seed=31), PARAMS * 2
    streams = [llm.stream(prompt, one) for prompt, one in zip(batch, params, strict=True)]
    shown = [[next(stream) for _ in range(5)] for stream in streams]
    moved = len(llm._engine.replicas[0].requests)
    os.kill(own[1], signal.SIGKILL)
    for outputs, stream in zip(shown, streams, strict=True):
        outputs += stream
    assert 0 < moved < 6
    assert completions([outputs[-1] for outputs in shown]) == answers(one_engine(), batch, params)
    assert any(outputs[-1].metrics.num_preemptions for outputs in shown)
    comes_true(lambda: is_whole(llm, 0, own))
    assert not any(map(is_alive, own)) and ranks_of(llm, 1) == other


@pytest.mark.slow  # the same notice as of a single engine; two engines of two processes take long to start
def test_a_rank_killed_while_idle_restarts_its_replica_before_the_next_call(llm):
    wait_until_up(llm)
    own, other = ranks_of(llm, 1), ranks_of(llm, 0)
    begin = time.monotonic()
    os.kill(own[1], signal.SIGKILL)
    comes_true(lambda: not is_alive(own[0]), 10.0)
    assert time.monotonic() - begin < 10.0
    comes_true(lambda: is_whole(llm, 1, own))
    assert ranks_of(llm, 0) == other
    assert_as_one_engine(llm, random_prompts(4, seed=32), PARAMS[1])


def test_a_first_rank_killed_while_another_is_stopped_leaves_none(llm):
    wait_until_up(llm)
    own = ranks_of(llm, 0)
    os.kill(own[1], signal.SIGSTOP)
    os.kill(own[0], signal.SIGKILL)
    comes_true(lambda: not any(map(is_alive, own)), 20.0)


@pytest.mark.full
def test_closing_ends_every_rank(llm):
    """Also a process that is about to start, as after the test before."""
    ids = [one for one in (*ranks_of(llm, 0), *ranks_of(llm, 1)) if one is not None]
    assert len(ids) >= 3
    llm.close()
    comes_true(lambda: not any(map(is_alive, ids)), 10.0)


def test_a_size_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(UnsupportedModelError, match="6 attention heads, 2 key and value heads"):
        LLM(tiny_folder(), **OPTIONS | {"data_parallel_size": 2, "tensor_parallel_size": 4})
