"""What `nanovllm tune` was asked: model, workload, goals, and the settings there are to choose from."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanovllm.bench.processes import about
from nanovllm.calibration import Calibration
from nanovllm.cli_flags import engine_options
from nanovllm.tune.goals import Goal, goals_from
from nanovllm.tune.settings import SWEPT, Candidates, Resolver, Values, default_values
from nanovllm.workload_flags import arriving, check_arrival_flags, check_is_one, with_own_arrivals
from nanovllm.workloads import Workload

Workloads = dict[float | None, Workload]  # by rate of arrival; None for arrivals of their own


@dataclass(frozen=True, slots=True)
class Question:
    """What the command was asked, checked as far as that goes without a model."""

    options: argparse.Namespace
    fixed: dict[str, Any]
    goals: list[Goal]
    workload: Workload
    workloads: Workloads
    calibration: Calibration | None
    resolver: Resolver
    candidates: Candidates

    @property
    def identity(self) -> dict[str, Any]:
        """What a measurement depends on, besides the machine."""
        options = self.options
        tokens = hashlib.sha256(json.dumps([asdict(request) for request in self.workload.requests]).encode())
        return {
            "model": options.model,
            "tokenizer": options.tokenizer,
            "engine_options": self.fixed,
            "workload": {"name": self.workload.name, **about(self.workload), "sha256": tokens.hexdigest()},
            "arrivals": {name: getattr(options, name) for name in ("arrivals", "burst", "seed")},
            "warm_ups": options.warm_ups,
        }


def ask(options: argparse.Namespace) -> Question:
    """Raises ValueError for flags that contradict one another, or a workload that cannot answer them."""
    if not (options.workload or options.trace):
        raise ValueError("say what to tune for: --workload, such as --workload chat, or --trace.")
    check_is_one(options)
    check_arrival_flags(options)
    fixed, goals = engine_options(options), goals_from(options)
    (workload,) = with_own_arrivals(options)
    if workload.num_output_tokens == len(workload.requests) and any(goal.time == "itl" for goal in goals):
        raise ValueError(
            "the workload has one output token a request and so none that follows; leave goals on ITL out."
        )
    workloads: Workloads = {rate: arriving(options, workload, rate) for rate in options.rate or ()} or {None: workload}
    calibration = Calibration.load(options.simulate) if options.simulate else None
    device = _device(fixed, calibration)
    named: Values = {name: of for name in SWEPT if (of := getattr(options, f"try_{name}")) is not None}
    values: Values = default_values(
        device, fixed, wide=calibration is not None, most_at_once=len(workload.requests),
        longest_prompt=max(len(request.prompt_token_ids) for request in workload.requests),
    ) | named  # fmt: skip
    resolver = Resolver(device, fixed)
    candidates = resolver.candidates(values)
    if not named:  # contradictions among values that nobody asked for are no news
        candidates = replace(candidates, refused=[])
    return Question(options, fixed, goals, workload, workloads, calibration, resolver, candidates)


def _device(fixed: dict[str, Any], calibration: Calibration | None) -> str:
    if calibration is not None:
        return calibration.device
    if fixed.get("device", "auto") != "auto":
        return fixed["device"].partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
