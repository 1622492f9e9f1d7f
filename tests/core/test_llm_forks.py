"""`LLM.fork`: the tokens of the same prompt, none of them computed twice, beside anything and behind failed steps."""

from contextlib import suppress

import pytest

from nanovllm import LLM
from nanovllm.errors import StepError
from tests.support.forked_processes import programs_are_forked
from tests.support.layer_kinds import model
from tests.support.llms import OPTIONS, assert_idle_and_whole, fail_in_step, generate, greedy, open_llm, token_ids
from tests.support.tiny_models import save_tiny

PROMPT = list(range(40, 75))
LONG = greedy(40)
SHORT = greedy(12)


def stream_of(llm, num_tokens):
    """A stream, and its output after so many tokens."""
    stream = llm.stream(PROMPT, LONG)
    for _ in range(num_tokens):
        output = next(stream)
    return stream, output


@pytest.mark.costly
@pytest.mark.parametrize("family", [None, "Gemma3Text", "DeepseekV2"])
@pytest.mark.parametrize("at", [None, 1, 16, 33, 35, 40, 41])
def test_a_fork_has_the_tokens_of_its_prompt(family, at):
    with open_llm(None if family is None else model(family), max_model_len=160) as llm:
        whole = token_ids(generate(llm, [PROMPT], LONG))[0]
        llm.reset_prefix_cache()
        stream, output = stream_of(llm, 8)
        tokens = (PROMPT + output.outputs[0].token_ids)[:at]
        *_, fork = llm.fork(output.request_id, at, SHORT)
        *_, rest = stream
        assert rest.outputs[0].token_ids == whole
        assert fork.prompt_token_ids == tokens
        assert token_ids([fork]) == token_ids(generate(llm, [tokens], SHORT))
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("options", [
    {}, {"overlap": True}, {"attention_backend": "cpp", "enforce_eager": False}, {"prefix_cache_host_bytes": 2**22},
    {"enable_prefix_caching": False},
], ids=["plain", "overlap", "cpp", "tiers", "no prefix cache"])  # fmt: skip
def test_nothing_that_the_request_has_computed_is_computed_again(options):
    records = []
    with open_llm(on_step=records.append, **options) as llm:
        stream, output = stream_of(llm, 8)
        records.clear()
        forks = [llm.fork(output.request_id, at, SHORT) for at in (38, 42, None)]
        firsts = [next(fork) for fork in forks]
        assert sum(record.num_prefill_tokens for record in records) == 0
        assert [first.num_cached_tokens for first in firsts] == [37, 41, len(firsts[2].prompt_token_ids) - 1]
        outputs = [[*fork][-1] for fork in forks]
        stream.close()
        assert token_ids(outputs) == token_ids(generate(llm, [output.prompt_token_ids for output in outputs], SHORT))
        assert_idle_and_whole(llm)


@pytest.mark.full
@programs_are_forked()
def test_ranks_fork_too(tmp_path):
    with LLM(save_tiny(tmp_path), **(OPTIONS | {"tensor_parallel_size": 2})) as llm:
        stream, output = stream_of(llm, 8)
        *_, fork = llm.fork(output.request_id, 38, SHORT)
        stream.close()
        assert token_ids([fork]) == token_ids(generate(llm, [fork.prompt_token_ids], SHORT))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_request_survives_the_failed_step_of_its_fork(number, monkeypatch):
    with open_llm() as llm:
        expected = token_ids(generate(llm, [PROMPT], LONG))[0]
        llm.reset_prefix_cache()
        stream, output = stream_of(llm, 8)
        fork = llm.fork(output.request_id, 40, greedy(12))
        fail_in_step(monkeypatch, llm, number, ValueError("this step fails"))
        tokens = []
        with pytest.raises(Exception, match="this step fails"):
            for found in fork:
                tokens.append(found.outputs[0].token_ids)
        assert all(expected[5 : 5 + len(found)] == found for found in tokens)
        *_, rest = stream
        assert rest.outputs[0].token_ids == expected
        assert_idle_and_whole(llm)


def test_a_step_that_fails_before_its_copies_leaves_no_fork_without_its_block(monkeypatch):
    with open_llm() as llm:
        expected = token_ids(generate(llm, [PROMPT], LONG))[0]
        llm.reset_prefix_cache()
        stream, output = stream_of(llm, 8)
        engine, failures = llm._engine, [ValueError("this step fails")]
        fork = llm.fork(output.request_id, 40, SHORT)
        step, launch = engine.step, engine.model_runner.launch

        def fail_once(batch):
            if failures:
                assert batch.copies
                raise failures.pop()
            return launch(batch)

        monkeypatch.setattr(engine.model_runner, "launch", fail_once)

        def step_again():  # as a server does: the requests of a failed step stay queued
            with suppress(StepError):
                step()

        monkeypatch.setattr(engine, "step", step_again)
        *_, last = fork
        assert last.outputs[0].token_ids == expected[5:17]
        assert engine.scheduler.stats.num_failed_steps == 1
        stream.close()
        assert_idle_and_whole(llm)


def test_a_request_that_has_ended_is_forked_by_its_output():
    with open_llm() as llm:
        ended, *_ = generate(llm, [PROMPT], LONG, cache_salt="ours")
        *_, fork = llm.fork(ended, 50, SHORT, cache_salt="ours")
        assert fork.num_cached_tokens == 48 and fork.prompt_token_ids == (PROMPT + ended.outputs[0].token_ids)[:50]
        assert fork.outputs[0].token_ids == ended.outputs[0].token_ids[15:27]
        *_, fork = llm.fork(ended, 50, SHORT)
        assert fork.num_cached_tokens == 0
        with pytest.raises(ValueError, match="no request '99' runs"):
            llm.fork("99")
        with pytest.raises(ValueError, match="at is 76; it must be between 1 and 75"):
            llm.fork(ended, 76)
