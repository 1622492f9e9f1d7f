"""`nanovllm tune`: the journal, measurements of one question and one machine on disk."""

import pytest

from nanovllm.tools.tune.halving import MeasurementError
from nanovllm.tools.tune.journal import Journal
from tests.support.refusals import invalid
from tests.support.sweeps import run, setting

# Setting, share, rates and repeat of two measurements.
FIRST = setting(256), 0.5, [2.0], 0
SECOND = setting(512), 0.5, [2.0], 0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.jsonl"


@pytest.fixture
def journal(path):
    """A journal on disk with the first measurement."""
    journal = Journal(path, {})
    journal.add(*FIRST, runs=[run(100)])
    return journal


def test_what_was_measured_is_found_again(path):
    question = {"model": "a", "rates": (1, 2)}
    journal = Journal(path, question)
    journal.add(*FIRST, runs=[run(100)])
    journal.add(*SECOND, failed="no memory")
    again = Journal(path, question)
    assert again.find(*FIRST) == [run(100)]
    for absent in ((setting(256), 0.5, [2.0], 1), (setting(256), 1.0, [2.0], 0), (setting(256), 0.5, [3.0], 0)):
        assert again.find(*absent) is None
    with pytest.raises(MeasurementError, match="no memory"):
        again.find(*SECOND)
    retried = Journal(path, question, retry=True)
    assert retried.find(*SECOND) is None
    retried.add(*SECOND, runs=[run(5)])
    assert Journal(path, question).find(*SECOND) == [run(5)]


def test_another_question_is_refused_with_what_differs(path):
    Journal(path, {"model": "a", "workload": {"name": "W", "requests": 64}, "warm_ups": 1})
    before = path.read_bytes()
    with invalid(r"another question.*workload\.requests was 64, and is 8; warm_ups was 1, and"):
        Journal(path, {"model": "a", "workload": {"name": "W", "requests": 8}, "warm_ups": 2})
    assert path.read_bytes() == before


def test_another_machine_is_refused(path, journal):
    journal.check_environment({"torch": "2", "gpu": None})
    with invalid("torch was 2, and is 3"):
        Journal(path, {}).check_environment({"torch": "3"})
    with invalid("torch was 2, and is 3"):
        journal.add(*SECOND, runs=[run(100) | {"environment": {"torch": "3"}}])
    assert journal.find(*SECOND) is None


def test_a_line_that_was_cut_off_is_measured_again(path, journal):
    journal.add(*SECOND, runs=[run(100)])
    path.write_bytes(path.read_bytes()[:-40])
    again = Journal(path, {})
    assert again.find(*FIRST) and again.find(*SECOND) is None
    again.add(*SECOND, runs=[run(7)])
    assert Journal(path, {}).find(*SECOND) == [run(7)]


def test_a_file_that_was_cut_off_within_its_first_line_is_begun_again(path):
    Journal(path, {"model": "a"})
    whole = path.read_text()
    for end in (0, 20, len(whole) - 1):
        path.write_text(whole[:end])
        Journal(path, {"model": "a"})
        assert path.read_text() == whole


def test_what_is_installed_for_other_engines_makes_no_other_machine(journal):
    journal.check_environment({"torch": "2", "vllm": "1", "llama-cpp-python": "1"})
    with invalid("numpy was None, and is 2"):
        journal.check_environment({"torch": "2", "numpy": "2"})


@pytest.mark.parametrize("text", ["no JSON\n", '{"prompt": [1], "output_tokens": 2}\n', "[1]\n", "half a li"])
def test_a_file_of_something_else_is_left_as_it_is(path, text):
    path.write_text(text)
    with invalid("is no record of `nanovllm tune`"):
        Journal(path, {})
    assert path.read_text() == text
