"""A flag or command that does not exist: the error names the nearest."""

import pytest

from nanovllm.cli import main as command_line
from nanovllm.cli.main import COMMANDS, main
from tests.support.command_line import words


def refusal(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words(line))
    assert ended.value.code == 2
    return capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    "line, expected",
    [
        ("generat a", "did you mean generate?"),
        ("generate --tempratur 0.5 a", "unrecognized arguments: --tempratur; did you mean --temperature"),
        ("generate --max_tokens=4 a", "; did you mean --max-tokens"),
        ("serve --prt 1", "; did you mean --port"),
        ("generate --format jsnl a", "did you mean jsonl"),
    ],
)
def test_the_nearest_one_is_named(line, expected, capsys):
    assert expected in refusal(line, capsys)


def test_the_command_alone_lists_its_commands(capsys):
    assert main([]) == 2
    err = capsys.readouterr().err
    assert "usage: nanovllm" in err and [name for name in COMMANDS if f"    {name}" not in err] == []


@pytest.mark.parametrize("line", ["-hf x/y", "models -hf=x/y"])
def test_hf_is_refused_where_no_model_is_taken_and_not_read_as_a_call_for_help(line, capsys):
    assert "-hf names a model, which this command does not take" in refusal(line, capsys)


@pytest.mark.parametrize("line", ["serve -hf x/y", "generate -hf=x/y a", "chat -hf x/y:Q8_0"])
def test_hf_is_the_flag_of_llama_cpp_for_a_file_of_the_hub(line):
    given = command_line._parser(words(line)).parse_args(words(line))
    assert given.model == ("x/y:Q8_0" if ":" in line else "x/y:auto") and given.names_model


@pytest.mark.parametrize("flag", ["-model", "-model=x", "-max-tokens", "-help"])
def test_a_long_flag_behind_one_dash_is_corrected_and_not_read_as_a_short_one(flag, capsys):
    name = flag.partition("=")[0]
    assert f"unrecognized arguments: {name}; did you mean -{name}?" in refusal(f"generate {flag} 3 a", capsys)


def test_what_follows_two_dashes_is_no_flag(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert main(words("generate --model /no/such/folder -- -hf")) == 2
    assert "/no/such/folder" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["xyzzy", "generate --xyzzy 1 a"])
def test_nothing_is_named_where_nothing_is_near(line, capsys):
    assert "did you mean" not in refusal(line, capsys)
