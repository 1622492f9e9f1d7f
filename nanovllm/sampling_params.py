"""How one request wants its tokens chosen: validated when it is built, immutable afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanovllm.validation import biases, functions, integer, items, real, strings, truth

if TYPE_CHECKING:
    from torch import Tensor

MIN_TEMPERATURE = 1e-6
COLD_TEMPERATURE = 0.02
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
MAX_SEED = 2**64 - 1
MAX_SAMPLES = 1024  # of one request: all of them are queued at once

# From the tokens so far (prompt and output) and the logits of the next one, [vocab_size] float32 on the model's device,
# to logits of the same shape; it may change those that it was given.
LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, in the order in which they act on the logits.

    n: how many samples to draw of the prompt, each with its own noise and its own end; the first is the one of n=1.
    truncate_prompt_tokens: keep only the last so many tokens of a longer prompt.
    allowed_token_ids: no other token is drawn; none given allows all.
    bad_words: strings whose tokens, spelt with or without a space in front, are never completed.
    logit_bias: added to the logits of these token ids; -100 to 100 each (in effect: never, or always). Kept as a
        read-only copy.
    repetition_penalty: divides the positive logits of tokens in prompt or output, multiplies the negative ones; 1e-6 to
        1e6, within which they stay finite, and 1 changes nothing.
    frequency_penalty: taken off a token's logit for each time that it stands in the output; -2 to 2.
    presence_penalty: taken off the logits of tokens that stand in the output; -2 to 2.
    logits_processors: functions from the tokens so far and a row of logits to another row, called in turn on the host;
        such a request never runs ahead of the host, so it gets a token in every second overlapped step.
    temperature: divides the logits; 0 is greedy (the most probable token, ties to the lowest id).
    top_k: keep the k most probable tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most probable tokens whose probability reaches p, the crossing token included
        (nucleus sampling, Holtzman et al. 2020); 1 keeps all.
    min_p: keep tokens at least min_p times as probable as the most probable one; 0 keeps all.
    logprobs: report the log-probability and rank of each output token, and of this many most probable ones beside it,
        all as the model gives them, before anything above acts; 0 reports the token alone, None nothing.
    prompt_logprobs: the same of each prompt token behind the first; the prompt is then computed without prefix hits.
    max_tokens: at most this many new tokens; None means as many as the engine's max_model_len leaves room for.
    min_tokens: no end-of-sequence, stop token or stop string before this many new tokens.
    ignore_eos: go on past the model's end-of-sequence tokens.
    stop_token_ids: token ids that end the request (kept in the output ids).
    stop: strings that end the request; the text ends before the first of them.
    include_stop_str_in_output: the text ends behind that string instead.
    skip_special_tokens: leave special tokens out of the text.
    seed: makes the request's noise its own, whatever runs beside it; None draws afresh for each request.

    Raises TypeError or ValueError naming the parameter, its value and what is allowed.
    """

    n: int = 1
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logits_processors: tuple[LogitsProcessor, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_what_changes_logits()
        self._check_temperature_and_filters()
        self._check_ends()
        for name in ("logprobs", "prompt_logprobs"):
            self._check_count(name, 0)
        self._check_count("truncate_prompt_tokens", 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            truth(name, getattr(self, name))
        if self.seed is not None:
            self._set("seed", integer("seed", self.seed, 0, MAX_SEED))
        self._set("n", integer("n", self.n, 1, MAX_SAMPLES))
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n is {self.n} and temperature 0: all samples would be the same. Use n=1, or a temperature above 0."
            )

    def _check_what_changes_logits(self) -> None:
        allowed = items("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
        self._set("allowed_token_ids", tuple(integer("allowed_token_ids", item, 0) for item in allowed))
        self._set("bad_words", strings("bad_words", self.bad_words, "For token ids use logit_bias, with -100."))
        for word in self.bad_words:
            if not word.strip():
                raise ValueError(f"bad_words holds {word!r}, which has nothing but space. Remove it.")
        self._set("logit_bias", biases(self.logit_bias))
        for name in ("frequency_penalty", "presence_penalty"):
            self._set(name, real(name, getattr(self, name), -2.0, 2.0))
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        self._set("repetition_penalty", real("repetition_penalty", self.repetition_penalty, low, high))
        self._set("logits_processors", functions("logits_processors", self.logits_processors))

    def _check_temperature_and_filters(self) -> None:
        self._set("temperature", real("temperature", self.temperature, 0.0, math.inf))
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}; the smallest above 0 is {MIN_TEMPERATURE}. Use 0 for greedy."
            )
        self._set("top_k", integer("top_k", self.top_k, -1))
        self._set("top_p", real("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; it must lie in (0, 1]. For the most probable token use temperature=0.")
        self._set("min_p", real("min_p", self.min_p, 0.0, 1.0))

    def _check_ends(self) -> None:
        self._check_count("max_tokens", 1)
        self._set("min_tokens", integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}).")
        stop_token_ids = items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        self._set("stop_token_ids", tuple(integer("stop_token_ids", item, 0) for item in stop_token_ids))
        self._set("stop", strings("stop", self.stop, "Token ids belong in stop_token_ids."))

    def _check_count(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None:
            self._set(name, integer(name, value, low))

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
        # Asked for every request in every step, so one expression instead of the properties that it consists of.
        return (
            bool(self.allowed_token_ids or self.bad_words or self.logit_bias or self.logits_processors)
            or self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def forbids(self) -> bool:
        """Whether some tokens, maybe all of them, are taken out before the temperature."""
        return bool(self.allowed_token_ids or self.bad_words or self.logits_processors)

    @property
    def has_filters(self) -> bool:
        """Whether top_k, top_p or min_p leave unlikely tokens out."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def is_cold(self) -> bool:
        """Whether logits over the temperature are so large that float32 rounds the noise beside them away."""
        return 0.0 < self.temperature < COLD_TEMPERATURE

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this is its constructor at work
