"""The help of every command and flag: on any Python, with or without docstrings."""

import dataclasses
import inspect
import json

import pytest

from nanovllm import EngineConfig, SamplingParams
from nanovllm.cli import main
from nanovllm.serving.server.settings import ServerSettings
from tests.support.command_line import command_parsers, python

PROGRAM = """
import json
from nanovllm.cli.main import _parser
(commands,) = (action for action in _parser()._actions if action.dest == "command")
print(json.dumps({
    f"{name} {flag}": action.help
    for name, parser in commands.choices.items() for action in parser._actions for flag in action.option_strings
} | {name: parser.format_help() for name, parser in commands.choices.items()}))
"""


def help_of_each_flag(*options):
    """Of every command's flags and arguments, by a Python with these options of its own."""
    return json.loads(python(*options, "-c", PROGRAM, check=True).stdout)


def test_python_without_docstrings_gives_every_flag_the_same_help():
    with_docstrings = help_of_each_flag()
    assert all(with_docstrings.values())
    assert help_of_each_flag("-OO") == with_docstrings


def test_docstrings_whose_indentation_is_stripped_change_no_help(monkeypatch):
    """As the compiler does from Python 3.13 on."""
    shown = main._parser().format_help(), help_of_commands()
    for cls in (EngineConfig, SamplingParams, ServerSettings):
        monkeypatch.setattr(cls, "__doc__", inspect.cleandoc(cls.__doc__))
    assert (main._parser().format_help(), help_of_commands()) == shown


def help_of_commands():
    return {name: parser.format_help() for name, parser in command_parsers().items()}


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams, ServerSettings])
def test_the_docstring_of_options_lists_each_field(cls):
    listed = [line.partition(": ")[0] for line in cls.__doc__.splitlines() if ": " in line]
    assert listed[-len(dataclasses.fields(cls)) :] == [field.name for field in dataclasses.fields(cls)]
