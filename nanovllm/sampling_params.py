"""How one request wants its tokens chosen: validated when it is built, immutable afterwards."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIN_TEMPERATURE = 1e-6
COLD_TEMPERATURE = 0.02
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, in the order in which they act on the logits.

    allowed_token_ids: no other token is drawn; none given allows all.
    logit_bias: added to the logits of these token ids; -100 to 100 each (in effect: never, or always).
    repetition_penalty: divides the positive logits of tokens in prompt or output, multiplies the negative ones; above
        0, and 1 changes nothing.
    frequency_penalty: taken off a token's logit for each time that it stands in the output; -2 to 2.
    presence_penalty: taken off the logits of tokens that stand in the output; -2 to 2.
    temperature: divides the logits; 0 is greedy (the most probable token, ties to the lowest id).
    top_k: keep the k most probable tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most probable tokens whose probability reaches p, the crossing token included
        (nucleus sampling, Holtzman et al. 2020); 1 keeps all.
    min_p: keep tokens at least min_p times as probable as the most probable one; 0 keeps all.
    max_tokens: at most this many new tokens; None means as many as the engine's max_model_len leaves room for.
    min_tokens: no end-of-sequence, stop token or stop string before this many new tokens.
    ignore_eos: go on past the model's end-of-sequence tokens.
    stop_token_ids: token ids that end the request (kept in the output ids).
    stop: strings that end the request; the text ends before the first of them.
    seed: makes the request's noise its own, whatever runs beside it; None draws afresh for each request.

    Raises TypeError or ValueError naming the parameter, its value and what is allowed.
    """

    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        allowed = _items("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
        self._set("allowed_token_ids", tuple(_integer("allowed_token_ids", item, 0) for item in allowed))
        self._set("logit_bias", _biases(self.logit_bias))
        for name in ("frequency_penalty", "presence_penalty"):
            self._set(name, _real(name, getattr(self, name), -2.0, 2.0))
        self._set("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf))
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty is 0; it must be above 0, and 1 changes nothing.")
        self._set("temperature", _real("temperature", self.temperature, 0.0, math.inf))
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}; the smallest above 0 is {MIN_TEMPERATURE}. Use 0 for greedy."
            )
        self._set("top_k", _integer("top_k", self.top_k, -1))
        self._set("top_p", _real("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; it must lie in (0, 1]. For the most probable token use temperature=0.")
        self._set("min_p", _real("min_p", self.min_p, 0.0, 1.0))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}).")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}.")
        stop_token_ids = _items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        self._set("stop_token_ids", tuple(_integer("stop_token_ids", item, 0) for item in stop_token_ids))
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, "a string or a list of them")
        for item in stop:
            if not isinstance(item, str):
                raise TypeError(f"stop must hold strings, not {item!r}. Token ids belong in stop_token_ids.")
            if not item:
                raise ValueError("stop holds an empty string, which every text contains. Remove it.")
        self._set("stop", stop)
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, 0, MAX_SEED))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether something acts on the logits before the temperature."""
        return bool(self.allowed_token_ids or self.logit_bias) or self.penalises

    @property
    def has_filters(self) -> bool:
        """Whether some tokens are never drawn."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def is_cold(self) -> bool:
        """Whether logits over the temperature are so large that float32 rounds the noise beside them away."""
        return 0.0 < self.temperature < COLD_TEMPERATURE

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this is its constructor at work


def _real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf  # a whole number beyond any float; out of every range here
    if not low <= value <= high or math.isinf(value):  # NaN fails the comparison too
        allowed = f"between {low:g} and {high:g}" if math.isfinite(high) else f"a finite number of at least {low:g}"
        raise ValueError(f"{name} is {value}; it must be {allowed}.")
    return value


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}.")
    value = int(value)
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} is {value}; it must be {allowed}.")
    return value


def _biases(values: Any) -> dict[int, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, not {values!r}.")
    biases = {}
    for key, value in values.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON has no other keys than strings
        biases[_integer("a token id of logit_bias", token_id, 0)] = _real("logit_bias", value, -100.0, 100.0)
    return biases


def _items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {expected}, not {value!r}.")
    return tuple(value)
