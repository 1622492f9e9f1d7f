"""An interrupt from the keyboard at any line of the engine: no request or block is lost, no module is left hooked."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

PACKAGE = str(Path(nanovllm.__file__).parent)
# A pool in which the two requests below preempt each other.
OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 14, "max_model_len": 160}
PROMPT, OTHER = random_prompts(2, low=90, high=100, seed=3)
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=["\0never\0"])


class InterruptAt:
    """Raises KeyboardInterrupt before the `number`-th line that runs in the given files of the package."""

    def __init__(self, number: int, files: tuple[str, ...]) -> None:
        self.lacking = number
        self.files = tuple(f"{PACKAGE}/{file}" for file in files)
        self.place = ""

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.files) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self.lacking -= 1
            if self.lacking == 0:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def open_llm(**options: Any) -> LLM:
    return LLM(tiny_model(), tokenizer=tiny_tokenizer(), **OPTIONS, **options)


def tokens(output: Any) -> list[int]:
    return output.outputs[0].token_ids


@functools.cache
def expected() -> list[tuple[list[int], str]]:
    outputs = open_llm().generate([PROMPT, OTHER], PARAMS, use_tqdm=False)
    return [(tokens(output), output.outputs[0].text) for output in outputs]


FILES = {
    "bookkeeping": (
        "engine.py",
        "scheduler.py",
        "block_manager.py",
        "request.py",
        "request_table.py",
        "sample_maker.py",
        "sequence.py",
        "step_records.py",
    ),
    "text": ("output_processor.py", "request.py", "detokenizer.py"),
    "runner": ("model_runner.py", "direct_executor.py", "model_binding.py", "attention/", "sampler.py"),
    "hooks": ("model_binding.py",),
}


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlap"])
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(files, overlap):
    """A stream is open while another call is interrupted: it goes on, and so does everything after."""
    model_state = None
    places = set()
    for number in [*range(1, 400, 11), *range(400, 6000, 373)]:
        llm = open_llm(overlap=overlap)
        stream = llm.stream(PROMPT, PARAMS, timeout=1000.0)
        seen = [next(stream) for _ in range(3)]
        module = llm._engine.model_runner.binding.model
        model_state = model_state or sorted(vars(module.model.layers[0].self_attn))
        with InterruptAt(number, files) as interrupt:
            try:
                llm.generate(OTHER, PARAMS, timeout=1000.0, use_tqdm=False)
            except KeyboardInterrupt:
                places.add(interrupt.place)
        assert sorted(vars(module.model.layers[0].self_attn)) == model_state, interrupt.place
        assert module.config._attn_implementation == "sdpa", interrupt.place
        seen += stream
        assert (tokens(seen[-1]), seen[-1].outputs[0].text) == expected()[0], interrupt.place
        (after,) = llm.generate(OTHER, PARAMS, use_tqdm=False)
        assert (tokens(after), after.outputs[0].text) == expected()[1], interrupt.place
        llm._engine.check_integrity()
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0), interrupt.place
        assert not llm._inboxes and not llm._engine.outputs and not llm._engine._requests._deadlines
    assert len(places) >= 8  # it was really interrupted, at many different lines


SAMPLES = SamplingParams(n=2, seed=1, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)
REPORTING = (
    "engine.py",
    "scheduler.py",
    "output_processor.py",
    "request.py",
    "sequence.py",
    "logprobs.py",
    "model_binding.py",
)


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlap"])
def test_an_interrupt_leaves_log_probabilities_with_their_tokens_and_samples_with_their_request(overlap):
    whole = open_llm().generate([PROMPT, OTHER], SAMPLES, use_tqdm=False)
    places = set()
    for number in [*range(1, 500, 61), *range(500, 5000, 601)]:
        llm = open_llm(overlap=overlap)
        stream = llm.stream(PROMPT, SAMPLES)
        seen = [next(stream)]
        with InterruptAt(number, REPORTING) as interrupt:
            try:
                llm.generate(OTHER, SAMPLES, use_tqdm=False)
            except KeyboardInterrupt:
                places.add(interrupt.place)
        assert "_compiled_call_impl" not in vars(llm._engine.model_runner.binding.model.model), interrupt.place
        seen += stream
        (after,) = llm.generate(OTHER, SAMPLES, use_tqdm=False)
        for output, expected_output in zip((seen[-1], after), whole, strict=True):
            assert_same_reports(output, expected_output, interrupt.place)
        llm._engine.check_integrity()
    assert len(places) >= 8


def assert_same_reports(output: Any, expected_output: Any, place: str) -> None:
    reports = [(completion.token_ids, completion.logprobs) for completion in output.outputs]
    expected_reports = [(completion.token_ids, completion.logprobs) for completion in expected_output.outputs]
    for (token_ids, logprobs), (expected_ids, expected_logprobs) in zip(reports, expected_reports, strict=True):
        assert token_ids == expected_ids, place
        assert_close(logprobs, expected_logprobs, place)
    assert_close(output.prompt_logprobs[1:], expected_output.prompt_logprobs[1:], place)


def assert_close(reports: Any, expected_reports: Any, place: str) -> None:
    for report, expected_report in zip(reports, expected_reports, strict=True):
        assert report.keys() == expected_report.keys(), place
        for token_id, (logprob, _) in report.items():
            assert logprob == pytest.approx(expected_report[token_id].logprob, abs=1e-4), place


def test_after_an_interrupt_in_the_middle_of_scheduling_counters_go_on(monkeypatch):
    llm = open_llm()
    llm.generate(PROMPT, PARAMS, use_tqdm=False)
    before = llm.stats()

    def interrupted(step):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._engine.scheduler, "_spend_what_is_left", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(OTHER, PARAMS, use_tqdm=False)
    after = llm.stats()
    assert (after.num_steps, after.num_output_tokens) == (before.num_steps, before.num_output_tokens)
    assert (after.num_running, after.num_waiting, after.num_used_blocks) == (0, 0, 0)
    (output,) = llm.generate(OTHER, PARAMS, use_tqdm=False)
    assert tokens(output) == expected()[1][0]


def test_an_interrupt_while_requests_are_queued_leaves_none_of_them_behind(monkeypatch):
    llm = open_llm()
    add_request = llm._engine.add_request
    num_added = 0

    def add(*arguments, **options):
        nonlocal num_added
        num_added += 1
        add_request(*arguments, **options)
        if num_added == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm._engine, "add_request", add)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 4, PARAMS, use_tqdm=False)
    monkeypatch.undo()
    assert llm.stats().num_waiting == 0
    (output,) = llm.generate(OTHER, PARAMS, use_tqdm=False)
    assert tokens(output) == expected()[1][0]
