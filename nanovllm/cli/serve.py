"""The command `nanovllm serve`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import os
import tomllib
from pathlib import Path
from typing import Any

from nanovllm.cli.flags import add_flags, add_model_flags, engine_options
from nanovllm.config import EngineConfig
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.server.settings import ServerSettings

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
# Where the engine has no limit of its own, a server wants one.
ENGINE_DEFAULTS = {"max_queue": 1024}
NOT_GIVEN = {"model": DEFAULT_MODEL, "tokenizer": None, "verbose": False}  # of flags that always have a value
KEY_VARIABLE = "NANOVLLM_API_KEY"


def add_serve_command(commands: Any) -> None:
    """Add the command to those of the command line."""
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP, as OpenAI does", allow_abbrev=False,
        description="Serve a model over HTTP, in the form of OpenAI's interface. docs/guide/server.md says more.",
        epilog=f"The environment's {KEY_VARIABLE} is an API key too. A server's engine has max_queue="
        f"{ENGINE_DEFAULTS['max_queue']} unless told otherwise.",
    )  # fmt: skip
    serve.add_argument(
        "--config", metavar="FILE",
        help="read options from a TOML file, under the names that they have here (with _ or -); what stands on the "
        "command line goes before",
    )  # fmt: skip
    settings = {field.name: field.default for field in dataclasses.fields(ServerSettings)}
    shown = {name: value for name, value in settings.items() if value is not None and value != ()}
    add_flags(serve.add_argument_group("server options"), ServerSettings, shown)
    add_model_flags(serve)
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"the server needs {', '.join(missing)}: pip install 'nanovllm[serve]'.")
    if options.config is not None:
        _read_config(options)
    engine_given = ENGINE_DEFAULTS | engine_options(options)
    settings = _settings(options)
    settings.api_keys()
    from nanovllm.server.running import serve

    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    return serve(options.model, options.tokenizer, settings, engine_given)


def _settings(options: argparse.Namespace) -> ServerSettings:
    names = [field.name for field in dataclasses.fields(ServerSettings)]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if key := os.environ.get(KEY_VARIABLE):
        given["api_key"] = (*given.get("api_key", ()), key)
    return ServerSettings(**given)


def _read_config(options: argparse.Namespace) -> None:
    """Put into `options` what a file says and the command line does not; raises ValueError for an unknown name."""
    path = Path(options.config)
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    names = {field.name for field in dataclasses.fields(ServerSettings)} | {"model", "tokenizer", "verbose"}
    names |= {"engine_seed" if field.name == "seed" else field.name for field in dataclasses.fields(EngineConfig)}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ValueError(f"{path} holds {key!r}, which is no option of the server; see nanovllm serve --help.")
        if getattr(options, name, NOT_GIVEN.get(name)) == NOT_GIVEN.get(name):
            setattr(options, name, tuple(value) if isinstance(value, list) else value)
