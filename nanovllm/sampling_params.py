"""`SamplingParams`, the sampling options of one request: validated on construction, immutable afterwards."""

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
MAX_SAMPLES = 1024  # all samples of a request are queued at once

# (token ids of prompt and output so far, logits [vocab_size] float32 on the model's device) -> logits of that shape.
# It may modify the logits in place.
LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, in the order in which they apply to the logits.

    n: number of samples per prompt, each with its own noise and its own end; the first one is the sample of n=1.
    truncate_prompt_tokens: keep only the last tokens of the prompt, at most this many. None: keep all.
    allowed_token_ids: restrict sampling to these token ids. Default: all.
    bad_words: strings whose token sequences are never completed, with or without a leading space.
    logit_bias: values added to the logits of token ids, -100 to 100 (in effect: never, or always). Kept as a read-only
        copy.
    repetition_penalty: divisor of positive and factor of negative logits of tokens in prompt or output; 1e-6 to 1e6,
        1 disables it.
    frequency_penalty: subtracted from a token's logit for each of its occurrences in the output; -2 to 2.
    presence_penalty: subtracted from the logit of each token that occurs in the output; -2 to 2.
    logits_processors: functions (token ids so far, logits) -> logits, called in turn on the host. Their requests cannot
        run ahead of the host: with overlap they get a token in every second step.
    temperature: divisor of the logits; 0 is greedy (the most probable token, ties to the lowest id).
    top_k: keep the k most probable tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most probable tokens whose probability reaches p, the crossing token included
        (nucleus sampling, Holtzman et al. 2020); 1 keeps all.
    min_p: keep tokens at least min_p times as probable as the most probable one; 0 keeps all.
    logprobs: number of most probable tokens to report with log-probability and rank beside each output token, before
        any option above applies; 0 reports the output token alone. None: no report.
    prompt_logprobs: the same for each prompt token after the first; disables prefix cache hits of the prompt.
    max_tokens: maximum number of new tokens. None: up to the engine's max_model_len.
    min_tokens: number of new tokens before end-of-sequence tokens, stop tokens and stop strings take effect.
    ignore_eos: continue after the model's end-of-sequence tokens.
    stop_token_ids: token ids that end the request; they stay in the output's token ids.
    stop: strings that end the request; the text ends before the first one found.
    include_stop_str_in_output: end the text after the stop string instead.
    skip_special_tokens: omit special tokens from the text.
    seed: seed of the request's own noise, independent of other requests in the batch, 0 to 2**64 - 1. None: a new one
        for each request.

    Raises TypeError or ValueError naming the parameter, its value and its limits.
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
                raise ValueError(f"bad_words holds {word!r}, which holds only whitespace. Remove it.")
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
        """Whether a penalty makes the logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether any option changes the logits before the temperature."""
        # Evaluated for every request in every step, hence one expression instead of several properties.
        return (
            bool(self.allowed_token_ids or self.bad_words or self.logit_bias or self.logits_processors)
            or self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def forbids(self) -> bool:
        """Whether an option may mask tokens before the temperature, possibly all of them."""
        return bool(self.allowed_token_ids or self.bad_words or self.logits_processors)

    @property
    def has_filters(self) -> bool:
        """Whether top_k, top_p or min_p mask unlikely tokens."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def is_cold(self) -> bool:
        """Whether logits over the temperature are so large that float32 rounds the noise beside them away."""
        return 0.0 < self.temperature < COLD_TEMPERATURE

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # within the constructor of a frozen dataclass
