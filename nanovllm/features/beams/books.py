"""The state of a beam search: which continuations of a prompt's beams are kept, and which are finished. No torch.

The rule of `transformers` (num_beams, early_stopping=False), in float32: of the most probable continuations of
all beams the best that do not end go on; one that ends is a result if it is among the best `beam_width`. A prompt is
done when no running beam can beat its worst result any longer, by its score at its present length.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from nanovllm.config import check_fields, documented, integer, option, real, truth
from nanovllm.outputs import TokenLogprobs

MAX_WIDTH = 64


@documented
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Options of a beam search, with vLLM's names.

    Raises TypeError or ValueError naming the option, its value and its limits.
    """

    beam_width: int = option(help="beams of a prompt, and results.", check=partial(integer, low=1, high=MAX_WIDTH))
    max_tokens: int = option(help="maximum number of new tokens.", check=partial(integer, low=1))
    ignore_eos: bool = option(False, "continue after the model's end-of-sequence tokens.", check=truth)
    temperature: float = option(
        0.0, "0: a beam search draws nothing; kept for calls written for vLLM.", check=partial(real, low=0, high=0)
    )
    length_penalty: float = option(
        1.0,
        "a result's score is its log-probability over its length to this power; below 0 short ones win.",
        check=partial(real, low=-math.inf, high=math.inf),
    )
    include_stop_str_in_output: bool = option(
        False, "keep the end-of-sequence token that ended a result in its tokens.", check=truth
    )

    def __post_init__(self) -> None:
        check_fields(self, {})


@dataclass(slots=True)
class BeamSearchSequence:
    """A result: prompt and output together, as in vLLM.

    tokens: token ids of prompt and output.
    text: text of these tokens, without special tokens; None without a tokenizer.
    logprobs: log-probability of each output token, with the other candidates of its beam.
    cum_logprob: sum of the output tokens' log-probabilities.
    score: cum_logprob / num_output_tokens ** length_penalty.
    finish_reason: "stop" at an end-of-sequence token, which is stop_reason, or "length".
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cum_logprob: float
    score: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The results of a prompt, best first; `beam_width` of them."""

    sequences: list[BeamSearchSequence]


class Continuation(NamedTuple):
    """A kept beam: the index of the earlier beam that it extends, and the token that it adds."""

    parent: int
    token_id: int
    score: np.float32


@dataclass(slots=True)
class BeamBooks:
    """The beams of one prompt.

    num_candidates: continuations of each beam that are looked at, the most probable first.
    """

    params: BeamSearchParams
    prompt: list[int]
    eos_token_ids: Collection[int]
    scores: list[np.float32] = field(default_factory=lambda: [np.float32(0.0)])
    histories: list[tuple[TokenLogprobs, ...]] = field(default_factory=lambda: [()])
    outputs: list[list[int]] = field(default_factory=lambda: [[]])
    results: list[BeamSearchSequence] = field(default_factory=list)
    is_done: bool = False

    @property
    def num_candidates(self) -> int:
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    def advance(self, logprobs: Sequence[TokenLogprobs]) -> list[Continuation]:
        """The beams that go on, from the most probable tokens of each beam; sets `is_done`."""
        width = self.params.beam_width
        every = [
            Continuation(parent, token_id, self.scores[parent] + np.float32(found.logprob))
            for parent, of_beam in enumerate(logprobs)
            for token_id, found in of_beam.items()
        ]
        every.sort(key=lambda each: (-each.score, each.parent, each.token_id))
        length = len(self.outputs[0]) + 1
        is_last = length >= self.params.max_tokens
        going_on: list[Continuation] = []
        for rank, each in enumerate(every[: self.num_candidates]):
            is_eos = each.token_id in self.eos_token_ids
            if not (is_eos or is_last):
                going_on.append(each)
            elif rank < width:
                self._finish(each, logprobs[each.parent], length, is_eos=is_eos)
        going_on = going_on[:width]
        self.is_done = is_last or not going_on or self._cannot_improve(going_on, length)
        self.histories = [(*self.histories[each.parent], logprobs[each.parent]) for each in going_on]
        self.outputs = [[*self.outputs[each.parent], each.token_id] for each in going_on]
        self.scores = [each.score for each in going_on]
        return going_on

    def _cannot_improve(self, going_on: list[Continuation], length: int) -> bool:
        if len(self.results) < self.params.beam_width:
            return False
        best = going_on[0].score / np.float32(length**self.params.length_penalty)
        return bool(best <= self.results[-1].score)

    def _finish(self, end: Continuation, logprobs: TokenLogprobs, length: int, *, is_eos: bool) -> None:
        keeps = self.params.include_stop_str_in_output or not is_eos
        tokens = [*self.prompt, *self.outputs[end.parent], *([end.token_id] if keeps else [])]
        score = float(end.score / np.float32(length**self.params.length_penalty))
        history = [*self.histories[end.parent], logprobs]
        self.results.append(BeamSearchSequence(
            tokens, history, float(end.score), score, finish_reason="stop" if is_eos else "length",
            stop_reason=end.token_id if is_eos else None,
        ))  # fmt: skip
        self.results.sort(key=lambda result: -result.score)  # stable: the earlier of two equal ones stays first
        del self.results[self.params.beam_width :]
