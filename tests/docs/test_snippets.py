"""Every snippet of every page runs: shell blocks in a shell, Python blocks of a page one after the other.

A page's blocks run in its order, in one folder. A block `text` behind a shell block is what that prints.
"""

import os
import re
import socket
import subprocess
import time
import types
from collections import Counter

import pytest
import torch

from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model
from tests.support.forked_commands import ForkedCommands
from tests.support.pages import PAGES, ROOT, snippets
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import save_tiny, tiny_model

pytestmark = pytest.mark.usefixtures("small_default_cache")
SHELL, PYTHON = ("bash", "sh"), ("python",)
RUN = (*SHELL, *PYTHON)
# Blocks that no test runs: reason in the page -> number. Their flags and names are checked.
NOT_RUN = {
    "Ray, in .ci/ray": 7,
    "PEFT, in .ci/peft": 1,
    "TRL, in .ci/trainers": 1,
    "a GPU": 1,
    "a program of others": 1,
    "a vision-language checkpoint, in tests/media": 1,
    "an adapter": 1,
    "a checkpoint and its adapters, in tests/adapters": 1,
    "weights of a trainer, in tests/updates": 3,
    "an engine of containers": 1,
    "clients, in .ci/clients": 11,
    "lm-eval, in .ci/evaluation": 2,
    "minutes of virtual time": 1,
    "root": 1,
    "runs until it is interrupted": 2,
    "several GPUs": 5,
    "the network, in .ci/run": 3,
    "the tests themselves": 2,
    "vLLM": 1,
    "weights of a trainer": 1,
}
# Folders that stand for models of a hub, below the working directory: the embedded model, or a random one of a family.
HUB_MODELS = {
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen3-Embedding-0.6B": "qwen3",
    "Qwen/Qwen3-4B-Instruct-2507": DEFAULT_MODEL,  # its tokenizer has a token for "yes"
}
BLOCKS = [snippet for page in PAGES for snippet in snippets(page) if snippet.language in RUN]
WITH_SLOW = sorted({block.page for block in BLOCKS if block.is_slow})
RUNNABLE = sorted({block.page for block in BLOCKS if not (block.is_slow or block.note.startswith("not run"))})
SECONDS = 300.0


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    commands = ForkedCommands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, family in HUB_MODELS.items():
        if family != DEFAULT_MODEL:
            save_tiny(folder / name, family, vocab_size=49_152, dtype=torch.bfloat16)  # the ids of workloads
        else:
            (folder / name).symlink_to(ensure_default_model())
    write_gguf(folder / "model.gguf", tiny_model())
    return folder


class Page:
    """One page's working directory, shell, Python names and background processes."""

    def __init__(self, folder, programs):
        self._folder = folder
        self._port = free_port()
        self._printed = ""
        self._module = types.ModuleType("page")
        self._background = []
        paths = [str(programs), os.environ["PATH"]]
        self._environment = os.environ | {
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, snippet):
        text = snippet.text.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}")
        text = re.sub(r"(?<=tcp://\*:)\d+", lambda found: str(free_port()), text)
        if snippet.language == "text":
            assert text in self._printed, f"{snippet}: it prints\n{self._printed}"
            return
        if snippet.language in PYTHON:
            padded = "\n" * (snippet.line - 1) + text  # so that a traceback has the page's lines
            exec(compile(padded, snippet.page, "exec"), self._module.__dict__)
            return
        if flags := snippet.flags:
            text = f'nanovllm() {{ command nanovllm "$@" {flags}; }}\n{text}'
        if snippet.note == "in the background":
            self._start(text, snippet)
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], cwd=self._folder, env=self._environment, capture_output=True,
            text=True, timeout=SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._printed = done.stdout
        assert done.returncode == 0, f"{snippet} ends with {done.returncode}:\n{done.stdout}\n{done.stderr}"

    def _start(self, text, snippet):
        """A server: its block's last command, which must have begun to answer."""
        text = re.sub(r"(nanovllm serve)", rf"exec \1 --port {self._port}", text)
        log = self._folder / "background.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-euc", text], cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._background.append(process)
        end = time.monotonic() + SECONDS
        while "running on " not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, f"{snippet} has not started:\n{log.read_text()}"
            time.sleep(0.05)

    def close(self):
        for process in self._background:
            process.terminate()
        for process in self._background:
            process.wait(60.0)
        self._module.__dict__.clear()


@pytest.fixture
def page(tmp_path, forked, models, monkeypatch):
    for name in models.iterdir():
        (tmp_path / name.name).symlink_to(name)
    for name in ("examples", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    page = Page(tmp_path, forked.path)
    yield page
    page.close()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.costly
@pytest.mark.parametrize("name", RUNNABLE)
def test_the_snippets_of_a_page_run(name, page):
    run_all(name, page, are_slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SLOW)
def test_the_slow_snippets_of_a_page_run(name, page):
    run_all(name, page, are_slow=True)


def run_all(name, page, *, are_slow):
    for snippet in snippets(name):
        is_left_out = snippet.note.startswith("not run") or (snippet.is_slow and not are_slow)
        if snippet.language in (*RUN, "text") and not is_left_out:
            page.run(snippet)


@pytest.mark.full
def test_what_is_not_run_is_listed_with_its_reason():
    reasons = Counter(block.note.removeprefix("not run: ") for block in BLOCKS if block.note.startswith("not run"))
    assert reasons == NOT_RUN


@pytest.mark.full
def test_notes_are_understood():
    known = re.compile(r"|in the background|not run: .+|(slow)?(; )?(with --.+)?")
    assert [str(block) for block in BLOCKS if not known.fullmatch(block.note)] == []
