"""Predictions of steps for budgets of tests: by a formula, or without sense."""

from types import SimpleNamespace

from nanovllm.features.goals.step_budget import StepBudget

BLOCK, MOST = 4, 256


class Costs:
    """A millisecond a step, a decode and a token of a chunk, and a microsecond a pair; nothing was read before 0."""

    last_time, error, num_misses = 0.0, None, 0

    def __init__(self, sizes=()):
        self._sizes = sizes

    def sizes(self, num_decodes, limit):
        return [size for size in self._sizes or range(1, MOST + 1) if size <= limit]

    def forecast(self, decodes, start):
        return lambda size: 1e-3 * (1 + len(decodes) + size) + 1e-6 * start * size


class RandomCosts(Costs):
    """Predictions without sense, which no request may starve of."""

    def __init__(self, rng):
        super().__init__()
        self._rng = rng

    def forecast(self, decodes, start):
        scale = self._rng.choice((0.0, 1e-3, 1.0, 1e6))
        return lambda size: scale * size


def make_budget(goal, costs=None, *, now=0.0, clock=None, **options):
    defaults = {"itl_goal": goal, "ttft_goal": None, "max_num_batched_tokens": MOST, "block_size": BLOCK}
    defaults |= {"long_prefill_token_threshold": MOST, "overlap": False}
    config = SimpleNamespace(**(defaults | options))
    return StepBudget(config, costs or Costs(), clock or (lambda: now))
