"""The settings that a sweep tries: combinations of values of the engine's limits, or a sample of them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.config import DEVICE_DEFAULTS, FLASH_BLOCK_SIZE, EngineConfig

# Engine options, in the order of tables; the last three say how far prompts may be computed in part.
SWEPT = (
    "max_num_batched_tokens", "max_num_seqs", "block_size", "max_num_partial_prefills", "max_long_partial_prefills",
    "long_prefill_token_threshold",
)  # fmt: skip
NARROW = (0.25, 0.5, 1.0, 2.0)  # times the device's default, where every setting is measured
WIDE = (0.125, *NARROW, 4.0)  # where they are simulated
UNLIMITED = 2**31  # of positions: what a model has is checked when it is loaded

Values = dict[str, Sequence[int | None]]  # for each option what to try; None leaves it to the engine


@dataclass(frozen=True, slots=True)
class Setting:
    """One value for each option of `SWEPT`, as the engine resolves them."""

    values: tuple[int, ...]

    @property
    def options(self) -> dict[str, int]:
        return dict(zip(SWEPT, self.values, strict=True))


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a sweep has to choose from.

    settings: all that the engine accepts, no two of them the same; the first is what it does when nobody says anything.
    refused: values that contradict one another, and what the engine says to them; for each reason the first such.
    """

    settings: list[Setting]
    refused: list[tuple[dict[str, int], str]]


class Resolver:
    """Resolves limits as an engine on a device does, without a model.

    Args:
        device: "cpu" or "cuda".
        fixed: engine options that all settings have.
        takes_flash: whether attention is "flash" where nobody says a block size.
    """

    def __init__(self, device: str, fixed: dict[str, Any], *, takes_flash: bool = False) -> None:
        self._device = device
        self._fixed = fixed
        self._block_size = FLASH_BLOCK_SIZE if takes_flash else None

    def resolve(self, options: dict[str, int]) -> Setting:
        """Raises ValueError for options that contradict one another."""
        config = EngineConfig(**(self._fixed | options)).resolve_limits(
            self._device, UNLIMITED, block_size=self._block_size
        )
        return Setting(tuple(getattr(config, name) for name in SWEPT))

    def told(self, setting: Setting) -> dict[str, int]:
        """The options that make a setting; limits of partial prefills that follow from the others are left out."""
        told = dict(itertools.islice(setting.options.items(), 3))
        for name, value in itertools.islice(setting.options.items(), 3, None):
            if self.resolve(told).options[name] != value:
                told[name] = value
        return told

    def flags(self, setting: Setting) -> str:
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.told(setting).items())

    def varying(self, settings: Sequence[Setting]) -> list[str]:
        """The options in which settings differ, less those that follow from the others."""
        told = {name for setting in settings for name in self.told(setting)}
        return [name for name in SWEPT if name in told and len({setting.options[name] for setting in settings}) > 1]

    def candidates(self, values: Values, named: Collection[str] = ()) -> Candidates:
        """Every combination of values.

        Args:
            named: options whose values somebody asked for; one of a single value has it in the first setting too.

        Raises ValueError for a value that no combination makes good.
        """
        for name, of in values.items():
            for value in of:
                EngineConfig.from_options(**_given({name: value}))
        pinned = {name: values[name][0] for name in named if len(values[name]) == 1}
        settings = {self.resolve(_given(pinned)): None}
        refused: dict[str, dict[str, int]] = {}
        for combination in itertools.product(*values.values()):
            options = _given(dict(zip(values, combination, strict=True)))
            try:
                settings[self.resolve(options)] = None
            except ValueError as error:
                refused.setdefault(str(error), options)
        return Candidates(list(settings), [(options, reason) for reason, options in refused.items()])


def _given(options: dict[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in options.items() if value is not None}


def values_to_try(
    device: str, named: Values, *, backend: str, longest_prompt: int, most_at_once: int, wide: bool
) -> Values:
    """What to try of each option: the values that are named, and others around the device's defaults.

    Args:
        backend: of attention, "auto" if nobody says which.
        longest_prompt: in tokens; limits of partial prefills are tried if it can take more than half of a step.
        most_at_once: requests that there can be; of larger values of `max_num_seqs` the smallest is enough.
        wide: many values, for the simulator.
    """
    defaults, factors = DEVICE_DEFAULTS[device], WIDE if wide else NARROW
    budgets = [int(factor * defaults.max_num_batched_tokens) for factor in factors]
    num_seqs = [int(factor * defaults.max_num_seqs) for factor in factors]
    enough = min((number for number in num_seqs if number >= most_at_once), default=num_seqs[-1])
    block_sizes = (FLASH_BLOCK_SIZE,) if backend == "flash" else (32, 64, 128)
    least_budget = min(budget for budget in named.get("max_num_batched_tokens", budgets) if budget is not None)
    are_long = longest_prompt > least_budget // 2
    values: Values = {
        "max_num_batched_tokens": budgets,
        "max_num_seqs": [number for number in num_seqs if number <= enough],
        "block_size": block_sizes,
        "max_num_partial_prefills": (None, 16) if are_long else (None,),
        "max_long_partial_prefills": (None, 4) if are_long else (None,),
        "long_prefill_token_threshold": (None,),
    }
    return values | named


def sample(settings: Sequence[Setting], count: int, *, seed: int = 0) -> list[Setting]:
    """So many of them, the first included, with every value of an option about equally often.

    Settings are taken one by one, each time one whose values have been taken least, drawn where several have.
    """
    rest = list(settings[1:])
    random.Random(seed).shuffle(rest)
    taken, used = [settings[0]], Counter(_cells(settings[0]))
    while rest and len(taken) < count:
        best = min(rest, key=lambda setting: sum(used[cell] for cell in _cells(setting)))
        rest.remove(best)
        taken.append(best)
        used.update(_cells(best))
    return taken


def _cells(setting: Setting) -> Iterable[tuple[int, int]]:
    return enumerate(setting.values)
