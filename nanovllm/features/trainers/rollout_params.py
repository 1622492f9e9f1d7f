"""`RolloutParams`: sampling parameters of a rollout, with the numbers that importance ratios need."""

from __future__ import annotations

from typing import ClassVar

from nanovllm.features.sampling_params import SamplingParams


class RolloutParams(SamplingParams):
    """`SamplingParams` with log-probabilities of the draws: the drawn tokens' entries are `DrawnLogprob`.

    Options are those of `SamplingParams`; logprobs None counts as 0.
    """

    __slots__ = ()
    reports_draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        SamplingParams.__post_init__(self)
        if self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
