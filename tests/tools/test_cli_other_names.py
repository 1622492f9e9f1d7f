"""Flags and commands of vLLM, Ollama and llama.cpp: each is refused with its name here, by the page's table."""

import argparse
import re

import pytest

from nanovllm.cli import coming_from, serve
from nanovllm.cli.main import COMMANDS, main
from tests.support.command_line import command_parsers, words
from tests.support.pages import TEXTS, tables

PAGE = TEXTS["docs/guide/coming_from.md"]
NAMES = [(engine, name) for engine, _, rows in coming_from.TABLES
         for row in rows.splitlines() for name in coming_from._names(row.split("|")[1])]  # fmt: skip


def said(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words(line))
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "line, expected",
    [
        ("serve m --enable-auto-tool-choice", "--enable-auto-tool-choice is vLLM's: not needed here"),
        ("serve m --tool-call-parser hermes", "--tool-call-parser is vLLM's: use --tool-format"),
        ("serve m -tp 2", "-tp is vLLM's: use --tensor-parallel-size"),
        ("serve m -tp=2", "-tp is vLLM's: use --tensor-parallel-size"),
        ("serve -c 4096 -m x.gguf", "-c is llama.cpp's: use --max-model-len"),
        ("serve -m x.gguf -ngl 99", "-ngl is llama.cpp's: use --device"),
        ("serve -md small.gguf", "-md is llama.cpp's: use --draft-model"),
        ("generate -p Hello", "-p is llama.cpp's: use nanovllm generate"),
        ("run llama3.2", "run is Ollama's: use nanovllm chat MODEL"),
        ("list", "list is Ollama's: use nanovllm models"),
        ("show llama3.2", "show is Ollama's: use nanovllm chat MODEL"),
        ("serve m --enable-lora", "--enable-lora is vLLM's: there is none here."),
    ],
)
def test_a_name_of_another_engine_is_answered_with_ours(line, expected, capsys):
    assert f"error: {expected}" in said(line, capsys)


@pytest.mark.costly
@pytest.mark.parametrize("engine, name", NAMES, ids=[f"{engine} {name}" for engine, name in NAMES])
def test_no_name_is_an_alias_unless_it_is_ours(engine, name, capsys):
    own = {flag for parser in command_parsers().values() for flag in parser._option_string_actions} | {*COMMANDS}
    if name in own:
        return
    error = said(f"serve {name}" if name.startswith("-") else name, capsys)
    assert f"{name} is {engine}'s: " in error
    assert re.search(r"use (nanovllm [a-z]|--[a-z]|[A-Z_]{4})|not needed here|there is none here", error), error
    for flag in re.findall(r"(?:use|,) (--[a-z-]+)", error):
        assert flag in own, error


def test_the_pages_tables_are_those_of_the_command():
    for _, heading, rows in coming_from.TABLES:
        section = PAGE.split(f"\n### {heading}\n")[1]
        assert next(tables(section))[1:] == next(tables(f"| a |\n|---|\n{rows}"))[1:], heading


def test_a_value_that_reads_like_a_flag_is_none(capsys):
    assert coming_from.answer("--stop") is None and coming_from.answer("--tokenizer") is None
    assert "is llama.cpp's" not in said("generate --stop=-c --xyzzy a", capsys)


@pytest.mark.parametrize(
    "arguments, names, model",
    [
        ("MODEL --served-model-name a b", ["a", "b"], "MODEL"),
        ("--served-model-name a b --port 1 MODEL", ["a", "b"], "MODEL"),
        ("--served-model-name a MODEL", ["a"], "MODEL"),
        ("--served-model-name a b MODEL", ["a", "b"], "MODEL"),
        ("-m MODEL --served-model-name a b", ["a", "b"], "MODEL"),
        ("--served-model-name a --served-model-name b -m MODEL", ["a", "b"], "MODEL"),
        ("--served-model-name a --config FILE", ["a"], None),
        ("--served-model-name a b --config FILE", ["a", "b"], None),
        ("--served-model-name a", ["a"], None),
    ],
)
def test_several_names_of_the_model_follow_one_flag(arguments, names, model):
    parser = argparse.ArgumentParser()
    serve.add_serve_command(parser.add_subparsers())
    options = parser.parse_args(["serve", *words(arguments)])
    serve._take_names(options)
    assert options.served_model_name == names
    assert (options.model if options.names_model else options.model_argument) == model
