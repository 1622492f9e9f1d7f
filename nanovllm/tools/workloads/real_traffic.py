"""Look-alikes of public traces, drawn from their statistics: arrivals, lengths and shared prefixes, by a seed."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from itertools import accumulate
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from nanovllm.tools.workloads.block_tokens import draw_prompt
from nanovllm.tools.workloads.trace_statistics import (
    LONG,
    PERCENTILES,
    RATE_PERCENTILES,
    Arrivals,
    Conversations,
    Table,
    Trace,
)

NUM_HASHES = 2**54
Seconds = np.ndarray[Any, np.dtype[np.float64]]


class Drawn(NamedTuple):
    """A drawn request: its arrival in seconds, its prompt, and the tokens of its output."""

    arrival: float
    prompt_token_ids: list[int]
    num_output_tokens: int


def draw_traffic(trace: Trace, count: int, *, rate: float, scale: float, seed: int) -> Iterator[Drawn]:
    """Draw `count` requests in order of arrival. Another rate has the same requests, faster or slower.

    Args:
        rate: requests per second, exact over the whole run.
        scale: multiplies all lengths, and the tokens of a shared block.
    """
    times = draw_arrivals(trace.arrivals, count, trace.rate, np.random.default_rng([seed, 2])).tolist()
    generator = np.random.default_rng([seed, 3])
    prompts = _Prompts(trace, scale, generator)
    for time in times:
        share = generator.random()
        row = trace.outputs[int(share * len(trace.outputs))]
        output = max(1, round(_quantile(row, generator.random()) * scale))
        yield Drawn(time * trace.rate / rate, prompts.draw(time, share), output)


# ------------------------------------------------------------------------------------------------------------ arrivals


def draw_arrivals(arrivals: Arrivals, count: int, rate: float, generator: np.random.Generator) -> Seconds:
    """Draw sorted arrival times in seconds, [count], within count / rate seconds.

    Given their number, the arrivals of a Poisson process are independent, with its rate as their density.
    """
    seconds = math.ceil(count / rate)
    slow = math.sqrt(arrivals.slow_share) * _noise(seconds, arrivals.slow_seconds, generator)
    fast = math.sqrt(1.0 - arrivals.slow_share) * _noise(seconds, arrivals.fast_seconds, generator)
    normal = [NormalDist().inv_cdf(percentile / 100.0) for percentile in RATE_PERCENTILES]
    rates = np.interp(slow + fast, normal, arrivals.rates)  # [seconds]
    expected = np.concatenate([[0.0], np.cumsum(rates)])  # arrivals until each second, up to a factor
    ends = np.linspace(0.0, count / rate, seconds + 1)
    return np.interp(np.sort(generator.uniform(0.0, expected[-1], count)), expected, ends)


def _noise(count: int, lasting: float, generator: np.random.Generator) -> Seconds:
    """Standard normal numbers; their autocorrelation decays by a factor e per `lasting` steps."""
    kept = math.exp(-1.0 / lasting)
    fresh = generator.standard_normal(count)
    fresh[1:] *= math.sqrt(1.0 - kept * kept)
    return np.array(list(accumulate(fresh.tolist(), lambda last, new: last * kept + new)))


# ------------------------------------------------------------------------------------------------------------- lengths


def _quantile(table: Table, share: float) -> float:
    """The quantile of a table at `share`, 0 to 1, interpolated in the logarithm, as tails are long."""
    return float(np.exp(np.interp(100.0 * share, PERCENTILES[len(table)], np.log(table))))


# ------------------------------------------------------------------------------------------------------------ prefixes


class _Prompt(NamedTuple):
    num_tokens: int  # length in the trace, before `scale`
    hash_ids: list[int]


class _Prompts:
    """Draws prompts; some continue earlier ones.

    With conversations, a prompt has new blocks after the whole blocks of the prompt that it continues, or after the
    common first block; without, it is one block.
    """

    def __init__(self, trace: Trace, scale: float, generator: np.random.Generator) -> None:
        self._lengths = trace.prompts
        self._conversations = trace.conversations
        self._scale = scale
        self._generator = generator
        self._common = self._hashes(1)
        self._open: list[_Prompt] = []  # prompts to be continued, by `_times`
        self._times: list[float] = []

    def draw(self, time: float, share: float) -> list[int]:
        """Draw the prompt of a request at `time`, of the length at `share` if it is new."""
        length = round(_quantile(self._lengths, share))
        if self._conversations is None:
            scaled = max(1, round(length * self._scale))
            return draw_prompt(self._hashes(1), scaled, scaled)
        prompt = self._turn(self._conversations, time, length)
        return self._tokens(prompt, self._conversations.block_tokens)

    def _turn(self, conversations: Conversations, time: float, length: int) -> _Prompt:
        block_tokens = conversations.block_tokens
        is_later = False
        shared = self._common
        if self._open and self._generator.random() < conversations.continuing:
            is_later = True
            begun = time - self._from(conversations.ages)
            index = min(bisect.bisect(self._times, begun), len(self._times) - 1)
            del self._times[index]
            length, shared = self._continued(conversations, self._open.pop(index))
        num_blocks = -(-length // block_tokens)
        prompt = _Prompt(length, shared + self._hashes(num_blocks - len(shared)))
        goes_on = conversations.later_goes_on if is_later else conversations.first_goes_on
        if length >= 2 * block_tokens and self._generator.random() < goes_on:
            self._open.append(prompt)
            self._times.append(time)
        return prompt

    def _continued(self, conversations: Conversations, last: _Prompt) -> tuple[int, list[int]]:
        """Length and shared blocks of a prompt that continues another."""
        block_tokens = conversations.block_tokens
        kept = last.num_tokens // block_tokens
        length = last.num_tokens + round(self._from(conversations.growths))
        if last.num_tokens >= LONG and self._generator.random() < conversations.rewritten:
            kept = max(1, int(kept * self._from(conversations.kept)))
            length = round(last.num_tokens * self._from(conversations.ratios))
        longest = int(self._lengths[-1])
        length = max(min(length, longest), kept * block_tokens)
        return length, last.hash_ids[:kept]

    def _tokens(self, prompt: _Prompt, block_tokens: int) -> list[int]:
        scaled = max(1, round(block_tokens * self._scale))
        fewest = (len(prompt.hash_ids) - 1) * scaled + 1  # the last block has a token
        length = max(fewest, round(prompt.num_tokens * scaled / block_tokens))
        return draw_prompt(prompt.hash_ids, length, scaled)

    def _from(self, table: Table) -> float:
        return _quantile(table, self._generator.random())

    def _hashes(self, count: int) -> list[int]:
        hash_ids: list[int] = self._generator.integers(NUM_HASHES, size=count).tolist()
        return hash_ids
