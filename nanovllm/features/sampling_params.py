"""`SamplingParams`, the public class: the engine's options of a request and those of features; `EmbeddingParams`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm import sampling_params as plain
from nanovllm.config import documented, option, real, strings, token_ids
from nanovllm.features.option_checks import MIN_GOAL_S, biases, functions
from nanovllm.features.structured_output import StructuredOutput, structured_output
from nanovllm.sampling_params import NOT_NEGATIVE

if TYPE_CHECKING:
    from torch import Tensor

MIN_REPETITION_PENALTY = 1e-6
MAX_REPETITION_PENALTY = 1e6

# (token ids of prompt and output so far, logits [vocab_size] float32 on the model's device) -> logits of that shape.
# It may modify the logits in place.
LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]

_GOAL = partial(real, low=MIN_GOAL_S, high=math.inf)
_PENALTY = partial(real, low=-2, high=2)
_OF_ENGINE: Any = None  # stands for the engine's declaration of the option


@dataclass(frozen=True)
class _InOrder:
    """All options in their documented order: features' with their declarations, the engine's by name."""

    __slots__ = ()

    n: int = _OF_ENGINE
    truncate_prompt_tokens: int | None = _OF_ENGINE
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
    temperature: float = _OF_ENGINE
    top_k: int = _OF_ENGINE
    top_p: float = _OF_ENGINE
    min_p: float = _OF_ENGINE
    logprobs: int | None = option(
        None,
        "number of most probable tokens to report with log-probability and rank beside each output token, before any "
        "option above applies; 0 reports the output token alone. None: no report.",
        check=NOT_NEGATIVE,
    )
    prompt_logprobs: int | None = option(
        None,
        "the same for each prompt token after the first; those tokens are computed, cached or not.",
        check=NOT_NEGATIVE,
    )
    prompt_logprobs_start: int = option(
        0,
        "index of the first prompt token that prompt_logprobs reports; what comes before may be found in the prefix "
        "cache.",
        check=NOT_NEGATIVE,
    )
    max_tokens: int | None = _OF_ENGINE
    min_tokens: int = option(
        0,
        "number of new tokens before end-of-sequence tokens, stop tokens and stop strings take effect.",
        check=NOT_NEGATIVE,
    )
    ignore_eos: bool = _OF_ENGINE
    stop_token_ids: tuple[int, ...] = _OF_ENGINE
    stop: tuple[str, ...] = _OF_ENGINE
    include_stop_str_in_output: bool = _OF_ENGINE
    skip_special_tokens: bool = _OF_ENGINE
    itl_goal: float | None = option(
        None,
        "seconds between two tokens that this request can wait, where the engine keeps an itl_goal; at least that one. "
        "None: the engine's.",
        check=_GOAL,
    )
    ttft_goal: float | None = option(
        None, "the same for the first token, at least the engine's ttft_goal. None: the engine's.", check=_GOAL
    )
    seed: int | None = _OF_ENGINE


@documented
@dataclass(frozen=True, slots=True)
class SamplingParams(plain.SamplingParams, _InOrder):
    """Sampling options of one request, in the order in which they apply to the logits.

    Raises TypeError or ValueError naming the parameter, its value and its limits.
    """

    model_options: ClassVar[tuple[str, ...]] = (*plain.SamplingParams.model_options, "repetition_penalty")
    reports_draws: ClassVar[bool] = False  # True for `RolloutParams`: logprobs hold `DrawnLogprob`

    def __post_init__(self) -> None:
        plain.set_checked(self, _CHECKS)
        for word in self.bad_words:
            if not word.strip():
                raise ValueError(f"bad_words holds {word!r}, which holds only whitespace. Remove it.")
        plain.SamplingParams.check_together(self)
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

    @classmethod
    def completed(cls, params: plain.SamplingParams) -> SamplingParams:
        """`params` as an object of this class; the engine's own class gets the defaults of features."""
        if isinstance(params, SamplingParams):
            return params
        return cls(**{field.name: getattr(params, field.name) for field in fields(params)})

    @property
    def penalises(self) -> bool:
        """Whether a penalty makes the logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether any option changes the logits before the temperature."""
        return self.needs_host_sampler or self.structured_output is not None or self.penalises

    @property
    def changes_draws(self) -> bool:
        """Whether tokens are drawn from another distribution than the model's own."""
        is_filtered = self.temperature > 0 and _DRAW(self) != _PLAIN_DRAW
        return is_filtered or self.changes_logits or self.min_tokens > 0

    @property
    def is_plain(self) -> bool:
        """Whether the request needs nothing but draws from the model's own logits."""
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

    def begin(self, sequence: Any) -> None:
        """Prepare a new `Sequence` for the log-probabilities that it reports."""
        if self.logprobs is not None:
            sequence.logprobs = []
        if self.prompt_logprobs is not None and sequence.index == 0:  # all samples have the same prompt
            sequence.prompt_logprobs = [None] * max(1, self.prompt_logprobs_start)


_CHECKS = plain.checks_of(SamplingParams)
CHECKS = {name: check for name, _, check in _CHECKS}
# Options that take a step through further stages of sampling than the draw, and their values where they do not.
_STAGES = attrgetter(
    "allowed_token_ids", "structured_output", "bad_words", "logit_bias", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logits_processors", "logprobs", "prompt_logprobs", "min_tokens",
)  # fmt: skip
_NO_STAGES = _STAGES(SamplingParams())
_DRAW = attrgetter("temperature", *plain.FILTERS)
_PLAIN_DRAW = _DRAW(SamplingParams())


class EmbeddingParams(SamplingParams):
    """Options of a request for the hidden state of its last token: `RequestOutput.embedding`; it draws no token.

    Args:
        truncate_prompt_tokens: most tokens of the prompt; the last ones are kept, as with `SamplingParams`.
    """

    __slots__ = ()

    @property
    def embeds(self) -> bool:
        return True

    def __init__(self, *, truncate_prompt_tokens: int | None = None) -> None:
        SamplingParams.__init__(self, truncate_prompt_tokens=truncate_prompt_tokens, temperature=0.0, max_tokens=1)
