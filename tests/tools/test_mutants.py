"""`.ci/mutants.py`: its list applies; what it says of mutants that live, die, hang, or cannot be run."""

import subprocess
from pathlib import Path

import pytest

from tests.support.command_line import python

CI = Path(__file__).parents[2] / ".ci"
TESTS = """
from package import add

def test_sum():
    assert add(2, 0) == 2

def test_wrong():
    assert add(2, 0) == 3
"""
SETTINGS = "[tool.pytest.ini_options]\nmarkers = ['full', 'slow']\npythonpath = ['.']\n"
MUTANT = """
[[mutant]]
name = "{name}"
file = "package.py"
old = '{old}'
new = '{new}'
tests = ["{test}"]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the tool on a project of one function, and a list of (name, old, new, test)."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*mutants, options="", limit=120):
        contents = {
            "package.py": "def add(a, b):\n    return a + b\n",
            "test_sums.py": TESTS,
            "pyproject.toml": SETTINGS,
            ".ci/mutants/sums.toml": "".join(
                MUTANT.format(name=name, old=old, new=new, test=f"test_sums.py::{test}")
                for name, old, new, test in mutants
            ),
        }
        (tmp_path / ".ci" / "mutants").mkdir(parents=True)
        for name, content in contents.items():
            (tmp_path / name).write_text(content)
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        program = (
            f"import sys; sys.path.insert(0, {str(CI)!r}); import mutants; from pathlib import Path\n"
            f"mutants.TIMEOUT_SECONDS = {limit}\n"
            f"sys.exit(mutants.main(['--jobs', '2', *{options.split()}], Path({str(tmp_path)!r}), ('pytest',)))"
        )
        done = python("-c", program)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    return run


def test_every_mutant_applies_and_names_tests_that_exist():
    assert python(CI / "mutants.py", "--check").stdout == ""


def test_the_page_of_rules_is_what_the_list_gives():
    """Else run `python .ci/rules.py`."""
    assert python(CI / "rules.py", "--check").returncode == 0


def test_a_survivor_fails_and_is_named_beside_those_that_are_killed(run):
    status, lines = run(
        ("differs", "a + b", "a - b - 1", "test_sum"),
        ("survives", "a + b", "a - b", "test_sum"),
    )
    assert status == 1
    assert sorted(line.rpartition(", ")[0] for line in lines[:-1]) == [
        "sums: differs: killed by test_sums.py::test_sum",
        "sums: survives: SURVIVED",
    ]
    assert lines[-1] == "1 of 2 mutants killed"


def test_a_mutant_that_hangs_is_killed_by_the_time_limit(run):
    status, lines = run(("hangs", "return a", "while a: a = 2  #", "test_sum"), limit=0.5)
    assert (status, lines[0].rpartition(", ")[0]) == (0, "sums: hangs: killed by the time limit of 0.5 s")


def test_what_does_not_apply_fails_by_name_before_any_run(run):
    status, lines = run(
        ("gone", "a * b", "a", "test_sum"),
        ("twice", "a", "b", "test_sum"),
        ("untested", "a + b", "a", "test_difference"),
        options="--check",
    )
    assert status == 1
    assert lines == [
        "sums: gone: its old text occurs 0 times in package.py",
        "sums: twice: its old text occurs 3 times in package.py",
        "sums: untested: test_sums.py::test_difference does not exist in the default tier",
    ]


def test_a_mutant_that_is_no_python_is_not_run(run):
    status, lines = run(("broken", "a + b", "a +", "test_sum"))
    assert status == 1 and lines[0].startswith("sums: broken: package.py with it is no Python")


def test_a_list_that_applies_is_not_run_by_a_check(run):
    assert run(("survives", "a + b", "a - b", "test_sum"), options="--check") == (0, [])


def test_tests_that_fail_by_themselves_are_no_kill(run):
    status, lines = run(("differs", "a + b", "a", "test_wrong"))
    assert status == 1 and lines[0] == "unmutated, these do not pass: test_sums.py::test_wrong"


def test_a_word_that_chooses_no_mutant_fails(run):
    differs = ("differs", "a + b", "a - b - 1", "test_sum")
    assert run(differs, options="--only other") == (1, ["no mutant has 'other' in its area, name or file"])
