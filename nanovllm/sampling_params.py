"""`SamplingParams` of the engine alone: options of one request, validated on construction and frozen; sample seeds.

`features.sampling_params` has the public class, with the options of features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

from nanovllm.config import documented, integer, option, real, strings, token_ids, truth

MIN_TEMPERATURE = 1e-6
COLD_TEMPERATURE = 0.02  # the least at which float32 keeps the noise that is added to logits / temperature
MAX_SEED = 2**64 - 1
MAX_SAMPLES = 1024  # all samples of a request are queued at once
# SplitMix64 (Steele, Lea and Flood 2014, with Stafford's "Mix13" finaliser): its i-th output is a mixed counter.
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

# Filters of unlikely tokens, in the order in which they act: `sampler.py` has their forms.
FILTERS = ("top_k", "top_p", "min_p")

POSITIVE = partial(integer, low=1)
NOT_NEGATIVE = partial(integer, low=0)
SHARE = partial(real, low=0, high=1)


def set_checked(params: Any, checks: tuple[tuple[str, Any, Callable[[str, Any], Any]], ...]) -> None:
    """Check and normalise the options of a frozen dataclass within its constructor.

    Args:
        checks: (name, default, check) of each option; a default needs no check, and most options keep theirs.
    """
    for name, default, check in checks:
        value = getattr(params, name)
        if value is not default:
            object.__setattr__(params, name, check(name, value))


def checks_of(cls: Any) -> tuple[tuple[str, Any, Callable[[str, Any], Any]], ...]:
    """(name, default, check) of each option of a class, in the order of its fields."""
    return tuple((field.name, field.default, field.metadata["check"]) for field in fields(cls))


@documented
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, in the order in which they apply to the logits.

    Raises TypeError or ValueError naming the parameter, its value and its limits.
    """

    model_options: ClassVar[tuple[str, ...]] = ("temperature", *FILTERS)  # options that a generation config may set

    n: int = option(
        1,
        "number of samples per prompt, each with its own noise and its own end; the first one is the sample of n=1.",
        check=partial(integer, low=1, high=MAX_SAMPLES),
    )
    truncate_prompt_tokens: int | None = option(
        None, "keep only the last tokens of the prompt, at most this many. None: keep all.", check=POSITIVE
    )
    temperature: float = option(
        1.0,
        "divisor of the logits; 0 is greedy (the most probable token, ties to the lowest id).",
        check=partial(real, low=0, high=math.inf),
    )
    top_k: int = option(0, "keep the k most probable tokens; 0 or -1 keeps all.", check=partial(integer, low=-1))
    top_p: float = option(
        1.0,
        "keep the smallest set of most probable tokens whose probability reaches p, the crossing token included "
        "(nucleus sampling, Holtzman et al. 2020); 1 keeps all.",
        check=SHARE,
    )
    min_p: float = option(
        0.0, "keep tokens at least min_p times as probable as the most probable one; 0 keeps all.", check=SHARE
    )
    max_tokens: int | None = option(
        None, "maximum number of new tokens. None: up to the engine's max_model_len.", check=POSITIVE
    )
    ignore_eos: bool = option(False, "continue after the model's end-of-sequence tokens.", check=truth)
    stop_token_ids: tuple[int, ...] = option(
        (), "token ids that end the request; they stay in the output's token ids.", check=token_ids
    )
    stop: tuple[str, ...] = option(
        (),
        "strings that end the request; the text ends before the first one found.",
        check=partial(strings, remedy="Token ids belong in stop_token_ids."),
    )
    include_stop_str_in_output: bool = option(False, "end the text after the stop string instead.", check=truth)
    skip_special_tokens: bool = option(True, "omit special tokens from the text.", check=truth)
    seed: int | None = option(
        None,
        "seed of the request's own noise, independent of other requests in the batch, 0 to 2**64 - 1. None: a new "
        "one for each request.",
        check=partial(integer, low=0, high=MAX_SEED),
    )

    def __post_init__(self) -> None:
        set_checked(self, _CHECKS)
        self.check_together()

    def check_together(self) -> None:
        """Raise ValueError for values that do not go together, and for gaps in the range of one."""
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}; the smallest above 0 is {MIN_TEMPERATURE}. Use 0 for greedy."
            )
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; it must lie in (0, 1]. For the most probable token use temperature=0.")
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n is {self.n} and temperature 0: all samples would be the same. Use n=1, or a temperature above 0."
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def embeds(self) -> bool:
        """Whether the request wants a hidden state of its prompt instead of tokens."""
        return False

    @property
    def min_tokens(self) -> int:
        """Number of new tokens before a stop string takes effect."""
        return 0

    @property
    def is_plain(self) -> bool:
        """Whether the request needs nothing but draws from the model's own logits."""
        return True

    @property
    def changes_logits(self) -> bool:
        """Whether an option changes the logits before the temperature."""
        return False

    @property
    def needs_host_tokens(self) -> bool:
        """Whether a token is drawn only once the host has read the one before."""
        return False

    def begin(self, sequence: Any) -> None:
        """Prepare a new `Sequence` for results that its options ask for: here none."""


_CHECKS = checks_of(SamplingParams)


def mix64(value: int) -> int:
    """SplitMix64's finaliser on a Python int, modulo 2**64."""
    value &= MAX_SEED
    value = ((value ^ (value >> 30)) * MIX_1) & MAX_SEED
    value = ((value ^ (value >> 27)) * MIX_2) & MAX_SEED
    return value ^ (value >> 31)


def sample_seeds(seed: int | None, count: int, *, engine_seed: int, request_number: int) -> list[int]:
    """The seeds of a request's samples: the request's own for the first, another for each of the others.

    Args:
        seed: seed of the request; with None each request of an engine gets another.
    """
    if seed is None:
        seed = mix64(mix64(engine_seed + GAMMA) + (request_number + 1) * GAMMA)
    return [seed, *(mix64(mix64(seed ^ MAX_SEED) + index * GAMMA) for index in range(1, count))]
