"""Fixtures of the command line: a folder with a tiny model, and commands run on it or without it."""

import io
import sys

import pytest

from nanovllm.cli.main import main
from tests.support.command_line import ENGINE, records, words
from tests.support.sweeps import Engines
from tests.support.tiny_models import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def command(capsys):
    """Run the command line in this process; returns exit status, standard output and standard error."""

    def command(line, *arguments):
        try:
            status = main([*words(line), *arguments])
        except SystemExit as exit_:  # raised by argparse
            status = exit_.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture
def run(folder, command, monkeypatch):
    """Run a command on the tiny model, with the flags of a tiny engine.

    Standard input as bytes is read as in the locale C.UTF-8, in which bytes that are not UTF-8 are no error.
    """

    def run(line, *arguments, stdin="", model=None):
        name, *flags = words(line)
        is_text = isinstance(stdin, str)
        given = io.StringIO(stdin) if is_text else io.TextIOWrapper(io.BytesIO(stdin), "utf-8", "surrogateescape")
        monkeypatch.setattr(sys, "stdin", given)
        return command(name, "--model", model or str(folder), *ENGINE, *flags, *arguments)

    return run


@pytest.fixture
def answers(run):
    """Run `generate --json` with short answers; returns its records."""

    def answers(line, *arguments, **options):
        status, out, err = run(f"generate --json --max-tokens 6 {line}", *arguments, **options)
        assert status == 0, err
        return records(out)

    return answers


@pytest.fixture
def engines(monkeypatch):
    """The engines that `tune` measures, which are simulations."""
    engines = Engines()
    monkeypatch.setattr("nanovllm.cli.tune.environment", lambda: {"torch": "9", "threads": None})
    monkeypatch.setattr("nanovllm.tools.tune.measuring.run_in_subprocess", engines.run_in_subprocess)
    return engines


@pytest.fixture
def output(tmp_path):
    """Where `tune` writes."""
    return tmp_path / "t"


@pytest.fixture
def answering_hub(monkeypatch):
    """A name that is no folder is a model of the hub, which no test reaches."""
    monkeypatch.setattr("nanovllm.models.hub.is_reachable", lambda *_, **__: True)
