"""The scripts of bench: what runs each of them once at its smallest, and the answer of each to --help."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.forked_processes import programs_are_forked

# The smallest run on a CPU, by a script's path below bench; these seconds are CI's.
ON_CPU = {
    "machines/adapters": "--shape tiny --requests 2 --tokens 4 --rounds 1",
    "machines/pictures": "question --shape tiny --repeats 1",
    "machines/prefix_tiers": "host --shape tiny --prefix 256 --repeats 1",
    "machines/replicas": "simulated --model tiny --sizes 1 --requests 2",
    "machines/simulator": "routing --replicas 1 2 --requests 2",
    "machines/speculation": "known --shape tiny --requests 1 --prompt 16 --output 32 --rounds 1",
    "machines/structured": "masks --vocab-size 1000 --rows 2 --steps 2",
    "machines/trainers": "live wake --shape tiny --requests 2 --prompt 16 --tokens 4 --rounds 1",
}
# The same behind the marker `slow`: models of real sizes, servers, calibrations.
SLOW_ON_CPU = {
    "machines/curves": "--output {folder} --repeats 1 budget",
    "machines/goals_flood": "--shape tiny --seconds 1 --every 0.5 --longest 20 --how shares",
    "machines/hybrid": "prefix streams --shape tiny --count 2 --tokens 4 --shared 64 --repeats 1",
    "machines/prefix_tiers": "start overhead beams --repeats 1 --requests 2",
    "machines/process_start": "--runs 1",
    "machines/quality": "--texts LICENSE --tokens 512 --models smollm2-135m-instruct:int8 --rounds 1 --requests 2",
    "machines/replicas": "offline served start sizes --model tiny --sizes 1 --requests 2 --tokens 4 --rounds 1",
    "machines/server_load": "--model tiny --clients 2 --tokens 6 --rounds 1",
    "machines/simulator": "accuracy --cpu-time --repeats 1 --scale 0.1",
    "machines/speculation": "chat --rounds 1",
    "machines/structured": "speed documents --rows 2 --new-tokens 4 --rounds 1 --documents 4 --schemas 2",
    "machines/tensor_parallel": "--shapes tiny --sizes 1 --requests 2 --rounds 1",
    "machines/trainers": "--steps 1 --answers 2 --tokens 2",
}
# The smallest run on a GPU; elsewhere each is refused by name.
ON_GPU = {
    "machines/gpu": "pool",
    "machines/paged_decode": "4x256 --no-flex",
}
# Scripts that another test runs, or a script that one runs, by its file.
IN_TESTS = {
    "machines/cpu_table": "tests/tools/test_cpu_machines.py",
    "machines/goals_by_rate": "tests/tools/test_goals_by_rate.py",
    "machines/traffic": "tests/tools/test_traffic.py",
    "machines/traffic_worker": "bench/machines/traffic.py",
}
# What scripts import.
PARTS = (
    "machines/assumed_costs", "machines/harness", "machines/random_models", "machines/step_counts",
    "machines/traffic_engines", "machines/traffic_report", "machines/traffic_requests",
)  # fmt: skip
LISTS = ON_CPU, SLOW_ON_CPU, ON_GPU, IN_TESTS
ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def names():
    """Each script by its path below bench, without suffix: every file that is no part of others and no test."""
    files = {path.relative_to(BENCH).with_suffix("").as_posix() for path in BENCH.rglob("*.py")}
    return {name for name in files if name not in PARTS and "/test_" not in name}


def run_script(name, *arguments):
    """Run a script as its page says, from the root of the repository."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(BENCH / f"{name}.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def helps():
    """Exit status and output of each script with --help."""
    answered = {}
    with programs_are_forked():
        for name in names():
            path = BENCH / f"{name}.py"
            program = (
                f"import runpy, sys; sys.argv[1:] = ['--help']; sys.path.insert(0, {str(path.parent)!r}); "
                f"runpy.run_path({str(path)!r}, run_name='__main__')"
            )
            done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
            answered[name] = done.returncode, done.stdout + done.stderr
    return answered
