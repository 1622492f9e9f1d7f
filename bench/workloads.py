"""The workloads: seeded lengths and token ids, the same for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at once: prompts as token ids, and how many tokens each generates."""

    name: str
    prompts: list[list[int]]
    output_lengths: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)

    def first(self, count: int) -> Workload:
        """The same workload cut to its first `count` requests."""
        if count >= len(self.prompts):
            return self
        return Workload(f"{self.name}[:{count}]", self.prompts[:count], self.output_lengths[:count])


def w() -> Workload:
    """64 requests with prompts of 32 to 256 tokens and outputs of 32 to 128: 9,871 in, 5,250 out."""
    r = random.Random(0)
    prompts, lengths = [], []
    for _ in range(64):
        prompt_length = r.randint(32, 256)
        lengths.append(r.randint(32, 128))
        prompts.append([r.randint(17, 49151) for _ in range(prompt_length)])
    return Workload("W", prompts, lengths)


def p() -> Workload:
    """64 requests that share 512 tokens and have 32 of their own, 32 tokens out: 34,816 in, 2,048 out."""
    r = random.Random(0)
    shared = [r.randint(17, 49151) for _ in range(512)]
    prompts = [shared + [r.randint(17, 49151) for _ in range(32)] for _ in range(64)]
    return Workload("P", prompts, [32] * 64)


def single() -> Workload:
    """One request, 128 tokens in and 128 out: the latency of a token."""
    r = random.Random(0)
    return Workload("single", [[r.randint(17, 49151) for _ in range(128)]], [128])


def w1() -> Workload:
    """256 requests with prompts and outputs of 100 to 1,024 tokens: 142,827 in, 133,966 out."""
    r = random.Random(0)
    prompts = [[r.randint(0, 10_000) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    return Workload("W1", prompts, [r.randint(100, 1024) for _ in range(256)])


def w2() -> Workload:
    """1,024 requests that share 512 tokens and have 64 of their own, 64 tokens out: 589,824 in, 65,536 out."""
    r = random.Random(0)
    shared = [r.randint(0, 10_000) for _ in range(512)]
    prompts = [shared + [r.randint(0, 10_000) for _ in range(64)] for _ in range(1024)]
    return Workload("W2", prompts, [64] * 1024)


def random_requests(name: str, count: int, num_prompt_tokens: int, num_output_tokens: int) -> Workload:
    """Requests of one size."""
    r = random.Random(0)
    prompts = [[r.randint(0, 10_000) for _ in range(num_prompt_tokens)] for _ in range(count)]
    return Workload(name, prompts, [num_output_tokens] * count)


WORKLOADS = {"W": w, "P": p, "single": single, "W1": w1, "W2": w2}
