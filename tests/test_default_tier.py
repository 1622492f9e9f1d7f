"""Which cases the default tier runs, and that CI fails when they take too long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

MATRIX = """
    import pytest

    @pytest.mark.parametrize("backend", ["flex", "cpp", "sdpa"])
    @pytest.mark.parametrize("overlap", [False, True])
    def test_matrix(backend, overlap):
        pass

    @pytest.mark.costly
    @pytest.mark.parametrize("backend", ["flex", pytest.param("cpp", marks=pytest.mark.skip), "sdpa"])
    def test_costly(backend):
        pass

    @pytest.mark.costly
    @pytest.mark.parametrize("backend", ["flex", "cpp", "sdpa"])
    def test_costly_too(backend):
        pass

    @pytest.mark.full
    def test_long():
        pass
"""
CONFTEST = """
    from tests.support import default_tier

    def pytest_collection_modifyitems(items):
        for case in default_tier.cases_left_out(items):
            case.add_marker("full")
"""


def names_run(pytester, *options):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(MATRIX)
    lines = pytester.runpytest("--collect-only", "-q", "-n", "0", *options).outlines
    return [line.partition("::")[2] for line in lines if "::" in line]


def test_a_matrix_shows_each_value_once_and_costly_functions_differ(pytester):
    default = names_run(pytester, "-m", "not full")
    assert default == [
        "test_matrix[False-flex]", "test_matrix[False-sdpa]", "test_matrix[True-cpp]",
        "test_costly[flex]", "test_costly_too[cpp]",
    ]  # fmt: skip


def test_the_full_tier_runs_what_the_default_one_leaves_out(pytester):
    tiers = [names_run(pytester, "-m", mark) for mark in ("not full", "full")]
    assert "test_long" in tiers[1]
    assert sorted(tiers[0] + tiers[1]) == sorted(names_run(pytester))


@pytest.mark.parametrize(("limit", "code"), [("0.1", 1), ("600", 0)])
def test_a_run_that_takes_more_processor_time_than_its_limit_fails(limit, code):
    file = __file__
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", "-p", "no:cacheprovider", file]
    environment = os.environ | {"NANOVLLM_MAX_TEST_SECONDS": limit}
    run = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == code
    assert ("more than the limit" in run.stdout) == (code == 1)
