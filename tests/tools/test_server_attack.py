"""`bench/machines/server_attack.py`: every kind of attack on a tiny model, and what becomes of its requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.machines.server_attack import delays
from bench.machines.server_attack_kinds import BODIES, BODY_BYTES, KINDS
from nanovllm import StepRecord
from tests.support.tiny_models import save_tiny

ROOT = Path(__file__).parents[2]
COMPILES_FOR_SECONDS = {"form_of_patterns", "form_of_multiples", "form_of_intersections"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attack")
    save_tiny(folder / "model")
    command = [sys.executable, "bench/machines/server_attack.py", "--model", str(folder / "model"), "--scale", "0.02"]
    command += ["--json", str(folder / "report.json"), "--kinds", *sorted(KINDS.keys() - COMPILES_FOR_SECONDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: above a limit, as a busy machine may be
    return json.loads((folder / "report.json").read_text()) | {"printed": done.stdout}


def test_every_kind_has_a_row_of_figures_and_a_verdict(report):
    assert set(report["kinds"]) == KINDS.keys() - COMPILES_FOR_SECONDS
    for kind, row in report["kinds"].items():
        assert row["gap_ms"] > 0 and row["step_ms"] > 0 and row["health_max_ms"] >= row["health_ms"] > 0
        within = row["excess_ms"] <= report["limits"]["excess_ms"]
        assert row["passes"] == (within and row["beyond_ms"] <= report["limits"]["beyond_ms"])
        assert row["beyond_ms"] >= row["health_max_ms"] - row["trivial_max_ms"] and row["trivial_ms"] > 0
        assert any(line.split()[:1] == [kind] for line in report["printed"].splitlines())


def test_hostile_bodies_and_headers_are_refused(report):
    for kind in [*BODIES, "refused_bodies"]:
        assert set(report["kinds"][kind]["answers"]) == {"400"}
    assert set(report["kinds"]["headers"]["answers"]) == {"431"}


def test_no_smuggled_request_is_answered(report):
    answers = report["kinds"]["smuggling"]["answers"]
    assert "400" in answers and not any("200" in answer for answer in answers)


def test_clients_are_served_until_they_vanish(report):
    assert set(report["kinds"]["vanishing"]["answers"]) == {"200"}


def test_bodies_are_as_large_as_a_body_may_be():
    sizes = {name: len(make(BODY_BYTES)) for name, make in BODIES.items() if name != "nesting_within_limits"}
    assert all(0.99 * BODY_BYTES < size < 1.01 * BODY_BYTES for size in sizes.values())


def test_a_gap_is_measured_against_the_longest_step_in_it():
    rest = (1, 1, 0, 0, 1, 0, 1, 0.0, 0.0, 0.0, 0.0, ())
    steps = [StepRecord(number, end, begin, *rest) for number, (begin, end) in enumerate([(1.0, 1.5), (1.6, 1.7)])]
    found = delays([[0.9, 1.0, 1.95], [5.0, 5.2]], steps)
    assert found == pytest.approx({"gap_ms": 950.0, "step_ms": 500.0, "excess_ms": 450.0})
