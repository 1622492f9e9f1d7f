"""Scripts of bench: each stands in one list, answers --help, and runs once at its smallest; tests/gpu has a GPU's."""

from pathlib import Path

import pytest
import torch

from tests.support.bench_scripts import IN_TESTS, LISTS, ON_CPU, ON_GPU, ROOT, SLOW_ON_CPU, helps, names, run_script


def test_every_script_stands_in_a_list_and_in_the_table():
    assert {name for each in LISTS for name in each} == names()
    table = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    assert not [name for name in names() if name != "machines/traffic_worker" and f"`{name}.py`" not in table]


def test_every_script_that_another_test_runs_is_named_there():
    for name, file in IN_TESTS.items():
        assert name.rpartition("/")[2] in Path(ROOT, file).read_text(encoding="utf-8"), name


@pytest.mark.full
def test_every_script_answers_help():
    answered = helps()
    assert answered.keys() == names()
    wrong = {name: output[-500:] for name, (status, output) in answered.items() if status or "usage: " not in output}
    assert not wrong


def check(name, arguments, folder):
    done = run_script(name, *arguments.format(folder=folder).split())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip(), "it prints figures"


@pytest.mark.full
@pytest.mark.parametrize("name", ON_CPU)
def test_a_script_runs_on_a_cpu(name, tmp_path):
    check(name, ON_CPU[name], tmp_path)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ON_GPU)
def test_a_script_that_needs_a_gpu_is_refused_by_name_without_one(name):
    done = run_script(name, *ON_GPU[name].split())
    assert done.returncode == 2 and "it needs a GPU that torch sees" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_ON_CPU)
def test_a_script_of_many_seconds_runs_on_a_cpu(name, tmp_path):
    check(name, SLOW_ON_CPU[name], tmp_path)
