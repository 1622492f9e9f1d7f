"""The command `nanovllm serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import logging
import os
import tomllib
from pathlib import Path
from typing import Any

from nanovllm.cli.early_checks import check_start
from nanovllm.cli.flags import (
    add_flags,
    add_model_argument,
    add_model_flags,
    engine_options,
    latency,
    options_given,
    take_model_argument,
)
from nanovllm.cli.servers import registered
from nanovllm.cli.suggestions import hint
from nanovllm.cli.units import whole_number
from nanovllm.features.engine_config import EngineConfig, fields_by_flag
from nanovllm.features.option_checks import utf8
from nanovllm.serving.server.preparing import check_packages, prepared
from nanovllm.serving.server.settings import ENGINE_DEFAULTS, ServerSettings, with_defaults

NOT_GIVEN = {"tokenizer": None, "verbose": False}  # defaults of flags that are always set, except --model
NAMES = "served_model_name"
KEY_VARIABLE = "NANOVLLM_API_KEY"


def add_serve_command(commands: Any) -> None:
    """Register the subcommand."""
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP, compatible with OpenAI's API", allow_abbrev=False,
        usage="nanovllm serve [options] [MODEL]",
        description="Serve a model over HTTP, compatible with OpenAI's API. See docs/guide/server.md.",
        epilog=f"The environment variable {KEY_VARIABLE} sets a further API key. --max-queue defaults to "
        f"{ENGINE_DEFAULTS['max_queue']} here, and --itl-goal to {ENGINE_DEFAULTS['itl_goal']} unless "
        "--max-num-batched-tokens is set.",
    )  # fmt: skip
    serve.add_argument(
        "--config", metavar="FILE",
        help="read options from a TOML file, named as here with _ or -; the command line takes precedence",
    )  # fmt: skip
    settings = serve.add_argument_group("server options")
    add_flags(settings, ServerSettings, {})
    next(action for action in settings._group_actions if action.dest == NAMES).nargs = "+"  # several names, as in vLLM
    add_model_flags(serve)
    add_model_argument(serve)
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    check_packages("the server")
    _take_names(options)
    take_model_argument(options)
    if options.config is not None:
        _read_config(options)
    engine_given = with_defaults(engine_options(options))
    settings = _settings(options)
    check_start(options, engine_given)
    with prepared(settings) as listeners, registered(options.model, settings, listeners):
        from nanovllm.serving.server.app import serve  # imports torch

        level = settings.log_level.upper()
        logging.getLogger().setLevel(level)
        logging.getLogger("nanovllm").setLevel(level)
        return serve(options.model, options.tokenizer, settings, engine_given, listeners)


def _take_names(options: argparse.Namespace) -> None:
    """Join the names of --served-model-name; the last word is the model where nothing else names one."""
    if (given := getattr(options, NAMES, None)) is None:
        return
    names = [name for group in given for name in group]
    if len(given[-1]) > 1 and options.model_argument is None and not options.names_model and options.config is None:
        options.model_argument = names.pop()
    setattr(options, NAMES, names)


def _settings(options: argparse.Namespace) -> ServerSettings:
    given = options_given(options, ServerSettings)
    if key := os.environ.get(KEY_VARIABLE):
        given["api_key"] = (*given.get("api_key", ()), key)
    return ServerSettings(**given)


def _read_config(options: argparse.Namespace) -> None:
    """Set options from the file unless the command line does; raises ValueError for an unknown name."""
    path = Path(options.config)
    try:
        given = tomllib.loads(utf8(str(path), path.read_bytes()))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    kinds = {"model": "str", "tokenizer": "str", "verbose": "bool"}
    for options_class in (ServerSettings, EngineConfig):
        kinds |= {name: str(field.type) for name, field in fields_by_flag(options_class).items()}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise ValueError(
                f"{path} holds {key!r}, which is not an option of the server{hint(name, kinds)}; see nanovllm serve "
                "--help."
            )
        if isinstance(value, str) and value[-1:].isalpha() and kinds[name].startswith("int"):  # "512MiB"
            try:
                value = whole_number(value)
            except ValueError as error:
                raise ValueError(f"{path} holds {key!r}: {error}") from None
        if isinstance(value, str) and kinds[name].startswith("Seconds"):
            try:
                value = latency(value)
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{path} holds {key!r}: {error}") from None
        unset = NOT_GIVEN.get(name)
        if not (options.names_model if name == "model" else getattr(options, name, unset) != unset):
            setattr(options, name, tuple(value) if isinstance(value, list) else value)
