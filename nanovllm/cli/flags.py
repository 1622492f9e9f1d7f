"""Command-line flags from the fields of option dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from nanovllm.cli.units import whole_number
from nanovllm.features.engine_config import EngineConfig, fields_by_flag
from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.models.hub_files import AUTO, gguf_path, split_name

ADAPTER = "NAME=PATH"


def add_model_flags(command: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Add the flags for model, verbosity and engine options.

    Args:
        leave_out: engine options without a flag.
    """
    add_verbose_flag(command, "log engine events and print full tracebacks")
    command.add_argument(
        "-m", "--model", metavar="MODEL", default=DEFAULT_MODEL, action=_ModelFlag,
        help=f"folder, GGUF file or hub id of the model; `nanovllm models` lists those of this machine (default: the "
        f"embedded {DEFAULT_MODEL})",
    )  # fmt: skip
    command.add_argument(
        "-hf", "--hf-repo", dest="model", metavar="ORG/NAME[:QUANT]", action=_HubFlag, default=argparse.SUPPRESS,
        help="a GGUF file of a hub repository, of the quantisation QUANT (default Q4_K_M); the same as -m "
        "ORG/NAME:QUANT",
    )  # fmt: skip
    command.set_defaults(names_model=False)
    command.add_argument("--tokenizer", help="folder, GGUF file or hub id of the tokenizer (default: the model's)")
    add_engine_flags(command, leave_out=leave_out)


class _ModelFlag(argparse.Action):
    """Sets `names_model` too, to tell a flag with the default from no flag when an argument or a file names a model."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.model = values
        namespace.names_model = True


class _HubFlag(_ModelFlag):
    """Names a GGUF file of a hub repository."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        super().__call__(parser, namespace, values if ":" in values else f"{values}:{AUTO}", option)


def add_model_argument(command: argparse.ArgumentParser) -> None:
    """Add the model as an argument without a flag; `take_model_argument` reads it."""
    command.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model MODEL")


def take_model_argument(options: argparse.Namespace) -> None:
    """Set the model to the argument; raises ValueError if --model names another."""
    given = options.model_argument
    if given is None:
        return
    if options.names_model and options.model != given:
        raise ValueError(f"the model is {given!r} by the argument and {options.model!r} by --model; give one of them.")
    options.model = given
    options.names_model = True


def add_verbose_flag(command: argparse.ArgumentParser, text: str = "print full tracebacks") -> None:
    """Add -v; `text` is its help."""
    command.add_argument("-v", "--verbose", action="store_true", help=text)


def model_source(model: str) -> str:
    """Return the folder of the embedded model or the GGUF file of a hub repository, or any other name unchanged."""
    if (parts := split_name(model)) is not None:
        return str(gguf_path(*parts))
    return str(ensure_default_model()) if model == DEFAULT_MODEL else model


def add_engine_flags(command: argparse.ArgumentParser, *, leave_out: Collection[str]) -> None:
    """Add a flag for each option of `EngineConfig`."""
    group = command.add_argument_group("engine options")
    add_flags(group, EngineConfig, {}, leave_out=leave_out)


def add_adapter_flag(command: argparse.ArgumentParser, text: str) -> None:
    """Add --adapter; `text` ends its help."""
    command.add_argument(
        "--adapter", action="append", default=[], type=_PAIRS["AdapterName"], metavar=ADAPTER,
        help=f"load the LoRA adapter in the folder PATH, {text}",
    )  # fmt: skip


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were set, validated without a model."""
    given = options_given(options, EngineConfig)
    EngineConfig.from_options(**given)
    return given


def options_given(options: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the fields of a dataclass that were set by flags."""
    fields = {flag: field for flag, field in fields_by_flag(cls).items() if hasattr(options, flag)}
    given = {field.name: getattr(options, flag) for flag, field in fields.items()}
    is_pairs = {field.name: str(field.type).startswith("dict") for field in fields.values()}
    if (named := given.get("policies")) is not None and len(dict(named)) < len(named):
        raise ValueError(f"--policy names two of a kind: {', '.join(f'{name} (a {kind})' for kind, name in named)}.")
    return {name: dict(value) if is_pairs[name] and isinstance(value, list) else value for name, value in given.items()}


def _whole_number(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form TOKEN_ID=BIAS, such as 17=-3.5") from None


def _weight(text: str) -> tuple[str, float]:
    client, equals, value = text.rpartition("=")
    try:
        if not equals:
            raise ValueError
        return client, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form CLIENT=WEIGHT, such as batch=0.25") from None


def _entry(text: str, parse: Callable[[str], Any], form: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, parse(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}") from None


def _folder(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _policy(text: str) -> tuple[str, str]:
    from nanovllm.features.policies.opening import kind_of  # a command without this flag imports no policies

    try:
        return kind_of(text), text
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _function(text: str) -> Callable[..., Any]:
    """Import MODULE:FUNCTION, with the working directory on the path as for `python -m`."""
    module, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{text!r} names no function in the form MODULE:FUNCTION, such as my_file:my_function: {error}"
        raise argparse.ArgumentTypeError(message) from None
    return function


def latency(text: str) -> float | str | None:
    """The goal that a flag such as "50ms", "auto" or "none" spells; raises argparse.ArgumentTypeError."""
    from nanovllm.tools.tune.goals import duration  # a command without this flag imports no tools

    return {"auto": "auto", "none": None}[text] if text in ("auto", "none") else duration(text)


_TYPES: dict[str, Callable[[str], Any]] = {
    "int": _whole_number,
    "float": float,
    "Seconds": latency,
    "str": str,
    "LogitsProcessor": _function,
}
# Parsers of entries and their forms, by the type of their key.
_PAIRS: dict[str, Callable[[str], Any]] = {
    "int": _bias,
    "str": _weight,
    "PolicyKind": _policy,
    "Modality": partial(_entry, parse=int, form="image=NUMBER, such as image=4"),
    "AdapterName": partial(_entry, parse=_folder, form=f"{ADAPTER}, such as summaries=/srv/adapters/summaries"),
    "ProcessorOption": partial(_entry, parse=json.loads, form="NAME=JSON, such as max_pixels=1003520"),
}
_PAIR_METAVARS = {
    "int": "TOKEN_ID=BIAS",
    "str": "CLIENT=WEIGHT",
    "PolicyKind": "MODULE:CLASS",
    "Modality": "image=NUMBER",
    "AdapterName": ADAPTER,
    "ProcessorOption": "NAME=JSON",
}
_METAVARS = {"Seconds": "TIME", "int": "INT", "float": "FLOAT", "str": "STR", "LogitsProcessor": "MODULE:FUNCTION"}


def add_flags(group: Any, options: type, defaults: dict[str, Any], leave_out: Collection[str] = ()) -> None:
    """Add a flag for each field of a dataclass of `option`s, with the field's help.

    Args:
        defaults: defaults of this command that differ from the dataclass.
        leave_out: fields without a flag.
    """
    for dest, field in fields_by_flag(options).items():
        if field.name in leave_out:
            continue
        flag = "--" + dest.replace("_", "-")
        text = field.metadata["help"].replace("%", "%%")
        if field.name in defaults:
            text += f" (default here: {defaults[field.name]})"
        elif not (field.default in (None, (), dataclasses.MISSING) or "default" in text.lower()):
            text += f" (default: {field.default})"
        kind = str(field.type)  # a string, since annotations are not evaluated
        common: dict[str, Any] = {"dest": dest, "help": text, "default": argparse.SUPPRESS}
        if kind == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif kind.startswith("dict"):
            item = kind.removeprefix("dict[").split(",")[0]
            group.add_argument(flag, action="append", type=_PAIRS[item], metavar=_PAIR_METAVARS[item], **common)
        elif kind.startswith("tuple"):
            item = kind.removeprefix("tuple[").split(",")[0]
            group.add_argument(flag, action="append", type=_TYPES[item], metavar=_METAVARS[item], **common)
        else:
            item = kind.split(" ")[0]
            group.add_argument(flag, type=_TYPES[item], metavar=_METAVARS[item], **common)
