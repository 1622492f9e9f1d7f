"""Workloads: requests with token ids, output lengths and arrival times, drawn from seeds.

W, P, W1, W2 and single are fixed, token for token, so results stay comparable over time. All other workloads take
parameters and are drawn by NumPy's generators: a seed gives the same tokens in every process. Their `scale` multiplies
numbers of requests and lengths, for small machines. `specs.build` parses texts such as "chat:turns=6".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nanovllm.tools.workloads.block_tokens import LOWEST_ID
from nanovllm.tools.workloads.real_traffic import draw_traffic
from nanovllm.tools.workloads.trace_statistics import TRACES

Span = int | tuple[int, int]  # a fixed length, or (shortest, longest) to draw from

VOCAB = 10_000  # default upper bound of drawn ids, below the vocabulary size of common models
MAX_GROUPS = 4  # most distinct arrival times of a workload that does not count as spread over time


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a workload.

    arrival: seconds after the workload's start, or after the end of the request `after`.
    prompt_token_ids: the prompt.
    num_output_tokens: exact output length; end-of-sequence tokens are ignored.
    after: index of a request that must end first, such as the previous turn of a conversation.
    priority, cache_salt, client: arguments of `LLM.generate`.
    """

    arrival: float
    prompt_token_ids: list[int]
    num_output_tokens: int
    after: int | None = None
    priority: int = 0
    cache_salt: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival; a request with `after` may be anywhere after that request.

    name: name with the parameters that differ from their defaults; identifies the workload in results.
    parameters: all parameters, defaults included.
    """

    name: str
    requests: list[TimedRequest]
    parameters: dict[str, Any] = field(default_factory=dict)
    draft_acceptance: float | None = None  # acceptance rate of a recorded run with speculation, for its simulation

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def is_timed(self) -> bool:
        """Whether a request arrives after the start."""
        return any(request.arrival or request.after is not None for request in self.requests)

    @property
    def is_spread(self) -> bool:
        """Whether requests arrive over time, not in a few groups."""
        return len({request.arrival for request in self.requests if request.after is None}) > MAX_GROUPS

    def first(self, count: int) -> Workload:
        """Return the workload of the first `count` requests."""
        if count >= len(self.requests):
            return self
        name = f"{self.name}[:{count}]"
        parameters = {**self.parameters, "first": count}
        return replace(self, name=name, requests=self.requests[:count], parameters=parameters)

    def hurried(self) -> Workload:
        """Return the requests with all arrivals at 0; `after` still holds."""
        return replace(self, requests=[replace(request, arrival=0.0) for request in self.requests])


def at_once(name: str, prompts: list[list[int]], output_lengths: list[int], **parameters: Any) -> Workload:
    """Build a workload with all arrivals at 0."""
    pairs = zip(prompts, output_lengths, strict=True)
    return Workload(name, [TimedRequest(0.0, prompt, length) for prompt, length in pairs], parameters)


WORKLOADS: dict[str, Callable[..., Workload]] = {}
ABOUT: dict[str, str] = {}  # a line on each workload, for help texts: docstrings are gone under `python -OO`
Maker = TypeVar("Maker", bound=Callable[..., Workload])


def _workload(name: str, about: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        WORKLOADS[name], ABOUT[name] = maker, about
        return maker

    return register


# --------------------------------------------------------------------------------------------------- fixed workloads


@_workload("W", "64 requests with prompts of 32 to 256 tokens and outputs of 32 to 128: 9,871 in, 5,250 out.")
def w() -> Workload:
    r = random.Random(0)
    prompts = []
    lengths = []
    for _ in range(64):
        prompt_length = r.randint(32, 256)
        lengths.append(r.randint(32, 128))
        prompts.append([r.randint(17, 49151) for _ in range(prompt_length)])
    return at_once("W", prompts, lengths)


@_workload(
    "P", "64 requests with a shared prefix of 512 tokens and 32 tokens of their own, 32 out: 34,816 in, 2,048 out."
)
def p() -> Workload:
    r = random.Random(0)
    shared = [r.randint(17, 49151) for _ in range(512)]
    return at_once("P", [shared + [r.randint(17, 49151) for _ in range(32)] for _ in range(64)], [32] * 64)


@_workload("single", "One request, 128 tokens in and 128 out: the latency of a single stream.")
def single() -> Workload:
    r = random.Random(0)
    return at_once("single", [[r.randint(17, 49151) for _ in range(128)]], [128])


@_workload("W1", "256 requests with prompts and outputs of 100 to 1,024 tokens: 142,827 in, 133,966 out, with seed 0.")
def w1(seed: int = 0) -> Workload:
    r = random.Random(seed)
    prompts = [[r.randint(0, 10_000) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    return at_once("W1" if seed == 0 else f"W1:seed={seed}", prompts, [r.randint(100, 1024) for _ in range(256)])


@_workload(
    "W2", "1,024 requests with a shared prefix of 512 tokens and 64 of their own, 64 out: 589,824 in, 65,536 out."
)
def w2() -> Workload:
    r = random.Random(0)
    shared = [r.randint(0, 10_000) for _ in range(512)]
    return at_once("W2", [shared + [r.randint(0, 10_000) for _ in range(64)] for _ in range(1024)], [64] * 1024)


# ----------------------------------------------------------------------------------------- workloads with parameters


@_workload("random", "Random tokens, all requests at once.")
def random_requests(
    *, requests: int = 64, prompt: Span = 128, shared: int = 0, output: Span = 64, vocab: int = VOCAB,
    scale: float = 1.0, seed: int = 0,
) -> Workload:  # fmt: skip
    """Build the workload.

    Args:
        prompt, output: tokens in and out, a number or (low, high) to draw from.
        shared: length of the prefix that all prompts share.
    """
    requests, prompt, shared, output = (_scaled(size, scale) for size in (requests, prompt, shared, output))
    draw = _Draw(seed, vocab)
    if shared > _span(prompt)[0]:
        raise ValueError(
            f"shared is {shared}, above the shortest prompt ({_span(prompt)[0]}). Lower it, or raise prompt."
        )
    beginning = draw.tokens(shared)
    prompts = [beginning + draw.tokens(draw.length(prompt) - shared) for _ in range(requests)]
    return at_once("random", prompts, [draw.length(output) for _ in range(requests)])


@_workload("P1", "Several long system prompts: each request has one of them, drawn, before tokens of its own.")
def p1(
    *, requests: int = 1024, prompts: int = 8, shared: int = 2000, own: Span = 64, output: Span = 64,
    vocab: int = VOCAB, scale: float = 1.0, seed: int = 0,
) -> Workload:  # fmt: skip
    """Build the workload.

    Args:
        prompts: number of system prompts, of `shared` tokens each; not scaled.
    """
    requests, shared, own, output = (_scaled(size, scale) for size in (requests, shared, own, output))
    draw = _Draw(seed, vocab)
    beginnings = [draw.tokens(shared) for _ in range(prompts)]
    whole = [beginnings[draw.below(prompts)] + draw.tokens(draw.length(own)) for _ in range(requests)]
    return at_once("P1", whole, [draw.length(output) for _ in range(requests)])


@_workload(
    "chat", "Conversations of several turns: each prompt is the previous prompt, a drawn answer and new user tokens."
)
def chat(
    *, conversations: int = 32, turns: int = 4, system: int = 200, user: Span = (20, 200), answer: Span = (50, 300),
    think: float = 2.0, vocab: int = VOCAB, scale: float = 1.0, seed: int = 0,
) -> Workload:  # fmt: skip
    """Build the workload. Answers in prompts are drawn, not generated, so that all engines get the same tokens.

    Args:
        turns: turns of a conversation; not scaled.
        system: tokens of a system prompt that all conversations share.
        user, answer: tokens that a turn adds to the prompt, and generates.
        think: mean of the exponentially distributed seconds between an answer and the next turn.
    """
    conversations, system, user, answer = (_scaled(size, scale) for size in (conversations, system, user, answer))
    draw = _Draw(seed, vocab)
    beginning = draw.tokens(system)
    histories = [beginning] * conversations
    made: list[TimedRequest] = []
    for turn in range(turns):
        for number in range(conversations):
            prompt = histories[number] + draw.tokens(draw.length(user))
            length = draw.length(answer)
            histories[number] = prompt + draw.tokens(length)
            after = len(made) - conversations if turn else None
            made.append(TimedRequest(draw.seconds(think) if turn else 0.0, prompt, length, after))
    return Workload("chat", made)


@_workload("whales", "Requests that decode while some with very long prompts arrive.")
def whales(
    *, decoding: int = 64, prompt: Span = 512, output: Span = 600, whales: int = 8, whale_prompt: Span = 8192,
    whale_output: Span = 4, delay: float = 5.0, vocab: int = VOCAB, scale: float = 1.0, seed: int = 0,
) -> Workload:  # fmt: skip
    """Build the workload.

    Args:
        decoding, prompt, output: number, prompt and output tokens of requests that arrive at the start.
        whales, whale_prompt, whale_output: number, prompt and output tokens of the long requests.
        delay: seconds until the long ones arrive, all at once; not scaled.
    """
    decoding, prompt, output = (_scaled(size, scale) for size in (decoding, prompt, output))
    whales = _scaled(whales, scale)
    whale_prompt = _scaled(whale_prompt, scale)
    draw = _Draw(seed, vocab)
    sizes = [(0.0, prompt, output)] * decoding + [(delay, whale_prompt, whale_output)] * whales
    made = [TimedRequest(time, draw.tokens(draw.length(long)), draw.length(out)) for time, long, out in sizes]
    return Workload("whales", made)


def real_traffic(name: str, *, requests: int = 1000, rate: float, scale: float = 1.0, seed: int = 0) -> Workload:
    """Build a look-alike of the trace `name` of `trace_statistics.TRACES`.

    Args:
        rate: requests per second; the trace's own arrivals, faster or slower.
    """
    drawn = draw_traffic(TRACES[name], _scaled(requests, scale), rate=rate, scale=scale, seed=seed)
    return Workload(name, [TimedRequest(*request) for request in drawn])


for _name, _trace in TRACES.items():
    _workload(_name, _trace.about)(partial(real_traffic, _name, rate=_trace.rate))


# ---------------------------------------------------------------------------------------------------------- arrivals


def poisson(workload: Workload, rate: float, *, seed: int = 0) -> Workload:
    """Poisson arrivals: the same requests, independently, `rate` a second on average.

    Requests with `after` keep their delay.
    """
    return _arriving(workload, rate, 1, seed, {"rate": rate, "arrivals": "poisson"})


def bursty(workload: Workload, rate: float, *, burst: int = 8, seed: int = 0) -> Workload:
    """Poisson arrivals of groups of `burst` requests, with `rate` requests a second on average."""
    return _arriving(workload, rate, burst, seed, {"rate": rate, "arrivals": "bursty", "burst": burst})


def paced(workload: Workload, rate: float) -> Workload:
    """The workload's own arrivals, faster or slower by one factor: `rate` requests a second on average.

    Requests with `after` keep their delay. Raises ValueError where all others arrive at once.
    """
    _check_rate(rate)
    free = [request.arrival for request in workload.requests if request.after is None]
    if not max(free):
        raise ValueError(
            f"all requests of {workload.name} arrive at once, so there is no pattern to keep at {rate:g}/s."
        )
    factor = len(free) / rate / max(free)
    requests = [r if r.after is not None else replace(r, arrival=r.arrival * factor) for r in workload.requests]
    parameters = {**workload.parameters, "rate": rate, "arrivals": "own"}
    return replace(workload, name=f"{workload.name} own {rate:g}/s", requests=requests, parameters=parameters)


def _check_rate(rate: float) -> None:
    if not 0.0 < rate < float("inf"):
        raise ValueError(f"the rate is {rate}; it must be a number of requests a second above 0.")


def _arriving(workload: Workload, rate: float, burst: int, seed: int, parameters: dict[str, Any]) -> Workload:
    _check_rate(rate)
    if burst < 1:
        raise ValueError(f"the burst is {burst}; it must be at least 1 request.")
    free = [index for index, request in enumerate(workload.requests) if request.after is None]
    generator = np.random.default_rng([seed, 1])  # a random stream separate from the tokens'
    groups = np.cumsum(generator.exponential(burst / rate, -(-len(free) // burst)))
    times = np.repeat(groups, burst)[: len(free)].tolist()
    requests = list(workload.requests)
    for index, time in zip(free, times, strict=True):
        requests[index] = replace(requests[index], arrival=time)
    name = f"{workload.name} {parameters['arrivals']} {rate:g}/s" + (f" by {burst}" if burst > 1 else "")
    parameters = {**workload.parameters, **parameters, "arrival_seed": seed}
    return replace(workload, name=name, requests=requests, parameters=parameters)


# ----------------------------------------------------------------------------------------------------------- drawing


class _Draw:
    """Random draws of one workload, from one generator."""

    def __init__(self, seed: int, vocab: int) -> None:
        if vocab <= LOWEST_ID:
            raise ValueError(f"vocab is {vocab}; it must be above {LOWEST_ID}, the lowest drawn token id.")
        self._generator = np.random.default_rng([seed, 0])
        self._vocab = vocab

    def tokens(self, count: int) -> list[int]:
        token_ids: list[int] = self._generator.integers(LOWEST_ID, self._vocab, count).tolist()
        return token_ids

    def below(self, limit: int) -> int:
        return int(self._generator.integers(limit))

    def length(self, span: Span) -> int:
        low, high = _span(span)
        return int(self._generator.integers(low, high, endpoint=True))

    def seconds(self, mean: float) -> float:
        return float(self._generator.exponential(mean))


def _span(lengths: Span) -> tuple[int, int]:
    return lengths if isinstance(lengths, tuple) else (lengths, lengths)


def _scaled(size: Any, scale: float) -> Any:
    """Scale a number or span; anything above 0 stays at least 1."""
    if isinstance(size, tuple):
        return tuple(_scaled(end, scale) for end in size)
    return size and max(1, round(size * scale))
