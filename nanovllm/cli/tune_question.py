"""The question of `nanovllm tune`: model, workload, goals and candidate settings, from its flags."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanovllm.cli.early_checks import check_output_folder, check_start
from nanovllm.cli.flags import engine_options
from nanovllm.cli.workload_flags import (
    arrival_options,
    check_arrival_flags,
    check_is_one,
    with_arrivals,
    with_own_arrivals,
)
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.extras import check_extra
from nanovllm.features.refusals import check_one_process
from nanovllm.tools.bench.processes import about
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.tune.goals import Goal, goals_from_flags, itl_goals_to_try
from nanovllm.tools.tune.settings import SWEPT, Candidates, Resolver, Values, values_to_try
from nanovllm.tools.workloads.workloads import Workload

Workloads = dict[float | None, Workload]  # workload by arrival rate; None: its own arrivals


@dataclass(frozen=True, slots=True)
class Question:
    """Parsed flags of the command, validated without a model."""

    options: argparse.Namespace
    fixed: dict[str, Any]
    goals: list[Goal]
    workload: Workload
    workloads: Workloads
    calibration: Calibration | None
    resolver: Resolver
    candidates: Candidates

    @property
    def pool_of_forecasts(self) -> int | None:
        """Bytes of the forecasts' KV cache, if the engine options do not determine it."""
        sizes = {"num_kv_blocks", "kv_cache_memory_bytes"} & self.fixed.keys()
        if self.calibration is None or sizes or "gpu_memory_utilization" not in self.fixed:
            return None
        return self.calibration.kv_cache_bytes

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that a measurement depends on, except the machine."""
        options = self.options
        tokens = hashlib.sha256(json.dumps([asdict(request) for request in self.workload.requests]).encode())
        return {
            "model": options.model,
            "tokenizer": options.tokenizer,
            "engine_options": {
                name: value for name, value in self.fixed.items() if value != getattr(EngineConfig(), name)
            },
            "workload": {"name": self.workload.name, **about(self.workload), "sha256": tokens.hexdigest()},
            "arrivals": arrival_options(options, self.workload),
            "warm_ups": options.warm_ups,
        }


def build_question(options: argparse.Namespace) -> Question:
    """Build the question; raises ValueError for contradictory flags or a workload without the goals' figures."""
    if not (options.workload or options.trace):
        raise ValueError("no workload: give --workload, such as --workload chat, or --trace.")
    check_is_one(options)
    check_arrival_flags(options)
    fixed = engine_options(options)
    goals = goals_from_flags(options)
    check_one_process("nanovllm tune", fixed)
    check_extra("nanovllm tune", "cli", "psutil")
    (workload,) = with_own_arrivals(options)
    if workload.num_output_tokens == len(workload.requests) and any(goal.time == "itl" for goal in goals):
        raise ValueError("the workload has one output token per request, hence no ITL; leave goals on ITL out.")
    _check_find_rate(options, goals)
    workloads = with_rates(options, workload, options.rate or [])
    calibration = Calibration.load(options.simulate) if options.simulate else None
    check_output_folder("--output", options.output)
    check_start(options, fixed)
    device = _device(fixed, calibration)
    named: Values = {name: values for name in SWEPT if (values := getattr(options, f"try_{name}")) is not None}
    if options.only_named and not named:
        raise ValueError("--only-named sweeps what is named, and nothing is; give values, such as --block-size 32,64.")
    values = values_to_try(
        device, named, wide=calibration is not None, most_at_once=len(workload.requests),
        longest_prompt=max(len(request.prompt_token_ids) for request in workload.requests),
        only_named=options.only_named,
    )  # fmt: skip
    resolver = Resolver(device, fixed)
    itl_goals = [] if options.only_named or "itl_goal" in fixed else itl_goals_to_try(goals)
    candidates = resolver.candidates(values, named, itl_goals)
    # Report contradictions among named values only.
    named_refusals = [refusal for refusal in candidates.refused if sum(name in refusal[1] for name in named) > 1]
    return Question(
        options, fixed, goals, workload, workloads, calibration, resolver, replace(candidates, refused=named_refusals)
    )


def with_rates(options: argparse.Namespace, workload: Workload, rates: Sequence[float]) -> Workloads:
    """The workload at each rate; without rates, with its own arrivals."""
    return {rate: with_arrivals(options, workload, rate) for rate in rates} or {None: workload}


def _check_find_rate(options: argparse.Namespace, goals: list[Goal]) -> None:
    if options.find_rate and not goals:
        raise ValueError("--find-rate needs a goal that a rate can miss, such as --ttft-p99 500ms.")
    if options.find_rate and options.rate is not None:
        raise ValueError("--find-rate looks for the rate; leave --rate out.")


def _device(fixed: dict[str, Any], calibration: Calibration | None) -> str:
    if calibration is not None:
        return calibration.device
    if fixed.get("device", "auto") != "auto":
        return str(fixed["device"]).partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
