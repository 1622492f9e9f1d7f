"""`SamplingParams`, the options of one request, validated on construction and immutable; seeds of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

from nanovllm.config import documented, integer, option, real, strings, token_ids, truth
from nanovllm.features.option_checks import MIN_GOAL_S, biases, functions
from nanovllm.features.structured_output import StructuredOutput, structured_output

if TYPE_CHECKING:
    from torch import Tensor

MIN_TEMPERATURE = 1e-6
COLD_TEMPERATURE = 0.02  # below it float32 rounds away noise that is added to logits / temperature
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
MAX_SEED = 2**64 - 1
MAX_SAMPLES = 1024  # all samples of a request are queued at once
# SplitMix64 (Steele, Lea and Flood 2014, with Stafford's "Mix13" finaliser): its i-th output is a mixed counter.
GAMMA = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# (token ids of prompt and output so far, logits [vocab_size] float32 on the model's device) -> logits of that shape.
# It may modify the logits in place.
LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]

# Filters of unlikely tokens, in the order in which they act: `sampler.py` has their forms.
FILTERS = ("top_k", "top_p", "min_p")
# Options that a model's generation config may set.
MODEL_OPTIONS = ("temperature", *FILTERS, "repetition_penalty")

_POSITIVE, _NOT_NEGATIVE = partial(integer, low=1), partial(integer, low=0)
_GOAL = partial(real, low=MIN_GOAL_S, high=math.inf)
_SHARE, _PENALTY = partial(real, low=0, high=1), partial(real, low=-2, high=2)


@documented
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, in the order in which they apply to the logits.

    Raises TypeError or ValueError naming the parameter, its value and its limits.
    """

    embeds: ClassVar[bool] = False  # whether the hidden state of the prompt's last token is wanted in place of tokens

    n: int = option(
        1,
        "number of samples per prompt, each with its own noise and its own end; the first one is the sample of n=1.",
        check=partial(integer, low=1, high=MAX_SAMPLES),
    )
    truncate_prompt_tokens: int | None = option(
        None, "keep only the last tokens of the prompt, at most this many. None: keep all.", check=_POSITIVE
    )
    allowed_token_ids: tuple[int, ...] = option(
        (), "restrict sampling to these token ids. Default: all.", check=token_ids
    )
    structured_output: StructuredOutput | None = option(
        None,
        "the form of the whole output, such as a JSON schema: tokens that leave it are never drawn, and "
        "end-of-sequence only where it is complete.",
        check=structured_output,
    )
    bad_words: tuple[str, ...] = option(
        (),
        "strings whose token sequences are never completed, with or without a leading space.",
        check=partial(strings, remedy="For token ids use logit_bias, with -100."),
    )
    logit_bias: dict[int, float] = option(
        default_factory=dict,
        help="values added to the logits of token ids, -100 to 100 (in effect: never, or always). Kept as a read-only "
        "copy.",
        hash=False,
        check=biases,
    )
    repetition_penalty: float = option(
        1.0,
        "divisor of positive and factor of negative logits of tokens in prompt or output; 1e-6 to 1e6, 1 disables it.",
        check=partial(real, low=MIN_REPETITION_PENALTY, high=MAX_REPETITION_PENALTY),
    )
    frequency_penalty: float = option(
        0.0, "subtracted from a token's logit for each of its occurrences in the output; -2 to 2.", check=_PENALTY
    )
    presence_penalty: float = option(
        0.0, "subtracted from the logit of each token that occurs in the output; -2 to 2.", check=_PENALTY
    )
    logits_processors: tuple[LogitsProcessor, ...] = option(
        (),
        "functions (token ids so far, logits) -> logits, called in turn on the host. With overlap, a step with such "
        "a request is drawn once the step before was read, while its forward pass runs.",
        check=functions,
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
        check=_SHARE,
    )
    min_p: float = option(
        0.0, "keep tokens at least min_p times as probable as the most probable one; 0 keeps all.", check=_SHARE
    )
    logprobs: int | None = option(
        None,
        "number of most probable tokens to report with log-probability and rank beside each output token, before any "
        "option above applies; 0 reports the output token alone. None: no report.",
        check=_NOT_NEGATIVE,
    )
    prompt_logprobs: int | None = option(
        None,
        "the same for each prompt token after the first; those tokens are computed, cached or not.",
        check=_NOT_NEGATIVE,
    )
    prompt_logprobs_start: int = option(
        0,
        "index of the first prompt token that prompt_logprobs reports; what comes before may be found in the prefix "
        "cache.",
        check=_NOT_NEGATIVE,
    )
    max_tokens: int | None = option(
        None, "maximum number of new tokens. None: up to the engine's max_model_len.", check=_POSITIVE
    )
    min_tokens: int = option(
        0,
        "number of new tokens before end-of-sequence tokens, stop tokens and stop strings take effect.",
        check=_NOT_NEGATIVE,
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
    itl_goal: float | None = option(
        None,
        "seconds between two tokens that this request can wait, where the engine keeps an itl_goal; at least that one. "
        "None: the engine's.",
        check=_GOAL,
    )
    ttft_goal: float | None = option(
        None, "the same for the first token, at least the engine's ttft_goal. None: the engine's.", check=_GOAL
    )
    seed: int | None = option(
        None,
        "seed of the request's own noise, independent of other requests in the batch, 0 to 2**64 - 1. None: a new "
        "one for each request.",
        check=partial(integer, low=0, high=MAX_SEED),
    )

    def __post_init__(self) -> None:
        for name, default, check in _OPTIONS:
            value = getattr(self, name)
            if value is not default:  # defaults need no check, and most options keep theirs
                object.__setattr__(self, name, check(name, value))
        for word in self.bad_words:
            if not word.strip():
                raise ValueError(f"bad_words holds {word!r}, which holds only whitespace. Remove it.")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}; the smallest above 0 is {MIN_TEMPERATURE}. Use 0 for greedy."
            )
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; it must lie in (0, 1]. For the most probable token use temperature=0.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}).")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ValueError(
                f"prompt_logprobs_start is {self.prompt_logprobs_start} without prompt_logprobs. Set prompt_logprobs, "
                "0 or more."
            )
        if self.structured_output is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos is set beside structured_output, which ends by an end-of-sequence token. Leave one out."
            )
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n is {self.n} and temperature 0: all samples would be the same. Use n=1, or a temperature above 0."
            )

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
        return self.needs_host_sampler or self.structured_output is not None or self.penalises

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's own logits, and nothing else is asked of the prompt's rows."""
        return _STAGES(self) == _NO_STAGES and not self.embeds

    @property
    def needs_host_sampler(self) -> bool:
        """Whether more changes the logits than penalties and a structured output's masks."""
        return bool(self.allowed_token_ids or self.bad_words or self.logit_bias or self.logits_processors)

    @property
    def forbids(self) -> bool:
        """Whether an option may mask tokens before the temperature, possibly all of them."""
        return bool(self.allowed_token_ids or self.bad_words or self.needs_host_tokens)

    @property
    def needs_host_tokens(self) -> bool:
        """Whether a token is drawn only once the host has read the one before."""
        return bool(self.logits_processors) or self.structured_output is not None


CHECKS = {field.name: field.metadata["check"] for field in fields(SamplingParams)}
# (name, default, check) of each option, in the order of the fields; kept, since building it takes longer than checking.
_OPTIONS = tuple((field.name, field.default, CHECKS[field.name]) for field in fields(SamplingParams))
# Options that take a step through further stages of sampling than the draw, and their values where they do not.
_STAGES = attrgetter(
    "allowed_token_ids", "structured_output", "bad_words", "logit_bias", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logits_processors", "logprobs", "prompt_logprobs", "min_tokens",
)  # fmt: skip
_NO_STAGES = _STAGES(SamplingParams())


class EmbeddingParams(SamplingParams):
    """Options of a request for the hidden state of its last token: `RequestOutput.embedding`; it draws no token.

    Args:
        truncate_prompt_tokens: as of `SamplingParams`.
    """

    __slots__ = ()
    embeds = True

    def __init__(self, *, truncate_prompt_tokens: int | None = None) -> None:
        SamplingParams.__init__(self, truncate_prompt_tokens=truncate_prompt_tokens, temperature=0.0, max_tokens=1)


def mix64(value: int) -> int:
    """SplitMix64's finaliser on a Python int, modulo 2**64."""
    value &= MAX_SEED
    value = ((value ^ (value >> 30)) * MIX_1) & MAX_SEED
    value = ((value ^ (value >> 27)) * MIX_2) & MAX_SEED
    return value ^ (value >> 31)


def sample_seeds(seed: int | None, count: int, *, engine_seed: int, request_number: int) -> list[int]:
    """The seeds of a request's samples: the request's own for the first, another for each of the others.

    Args:
        seed: None if the request has none of its own; then each request of an engine has another.
    """
    if seed is None:
        seed = mix64(mix64(engine_seed + GAMMA) + (request_number + 1) * GAMMA)
    return [seed, *(mix64(mix64(seed ^ MAX_SEED) + index * GAMMA) for index in range(1, count))]
