"""Workload flags of `bench`, `tune` and `simulate`, and the workloads built from them."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import replace
from typing import Any

from nanovllm.cli.flags import model_source
from nanovllm.models.source import is_gguf
from nanovllm.tools.workloads.files import read_trace
from nanovllm.tools.workloads.specs import build, format_value
from nanovllm.tools.workloads.workloads import ABOUT, WORKLOADS, Workload, bursty, paced, poisson


def add_workload_flags(
    parser: argparse.ArgumentParser, *, several: bool = False, default: str | None = "random"
) -> None:
    """Add the flags for the requests of a workload.

    Args:
        several: accept several workloads and traces.
        default: default workload for the help; None if one is required.
    """
    more = ("; may be repeated" if several else "") + (f" (default {default})" if default else "")
    parser.add_argument(
        "--workload", action="append", default=[], metavar="NAME[:KEY=VALUE,...]",
        help=f"workload with its parameters, such as random:requests=8,prompt=100-1024{more}",
    )  # fmt: skip
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="FILE",
        help="read a workload from a trace file, a server's --record, or a trace of Mooncake's or Azure's",
    )
    parser.add_argument("--seed", type=int, metavar="INT", help="seed of drawn workloads and arrivals (default 0)")
    parser.add_argument("--requests", type=positive, metavar="INT", help="keep the first INT requests of each workload")
    if not several:
        parser.add_argument(
            "--draft-acceptance", type=_share, metavar="FLOAT",
            help="with --speculation: how often a simulated draft is right, if those before it are; accepted by "
            "verified drafts of a recorded run",
        )  # fmt: skip


def add_arrival_flags(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the flags for arrivals; with `several`, `options.rate` is a list."""
    about = "mean arrival rate, in requests per second"
    if several:
        parser.add_argument("--rate", type=_rates, metavar="FLOAT,...", help=f"{about}; each value is measured")
    else:
        parser.add_argument("--rate", type=float, metavar="FLOAT", help=about)
    parser.add_argument(
        "--arrivals", choices=("own", "poisson", "bursty"),
        help="arrivals with --rate: the workload's own, faster or slower (default where it has some), or drawn ones "
        "(default poisson)",
    )  # fmt: skip
    parser.add_argument(
        "--burst", type=positive, metavar="INT", help="requests per burst with --arrivals bursty (default 8)"
    )


def add_warm_ups_flag(parser: argparse.ArgumentParser) -> None:
    """Add --warm-ups."""
    parser.add_argument(
        "--warm-ups", type=_count, default=1, metavar="INT",
        help="unmeasured replays before each measured one (default 1)",
    )  # fmt: skip


def about_workloads() -> str:
    """Format the list of workloads for the epilog of a command's help."""
    return "workloads:\n" + "\n".join(f"  {name:<11}{_about(name)}" for name in WORKLOADS)


def _about(name: str) -> str:
    maker = WORKLOADS[name]
    parameters = inspect.signature(maker).parameters.values()
    takes = " ".join(f"{parameter.name}={format_value(parameter.default)}" for parameter in parameters)
    return ABOUT[name] + (f"\n{'':<13}{takes}" if takes else "")


# ------------------------------------------------------------------------------------------------ values of the flags


def _count(text: str) -> int:
    """Parse a whole number of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0; it must be at least 0")
    return value


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    value = _count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too small; it must be at least 1")
    return value


def _share(text: str) -> float:
    """Parse a number from 0 to 1, for argparse."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value:g} is no share; it must be from 0 to 1")
    return value


def _rates(text: str) -> list[float]:
    try:
        rates = sorted(float(item) for item in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FLOAT,FLOAT,... such as 1,2.5") from None
    if len(set(rates)) < len(rates):
        raise argparse.ArgumentTypeError(f"{text!r} names a rate twice")
    return rates


# ---------------------------------------------------------------------------------------------------------- workloads


def several_workloads(options: argparse.Namespace) -> list[Workload]:
    """Build the workloads of the flags, with arrivals; `random` by default.

    Raises ValueError for contradictory flags and flags without effect.
    """
    check_arrival_flags(options)
    workloads = with_own_arrivals(options)
    if options.rate is None:
        return workloads
    return [with_arrivals(options, workload, options.rate) for workload in workloads]


def one_workload(options: argparse.Namespace) -> Workload:
    """Build the only workload of the flags; raises ValueError for several."""
    check_is_one(options)
    return several_workloads(options)[0]


def check_is_one(options: argparse.Namespace) -> None:
    """Raise ValueError for more than one workload or trace."""
    asked_for = [*options.workload, *options.trace]
    if len(asked_for) > 1:
        raise ValueError(
            f"this command takes one workload or trace, but {len(asked_for)} are given: {' and '.join(asked_for)}."
        )


def with_own_arrivals(options: argparse.Namespace) -> list[Workload]:
    """Build the workloads of the flags with their own arrivals."""
    texts = options.workload or ([] if options.trace else ["random"])
    workloads = [build(text, seed=options.seed) for text in texts]
    uses_seed = any(workload.parameters.get("seed") == options.seed for workload in workloads)
    if options.requests:
        workloads = [workload.first(options.requests) for workload in workloads]
    tokenize = _Tokenize(options)
    workloads += [read_trace(path, tokenize=tokenize, first=options.requests) for path in options.trace]
    draws = _sets_rate(options) and any(_arrivals(options, workload) != "own" for workload in workloads)
    if options.seed is not None and not draws and not uses_seed:
        raise ValueError(
            f"--seed is {options.seed}, but nothing is drawn with it: {' and '.join([*texts, *options.trace])} has "
            "fixed tokens or its own seed, and its own arrivals. Leave --seed out, or give a --rate with --arrivals "
            "poisson."
        )
    if (acceptance := getattr(options, "draft_acceptance", None)) is not None:
        workloads = [replace(workload, draft_acceptance=acceptance) for workload in workloads]
    return workloads


def check_arrival_flags(options: argparse.Namespace) -> None:
    """Raise ValueError for arrival flags without effect."""
    if options.arrivals and not _sets_rate(options):
        raise ValueError(f"--arrivals is {options.arrivals}, but without --rate all requests keep their own arrivals.")
    if options.burst and options.arrivals != "bursty":
        raise ValueError(f"--burst is {options.burst}, but only --arrivals bursty has bursts.")


def _sets_rate(options: argparse.Namespace) -> bool:
    return options.rate is not None or getattr(options, "find_rate", False)


def _arrivals(options: argparse.Namespace, workload: Workload) -> str:
    if options.arrivals == "own" and not workload.is_spread:
        raise ValueError(
            f"--arrivals is own, but the requests of {workload.name} arrive at once or in a few groups. Leave it out "
            "for independent arrivals."
        )
    return options.arrivals or ("own" if workload.is_spread else "poisson")


def arrival_options(options: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Return "arrivals", "burst" and "seed" of a workload's arrival process; None where unused."""
    arrivals = _arrivals(options, workload) if _sets_rate(options) else None
    return {
        "arrivals": arrivals,
        "burst": (options.burst or 8) if arrivals == "bursty" else None,
        "seed": (options.seed or 0) if arrivals in ("poisson", "bursty") else None,
    }


def with_arrivals(options: argparse.Namespace, workload: Workload, rate: float) -> Workload:
    """Return the workload with arrivals at `rate` by the flags' arrival process."""
    how = arrival_options(options, workload)
    if how["arrivals"] == "own":
        return paced(workload, rate)
    if how["arrivals"] == "bursty":
        return bursty(workload, rate, burst=how["burst"], seed=how["seed"])
    return poisson(workload, rate, seed=how["seed"])


def _load_tokenizer(source: str) -> Any:
    if is_gguf(source):
        from nanovllm.models.gguf.file import GGUFFile
        from nanovllm.models.gguf.tokenizer import build_tokenizer

        return build_tokenizer(GGUFFile(source))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


class _Tokenize:
    """The model's tokenizer, loaded for the first text prompt of a trace."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._name = getattr(options, "tokenizer", None) or options.model
        self._tokenizer: Any = None

    def __call__(self, text: str) -> list[int]:
        if self._name is None:
            raise ValueError("the prompt is text, which needs a tokenizer; give --model.")
        if self._tokenizer is None:
            self._tokenizer = _load_tokenizer(model_source(self._name))
        token_ids: list[int] = self._tokenizer(text)["input_ids"]
        return token_ids
