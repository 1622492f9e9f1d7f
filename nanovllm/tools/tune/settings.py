"""Settings of a sweep: combinations of values for the engine's limits, or a sample of them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.config import DEVICE_DEFAULTS
from nanovllm.features.engine_config import EngineConfig

# Engine options under tuning, in table order; the last three limit partial prefills.
SWEPT = (
    "max_num_batched_tokens", "max_num_seqs", "block_size", "max_num_partial_prefills", "max_long_partial_prefills",
    "long_prefill_token_threshold",
)  # fmt: skip
NARROW = (0.25, 0.5, 1.0, 2.0)  # factors of the device's default, for measured settings
WIDE = (0.125, *NARROW, 4.0)  # same factors for simulated settings
UNLIMITED = 2**31  # positions; the model's limit is checked when it is loaded

Values = dict[str, Sequence[int | None]]  # values to try per option; None: not set


@dataclass(frozen=True, slots=True)
class Setting:
    """A resolved value for each option of `SWEPT`, and an `itl_goal` in seconds, which bounds steps by time instead."""

    values: tuple[int, ...]
    itl_goal: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        goal = {} if self.itl_goal is None else {"itl_goal": self.itl_goal}
        return dict(zip(SWEPT, self.values, strict=True)) | goal


def format_value(name: str, value: Any) -> str:
    """An option's value as its flag takes it."""
    return f"{1e3 * value:g}ms" if name == "itl_goal" and isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Settings that a sweep chooses from.

    settings: distinct settings that the engine accepts; the first holds the defaults.
    refused: contradictory values with the engine's error, one combination per error.
    """

    settings: list[Setting]
    refused: list[tuple[dict[str, int], str]]


class Resolver:
    """Resolves limits like an engine on a device, without a model.

    Args:
        device: "cpu" or "cuda".
        fixed: engine options common to all settings.
    """

    def __init__(self, device: str, fixed: dict[str, Any]) -> None:
        self._device = device
        self._fixed = fixed

    def resolve(self, options: dict[str, Any]) -> Setting:
        """Resolve options to a setting; raises ValueError for contradictory ones."""
        config = EngineConfig(**(self._fixed | options)).resolve_limits(self._device, UNLIMITED)
        return Setting(tuple(getattr(config, name) for name in SWEPT), options.get("itl_goal"))

    def explicit(self, setting: Setting) -> dict[str, Any]:
        """Return the options that yield a setting, without limits of partial prefills that are derived."""
        explicit = dict(itertools.islice(setting.options.items(), 3))
        for name, value in itertools.islice(setting.options.items(), 3, None):
            if self.resolve(explicit).options.get(name) != value:
                explicit[name] = value
        return explicit

    def flags(self, setting: Setting) -> str:
        explicit = self.explicit(setting).items()
        return " ".join(f"--{name.replace('_', '-')} {format_value(name, value)}" for name, value in explicit)

    def varying(self, settings: Sequence[Setting]) -> list[str]:
        """Return the options in which settings differ, without derived ones."""
        explicit = {name for setting in settings for name in self.explicit(setting)}
        names = [name for name in (*SWEPT, "itl_goal") if name in explicit]
        return [name for name in names if len({setting.options.get(name) for setting in settings}) > 1]

    def candidates(self, values: Values, named: Collection[str] = (), itl_goals: Sequence[float] = ()) -> Candidates:
        """Return every combination of values, and each without its budget for each `itl_goal`.

        Args:
            named: options with values set by the user; a single value also applies to the first setting.
            itl_goals: seconds; the budget is the first setting's then, as a bound for memory.

        Raises ValueError for a value that is invalid in every combination.
        """
        for name, to_try in values.items():
            for value in to_try:
                EngineConfig.from_options(**_given({name: value}))
        pinned = {name: values[name][0] for name in named if len(values[name]) == 1}
        settings = {self.resolve(_given(pinned)): None}
        refused: dict[str, dict[str, Any]] = {}
        combinations: list[dict[str, Any]]
        combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
        bound = {"max_num_batched_tokens": pinned.get("max_num_batched_tokens")}
        with_goal = [each | bound | {"itl_goal": goal} for goal in itl_goals for each in (pinned, *combinations)]
        for options in map(_given, (*combinations, *with_goal)):
            try:
                settings[self.resolve(options)] = None
            except ValueError as error:
                refused.setdefault(str(error), options)
        return Candidates(list(settings), [(options, reason) for reason, options in refused.items()])


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def values_to_try(
    device: str,
    named: Values,
    *,
    longest_prompt: int,
    most_at_once: int,
    wide: bool,
    only_named: bool = False,
) -> Values:
    """Return the values to try for each option: named ones, else values around the device's defaults.

    Args:
        longest_prompt: length in tokens; above half a step's budget, limits of partial prefills are tried too.
        most_at_once: maximum number of concurrent requests; bounds `max_num_seqs`.
        wide: more values, for the simulator.
        only_named: leave options that are not named at their defaults.
    """
    if only_named:
        return dict.fromkeys(SWEPT, (None,)) | named
    defaults = DEVICE_DEFAULTS[device]
    factors = WIDE if wide else NARROW
    budgets = [int(factor * defaults.max_num_batched_tokens) for factor in factors]
    num_seqs = [int(factor * defaults.max_num_seqs) for factor in factors]
    enough = min((number for number in num_seqs if number >= most_at_once), default=num_seqs[-1])
    least_budget = min(budget for budget in named.get("max_num_batched_tokens", budgets) if budget is not None)
    are_long = longest_prompt > least_budget // 2
    values: Values = {
        "max_num_batched_tokens": budgets,
        "max_num_seqs": [number for number in num_seqs if number <= enough],
        "block_size": (32, 64, 128),
        "max_num_partial_prefills": (None, 16) if are_long else (None,),
        "max_long_partial_prefills": (None, 4) if are_long else (None,),
        "long_prefill_token_threshold": (None,),
    }
    return values | named


def sample(settings: Sequence[Setting], count: int, *, seed: int = 0) -> list[Setting]:
    """Sample settings, the first included, with a balanced number of uses per value.

    Each draw takes the setting with the least used values so far; ties are random. Settings with an `itl_goal`, if
    there are some, are a quarter.
    """
    with_goal = [setting for setting in settings if setting.itl_goal is not None]
    num_goals = min(len(with_goal), max(1, count // 4)) if count > 1 else 0
    if not num_goals:
        return _balanced(settings, count, seed)
    fixed = [setting for setting in settings if setting.itl_goal is None]
    return _balanced(fixed, count - num_goals, seed) + _balanced(with_goal, num_goals, seed)


def _balanced(settings: Sequence[Setting], count: int, seed: int) -> list[Setting]:
    rest = list(settings[1:])
    random.Random(seed).shuffle(rest)
    taken = [settings[0]]
    used = Counter(_cells(settings[0]))
    while rest and len(taken) < count:
        best = min(rest, key=lambda setting: sum(used[cell] for cell in _cells(setting)))
        rest.remove(best)
        taken.append(best)
        used.update(_cells(best))
    return taken


def _cells(setting: Setting) -> Iterable[tuple[int, int]]:
    return enumerate(setting.values)
