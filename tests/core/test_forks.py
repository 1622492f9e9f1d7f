"""Forked children: engines of the parent refuse them at once, and both processes end cleanly."""

import asyncio
import faulthandler
import gc
import os
import pickle
import re
import threading
import weakref
from contextlib import closing, contextmanager

import pytest
import torch

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.build import build_engine
from nanovllm.errors import ForkedChildError
from nanovllm.observability.trace_writer import TraceWriter
from tests.support.llms import generate, submit
from tests.support.tiny_models import tiny_model

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system knows no fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of forking with threads, which is what is tested
]

OPTIONS = {"max_model_len": 128, "enforce_eager": True}
DRAWS = SamplingParams(max_tokens=12, ignore_eos=True)
REFUSAL = re.compile(r"lives in process \d+, and a forked child \(process \d+\) cannot use it; build one there")


def in_child(call):
    """The bytes that `call` returned in a forked child, if any; the child is killed if it hangs."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        status = 1
        try:
            torch.set_num_threads(1)  # as the refusal says
            faulthandler.dump_traceback_later(60, exit=True)  # a whole collection copies the heap, page by page
            result = call()
            os.write(writes, result if isinstance(result, bytes) else b"")
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        written = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child hung or failed"
    return written


@contextmanager
def held_elsewhere(lock):
    """The lock, in the hands of another thread."""
    is_held, may_end = threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        may_end.set()
        thread.join()


def assert_refused(calls):
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert REFUSAL.search(str(error)), (name, error)
        else:
            raise AssertionError(f"{name} was not refused")


def test_a_pools_worker_can_send_its_refusal_to_the_parent():
    with LLM(tiny_model(), **OPTIONS) as llm:

        def refused():
            with pytest.raises(ForkedChildError) as refusal:
                llm.stats()
            return pickle.dumps(refusal.value)

        error = pickle.loads(in_child(refused))
    assert isinstance(error, ForkedChildError)
    assert REFUSAL.search(str(error)) and f"forked child (process {os.getpid()})" not in str(error)


def test_a_child_forked_within_a_step_is_refused_by_every_call_and_its_parent_goes_on():
    is_in_step, may_go_on = threading.Event(), threading.Event()

    def on_step(_):
        is_in_step.set()
        may_go_on.wait()

    outputs = []
    with LLM(tiny_model(), on_step=on_step, **OPTIONS) as llm:
        stream = llm.stream([6, 7], DRAWS)
        thread = threading.Thread(target=lambda: outputs.extend(generate(llm, [5, 6, 7], DRAWS)))
        thread.start()
        is_in_step.wait()

        def use():
            assert_refused(
                {
                    "generate": lambda: generate(llm, [5], DRAWS),
                    "chat": lambda: llm.chat([{"role": "user", "content": "a"}]),
                    "stream": lambda: llm.stream([5], DRAWS),
                    "next": lambda: next(stream),
                    "apply_chat_template": lambda: llm.apply_chat_template([{"role": "user", "content": "a"}]),
                    "config": lambda: llm.config,
                    "stats": llm.stats,
                    "reset_prefix_cache": llm.reset_prefix_cache,
                    "weights_changed": llm.weights_changed,
                }
            )
            with llm:
                pass  # its end closes nothing here
            llm.close()

        try:
            in_child(use)
        finally:
            may_go_on.set()
            thread.join()
        assert outputs[0].outputs[0].finish_reason == "length" and len(outputs[0].outputs[0].token_ids) == 12
        assert [*stream][-1].finished
        assert llm.stats().num_running == 0


@pytest.fixture
def own_garbage():
    """Collections within the test leave alone what was made before it: some of that may not end in a forked child."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("own_garbage")
def test_a_stream_that_a_child_forgets_goes_on_in_the_parent():
    with LLM(tiny_model(), **OPTIONS) as llm:
        alone = generate(llm, [5, 6, 7], SamplingParams(temperature=0, max_tokens=12))[0]
        stream = llm.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=12))
        next(stream)

        def forget():
            nonlocal stream
            stream.close()
            del stream
            gc.collect()
            assert llm._engine.has_unfinished  # the copy of the parent's engine is left as it is

        in_child(forget)
        assert [*stream][-1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_an_engine_is_refused_in_a_child_and_closes_quietly():
    with closing(build_engine(tiny_model(), None, None, OPTIONS)) as engine:
        submit(engine, "a", [5, 6], DRAWS)

        def use():
            assert_refused(
                {
                    "add_request": lambda: submit(engine, "b", [5], DRAWS),
                    "step": engine.step,
                    "abort": lambda: engine.abort("a"),
                    "stats": engine.stats,
                    "drop_computed": engine.drop_computed,
                    "reset_prefix_cache": engine.reset_prefix_cache,
                }
            )
            engine.close()

        in_child(use)
        while engine.has_unfinished:
            engine.step()
        assert engine.outputs[0].outputs[0].finish_reason == "length"


def test_an_engine_that_ends_in_a_child_leaves_what_is_frozen():
    """Its finalizer is the parent's; a collection of the whole heap would copy it."""
    engines = [build_engine(tiny_model(), None, None, OPTIONS)]

    def end():
        alive = weakref.ref(engines[0])
        engines.clear()
        assert alive() is None and gc.get_freeze_count()

    in_child(end)
    engines[0].close()


def test_an_async_llm_closes_quietly_in_a_child_though_its_lock_was_held():
    llm = AsyncLLM(tiny_model(), **OPTIONS)
    with held_elsewhere(llm._engine_thread._changes):

        def close():
            llm._engine_thread._stop_at_exit()
            asyncio.run(llm.close())

        in_child(close)

    async def run():
        async with llm:
            return [output async for output in llm.generate([5], DRAWS)][-1].outputs[0].finish_reason

    assert asyncio.run(run()) == "length"


def test_a_trace_that_a_child_closes_goes_on_in_the_parent(tmp_path):
    with TraceWriter(tmp_path / "trace.json") as trace:
        in_child(trace.close)
        written = (tmp_path / "trace.json").read_bytes()
        assert not written.endswith(b"]\n")
    assert (tmp_path / "trace.json").read_bytes().startswith(written)
