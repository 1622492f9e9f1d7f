"""Flags and commands of vLLM, Ollama and llama.cpp: each is refused with its name here, by the page's table."""

import argparse
import re

import pytest

from nanovllm.cli import coming_from, serve
from nanovllm.cli.main import COMMANDS
from tests.support.command_line import command_parsers, words
from tests.support.pages import TEXTS, tables

PAGE = TEXTS["docs/guide/coming_from.md"]
NAMES = [(engine, name) for engine, _, rows in coming_from.TABLES
         for row in rows.splitlines() for name in coming_from._names(row.split("|")[1])]  # fmt: skip


@pytest.fixture
def said(command):
    """The error of a refused command line, without line breaks."""

    def said(line):
        status, _, err = command(line)
        assert status == 2
        return " ".join(err.split())

    return said


@pytest.mark.parametrize(
    "line, expected",
    {
        "serve m --enable-auto-tool-choice": "--enable-auto-tool-choice is vLLM's: not needed here",
        "serve m --tool-call-parser hermes": "--tool-call-parser is vLLM's: use --tool-format",
        "serve m -tp 2": "-tp is vLLM's: use --tensor-parallel-size",
        "serve m -tp=2": "-tp is vLLM's: use --tensor-parallel-size",
        "serve -c 4096 -m x.gguf": "-c is llama.cpp's: use --max-model-len",
        "serve -m x.gguf -ngl 99": "-ngl is llama.cpp's: use --device",
        "serve -md small.gguf": "-md is llama.cpp's: use --draft-model",
        "generate -p Hello": "-p is llama.cpp's: use nanovllm generate",
        "run llama3.2": "run is Ollama's: use nanovllm chat MODEL",
        "list": "list is Ollama's: use nanovllm models",
        "show llama3.2": "show is Ollama's: use nanovllm chat MODEL",
        "serve m --enable-lora": "--enable-lora is vLLM's: not needed here",
    }.items(),
)
def test_a_name_of_another_engine_is_answered_with_ours(line, expected, said):
    assert f"error: {expected}" in said(line)


@pytest.mark.costly
@pytest.mark.parametrize("engine, name", NAMES, ids=[f"{engine} {name}" for engine, name in NAMES])
def test_no_name_is_an_alias_unless_it_is_ours(engine, name, said):
    own = {flag for parser in command_parsers().values() for flag in parser._option_string_actions} | {*COMMANDS}
    if name in own:
        return
    error = said(f"serve {name}" if name.startswith("-") else name)
    assert f"{name} is {engine}'s: " in error
    assert re.search(r"use (nanovllm [a-z]|--[a-z]|[A-Z_]{4})|not needed here|there is none here", error), error
    for flag in re.findall(r"(?:use|,) (--[a-z-]+)", error):
        assert flag in own, error


def test_the_pages_tables_are_those_of_the_command():
    for _, heading, rows in coming_from.TABLES:
        section = PAGE.split(f"\n### {heading}\n")[1]
        assert next(tables(section))[1:] == next(tables(f"| a |\n|---|\n{rows}"))[1:], heading


def test_a_value_that_reads_like_a_flag_is_none(said):
    assert coming_from.answer("--stop") is None and coming_from.answer("--tokenizer") is None
    assert "is llama.cpp's" not in said("generate --stop=-c --xyzzy a")


@pytest.mark.parametrize(
    "arguments",
    [
        "MODEL --served-model-name a b",
        "--served-model-name a b --port 1 MODEL",
        "--served-model-name a MODEL",
        "--served-model-name a b MODEL",
        "-m MODEL --served-model-name a b",
        "--served-model-name a --served-model-name b -m MODEL",
        "--served-model-name a --config FILE",
        "--served-model-name a b --config FILE",
        "--served-model-name a",
    ],
)
def test_several_names_of_the_model_follow_one_flag(arguments):
    """The model's are `a` and `b`, in this order."""
    parser = argparse.ArgumentParser()
    serve.add_serve_command(parser.add_subparsers())
    options = parser.parse_args(["serve", *words(arguments)])
    serve._take_names(options)
    given = words(arguments)
    assert options.served_model_name == [name for name in given if name in ("a", "b")]
    model = options.model if options.names_model else options.model_argument
    assert model == ("MODEL" if "MODEL" in given else None)
