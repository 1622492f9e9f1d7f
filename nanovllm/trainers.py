"""For trainers: `install` serves a model's `generate_batch` by an engine; `uninstall` restores the method."""

from nanovllm.features.logprobs.draws import DrawnLogprob
from nanovllm.features.trainers.rollout_params import RolloutParams
from nanovllm.features.trainers.slot import Rollout, install, uninstall

__all__ = ["DrawnLogprob", "Rollout", "RolloutParams", "install", "uninstall"]
