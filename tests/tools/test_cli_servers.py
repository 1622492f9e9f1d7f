"""`nanovllm ps` and `stop`: the servers of this user, by files that outlive none of them."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import psutil
import pytest

from nanovllm.cli.servers import RunningServer, registered, running_servers, runtime_folder
from nanovllm.serving.server.settings import ServerSettings
from tests.support.command_line import assert_refused, records

# A process that runs until SIGTERM, or, stubborn, until SIGKILL.
PROGRAM = """
import signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "nanovllm"


@pytest.fixture
def start(runtime):
    started = []

    def start(model="org/tiny", port=8000, kind=""):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, kind], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        server = RunningServer(
            process.pid, psutil.Process(process.pid).create_time(), model, f"http://h:{port}", ["named"]
        )
        (runtime_folder() / f"{process.pid}.json").write_text(json.dumps(asdict(server)))
        return server

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def listed(command):
    """The processes that the command lists."""
    return lambda: [server["pid"] for server in records(command("ps --json")[1])]


def test_a_server_is_listed_while_it_runs(runtime, command, listed):
    with registered("org/tiny", ServerSettings(port=9), []):
        assert listed() == [os.getpid()]
        assert runtime.stat().st_mode & 0o777 == 0o700
        heading, row = command("ps")[1].splitlines()
        assert heading.split() == ["PID", "MODEL", "ADDRESS", "RUNS", "FOR", "MEMORY"]
        assert row.split()[:3] == [str(os.getpid()), "org/tiny", "http://127.0.0.1:9"]
    assert listed() == []


def test_serve_is_listed_from_before_its_model_is_loaded(monkeypatch, answering_hub, command):
    seen = []
    monkeypatch.setattr("nanovllm.serving.server.app.serve", lambda *_: seen.extend(running_servers()) or 0)
    assert command("serve own/tiny --port 0")[0] == 0
    (server,) = seen
    assert server.pid == os.getpid() and server.model == "own/tiny" and not server.address.endswith(":0")
    assert running_servers() == []


def test_files_of_ended_processes_and_of_later_ones_with_their_number_are_removed(runtime, start, listed):
    server = start()
    other = {"pid": os.getpid(), "started": 1.0, "model": "m", "address": "http://h:1"}
    (runtime / f"{os.getpid()}.json").write_text(json.dumps(other))
    (runtime / "torn.json").write_text('{"pid":')
    assert listed() == [server.pid]
    os.kill(server.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(server.pid)], timeout=0)
    while server.process() is not None:
        pass
    assert listed() == [] and [path.name for path in runtime.iterdir()] == ["torn.json"]


@pytest.mark.parametrize("name", ["{pid}", "8001", "org/tiny", "tiny", "named", ""])
def test_stop_ends_the_server_that_is_named_and_waits(start, command, name):
    server = start(port=8001)
    other = start("org/other", 8002) if name and name != "named" else None
    status, out, _ = command(f"stop {name.format(pid=server.pid)}")
    assert status == 0 and f"{server.pid} (org/tiny at http://h:8001) has stopped" in out
    assert server.process() is None and (other is None or other.process() is not None)


def test_stop_ends_all_of_them(start, command):
    servers = [start(), start()]
    assert command("stop --all")[0] == 0
    assert [server.process() for server in servers] == [None, None]


def test_stop_refuses_what_is_none_or_several(start, command):
    assert_refused(command("stop"), "no server of this user runs")
    start(), start()
    for arguments, named in {
        "": "2 servers are meant",
        "tiny": "2 servers are meant",
        "8999": "no server of this user is 8999",
        "tiny --all": "Give one of the two",
    }.items():
        assert_refused(command(f"stop {arguments}"), named)


def test_a_server_that_does_not_end_in_time_is_named(start, command):
    server = start(kind="stubborn")
    named = f"{server.pid} (org/tiny at http://h:8000) still runs after 0.2 s"
    assert_refused(command("stop --timeout 0.2"), named)


def test_a_folder_that_others_may_write_is_refused(runtime, command):
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    status, _, err = command("ps")
    assert status == 2 and ("may not open" in err or "closed to others" in err)
    with registered("m", ServerSettings(), []):  # a server runs unlisted
        assert list(runtime.iterdir()) == []
