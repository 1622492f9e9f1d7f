"""A flag or command that does not exist: the error names the nearest."""

import pytest

from nanovllm.cli import main as command_line
from nanovllm.cli.main import COMMANDS
from tests.support.command_line import assert_refused, words


@pytest.mark.parametrize(
    "line, expected",
    {
        "generat a": "did you mean generate?",
        "generate --tempratur 0.5 a": "unrecognized arguments: --tempratur; did you mean --temperature",
        "generate --max_tokens=4 a": "; did you mean --max-tokens",
        "serve --prt 1": "; did you mean --port",
        "generate --format jsnl a": "did you mean jsonl",
    }.items(),
)
def test_the_nearest_one_is_named(line, expected, command):
    assert_refused(command(line), expected)


def test_the_command_alone_lists_its_commands(command):
    status, _, err = command("")
    assert status == 2 and "usage: nanovllm" in err
    assert [name for name in COMMANDS if f"    {name}" not in err] == []


@pytest.mark.parametrize("line", ["-hf x/y", "models -hf=x/y"])
def test_hf_is_refused_where_no_model_is_taken_and_not_read_as_a_call_for_help(line, command):
    assert_refused(command(line), "-hf names a model, which this command does not take")


@pytest.mark.parametrize("line", ["serve -hf x/y", "generate -hf=x/y a", "chat -hf x/y:Q8_0"])
def test_hf_is_the_flag_of_llama_cpp_for_a_file_of_the_hub(line):
    given = command_line._parser(words(line)).parse_args(words(line))
    assert given.model == ("x/y:Q8_0" if ":" in line else "x/y:auto") and given.names_model


@pytest.mark.parametrize("flag", ["-model", "-model=x", "-max-tokens", "-help"])
def test_a_long_flag_behind_one_dash_is_corrected_and_not_read_as_a_short_one(flag, command):
    name = flag.partition("=")[0]
    assert_refused(command(f"generate {flag} 3 a"), f"unrecognized arguments: {name}; did you mean -{name}?")


def test_what_follows_two_dashes_is_no_flag(command, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert_refused(command("generate --model /no/such/folder -- -hf"), "/no/such/folder")


@pytest.mark.parametrize("line", ["xyzzy", "generate --xyzzy 1 a"])
def test_nothing_is_named_where_nothing_is_near(line, command):
    status, _, err = command(line)
    assert status == 2 and "did you mean" not in err
