"""A flag or command that does not exist: the error names the nearest."""

from __future__ import annotations

import pytest

from nanovllm.cli.main import main


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


@pytest.mark.parametrize("arguments", [["xyzzy"], ["generate", "--xyzzy", "1", "a"]])
def test_nothing_is_named_where_nothing_is_near(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "did you mean" not in capsys.readouterr().err
