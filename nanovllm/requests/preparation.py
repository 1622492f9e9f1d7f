"""Preparation threads: requests are tokenised and checked beside the event loop, long texts and forms apart."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from nanovllm.core.sampling_params import SamplingParams

Result = TypeVar("Result")

# Longer texts take some 20 ms and more to tokenise.
LONG_CHARS = 32768
# Threads in which forms are compiled, at most; most of them wait for a trial.
FORM_THREADS = 32
# What a chat template spends on a message or field, in characters to tokenise.
CHARS_PER_VALUE = 16


class Preparation:
    """One thread for short texts, which keeps their order; one for long texts and some for forms, which they overtake.

    Args:
        tokenizer: a fast tokenizer frees the GIL and serves threads at a time; any other gets one thread for all.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-prepare")
        self._long = self._forms = self._short
        if getattr(tokenizer, "is_fast", False):
            self._long = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-prepare-long")
            self._forms = ThreadPoolExecutor(FORM_THREADS, thread_name_prefix="nanovllm-prepare-form")

    def submit(self, work: Callable[[], Result], num_chars: int, *, compiles: bool = False) -> Future[Result]:
        """Run `work`, which tokenises about `num_chars` characters; raises RuntimeError once it is shut down.

        Args:
            compiles: whether it compiles forms too.
        """
        if compiles:
            return self._forms.submit(work)
        return (self._short if num_chars <= LONG_CHARS else self._long).submit(work)

    def shutdown(self) -> None:
        """Take no more work; what was submitted is done."""
        for threads in (self._short, self._long, self._forms):
            threads.shutdown(wait=False)


def check_request_ids(request_ids: SequenceABC[Any], in_preparation: Container[str]) -> None:
    """Raise TypeError for what is no id, and ValueError for one given twice or of a request that is being prepared."""
    seen: set[str] = set()
    for request_id in request_ids:
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a string that is not empty, or None for any, not {request_id!r}.")
        if request_id in in_preparation or request_id in seen:
            raise ValueError(f"a request with id {request_id!r} is being prepared already; ids must be unique.")
        seen.add(request_id)


def text_size(*values: Any) -> int:
    """Characters in nested values, a share for each value included; counting ends above LONG_CHARS."""
    open_values, num_chars = list(values), 0
    while open_values and num_chars <= LONG_CHARS:
        value = open_values.pop()
        num_chars += CHARS_PER_VALUE
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, Mapping):
            open_values.extend(value.values())
        elif isinstance(value, list | tuple):
            open_values.extend(value)
    return num_chars


def num_samples(sampling_params: Any, num_prompts: int) -> int:
    """Samples of prompts with these parameters; what is no valid parameter counts one."""
    params = sampling_params if isinstance(sampling_params, SequenceABC) else [sampling_params] * num_prompts
    return sum(one.n if isinstance(one, SamplingParams) else 1 for one in params)


def words_of(sampling_params: Any) -> list[Any]:
    """The bad words of parameters, which are tokenised too, and their structured outputs, which are compiled."""
    params = sampling_params if isinstance(sampling_params, SequenceABC) else [sampling_params]
    forms = [one.structured_output for one in params if isinstance(one, SamplingParams)]
    words: list[Any] = [one.bad_words for one in params if isinstance(one, SamplingParams)]
    return words + [form.to_dict() for form in forms if form is not None]
