"""How long OpenMP's threads spin while they wait, in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from nanovllm.fast.gpu.rank_runner import computing_with

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def run(program, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | variables
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch brings GNU's OpenMP on Linux")
def test_openmp_has_the_count_when_the_engine_is_imported_first():
    found = run("import nanovllm, torch", OMP_DISPLAY_ENV="VERBOSE").stderr
    assert "GOMP_SPINCOUNT = '1000'" in found


@pytest.mark.parametrize(
    "variables, count", [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")], ids=str
)
def test_the_user_decides_how_threads_wait(variables, count):
    assert run("import os, nanovllm; print(os.environ.get('GOMP_SPINCOUNT'))", **variables).stdout.strip() == count


def test_threads_are_as_before_after_a_block_that_computes_with_others():
    before = torch.get_num_threads()
    with computing_with(before + 1):
        assert torch.get_num_threads() == before + 1
    with computing_with(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
