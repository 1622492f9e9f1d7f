"""The commands `nanovllm calibrate` and `nanovllm simulate`."""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from nanovllm.calibration import Calibration
from nanovllm.config import EngineConfig
from nanovllm.routing import POLICIES
from nanovllm.simulator import report
from nanovllm.simulator import simulate as replay
from nanovllm.workloads import TimedRequest, Workload

SIZES = {
    "num_requests": (64, "requests"),
    "input_tokens": (128, "tokens of each prompt"),
    "shared_tokens": (0, "of those, at the beginning and the same for all"),
    "output_tokens": (64, "tokens that each request generates"),
}
TRACE_FIELDS = ("arrival", "prompt", "output_tokens", "after", "priority", "cache_salt")


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write the calibration, as JSON")
    parser.add_argument("--repeats", type=int, default=3, help="how often each step is measured (default 3)")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calibration", required=True, metavar="FILE", help="written by `nanovllm calibrate`")
    parser.add_argument(
        "--trace", metavar="FILE",
        help='JSON lines, one for each request: "prompt" (token ids) and "output_tokens"; "arrival" (s), "after" (the '
        'line, from 0, of a request that has to end first), "priority" and "cache_salt"; without it random prompts',
    )  # fmt: skip
    for name, (default, text) in SIZES.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=argparse.SUPPRESS, help=f"{text} (default {default})")
    parser.add_argument(
        "--rate", type=float, default=argparse.SUPPRESS,
        help="requests a second that arrive, independently of each other (default: all are there at the start)",
    )  # fmt: skip
    parser.add_argument("--replicas", type=int, default=1, help="engines that share the requests (default 1)")
    parser.add_argument(
        "--routing", choices=list(POLICIES), default="round-robin", help="which of them gets a request (default: turns)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write figures, requests and steps to FILE, or to standard output if it is -"
    )


def calibrate(options: argparse.Namespace, engine_options: dict[str, Any]) -> int:
    from nanovllm.calibrate import calibrate as measure  # waits for torch

    folder = Path(options.output).parent
    if not folder.is_dir():  # better said now than in two minutes
        raise ValueError(f"--output is {options.output!r}, but there is no folder {str(folder)!r}.")
    calibration = measure(options.model, tokenizer=options.tokenizer, repeats=options.repeats, **engine_options)
    calibration.save(options.output)
    errors = ", ".join(f"{name} {error:.1%}" for name, error in calibration.residuals.items())
    print(f"{options.output}: {calibration.num_samples} steps measured; relative errors of the fit: {errors}")
    return 0


def simulate(options: argparse.Namespace, engine_options: dict[str, Any]) -> int:
    calibration = Calibration.load(options.calibration)
    config = calibration.resolve(EngineConfig.from_options(**engine_options), model=options.model)
    workload = _workload(options)
    begin = time.perf_counter()
    simulation = replay(
        workload,
        config,
        calibration.cost_model,
        num_replicas=options.replicas,
        route=POLICIES[options.routing](),
        keep_steps=bool(options.json),
    )
    took, figures = time.perf_counter() - begin, simulation.figures()
    if options.json:
        text = json.dumps(
            {
                "workload": workload.name,
                "model": calibration.model,
                "config": _as_dict(config),
                "replicas": options.replicas,
                "routing": options.routing,
                "figures": figures,
                "requests": [
                    _as_dict(metrics) | {"replica": replica}
                    for metrics, replica in zip(simulation.requests, simulation.replica_of, strict=True)
                ],
                "steps": [[_as_dict(record) for record in records] for records in simulation.steps],
            }
        )
        if options.json == "-":
            print(text)
            return 0
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    print(f"{workload.name} on {options.replicas} x {calibration.model}, simulated in {took:.2f} s\n{report(figures)}")
    return 0


def _as_dict(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


# -------------------------------------------------------------------------------------------------------- workloads


def _workload(options: argparse.Namespace) -> Workload:
    given = [name for name in (*SIZES, "rate") if hasattr(options, name)]
    if options.trace is not None:
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise ValueError(f"{flag} is of random prompts, and --trace brings its own. Leave one of them out.")
        return _read_trace(options.trace)
    sizes = {name: getattr(options, name, default) for name, (default, _) in SIZES.items()}
    for name, value in sizes.items():
        least = 0 if name == "shared_tokens" else 1
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
    if sizes["shared_tokens"] > sizes["input_tokens"]:
        raise ValueError(
            f"--shared-tokens is {sizes['shared_tokens']}, more than the prompts have ({sizes['input_tokens']}). Lower "
            "it, or raise --input-tokens."
        )
    rate = getattr(options, "rate", None)
    if rate is not None and not 0.0 < rate < float("inf"):
        raise ValueError(f"--rate is {rate}; it must be a number of requests a second above 0.")
    return random_workload(**sizes, rate=rate)


def random_workload(
    *, num_requests: int, input_tokens: int, shared_tokens: int, output_tokens: int, rate: float | None
) -> Workload:
    """Random prompts that begin alike, all there at the start or arriving `rate` a second on average."""
    r = random.Random(0)
    shared = r.choices(range(10_000), k=shared_tokens)
    requests, now = [], 0.0
    for _ in range(num_requests):
        prompt = shared + r.choices(range(10_000), k=input_tokens - shared_tokens)
        requests.append(TimedRequest(now, prompt, output_tokens))
        now += 0.0 if rate is None else r.expovariate(rate)
    name = f"{num_requests} x {input_tokens} in ({shared_tokens} shared), {output_tokens} out"
    return Workload(name if rate is None else f"{name}, {rate:g}/s", requests)


def _read_trace(path: str) -> Workload:
    requests = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    requests.append(_request(json.loads(line)))
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    return Workload(Path(path).stem, requests)


def _request(fields: Any) -> TimedRequest:
    if not isinstance(fields, dict):
        raise TypeError(f"a request is an object, not {fields!r}")
    unknown = sorted(set(fields) - set(TRACE_FIELDS))
    if unknown:
        raise ValueError(f"there is no field {unknown[0]!r}; there are {', '.join(TRACE_FIELDS)}")
    fields = {"arrival": 0.0, "after": None, "priority": 0, "cache_salt": ""} | fields
    prompt, numbers = fields["prompt"], [fields["output_tokens"], fields["priority"], fields["after"] or 0]
    if not isinstance(prompt, list) or not all(isinstance(number, int) for number in [*prompt, *numbers]):
        raise TypeError('"prompt" must be a list of token ids; "output_tokens", "priority" and "after" whole numbers')
    if not isinstance(fields["cache_salt"], str):
        raise TypeError(f'"cache_salt" is {fields["cache_salt"]!r}, not a string')
    return TimedRequest(
        float(fields["arrival"]),
        prompt,
        fields["output_tokens"],
        fields["after"],
        fields["priority"],
        fields["cache_salt"],
    )
