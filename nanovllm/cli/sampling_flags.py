"""The sampling flags that `generate` and `chat` share, and the model that they load."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from nanovllm.cli.flags import add_flags, engine_options, options_given
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.observability.trace_writer import TraceWriter

# Small models answer best without sampling, and a command must end by itself.
CLI_DEFAULTS = {"temperature": 0.0, "max_tokens": 256}


def add_timeout_flag(command: argparse.ArgumentParser) -> None:
    """Add --timeout."""
    command.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="end an answer after SECONDS and keep its text so far"
    )


def add_sampling_flags(command: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Add a flag for each field of `SamplingParams` that is not left out."""
    group = command.add_argument_group("sampling options")
    add_flags(group, SamplingParams, CLI_DEFAULTS, leave_out=leave_out)


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that were set, over the command's defaults."""
    given = options_given(options, SamplingParams)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return CLI_DEFAULTS | given


def load_llm(options: argparse.Namespace, trace: TraceWriter | None = None) -> LLM:
    """Load the model with the engine options that were set."""
    given = engine_options(options)
    from nanovllm import LLM  # imports torch, which takes seconds: only after the arguments passed their checks

    return LLM(options.model, tokenizer=options.tokenizer, trace=trace, **given)
