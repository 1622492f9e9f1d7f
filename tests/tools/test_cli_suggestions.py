"""A flag or command that does not exist: the error names the nearest."""

from __future__ import annotations

import pytest

from nanovllm.cli import main as command_line
from nanovllm.cli.main import COMMANDS, main


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generat", "a"], "did you mean generate?"),
        (
            ["generate", "--tempratur", "0.5", "a"],
            "unrecognized arguments: --tempratur; did you mean --temperature",
        ),
        (["generate", "--max_tokens=4", "a"], "; did you mean --max-tokens"),
        (["serve", "--prt", "1"], "; did you mean --port"),
        (["generate", "--format", "jsnl", "a"], "did you mean jsonl"),
    ],
)
def test_the_nearest_one_is_named(arguments, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err.replace("\n", " ")


def test_the_command_alone_lists_its_commands(capsys):
    assert main([]) == 2
    err = capsys.readouterr().err
    assert [name for name in COMMANDS if f"    {name}" not in err] == []


@pytest.mark.parametrize("arguments", [["-hf", "x/y"], ["models", "-hf=x/y"]])
def test_hf_is_refused_where_no_model_is_taken_and_not_read_as_a_call_for_help(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "-hf names a model, which this command does not take" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["serve", "-hf", "x/y"], ["generate", "-hf=x/y", "a"], ["chat", "-hf", "x/y:Q8_0"]]
)
def test_hf_is_the_flag_of_llama_cpp_for_a_file_of_the_hub(arguments):
    given = command_line._parser(arguments).parse_args(arguments)
    assert given.model == ("x/y:Q8_0" if ":" in arguments[-1] else "x/y:auto") and given.names_model


@pytest.mark.parametrize("flag", ["-model", "-model=x", "-max-tokens", "-help"])
def test_a_long_flag_behind_one_dash_is_corrected_and_not_read_as_a_short_one(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", flag, "3", "a"])
    assert ended.value.code == 2
    name = flag.partition("=")[0]
    assert f"unrecognized arguments: {name}; did you mean -{name}?" in capsys.readouterr().err


def test_what_follows_two_dashes_is_no_flag(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "--model", "/no/such/folder", "--", "-hf"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["xyzzy"], ["generate", "--xyzzy", "1", "a"]])
def test_nothing_is_named_where_nothing_is_near(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "did you mean" not in capsys.readouterr().err
