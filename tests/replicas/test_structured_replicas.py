"""Structured outputs behind replicas: the front checks them, each engine process compiles its own."""

import queue
import threading

import pytest

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.build import build_engine
from nanovllm.features.grammar import compiler
from nanovllm.outputs import OutputKind
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.engine_process import Intake, Reporter
from nanovllm.serving.replicas.messages import Abort, Add, SentRequest
from nanovllm.serving.streaming.engine_thread import EngineThread
from tests.support.replicas import OPTIONS, REPLICAS, answers, busiest, completions, kill
from tests.support.structured import EOS, FORMS, check_text, form
from tests.support.tiny_models import random_prompts, save_tiny

pytestmark = pytest.mark.usefixtures("programs_are_forked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), eos_token_ids=[EOS]))


@pytest.fixture(scope="module")
def pool(folder):
    with LLM(folder, **REPLICAS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **OPTIONS) as llm:
        return answers(llm, PROMPTS, PARAMS)


KINDS = [kind for kind in FORMS if kind != "json_object"] * 2
PROMPTS = random_prompts(len(KINDS), seed=3)
PARAMS = [SamplingParams(seed=n, max_tokens=60, structured_output=form(kind)) for n, kind in enumerate(KINDS)]


def test_every_kind_crosses_to_an_engine_process_and_draws_what_one_engine_draws(pool, expected):
    assert answers(pool, PROMPTS, PARAMS) == expected
    for kind, ((_, _, text, finish_reason, _),) in zip(KINDS, expected, strict=True):
        assert finish_reason == "stop"
        check_text(kind, text)


def test_the_front_refuses_what_cannot_be_compiled(pool):
    with pytest.raises(ValueError, match=r"structured_output\.regex cannot be compiled"):
        pool.generate([5, 6], SamplingParams(structured_output=StructuredOutput(regex="(")), use_tqdm=False)
    assert not pool._engine.requests


@pytest.mark.full
def test_a_request_whose_process_dies_goes_on_within_its_form(pool, expected):
    stream = pool.stream(PROMPTS[0], PARAMS[0])
    assert not [next(stream) for _ in range(4)][-1].finished
    kill(pool, busiest(pool))
    assert completions(list(stream)[-1:]) == expected[:1]


class Ending(Reporter):
    def end(self, refusal):
        """Leave this process alive."""


@pytest.mark.full
def test_a_form_that_is_compiled_in_an_engine_process_is_overtaken_and_can_be_aborted(folder, monkeypatch):
    may_go_on, is_compiling, finished = threading.Event(), threading.Semaphore(0), queue.Queue()
    compile_form = compiler.compile_form

    def held(*arguments):
        is_compiling.release()
        may_go_on.wait(60.0)
        return compile_form(*arguments)

    def send(message):
        for output in message.outputs:
            if output.finished:
                finished.put(output.request_id)

    def sent(request_id, placement, params):
        new = NewRequest(request_id, [5, 6], params, output_kind=OutputKind.DELTA)
        return SentRequest.from_new(new, placement, None)

    monkeypatch.setattr(compiler, "compile_form", held)
    engine = build_engine(folder, None, None, OPTIONS)
    reporter = Ending(engine, send, sends_records=False, sends_block_events=False)
    thread = EngineThread(engine, reporter)
    intake = Intake(thread, reporter, engine.input_processor)
    plain, *forms = (
        SamplingParams(max_tokens=9, structured_output=one) for one in (None, form("regex"), form("choice"))
    )
    try:
        intake.handle(Add([sent("kept", 0, forms[0]), sent("aborted", 1, forms[1]), sent("beside", 2, plain)]))
        intake.handle(Add([sent("behind", 3, plain)]))
        assert {finished.get(timeout=60.0), finished.get(timeout=60.0)} == {"beside", "behind"}
        for _ in forms:
            assert is_compiling.acquire(timeout=60.0)
        intake.handle(Abort("aborted", 1))
        may_go_on.set()
        assert finished.get(timeout=60.0) == "kept"
        intake._forms.shutdown()
        thread.submit(lambda _: None).result(60.0)  # after the additions of all forms
        assert not reporter.placements and finished.empty()
    finally:
        may_go_on.set()
        thread.stop()
        thread.join()
