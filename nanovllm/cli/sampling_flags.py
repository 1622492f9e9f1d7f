"""The sampling flags that `generate` and `chat` share, and the model that they load."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.early_checks import check_start
from nanovllm.cli.errors import in_words
from nanovllm.cli.flags import add_adapter_flag, add_flags, engine_options, options_given
from nanovllm.fast.host.gc_control import collector_paused
from nanovllm.features.option_checks import utf8
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.features.structured_output import KINDS, StructuredOutput
from nanovllm.sampling_params import FILTERS

if TYPE_CHECKING:
    from nanovllm.observability.trace_writer import TraceWriter
    from nanovllm.serving.llm import LLM

TEMPERATURE = "temperature"
OF_SAMPLING = {TEMPERATURE, *FILTERS}  # greedy requests ignore these
NO_FLAGS = ("structured_output", "itl_goal", "ttft_goal")  # no flag: forms, and goals of the engine's only user
HELP = {  # defaults that depend on other options
    TEMPERATURE: "the model's generation_config.json, if that sets a sampling option, else 0; 1 for several samples "
    f"or with {', '.join(FILTERS[:-1])} or {FILTERS[-1]}"
}


def add_timeout_flag(command: argparse.ArgumentParser) -> None:
    """Add --timeout."""
    command.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="end an answer after SECONDS and keep its text so far"
    )


def add_sampling_flags(command: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Add --adapter, and a flag for each field of `SamplingParams` that is not left out."""
    add_adapter_flag(command, "which answers every prompt")
    group = command.add_argument_group("sampling options")
    add_flags(group, SamplingParams, HELP, leave_out=(*leave_out, *NO_FLAGS))
    forms = command.add_argument_group("structured output, by one of").add_mutually_exclusive_group()
    forms.add_argument("--json-schema", metavar="FILE", help="answer with JSON that the schema in FILE accepts")
    forms.add_argument("--json-object", action="store_true", help="answer with a JSON object")
    forms.add_argument("--regex", metavar="REGEX", help="answer with a text that the whole expression matches")
    forms.add_argument("--grammar", metavar="FILE", help="answer with a text of the Lark grammar in FILE")
    forms.add_argument(
        "--choice", metavar="TEXT", action="append", help="answer with one of these texts, a flag for each"
    )


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that were set; raises ValueError for a bad one."""
    given = options_given(options, SamplingParams)
    form = {name: value for name in KINDS if (value := getattr(options, name)) not in (None, False)}
    for name in ("json_schema", "grammar"):
        if name in form:
            form[name] = _text_of(form[name], "--" + name.replace("_", "-"))
    if form:
        given["structured_output"] = StructuredOutput(**form)
    check_sampling(given)
    return given


def check_sampling(options: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for sampling options that no model could serve."""
    params = SamplingParams(**options)
    if params.structured_output is not None:
        from nanovllm.features.grammar.compiler import check_form  # imports numpy

        check_form(params.structured_output)


def sampling_params(options: dict[str, Any], llm: LLM) -> SamplingParams:
    """Sampling parameters of a request: its options, else the model's defaults, else the command's.

    A model without defaults is greedy here, since small models answer best so. Options that affect only sampling turn
    it on, and so do any sampling defaults of the model, even a temperature of 1.
    """
    if not OF_SAMPLING & options.keys() and not llm.sampling_defaults and options.get("n", 1) == 1:
        options = options | {TEMPERATURE: 0.0}
    return replace(llm.default_sampling_params, **options)


def _text_of(path: str, flag: str) -> str:
    try:
        return utf8(path, Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} is {path!r}, which cannot be read as text: {in_words(error)}") from None


def load_llm(options: argparse.Namespace, trace: TraceWriter | None = None) -> LLM:
    """Load the model with the engine options that were set."""
    given = engine_options(options)
    check_start(options, given)
    with collector_paused():
        from nanovllm import LLM  # imports torch, which takes seconds: only after the arguments passed their checks

    llm = LLM(options.model, tokenizer=options.tokenizer, trace=trace, **given)
    try:
        if not llm.can_generate:
            raise ValueError(
                f"{options.model} has no language model head, so it generates nothing. It embeds: nanovllm serve."
            )
        for name, path in getattr(options, "adapter", ()):
            llm.load_adapter(name, path)
    except BaseException:
        llm.close()
        raise
    return llm


def adapter_name(options: argparse.Namespace) -> str | None:
    """The name of the adapter that answers all prompts; raises ValueError for several."""
    names = [name for name, _ in options.adapter]
    if len(names) > 1:
        raise ValueError(f"--adapter gives {', '.join(names)}; one adapter answers all prompts. Give one of them.")
    return names[0] if names else None
