"""`nanovllm ps` and `stop`: the servers of this user, by files that outlive none of them."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import psutil
import pytest

from nanovllm.cli.main import main
from nanovllm.cli.servers import RunningServer, registered, running_servers, runtime_folder
from nanovllm.serving.server.settings import ServerSettings
from tests.support.command_line import words

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


def listed(capsys):
    assert main(["ps", "--json"]) == 0
    return [json.loads(line)["pid"] for line in capsys.readouterr().out.splitlines()]


def test_a_server_is_listed_while_it_runs(runtime, capsys):
    with registered("org/tiny", ServerSettings(port=9), []):
        assert listed(capsys) == [os.getpid()]
        assert runtime.stat().st_mode & 0o777 == 0o700
        assert main(["ps"]) == 0
        heading, row = capsys.readouterr().out.splitlines()
        assert heading.split() == ["PID", "MODEL", "ADDRESS", "RUNS", "FOR", "MEMORY"]
        assert row.split()[:3] == [str(os.getpid()), "org/tiny", "http://127.0.0.1:9"]
    assert listed(capsys) == []


def test_serve_is_listed_from_before_its_model_is_loaded(monkeypatch, answering_hub):
    seen = []

    def serve(*_):
        seen.extend(running_servers())
        return 0

    monkeypatch.setattr("nanovllm.serving.server.app.serve", serve)
    assert main(words("serve own/tiny --port 0")) == 0
    ((pid, model, address),) = ((server.pid, server.model, server.address) for server in seen)
    assert (pid, model) == (os.getpid(), "own/tiny") and not address.endswith(":0")
    assert running_servers() == []


def test_files_of_ended_processes_and_of_later_ones_with_their_number_are_removed(runtime, start, capsys):
    server = start()
    other = {"pid": os.getpid(), "started": 1.0, "model": "m", "address": "http://h:1"}
    (runtime / f"{os.getpid()}.json").write_text(json.dumps(other))
    (runtime / "torn.json").write_text('{"pid":')
    assert listed(capsys) == [server.pid]
    os.kill(server.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(server.pid)], timeout=0)
    while server.process() is not None:
        pass
    assert listed(capsys) == [] and [path.name for path in runtime.iterdir()] == ["torn.json"]


@pytest.mark.parametrize("name", ["{pid}", "8001", "org/tiny", "tiny", "named", None])
def test_stop_ends_the_server_that_is_named_and_waits(start, capsys, name):
    server = start(port=8001)
    other = start("org/other", 8002) if name and name != "named" else None
    assert main(["stop", *([] if name is None else [name.format(pid=server.pid)])]) == 0
    assert f"{server.pid} (org/tiny at http://h:8001) has stopped" in capsys.readouterr().out
    assert server.process() is None and (other is None or other.process() is not None)


def test_stop_ends_all_of_them(start, capsys):
    servers = [start(), start()]
    assert main(["stop", "--all"]) == 0
    assert [server.process() for server in servers] == [None, None]


def test_stop_refuses_what_is_none_or_several(start, capsys):
    assert main(["stop"]) == 2
    assert "no server of this user runs" in capsys.readouterr().err
    start(), start()
    for arguments, named in (
        ([], "2 servers are meant"),
        (["tiny"], "2 servers are meant"),
        (["8999"], "no server of this user is 8999"),
        (["tiny", "--all"], "Give one of the two"),
    ):
        assert main(["stop", *arguments]) == 2
        assert named in capsys.readouterr().err


def test_a_server_that_does_not_end_in_time_is_named(start, capsys):
    server = start(kind="stubborn")
    assert main(words("stop --timeout 0.2")) == 2
    assert f"{server.pid} (org/tiny at http://h:8000) still runs after 0.2 s" in capsys.readouterr().err


def test_a_folder_that_others_may_write_is_refused(runtime, capsys):
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    assert main(["ps"]) == 2
    assert "may not open" in capsys.readouterr().err or "closed to others" in capsys.readouterr().err
    with registered("m", ServerSettings(), []):  # a server runs unlisted
        assert list(runtime.iterdir()) == []
