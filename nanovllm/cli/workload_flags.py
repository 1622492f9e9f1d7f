"""The flags by which commands are told what to play, and the workloads that they ask for."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.tools.workloads.files import read_trace
from nanovllm.tools.workloads.specs import build, spelled
from nanovllm.tools.workloads.workloads import WORKLOADS, Workload, bursty, poisson


def add_workload_flags(
    parser: argparse.ArgumentParser, *, several: bool = False, default: str | None = "random"
) -> None:
    """Which requests.

    Args:
        several: any number of workloads and traces instead of one.
        default: what the help says about that; None if one has to be named.
    """
    more = ("; again for another" if several else "") + (f" (default {default})" if default else "")
    parser.add_argument(
        "--workload", action="append", default=[], metavar="NAME[:KEY=VALUE,...]",
        help=f"a workload, with its parameters if it has any, such as random:requests=8,prompt=100-1024{more}",
    )  # fmt: skip
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="a workload from a trace file")
    parser.add_argument("--seed", type=int, metavar="INT", help="of workloads that are drawn, and of arrivals")
    parser.add_argument("--requests", type=positive, metavar="INT", help="cut workloads to their first requests")


def add_arrival_flags(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """When they arrive; several: any number of rates, `options.rate` being a list then."""
    about = "requests arrive, so many a second on average"
    if several:
        parser.add_argument("--rate", type=_rates, metavar="FLOAT,...", help=f"{about}; each rate is measured")
    else:
        parser.add_argument("--rate", type=float, metavar="FLOAT", help=about)
    parser.add_argument(
        "--arrivals", choices=("poisson", "bursty"), help="how they arrive, with --rate (default poisson)"
    )
    parser.add_argument("--burst", type=positive, metavar="INT", help="requests of a burst (default 8)")


def about_workloads() -> str:
    """What there is, for the end of a command's help."""
    return "workloads:\n" + "\n".join(f"  {name:<9}{_about(name)}" for name in WORKLOADS)


def _about(name: str) -> str:
    maker = WORKLOADS[name]
    parameters = inspect.signature(maker).parameters.values()
    takes = " ".join(f"{parameter.name}={spelled(parameter.default)}" for parameter in parameters)
    first = inspect.getdoc(maker).splitlines()[0]  # type: ignore[union-attr]
    return first + (f"\n{'':<11}{takes}" if takes else "")


# ------------------------------------------------------------------------------------------------ values of the flags


def count(text: str) -> int:
    """A whole number from 0 on, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is no count; it must be 0 or more")
    return value


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too few; it must be at least 1")
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
    """The workloads that are asked for, arrivals and all; random requests if none is.

    Raises ValueError for flags that contradict one another or have no effect.
    """
    check_arrival_flags(options)
    workloads = with_own_arrivals(options)
    if options.rate is None:
        return workloads
    return [arriving(options, workload, options.rate) for workload in workloads]


def one_workload(options: argparse.Namespace) -> Workload:
    """As `several_workloads`, but only one can be asked for."""
    check_is_one(options)
    return several_workloads(options)[0]


def check_is_one(options: argparse.Namespace) -> None:
    asked_for = [*options.workload, *options.trace]
    if len(asked_for) > 1:
        raise ValueError(f"one workload or trace is played at a time; {' and '.join(asked_for)} are {len(asked_for)}.")


def with_own_arrivals(options: argparse.Namespace) -> list[Workload]:
    """The workloads that are asked for, with arrivals of their own."""
    texts = options.workload or ([] if options.trace else ["random"])
    workloads = [build(text, seed=options.seed) for text in texts]
    uses_seed = any(workload.parameters.get("seed") == options.seed for workload in workloads)
    if options.seed is not None and options.rate is None and not uses_seed:
        raise ValueError(
            f"--seed is {options.seed}, but nothing is drawn with it: {' and '.join([*texts, *options.trace])} has "
            "its own tokens or its own seed, and without --rate its own arrivals. Leave --seed out, or give a --rate."
        )
    workloads += [read_trace(path, tokenize=_Tokenize(options)) for path in options.trace]
    if options.requests:
        workloads = [workload.first(options.requests) for workload in workloads]
    return workloads


def check_arrival_flags(options: argparse.Namespace) -> None:
    if options.arrivals and options.rate is None:
        raise ValueError(f"--arrivals is {options.arrivals}, but without --rate all requests keep their own arrivals.")
    if options.burst and options.arrivals != "bursty":
        raise ValueError(f"--burst is {options.burst}, but only --arrivals bursty has bursts.")


def arrivals_of(options: argparse.Namespace) -> dict[str, Any]:
    """How requests arrive, in full, by "arrivals", "burst" and "seed"; None where it makes no difference."""
    is_drawn, is_bursty = options.rate is not None, options.arrivals == "bursty"
    return {
        "arrivals": (options.arrivals or "poisson") if is_drawn else None,
        "burst": (options.burst or 8) if is_bursty else None,
        "seed": (options.seed or 0) if is_drawn else None,
    }


def arriving(options: argparse.Namespace, workload: Workload, rate: float) -> Workload:
    """A workload whose requests arrive, so many a second, in the way that the flags say."""
    how = arrivals_of(options)
    if how["arrivals"] == "bursty":
        return bursty(workload, rate, burst=how["burst"], seed=how["seed"])
    return poisson(workload, rate, seed=how["seed"])


class _Tokenize:
    """The model's tokenizer, loaded when the first text of a trace wants it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._name = getattr(options, "tokenizer", None) or options.model
        self._tokenizer: Any = None

    def __call__(self, text: str) -> list[int]:
        if self._name is None:
            raise ValueError("the prompt is text; --model says whose tokenizer reads it.")
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            folder = ensure_default_model() if self._name == DEFAULT_MODEL else self._name
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        return self._tokenizer(text)["input_ids"]
