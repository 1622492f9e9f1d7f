"""Workloads: requests with token ids, lengths and times of arrival, drawn from seeds or read from traces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a workload.

    arrival: seconds after the workload's start; with `after`, seconds after the end of that request.
    prompt_token_ids: the whole prompt.
    num_output_tokens: it generates exactly as many; end-of-sequence tokens are ignored.
    after: the place in the workload of a request that has to end first, such as a conversation's last turn.
    priority, cache_salt: as for `LLM.generate`.
    """

    arrival: float
    prompt_token_ids: list[int]
    num_output_tokens: int
    after: int | None = None
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival; of those that wait for another, in any order behind it.

    name: with the parameters that made it, so that results can be told apart.
    """

    name: str
    requests: list[TimedRequest]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)
