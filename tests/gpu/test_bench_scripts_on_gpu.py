"""Scripts of bench that need a GPU, each once at its smallest."""

import pytest

from tests.support.bench_scripts import ON_GPU, run_script


@pytest.mark.parametrize("name", ON_GPU)
def test_a_script_runs_on_a_gpu(name):
    done = run_script(name, *ON_GPU[name].split())
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert done.stdout.strip(), "it prints figures"
