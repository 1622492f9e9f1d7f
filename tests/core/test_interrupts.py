"""Ctrl-C at any line of a call: it ends that call, and other streams and the next call are right."""

import functools
import signal
import sys
import threading
from pathlib import Path

import pytest

import nanovllm
from nanovllm import EngineDeadError, SamplingParams
from nanovllm.features.interrupts import InterruptsHeld, interrupts_let_through
from tests.support import llms
from tests.support.llms import assert_idle_and_whole, check_engine, greedy
from tests.support.logprobs import assert_same_reports
from tests.support.tiny_models import random_prompts

PACKAGE = str(Path(nanovllm.__file__).parent)
# A pool in which the two requests below preempt each other.
OPTIONS = {"num_kv_blocks": 13, "max_model_len": 160}
PROMPT, OTHER = random_prompts(2, low=90, high=90, seed=3)
PARAMS = greedy(8, ignore_eos=True, stop=["\0never\0"])


pytestmark = pytest.mark.usefixtures("sigint_is_heeded")


class SigintAt:
    """Sends this process SIGINT before the `number`-th line, and the `second`-th, that runs in files of the package."""

    def __init__(self, number, files, second=None):
        self.due = {number, second}
        self.num_lines = 0
        self.files = tuple(f"{PACKAGE}/{file}" for file in files)
        self.place = ""

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(self.files) else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.num_lines += 1
            if self.num_lines in self.due:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._line


def open_llm(**options):
    return llms.open_llm(**OPTIONS, **options)


def tokens(output):
    return output.outputs[0].token_ids


@functools.cache
def expected():
    llm = open_llm()
    outputs = llm.generate([PROMPT, OTHER], PARAMS, use_tqdm=False)
    assert llm.stats().num_preemptions > 0
    return [(tokens(output), output.outputs[0].text) for output in outputs]


FILES = {
    "call": ("llm.py",),
    "bookkeeping": ("engine.py", "scheduler.py", "block_manager.py", "sequence.py", "observability/step_records.py"),
    "text": ("responses.py", "requests.py"),
    "runner": ("model_runner.py", "fast/gpu/", "model.py", "fast/attention/", "sampling/"),
}


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlap"])
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_sigint_at_any_line_of_a_call_ends_that_call_and_no_other(files, overlap):
    """A stream is open while another call is interrupted: it goes on, and so does everything after."""
    model_state = None
    places = set()
    # With and without overlap nearly the same lines run: each way takes every other of these.
    for number in [*range(1, 400, 17), *range(400, 6000, 613)][overlap::2]:
        llm = open_llm(overlap=overlap)
        stream = llm.stream(PROMPT, PARAMS, timeout=1000.0)
        seen = [next(stream) for _ in range(3)]
        module = llm._engine.model_runner.binding.model
        model_state = model_state or sorted(vars(module.model.layers[0].self_attn))
        with SigintAt(number, files) as interrupt:
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
        assert_idle_and_whole(llm)
        assert not llm._inboxes and not llm._engine.outputs and not llm._engine._deadlines
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not interrupt.place:
            break  # the call has fewer lines
    assert len(places) >= 8  # it was really interrupted, at many different lines


SAMPLES = SamplingParams(n=2, seed=1, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)
REPORTING = ("engine.py", "scheduler.py", "features/chat/", "sequence.py", "features/logprobs/logprobs.py", "model.py")


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlap"])
def test_an_interrupt_leaves_log_probabilities_with_their_tokens_and_samples_with_their_request(overlap):
    whole = open_llm().generate([PROMPT, OTHER], SAMPLES, use_tqdm=False)
    places = set()
    for number in [*range(1, 500, 43), *range(500, 4800, 601)][overlap::2]:
        llm = open_llm(overlap=overlap)
        stream = llm.stream(PROMPT, SAMPLES)
        seen = [next(stream)]
        with SigintAt(number, REPORTING) as interrupt:
            try:
                llm.generate(OTHER, SAMPLES, use_tqdm=False)
            except KeyboardInterrupt:
                places.add(interrupt.place)
        assert "_compiled_call_impl" not in vars(llm._engine.model_runner.binding.model.model), interrupt.place
        seen += stream
        (after,) = llm.generate(OTHER, SAMPLES, use_tqdm=False)
        for output, expected_output in zip((seen[-1], after), whole, strict=True):
            assert_same_answers(output, expected_output, interrupt.place)
        check_engine(llm)
    assert len(places) >= 8


def assert_same_answers(output, expected_output, place):
    for completion, expected_completion in zip(output.outputs, expected_output.outputs, strict=True):
        assert completion.token_ids == expected_completion.token_ids, place
        assert_same_reports(completion.logprobs, expected_completion.logprobs)
    assert_same_reports(output.prompt_logprobs, expected_output.prompt_logprobs)


def test_a_second_sigint_within_a_step_raises_at_once_and_may_kill_the_engine_by_name():
    num_dead = 0
    for number in range(20, 2000, 197):
        llm = open_llm()
        with SigintAt(number, FILES["bookkeeping"], number + 3) as interrupt:
            try:
                llm.generate(OTHER, PARAMS, use_tqdm=False)
            except KeyboardInterrupt:
                pass
            except EngineDeadError as error:  # it was cut short while the first one was raised
                assert isinstance(error.__cause__, KeyboardInterrupt), interrupt.place
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            (after,) = llm.generate(OTHER, PARAMS, use_tqdm=False)
            assert tokens(after) == expected()[1][0], interrupt.place
        except EngineDeadError as error:
            num_dead += 1
            assert "KeyboardInterrupt" in str(error) and "build a new one" in str(error)
        llm.close()
    assert num_dead > 0


def test_sigint_while_another_thread_steps_ends_the_main_threads_call_alone():
    llm = open_llm()
    results = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate([PROMPT] * 3, PARAMS, use_tqdm=False)))
    thread.start()
    with SigintAt(40, FILES["bookkeeping"]), pytest.raises(KeyboardInterrupt):
        llm.generate([OTHER] * 3, PARAMS, use_tqdm=False)
    thread.join()
    assert [tokens(output) for output in results] == [expected()[0][0]] * 3
    assert llm.stats().num_used_blocks == 0


def test_a_handler_of_the_users_own_is_called_between_steps_and_put_back():
    calls = []

    def note(signum, frame):
        calls.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        with SigintAt(300, FILES["bookkeeping"]):
            (output,) = open_llm().generate(OTHER, PARAMS, use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is note
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]
    assert tokens(output) == expected()[1][0]  # it does not raise, so the call goes on


def test_what_lets_interrupts_through_is_ended_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt), InterruptsHeld():
        signal.raise_signal(signal.SIGINT)
        reached.append("held")
        with interrupts_let_through():
            reached.append("never")
    assert reached == ["held"]
    with pytest.raises(KeyboardInterrupt), InterruptsHeld(), interrupts_let_through():
        signal.raise_signal(signal.SIGINT)
        reached.append("never")
    assert reached == ["held"]
    with pytest.raises(KeyboardInterrupt), InterruptsHeld():
        with interrupts_let_through():
            pass
        signal.raise_signal(signal.SIGINT)
        reached.append("held again")
    assert reached == ["held", "held again"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigint_is_held_by_the_innermost_and_raised_by_the_outermost():
    reached = []
    with pytest.raises(KeyboardInterrupt), InterruptsHeld():
        with InterruptsHeld():
            signal.raise_signal(signal.SIGINT)
        reached.append("inner ended")
    assert reached == ["inner ended"]


def test_a_second_sigint_while_the_first_is_raised_leaves_no_handler_behind():
    places = set()
    for number in range(2, 8):
        held = InterruptsHeld().__enter__()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), SigintAt(number, ("features/interrupts.py",)) as interrupt:
            held.__exit__()
        places.add(interrupt.place)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, interrupt.place
        assert InterruptsHeld._holder is None, interrupt.place
    assert len(places) >= 5


def test_sigint_while_requests_are_queued_leaves_none_of_them_behind():
    llm = open_llm()
    add = llm._engine.scheduler.add
    num_added = 0

    def add_and_interrupt(sequence):
        nonlocal num_added
        num_added += 1
        add(sequence)
        if num_added == 2:
            signal.raise_signal(signal.SIGINT)

    llm._engine.scheduler.add = add_and_interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 4, PARAMS, use_tqdm=False)
    llm._engine.scheduler.add = add
    assert llm.stats().num_waiting == 0
    (output,) = llm.generate(OTHER, PARAMS, use_tqdm=False)
    assert tokens(output) == expected()[1][0]


def test_sigint_in_the_middle_of_scheduling_loses_no_step():
    llm = open_llm()
    spend = llm._engine.scheduler._spend_what_is_left
    llm.generate(PROMPT, PARAMS, use_tqdm=False)
    before = llm.stats()

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        spend(*arguments)

    llm._engine.scheduler._spend_what_is_left = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(OTHER, PARAMS, use_tqdm=False)
    llm._engine.scheduler._spend_what_is_left = spend
    after = llm.stats()
    assert after.num_steps == before.num_steps + 1  # the step is whole
    assert (after.num_running, after.num_waiting, after.num_used_blocks) == (0, 0, 0)
    (output,) = llm.generate(OTHER, PARAMS, use_tqdm=False)
    assert tokens(output) == expected()[1][0]
