"""A process that is held on to by more than its number, which may be another's after its end."""

import os
import subprocess
import sys

import pytest

from nanovllm.serving.replicas.foreign_process import ForeignProcess

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def child():
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_a_living_process_is_killed(child):
    held = ForeignProcess(child.pid)
    assert held.is_alive
    held.kill()
    assert child.wait(10) == -9
    assert not held.is_alive
    held.close()


def test_a_zombie_has_ended(child):
    held = ForeignProcess(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # without taking it away
    assert not held.is_alive


def test_another_process_of_the_same_number_is_left_alone(child):
    """The number is read once: a later process with the same number is another one."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    held = ForeignProcess(ended.pid)
    ended.wait()
    held.process_id = child.pid
    held.kill()
    assert not held.is_alive
    assert child.poll() is None


def test_one_that_ended_before_counts_as_ended():
    ended = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    ended.wait()
    held = ForeignProcess(ended.pid)
    assert not held.is_alive
    held.kill()
    held.close()
