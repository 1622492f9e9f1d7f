"""Threads that tokenise and check requests outside of the event loop, with separate ones for long texts and forms."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from nanovllm.core.sampling_params import SamplingParams

Result = TypeVar("Result")

# Longer texts take 20 ms and more to tokenise.
LONG_CHARS = 32768
# Most threads that compile forms; most of these wait for a trial.
FORM_THREADS = 32
# Cost of a message or field in a chat template, as a number of tokenised characters.
CHARS_PER_VALUE = 16


class Preparation:
    """One thread for short texts, in order of submission; others for long texts and forms, which short texts overtake.

    Args:
        tokenizer: a fast tokenizer releases the GIL and is thread-safe; any other gets one thread for everything.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-prepare")
        self._long = self._forms = self._short
        if getattr(tokenizer, "is_fast", False):
            self._long = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-prepare-long")
            self._forms = ThreadPoolExecutor(FORM_THREADS, thread_name_prefix="nanovllm-prepare-form")

    def submit(self, work: Callable[[], Result], num_chars: int, *, compiles: bool = False) -> Future[Result]:
        """Run `work`, which tokenises about `num_chars` characters; raises RuntimeError after `shutdown`.

        Args:
            compiles: whether `work` compiles forms too.
        """
        if compiles:
            return self._forms.submit(work)
        return (self._short if num_chars <= LONG_CHARS else self._long).submit(work)

    def shutdown(self) -> None:
        """Refuse further work; work already submitted still runs."""
        for threads in (self._short, self._long, self._forms):
            threads.shutdown(wait=False)


def check_request_ids(request_ids: SequenceABC[Any], in_preparation: Container[str]) -> None:
    """Raise TypeError for an invalid id, ValueError for a duplicate or the id of a request in preparation."""
    seen: set[str] = set()
    for request_id in request_ids:
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a string that is not empty, or None for any, not {request_id!r}.")
        if request_id in in_preparation or request_id in seen:
            raise ValueError(f"a request with id {request_id!r} is being prepared already; ids must be unique.")
        seen.add(request_id)


def text_size(*values: Any) -> int:
    """Characters in nested values plus CHARS_PER_VALUE for each value; stops counting above LONG_CHARS."""
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
    """Number of samples of prompts with these parameters; invalid parameters count as one."""
    params = sampling_params if isinstance(sampling_params, SequenceABC) else [sampling_params] * num_prompts
    return sum(one.n if isinstance(one, SamplingParams) else 1 for one in params)


def texts_of(sampling_params: Any) -> list[Any]:
    """Further texts to prepare: bad words, which are tokenised, and structured outputs, which are compiled."""
    params = sampling_params if isinstance(sampling_params, SequenceABC) else [sampling_params]
    forms = [one.structured_output for one in params if isinstance(one, SamplingParams)]
    words: list[Any] = [one.bad_words for one in params if isinstance(one, SamplingParams)]
    return words + [form.to_dict() for form in forms if form is not None]
