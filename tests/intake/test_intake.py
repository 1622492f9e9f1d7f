"""Shares of preparation: clients take turns by seconds, work that nobody waits for ends, trials of forms make way."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from nanovllm import SamplingParams
from nanovllm.features.grammar.trials import TRIALS, TrialVocabulary
from nanovllm.features.intake import intake
from nanovllm.features.intake.intake import (  # fmt: skip
    CLIENT,
    FORM_PLACES,
    LONG_CHARS,
    MAX_FORMS,
    Accounts,
    Intake,
    IntakeClosedError,
    Task,
    checkpoint,
    form_turn,
)
from nanovllm.features.structured_output import StructuredOutput
from tests.support.async_llms import open_llm
from tests.support.llms import comes_true
from tests.support.tiny_models import tiny_tokenizer


class Seconds:
    """A clock that tests move; each client's work takes the seconds that it says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(intake.time, "perf_counter", lambda: self.now)

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Seconds(monkeypatch)


class Held:
    """Work that occupies a place until it may go on."""

    def __init__(self, own, client="first", num_chars=0):
        self.may_go_on, self._has_begun = threading.Event(), threading.Event()
        self.task = own.submit(self._work, num_chars, client=client)
        assert self._has_begun.wait(30.0)

    def _work(self):
        self._has_begun.set()
        assert self.may_go_on.wait(30.0)

    def end(self):
        self.may_go_on.set()
        self.task.result(30.0)


def ended(tasks):
    return [task.result(30.0) for task in tasks]


def num_trials(own):
    """Forms whose trial has begun."""
    return sum(task.stop is not None for task in own.forms.running)


def test_a_client_does_not_wait_for_the_queue_of_another():
    own, order = Intake(), []
    first = Held(own)
    tasks = [own.submit(lambda n=n: order.append(f"alice {n}"), client="alice") for n in range(200)]
    tasks.append(own.submit(lambda: order.append("bob"), client="bob"))
    first.end()
    ended(tasks)
    assert order.index("bob") <= 1
    assert [name for name in order if name != "bob"] == [f"alice {n}" for n in range(200)]


def test_the_client_that_had_the_fewest_seconds_is_next(clock):
    own, order = Intake(), []
    first = Held(own)

    def work(name, seconds):
        return lambda: (order.append(name), clock.pass_by(seconds))[0]

    tasks = [own.submit(work("slow", 3.0), client="slow") for _ in range(3)]
    tasks += [own.submit(work("quick", 1.0), client="quick") for _ in range(6)]
    first.end()
    ended(tasks)
    assert order.count("quick") == 6 and order.index("slow", 1) == 4


def test_a_client_that_returns_does_not_have_the_seconds_that_it_did_not_ask_for():
    accounts = Accounts()
    busy, other = accounts.open("busy"), accounts.open("other")
    busy.served, other.served = 10.0, 20.0
    assert accounts.open("new").served == 10.0
    accounts.close(other)
    busy.served = 15.0
    assert accounts.open("other").served == 20.0


def test_accounts_of_clients_without_work_are_bounded():
    accounts = Accounts()
    accounts.open("busy")
    for number in range(3 * intake.MAX_IDLE):
        accounts.close(accounts.open(str(number)))
    assert len(accounts._accounts) <= intake.MAX_IDLE + 1


def test_long_work_makes_way_at_its_checkpoints_and_goes_on(clock):
    own, order, is_open = Intake(), [], threading.Event()

    def long():
        for piece in range(4):
            order.append(f"piece {piece}")
            clock.pass_by(1.0)
            if piece == 1:
                is_open.set()
                comes_true(lambda: own.long.waiting)
            checkpoint()
        return "done"

    task = own.submit(long, LONG_CHARS + 1, client="alice")
    assert is_open.wait(30.0)
    own.submit(lambda: order.append("bob"), LONG_CHARS + 1, client="bob").result(30.0)
    assert task.result(30.0) == "done"
    assert order == ["piece 0", "piece 1", "bob", "piece 2", "piece 3"]


def test_work_that_waits_is_dropped_and_never_begins():
    own, begun = Intake(), []
    first = Held(own)
    tasks = [own.submit(lambda n=n: begun.append(n), client="alice") for n in range(10)]
    for task in tasks[:9]:
        assert task.cancel()
    assert all(task.work is None for task in tasks[:9])  # what it holds is free
    first.end()
    tasks[9].result(30.0)
    assert begun == [9]
    with pytest.raises(CancelledError):
        tasks[0].result(0)


@pytest.mark.parametrize("is_suspended", [False, True])
def test_work_that_runs_ends_at_its_next_checkpoint(is_suspended, clock):
    own, has_begun, may_go_on, num_pieces = Intake(), threading.Event(), threading.Event(), []

    def long():
        for _ in range(1000):
            num_pieces.append(1)
            clock.pass_by(1.0)
            has_begun.set()
            may_go_on.wait(30.0)
            checkpoint()

    task = own.submit(long, client="alice")
    assert has_begun.wait(30.0)
    if is_suspended:
        other = threading.Event()
        bob = own.submit(lambda: other.wait(30.0), client="bob")
        may_go_on.set()
        comes_true(lambda: task in own.short.waiting.get(task.account, ()))
    task.cancel()
    may_go_on.set()
    with pytest.raises(IntakeClosedError):
        task.result(30.0)
    assert sum(num_pieces) == 1
    if is_suspended:
        other.set()
        assert bob.result(30.0)
    assert own.submit(lambda: "next", client="alice").result(30.0) == "next"


def test_a_thread_ends_with_its_error_and_leaves_its_place():
    own = Intake()
    with pytest.raises(ZeroDivisionError):
        own.submit(lambda: 1 / 0).result(30.0)
    assert own.submit(lambda: 1).result(30.0) == 1
    own.shutdown()
    with pytest.raises(IntakeClosedError):
        own.submit(lambda: 1)


def test_work_that_waits_is_refused_when_the_intake_closes_and_work_that_runs_ends():
    own = Intake()
    first = Held(own)
    waiting = [own.submit(lambda: 1, number, client=str(number % 2)) for number in range(0, 2 * LONG_CHARS, 1000)]
    others = [task for task in waiting if task.lane is own.short]
    own.shutdown()
    for task in others:
        with pytest.raises(IntakeClosedError):
            task.result(30.0)
    first.end()
    comes_true(lambda: not own.short.tasks() and not own.long.tasks())


def test_a_client_with_forms_leaves_room_for_its_own_texts_and_for_others():
    own, may_go_on = Intake(), threading.Event()

    def compile_form():
        with form_turn():
            return may_go_on.wait(30.0)

    forms = [own.submit(compile_form, client="alice", compiles=True) for _ in range(60)]
    comes_true(lambda: len(own.forms.running) == FORM_PLACES)
    assert own.submit(lambda: "text", client="alice").result(30.0) == "text"
    assert own.submit(lambda: "known form", client="bob").result(30.0) == "known form"
    assert sum(task.has_begun for task in forms) == MAX_FORMS
    may_go_on.set()
    assert all(ended(forms))


def vocabulary():
    source = tiny_tokenizer().backend_tokenizer.to_str()
    return TrialVocabulary((source, len(tiny_tokenizer()), [1]))


def trial(source, **form):
    return lambda: TRIALS.compile(source, StructuredOutput(**form), is_forced=False)


def bomb(source, number):
    """A trial that takes longer than it may."""
    return trial(source, json_schema={"allOf": [{"type": "string", "pattern": f"a{i}b{number}"} for i in range(22)]})


def test_a_trial_of_the_client_with_the_most_makes_way_and_is_tried_again(monkeypatch):
    own, source = Intake(), vocabulary()
    stopped = []
    make_way = Intake._make_way

    def watched(self, *arguments):
        before = {task for task in self.forms.running if task.is_stopped}
        make_way(self, *arguments)
        stopped.extend(task for task in self.forms.running if task.is_stopped and task not in before)

    monkeypatch.setattr(Intake, "_make_way", watched)
    again = []
    requeue = Task.requeue
    monkeypatch.setattr(Task, "requeue", lambda task: again.append(task) or requeue(task))
    bombs = [own.submit(bomb(source, n), client="alice", compiles=True) for n in range(12)]
    comes_true(lambda: num_trials(own) == FORM_PLACES)
    quick = own.submit(trial(source, regex="abc"), client="bob", compiles=True)
    assert quick.result(60.0) >= 0
    assert [task.account.client for task in stopped][:1] == ["alice"] and again
    for task in bombs:  # each has its verdict, also the one that made way
        with pytest.raises(ValueError, match="to compile"):
            task.result(120.0)


def test_a_trial_ends_when_nobody_waits_for_it():
    own, source = Intake(), vocabulary()
    bombs = [own.submit(bomb(source, n), client="alice", compiles=True) for n in range(30)]
    comes_true(lambda: num_trials(own) == FORM_PLACES)
    for task in bombs:
        task.cancel()
    comes_true(lambda: not own.forms.running)
    assert not own.forms.waiting
    assert own.submit(trial(source, regex="abc"), client="alice", compiles=True).result(60.0) >= 0


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_a_request_whose_reader_leaves_is_not_prepared(how, monkeypatch):
    async with open_llm() as llm:
        await llm.prepare(lambda: None)
        held = Held(llm._intake)
        prepared = []
        monkeypatch.setattr(llm._input_processor, "process_each", lambda *_, **__: prepared.append(1))
        waiting = asyncio.create_task(llm.submit(["the sea"], SamplingParams(n=2), request_ids=["left"]))
        while not [task for task in llm._intake.short.tasks() if not task.has_begun]:
            await asyncio.sleep(0)
        if how == "cancel":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            assert await llm.abort("left")
            (output,) = [output async for output in await waiting]
            assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 2
        assert not [task for task in llm._intake.short.tasks() if not task.has_begun] and not llm._preparing
        held.end()
        await llm.prepare(lambda: None)
        assert not prepared


async def test_work_of_an_aborted_request_that_runs_ends_once_all_of_its_call_are(monkeypatch):
    begun = threading.Event()

    def endless(*_, **__):
        begun.set()
        while True:
            checkpoint()

    async with open_llm() as llm:
        monkeypatch.setattr(llm._input_processor, "process_each", endless)
        running = asyncio.create_task(llm.submit(["the sea", "a bird"], request_ids=["first", "second"]))
        await asyncio.to_thread(begun.wait, 30.0)
        assert await llm.abort("first")
        for _ in range(10):  # what the abort has scheduled
            await asyncio.sleep(0)
        assert not running.done() and llm._intake.short.running
        assert await llm.abort("second")
        outputs = [output async for output in await running]
        assert {output.request_id for output in outputs} == {"first", "second"}
        await llm.prepare(lambda: None)  # the place is free
        assert not await llm.abort("second")


async def test_clients_are_those_of_the_request_unless_a_server_names_them():
    async with open_llm() as llm:
        seen = []
        submit = llm._intake.submit

        def watched(*arguments, **options):
            task = submit(*arguments, **options)
            seen.append(task.account.client)
            return task

        llm._intake.submit = watched
        params = SamplingParams(max_tokens=1)
        for name in (None, "key-1"):
            CLIENT.set(name)
            async for _ in llm.generate("the sea", params, client="own"):
                pass
        assert seen == ["own", "key-1"]
