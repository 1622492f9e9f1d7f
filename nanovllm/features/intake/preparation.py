"""Preparation of requests: checks of ids and sizes before it, and work that is done ahead of the first request."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from typing import Any

from nanovllm.features.intake.headless import check_head
from nanovllm.features.intake.intake import LONG_CHARS, form_turn
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.requests import InputProcessor

# Cost of a message or field in a chat template, as a number of tokenised characters.
CHARS_PER_VALUE = 16
# Bytes of JSON that are parsed in the time in which a character is tokenised.
PARSED_BYTES = 8


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
    """Characters in nested values plus CHARS_PER_VALUE for each value; stops counting above LONG_CHARS.

    Bytes are JSON to be parsed.
    """
    open_values = list(values)
    num_chars = 0
    while open_values and num_chars <= LONG_CHARS:
        value = open_values.pop()
        num_chars += CHARS_PER_VALUE
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, bytes):
            num_chars += len(value) // PARSED_BYTES
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


def prepare_ahead(processor: InputProcessor, *, is_tried: bool = False) -> None:
    """Prepare for the first structured output and the first message that spells a control token.

    Args:
        is_tried: argument of `GrammarCompiler.prepare`.
    """
    if processor.tokenizer is None:
        return
    with form_turn():
        with suppress(ValueError, ModuleNotFoundError):  # requests with forms raise the error
            check_head(processor.limits)
            processor.parts.grammars.prepare(is_tried=is_tried)
        if not is_tried:
            processor.parts.texts.prepare()
            processor.parts.chat.prepare()


def compiles_form(processor: InputProcessor, sampling_params: Any) -> bool:
    """Whether parameters have a structured output that is not compiled yet."""
    params = sampling_params if isinstance(sampling_params, SequenceABC) else [sampling_params]
    forms = [one.structured_output for one in params if isinstance(one, SamplingParams)]
    return not all(form is None or processor.parts.grammars.is_known(form) for form in forms)
