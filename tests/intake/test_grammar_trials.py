"""Grammars that explode are refused within limits of time and memory, while requests without a form go on."""

import asyncio
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from nanovllm import AsyncLLM, SamplingParams, StructuredOutput
from nanovllm.features.composition.input_processor import build_input_processor
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.grammar import compilation, compiler
from nanovllm.features.grammar.compiler import GrammarCompiler, check_form
from nanovllm.features.grammar.matcher import RESERVE_SECONDS, MaskBudget
from nanovllm.features.grammar.trial_process import NICENESS
from nanovllm.features.grammar.trials import MAX_TRIALS, TRIALS, Trials
from nanovllm.features.intake.preparation import prepare_ahead
from nanovllm.features.structured_output import GrammarError
from nanovllm.requests import RequestLimits
from nanovllm.serving import async_llm
from tests.support.async_llms import OPTIONS, collect
from tests.support.structured import EOS, allowed, grammars, model
from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer

BOMBS = {
    "patterns": {"json_schema": {"allOf": [{"type": "string", "pattern": f"a{i}b"} for i in range(22)]}},
    "counted patterns": {"json_schema": {"type": "string", "allOf": [{"pattern": f"a{{{i}}}b"} for i in range(2, 24)]}},
    "a multiple": {"json_schema": {"type": "integer", "multipleOf": 1000003}},
    "multiples": {"json_schema": {"allOf": [{"type": "integer", "multipleOf": n} for n in (101, 103, 107, 109)]}},
    "terminals": {"grammar": "start: T\nT: " + " & ".join(f"/(.|\\n)*a.{{{i}}}b(.|\\n)*/" for i in range(1, 15))},
    "a schema in a grammar": {"grammar": 'start: %json {"type": "integer", "multipleOf": 1000003}'},
    "a hidden intersection": {
        "grammar": 'start: T\nT: "c" | /x{30}/ (' + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 14)) + ")"
    },
}
LIMITS = "takes more than 0.5 s of a processor or 256 MB of memory to compile. Simplify it"


@pytest.mark.parametrize("name", BOMBS)
def test_a_form_that_explodes_is_refused_with_the_limits(name):
    form = StructuredOutput(**BOMBS[name])
    with pytest.raises(ValueError, match=f"structured_output.{form.kind} {LIMITS}"):
        grammars().matcher(form)


def test_a_trial_beside_the_first_names_no_vocabulary_that_is_not_sent_yet():
    """Else its child knows no such vocabulary, ends, and the form is refused as too large."""
    form, sent, is_overtaken = StructuredOutput(regex="a"), [], threading.Event()

    class Watched(Trials):
        def _send(self, message):
            if message[0] == "vocabulary":
                beside.start()
                is_overtaken.wait(0.3)
            sent.append(message[0])
            if message[0] == "compile":
                is_overtaken.set()
            return super()._send(message)

    watched, vocabulary = Watched(), grammars()._source
    beside = threading.Thread(target=lambda: watched.compile(vocabulary, form, is_forced=False))
    try:
        watched.compile(vocabulary, form, is_forced=False)
        beside.join()
    finally:
        watched.close()
    assert sent == ["vocabulary", "compile", "compile"]


def test_a_refusal_is_remembered(monkeypatch):
    own, form = new_compiler(), StructuredOutput(**BOMBS["a multiple"])
    with pytest.raises(ValueError, match=LIMITS):
        own.matcher(form)
    monkeypatch.setattr(TRIALS, "compile", lambda *_, **__: pytest.fail("it was tried again"))
    with pytest.raises(ValueError, match=LIMITS):
        own.matcher(form)


def test_a_check_without_a_vocabulary_has_the_limits_too():
    with pytest.raises(ValueError, match=f"structured_output.json_schema {LIMITS}"):
        check_form(StructuredOutput(**BOMBS["patterns"]))


@pytest.mark.full
def test_trials_go_on_behind_a_process_that_was_killed():
    grammars().matcher(StructuredOutput(regex="before"))
    TRIALS._process.kill()
    TRIALS._process.wait()
    assert allowed(grammars().matcher(StructuredOutput(regex="behind")))


def test_the_process_of_trials_shares_the_processors_with_its_engine_and_does_not_hear_ctrl_c():
    """Linux gives each session an equal share (sched_autogroup), whatever the niceness of its processes."""
    grammars().matcher(StructuredOutput(regex="beside"))
    process_id = TRIALS._process.pid
    assert os.getsid(process_id) == os.getsid(0)
    assert os.getpgid(process_id) == process_id
    own, its = (os.getpriority(os.PRIO_PROCESS, number) for number in (0, process_id))
    assert its == min(19, own + NICENESS)


def test_a_grammar_whose_lexer_is_full_is_compiled_anew(monkeypatch):
    monkeypatch.setitem(compilation.LIMITS, "max_lexer_states", 200)
    own, form = new_compiler(), StructuredOutput(regex="(.*a.{50}b){20}")
    first = own.matcher(form)
    matcher, chance = first.copy(), np.random.default_rng(0)
    with pytest.raises(GrammarError, match="too many states"):
        for _ in range(100):
            matcher.consume(int(chance.choice(allowed(matcher))))
    second = own.matcher(form)
    assert second is not first and allowed(second.copy())


@pytest.fixture
def clock(monkeypatch):
    """A processor's time that stands still but for what a test adds in a mask, by setting `seconds`."""
    found = SimpleNamespace(now=0.0, seconds=0.0)

    def thread_time():
        found.now += found.seconds / 2  # asked before a mask and behind it: half of it belongs to neither
        return found.now

    monkeypatch.setattr("nanovllm.features.grammar.matcher.thread_time", thread_time)
    return found


def new_compiler():
    return GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE, (EOS,))


def followed(matcher, *token_ids):
    mask = np.zeros(matcher.num_words, np.int32)
    matcher.follow(token_ids, mask.ctypes.data)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_masks_that_take_too_long_end_every_sample_of_their_form_and_the_next_request_begins_anew(clock):
    own, form = new_compiler(), StructuredOutput(regex="[a-z]*")
    compiled = own.matcher(form)
    one, other = compiled.copy(), compiled.copy()
    clock.seconds = 2 * (RESERVE_SECONDS * 0.6 + MaskBudget(one.num_words).allowed)
    assert followed(one) == followed(other)
    for sample in (one, other):
        with pytest.raises(GrammarError, match=r"regex takes too long for its masks: more than 50 ms of a processor"):
            followed(sample)
    assert followed(own.matcher(form).copy())


def test_masks_within_their_allowance_refill_the_reserve():
    budget = MaskBudget(num_words=16)
    for _ in range(100):
        budget.add(budget.allowed + RESERVE_SECONDS * 0.9, 1)
        for _ in range(30):
            budget.add(0.0, 1)
    assert not budget.is_exceeded


def test_a_resumed_output_has_an_allowance_for_each_of_its_tokens(clock):
    matcher = grammars().matcher(StructuredOutput(regex="a*")).copy()
    (token_id,) = tiny_tokenizer().encode("a")
    clock.seconds = 2 * 1000 * MaskBudget(matcher.num_words).allowed
    followed(matcher, *[token_id] * 1000)
    assert followed(matcher)


def test_large_grammars_are_kept_by_their_bytes(monkeypatch):
    trials = Trials()  # a new process: what fits into memory that earlier forms have freed counts as nothing
    monkeypatch.setattr(compiler, "TRIALS", trials)
    monkeypatch.setattr(compiler, "STATES_BYTES", 0)
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 2**20)
    own = new_compiler()
    # Of 2.4 MB, compiled in 16 ms: far from a trial's limits on a slow processor too.
    small, large = StructuredOutput(regex="a"), StructuredOutput(json_schema={"const": "x" * 10_000})
    try:
        own.matcher(small)
        assert own.is_known(small)
        own.matcher(large)
    finally:
        trials.close()
    assert own.is_known(large) and not own.is_known(small)


async def test_a_plain_request_is_answered_while_forms_are_tried(monkeypatch):
    may_go_on, started, compile_ = threading.Event(), threading.Semaphore(0), TRIALS.compile

    def held(*arguments, **options):
        started.release()
        may_go_on.wait(60.0)
        return compile_(*arguments, **options)

    monkeypatch.setattr(TRIALS, "compile", held)
    async with AsyncLLM(model(), tokenizer=tiny_tokenizer(), **OPTIONS) as llm:
        forms = [SamplingParams(max_tokens=4, structured_output=StructuredOutput(regex=f"a{n}")) for n in range(16)]
        tasks = [asyncio.create_task(collect(llm.generate([5, 6], params))) for params in forms]
        try:
            for _ in range(MAX_TRIALS):  # each is in a thread of its own
                assert await asyncio.to_thread(started.acquire, timeout=60.0)
            assert (await collect(llm.generate("the sea", SamplingParams(max_tokens=4))))[-1].finished
            assert not any(task.done() for task in tasks)
        finally:
            may_go_on.set()
        assert all(outputs[-1].finished for outputs in await asyncio.gather(*tasks))


def test_what_the_first_form_and_the_first_control_token_need_is_made_ahead(monkeypatch):
    limits = RequestLimits(VOCAB_SIZE, VOCAB_SIZE, "Tiny", eos_token_ids=(EOS,))
    processor = build_input_processor(tiny_tokenizer(), EngineConfig(max_model_len=64), limits)
    prepare_ahead(processor)
    monkeypatch.setattr(compiler, "open_vocabulary", lambda *_: pytest.fail("it reads the vocabulary"))
    monkeypatch.setattr(Tokenizer, "from_str", lambda *_: pytest.fail("it copies the tokenizer"))
    assert allowed(processor.parts.grammars.matcher(StructuredOutput(regex="a")))
    assert processor.parts.chat.apply_to([{"role": "user", "content": "<|end|>"}])


async def test_an_asynchronous_engine_prepares_without_a_request(monkeypatch):
    prepared = threading.Event()
    monkeypatch.setattr(async_llm, "prepare_ahead", lambda _: prepared.set())
    async with AsyncLLM(model(), tokenizer=tiny_tokenizer(), **OPTIONS):
        assert await asyncio.to_thread(prepared.wait, 60.0)
