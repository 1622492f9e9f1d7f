"""The examples run from beginning to end and say what they promise; one of them in a process of its own."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("small_default_cache")
ROOT = Path(__file__).parents[2]
PAGE_OF_A_STEP = (ROOT / "docs" / "internals" / "one_step.md").read_text(encoding="utf-8")
SAYS = {
    "async_streams": ["Paris", "that is enough", "steps served them all"],
    "least_progress_first": ["keeps every invariant", "28 preemptions", "19 preemptions, 2,844 tokens computed again"],
    "live_module": ["after 0 training steps", "after 3 training steps"],
    "logprobs": ["' Paris'", "The capital of France is Paris."],
    "offline_batch": ["'The capital of France is'", "(length)"],
    "priorities": ["an alarm        priority -10", "ended by length"],
    "samples": ["0: ", "3: ", "(length)"],
    "shared_system_prompt": ["prompt tokens from the cache", "France"],
    "step_by_step": PAGE_OF_A_STEP.partition("```\nstep 2")[2].partition("\n```")[0].splitlines(),
}


def test_every_example_is_run():
    assert sorted(SAYS) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.full
def test_an_example_is_a_program():
    command = [sys.executable, str(ROOT / "examples" / "offline_batch.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in SAYS["offline_batch"]), done.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SAYS.keys() - {"offline_batch"}))
def test_an_example_runs_and_says_what_it_promises(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(part in printed for part in SAYS[name]), printed
