"""Policies of users: the queue of waiting requests, or the budget of steps, in place of the scheduler's own.

A policy is a callable, such as a class, that returns an object with the methods of `Queue` or of `Budget` in
`nanovllm.scheduler`; or its name as "module:Class", or the name of an entry point of an installed distribution. It is
called by keyword, with those facts that it has parameters for:

    config    `EngineConfig`, resolved
    blocks    block manager of the scheduler
    clock     function that returns the engine's time in seconds; a simulation's is virtual
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, getattr_static, isfunction, signature
from operator import attrgetter
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.scheduler import Budget, Queue, Scheduler

GROUP = "nanovllm.features"  # group of entry points
PROTOCOLS = {"queue": Queue, "budget": Budget}
NAMES = {
    kind: [name for name, member in vars(cls).items() if isfunction(member) or isinstance(member, property)]
    for kind, cls in PROTOCOLS.items()
}
METHODS = {kind: [name for name in names if not hasattr(object, name)] for kind, names in NAMES.items()}
MISSING = object()
# Sizes of the trial, in which a policy is built before a model is loaded.
TRIAL_BLOCKS = 9
TRIAL_BLOCK_SIZE = 16
TRIAL = EngineConfig(
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    block_size=TRIAL_BLOCK_SIZE,
    num_kv_blocks=TRIAL_BLOCKS,
    long_prefill_token_threshold=32,
    max_num_partial_prefills=4,
    max_long_partial_prefills=1,
)


def set_policies(scheduler: Scheduler, clock: Callable[[], float]) -> None:
    """Hand the policies of its config to a scheduler without requests."""
    config: Any = scheduler.config
    policies = config.policies or {}
    facts = {"config": config, "blocks": scheduler.block_manager, "clock": clock}
    if "queue" in policies:
        scheduler.waiting = built("queue", policies["queue"], facts)
    if "budget" in policies:
        scheduler.budget = built("budget", policies["budget"], facts)


def check_policies(config: EngineConfig) -> None:
    """Build each policy of a config on a small scheduler; errors as of `built`."""
    for kind, policy in (config.policies or {}).items():
        built(kind, policy, _facts_of_trial())


def kind_of(policy: Callable[..., Any] | str) -> str:
    """Whether a policy is a "queue" or a "budget", by its methods.

    Raises ValueError if it cannot be imported, TypeError if it cannot be called or lacks methods.
    """
    found = _call(policy, _facts_of_trial())
    lacking = {kind: _lacking(found, kind) for kind in PROTOCOLS}
    for kind, names in lacking.items():
        if not names:
            return kind
    kind = min(lacking, key=lambda kind: len(lacking[kind]) / len(METHODS[kind]))
    raise _incomplete(policy, found, kind)


def built(kind: str, policy: Callable[..., Any] | str, facts: dict[str, Any]) -> Any:
    """Call a policy; raises ValueError if it cannot be imported, TypeError if it cannot be called or lacks methods."""
    found = _call(policy, facts)
    if _lacking(found, kind):
        raise _incomplete(policy, found, kind)
    return found


def _facts_of_trial() -> dict[str, Any]:
    return {"config": TRIAL, "blocks": BlockManager(TRIAL_BLOCKS, TRIAL_BLOCK_SIZE), "clock": lambda: 0.0}


def _lacking(found: Any, kind: str) -> list[str]:
    return [name for name in METHODS[kind] if getattr_static(found, name, MISSING) is MISSING]


def _incomplete(policy: Callable[..., Any] | str, found: Any, kind: str) -> TypeError:
    default = {"queue": "WaitingQueue", "budget": "WholeBudget"}[kind]
    return TypeError(
        f"policy {policy!r} made {found!r}, which is no {kind}: it lacks {', '.join(_lacking(found, kind))}. Derive "
        f"its class from nanovllm.scheduler.{default}, which has them all, or add them."
    )


def _call(policy: Callable[..., Any] | str, facts: dict[str, Any]) -> Any:
    """The object that a policy makes from those facts that it has parameters for."""
    factory = _imported(policy) if isinstance(policy, str) else policy
    if not callable(factory):
        raise TypeError(f"policy {policy!r} is {factory!r}; it must be a class or a function that makes a policy.")
    parameters = signature(factory).parameters.values()
    for parameter in parameters:
        is_open = parameter.default is Parameter.empty and parameter.kind not in (
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        )
        if is_open and (parameter.name not in facts or parameter.kind is Parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"policy {policy!r} needs {parameter.name!r}, but it is given {', '.join(facts)} by keyword. Rename "
                "the parameter, or give it a default."
            )
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return factory(**{name: fact for name, fact in facts.items() if takes_all or name in names})


def _imported(name: str) -> Any:
    """The object that "module:Class" names, with the working directory on the path; without a colon, an entry point."""
    module, colon, attribute = name.partition(":")
    if not colon:
        points = {point.name: point for point in entry_points(group=GROUP)}
        if name not in points:
            raise ValueError(
                f"policy {name!r} is not the name of an entry point of the group {GROUP}; installed are: "
                f"{', '.join(sorted(points)) or 'none'}. Name one of them, or a class as module:Class."
            )
        module = points[name].module
        attribute = points[name].attr
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return attrgetter(attribute)(import_module(module))
    except Exception as error:
        raise ValueError(
            f"policy {name!r} cannot be imported ({type(error).__name__}: {error}). Name a class of an installed "
            "package or of the working directory as module:Class, such as my_policies:LeastProgressFirst."
        ) from error
