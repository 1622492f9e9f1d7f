"""The engine between steps: deadlines, limits, aborts, failed steps, devices that fail, closing."""

from __future__ import annotations

import os
from typing import Any

import pytest

from nanovllm.build import build_engine
from nanovllm.config import EngineConfig
from nanovllm.engine import Engine, NoObservers
from nanovllm.errors import DeviceError, EngineClosedError, EngineDeadError, ForkedChildError, QueueFullError, StepError
from nanovllm.sampling_params import SamplingParams
from tests.engine.models import (
    GREEDY,
    OPTIONS,
    byte_tokenizer,
    check_idle,
    generate,
    open_llm,
    own_answer,
    tiny_model,
    token_ids,
)

LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def open_engine(clock: Clock | None = None, **options: Any) -> Engine:
    return build_engine(tiny_model(), None, None, OPTIONS | options, clock=clock or Clock())


def add(engine: Engine, request_id: str, prompt: list[int], params: SamplingParams = LONG, **options: Any) -> None:
    engine.add(engine.input_processor.process_one(request_id, prompt, params, **options))


def steps(engine: Engine, count: int | None = None) -> list[Any]:
    """Outputs of so many steps, or of all."""
    while engine.has_unfinished and count != 0:
        engine.step()
        count = None if count is None else count - 1
    outputs = [*engine.outputs]
    engine.outputs.clear()
    return outputs


def fail_in_step(monkeypatch: pytest.MonkeyPatch, engine: Engine, number: int, error: BaseException) -> None:
    """Raise in the `number`-th draw from now, after the step's KV is written."""
    sampler, count = engine.model_runner.sampler, iter(range(1, 10_000))
    sample = sampler.sample

    def failing(*arguments: Any) -> Any:
        if next(count) == number:
            raise error
        return sample(*arguments)

    monkeypatch.setattr(sampler, "sample", failing)


# ---------------------------------------------------------------------------------------------------- ends from outside


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_ends_at_its_deadline_with_what_it_has(overlap):
    clock = Clock()
    engine = open_engine(clock, overlap=overlap)
    add(engine, "late", [1, 2], timeout=5.0)
    add(engine, "other", [3])
    assert steps(engine, 8) == []
    clock.now += 5.0
    (output,) = steps(engine, 1)
    (completion,) = output.outputs
    assert (output.request_id, completion.finish_reason) == ("late", "timeout")
    assert completion.token_ids == own_answer(tiny_model(), [1, 2], 50)[: len(completion.token_ids)]
    (other,) = steps(engine)
    assert other.outputs[0].token_ids == own_answer(tiny_model(), [3], 50)
    check_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_request_gives_its_output_so_far_and_frees_its_blocks_at_once(overlap):
    engine = open_engine(overlap=overlap)
    add(engine, "one", [1, 2])
    steps(engine, 4)
    assert engine.abort("unknown") is None
    output = engine.abort("one")
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert 2 < len(output.outputs[0].token_ids) < 5
    check_idle(engine)
    engine.step()  # with nothing to do


def test_an_abort_ends_the_samples_that_still_run():
    engine = open_engine()
    params = SamplingParams(n=2, max_tokens=50, ignore_eos=True)
    add(engine, "one", [1, 2], params)
    steps(engine, 3)
    engine.scheduler.finish(engine.requests["one"].sequences[0], "length")
    output = engine.abort("one")
    assert [completion.finish_reason for completion in output.outputs] == ["length", "abort"]
    check_idle(engine)


def test_more_requests_than_the_queue_has_room_for_are_refused_together():
    engine = open_engine(max_num_seqs=2, max_queue=1)
    add(engine, "a", [1], SamplingParams(n=2, max_tokens=3))
    with pytest.raises(QueueFullError, match=r"2 requests .* with 2 more .* max_queue \(1\)"):
        add(engine, "b", [1], SamplingParams(n=2, max_tokens=3))
    add(engine, "b", [1])
    assert len(steps(engine)) == 2
    check_idle(engine)


def test_an_id_in_use_is_refused():
    engine = open_engine()
    add(engine, "a", [1])
    with pytest.raises(ValueError, match="'a' is running already"):
        add(engine, "a", [2])
    assert len(steps(engine)) == 1


def test_several_requests_are_added_and_end_together():
    """All or none are queued; all that are overdue end in one step."""
    clock = Clock()
    engine = open_engine(clock, overlap=True)
    one, two = (engine.input_processor.process_one(name, [1, 2], LONG, timeout=5.0) for name in ("one", "two"))
    with pytest.raises(ValueError, match="unique"):
        engine.add(one, one)
    assert not engine.has_unfinished
    engine.add(one, two)
    engine.step()
    assert engine.scheduler.in_flight
    clock.now += 5.0
    engine.step()
    assert {output.request_id for output in engine.outputs} == {"one", "two"}
    assert not engine.scheduler.in_flight, "nobody waits for the step in flight"
    check_idle(engine)


def test_requests_of_a_more_urgent_priority_start_first():
    engine = open_engine(max_num_seqs=1)
    for number, priority in enumerate((1, 0, -1)):
        add(engine, str(number), [number], GREEDY, priority=priority)
    assert [output.request_id for output in steps(engine)] == ["2", "1", "0"]


# --------------------------------------------------------------------------------------------------------- failed steps


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_failed_step_names_its_requests_and_their_answers_are_unchanged(monkeypatch, overlap, number):
    engine = open_engine(overlap=overlap)
    prompts = [[1] * 40, [2, 3], [4] * 30]
    for request_id, prompt in enumerate(prompts):
        add(engine, str(request_id), prompt)
    cause = RuntimeError("boom")
    fail_in_step(monkeypatch, engine, number, cause)
    with pytest.raises(StepError, match=r"RuntimeError.*boom") as caught:
        steps(engine)
    assert caught.value.__cause__ is cause and {*caught.value.request_ids} <= {"0", "1", "2"}
    outputs = sorted(steps(engine), key=lambda output: output.request_id)
    assert token_ids(outputs) == [own_answer(tiny_model(), prompt, 50) for prompt in prompts]
    check_idle(engine)


def test_an_interrupt_of_a_step_is_passed_on_and_leaves_the_engine_whole(monkeypatch):
    with open_llm() as llm:
        fail_in_step(monkeypatch, llm._engine, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]], GREEDY, use_tqdm=False)
        assert token_ids(generate(llm, [[1, 2]])) == [own_answer(tiny_model(), [1, 2])]


def test_requests_of_steps_that_fail_again_and_again_end_those_without_a_token_first(monkeypatch):
    engine = open_engine()
    add(engine, "has tokens", [1, 2])
    steps(engine, 3)
    add(engine, "suspect", [3, 4])
    fail_in_step(monkeypatch, engine, 1, RuntimeError("boom"))
    with pytest.raises(StepError) as caught:
        engine.step()
    engine.fail(caught.value, num_failed_steps=2)
    assert not engine.outputs  # it may be chance
    engine.fail(caught.value, num_failed_steps=1)
    (output,) = steps(engine, 0)
    assert (output.request_id, output.outputs[0].finish_reason) == ("suspect", "error") and "boom" in output.error
    assert len(steps(engine)) == 1
    check_idle(engine)


def test_an_error_of_the_device_ends_the_engine(monkeypatch):
    llm = open_llm()
    fail_in_step(monkeypatch, llm._engine, 1, RuntimeError("CUDA error: the device fell off the bus"))
    with pytest.raises(StepError, match="fell off the bus"):
        llm.generate([[1]], GREEDY, use_tqdm=False)
    for call in (lambda: llm.generate([[1]], use_tqdm=False), lambda: next(llm.stream([1]))):
        with pytest.raises(EngineDeadError, match=r"a device error \(DeviceError: .*fell off the bus"):
            call()
    assert isinstance(llm._engine._death, DeviceError)
    llm.close()


def test_an_error_in_the_books_ends_the_engine(monkeypatch):
    llm = open_llm()
    monkeypatch.setattr(llm._engine.scheduler, "schedule", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[1]], GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="an error in its bookkeeping"):
        llm.generate([[1]], GREEDY, use_tqdm=False)
    llm.close()


# -------------------------------------------------------------------------------------------------------------- closing


def test_a_closed_llm_says_so_and_may_be_closed_again():
    with open_llm() as llm:
        waiting = llm.stream([1], GREEDY)
        next(waiting)
    llm.close()
    for call in (lambda: llm.generate([[1]]), llm.reset_prefix_cache, lambda: llm.config):
        with pytest.raises(EngineClosedError, match="closed; build a new one"):
            call()


def test_an_llm_that_is_called_from_within_a_step_says_that_this_would_be_a_deadlock(monkeypatch):
    with open_llm() as llm:
        monkeypatch.setattr(llm._engine, "step", lambda: llm.generate([[2]], use_tqdm=False))
        with pytest.raises(RuntimeError, match="called from within one of its own steps"):
            llm.generate([[1]], use_tqdm=False)


def test_a_forked_child_can_only_close():
    llm = open_llm()
    source, sink = os.pipe()
    if (child := os.fork()) == 0:
        found = b"no error"
        try:
            llm.close()
            llm._engine.close()
            for call in (lambda: llm.generate([[1]], use_tqdm=False), llm._engine.stats, llm._engine.check_alive):
                try:
                    call()
                except ForkedChildError as error:
                    found = type(error).__name__.encode()
                    continue
                found = b"no error"
                break
        finally:
            os.write(sink, found)
            os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        assert pipe.read() == b"ForkedChildError"
    os.waitpid(child, 0)
    assert len(generate(llm, [[1]])) == 1
    llm.close()


def test_a_process_that_did_not_build_an_engine_cannot_use_it(monkeypatch):
    with open_llm() as llm:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        for call in (lambda: llm.generate([[1]]), llm._engine.stats, llm._engine.check_alive):
            with pytest.raises(ForkedChildError, match=r"forked|child"):
                call()
        llm._engine.close()
        monkeypatch.undo()
        assert llm._engine.stats() is not None and len(generate(llm, [[1]])) == 1


def test_options_that_do_not_exist_or_contradict_each_other_are_refused_by_name():
    for options, error, message in (
        ({"blocksize": 16}, TypeError, "unknown engine option 'blocksize'. Did you mean block_size"),
        ({"attention_backend": "flex", "enforce_eager": True}, ValueError, "needs compilation"),
        ({"num_kv_blocks": 1}, ValueError, "num_kv_blocks is 1"),
        ({"max_num_batched_tokens": 16}, ValueError, "max_num_batched_tokens is 16"),
        ({"long_prefill_token_threshold": 8}, ValueError, "long_prefill_token_threshold is 8"),
        ({"max_long_partial_prefills": 5, "max_num_partial_prefills": 2}, ValueError, "max_long_partial_prefills is 5"),
        ({"max_model_len": 1000}, ValueError, "max_model_len is 1000"),
        ({"dtype": "int3"}, ValueError, "dtype is 'int3'; it must be one of auto"),
        ({"device": "tpu"}, ValueError, "device is 'tpu'"),
        ({"block_size": 24}, ValueError, "block_size is 24"),
        ({"gpu_memory_utilization": 0.0}, ValueError, "gpu_memory_utilization is 0.0"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization is 1.5"),
        ({"priority_ageing_s": 1e-9}, ValueError, "at least .* seconds, or 0 for no ageing"),
        ({"skip_tokenizer_init": 1}, TypeError, "skip_tokenizer_init must be True or False"),
        ({"seed": -1}, ValueError, "seed is -1"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            open_llm(**options)


def test_limits_that_are_not_set_yield_to_those_that_are():
    def resolved(device: str = "cpu", **options: object) -> tuple[int, int, int, int]:
        config = EngineConfig(**options).resolve_limits(device, 4096)
        return (
            config.max_num_batched_tokens, config.max_num_seqs, config.block_size, config.long_prefill_token_threshold
        )  # fmt: skip

    assert resolved() == (1024, 64, 64, 512) and resolved("cuda") == (8192, 1024, 64, 4096)
    assert resolved(max_num_batched_tokens=48) == (48, 16, 32, 32)
    assert resolved(max_num_batched_tokens=48, max_num_seqs=30) == (48, 30, 16, 16)
    assert resolved(max_num_batched_tokens=80, block_size=64) == (80, 16, 64, 64)
    assert resolved(max_num_seqs=2000) == (2064, 2000, 64, 1024)


def test_idle_time_is_used_for_nothing_and_ageing_raises_who_waits():
    with open_llm(priority_ageing_s=1.0) as llm:
        assert not llm._engine.use_idle_time(captures=False) and not llm._engine.use_idle_time(captures=True)
        assert llm._engine.num_output_tokens() == 0
        assert [output.finished for output in generate(llm, [[1], [2]], priority=[5, 0])] == [True, True]


def test_a_sequence_says_what_it_is():
    engine = open_engine()
    add(engine, "a", [1, 2])
    (sequence,) = engine.scheduler.waiting
    assert repr(sequence) == "Sequence('a', waiting, 2 known, 0 computed, 0 blocks)"
    engine.step()
    assert repr(sequence) == "Sequence('a', running, 3 known, 2 computed, 1 blocks)"
    engine.abort("a")
    assert repr(sequence).startswith("Sequence('a', finished")


def test_observers_that_nobody_brings_are_refused():
    with pytest.raises(ValueError, match=r"built without `nanovllm\.observability`"):
        NoObservers().append(print)


def test_the_progress_bar_shows_how_many_requests_ended(capsys):
    with open_llm(tokenizer=byte_tokenizer()) as llm:
        llm.generate([[1], [2], [3]], GREEDY, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
