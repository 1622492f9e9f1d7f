"""Finds texts of a conversation that a template leaves out in silence, and a form without such losses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from nanovllm.features.chat.plain_messages import PlainMessage, as_parts
from nanovllm.features.chat.template_folds import Conversation, Tools, folded

Render = Callable[[list[PlainMessage], Tools], str]
Probes = list[tuple[int, str]]  # (number of the message, words of a text)

PROBE_LENGTH = 200  # last characters of a text in which words are looked for, so that a check takes no time
_WORDS = re.compile(r"\w+(?: \w+)*")  # no escape of JSON and no filter of a template changes them
_END_OF_THOUGHT = re.compile(r"(?is).*(?:think(?:ing)?(?:\|?>|\]|▷)|channel\|>)")  # templates leave earlier thought out


def probes_of(messages: list[PlainMessage]) -> Probes:
    """Words of each text and argument of a conversation, in its order; the name of a call without text."""
    return [(number, probe) for number, message in enumerate(messages) for probe in _probes(message)]


def _probes(message: PlainMessage) -> Iterator[str]:
    content = message["content"]
    texts = [part.get("text", "") for part in (as_parts(content) if isinstance(content, str) else content)]
    for call in message.get("tool_calls", ()):
        texts += list(_strings(call["function"]["arguments"])) or [call["function"]["name"]]
    for text in texts:
        end = text[-PROBE_LENGTH:]
        if message["role"] == "assistant":
            end = _END_OF_THOUGHT.sub("", end)
        if words := _WORDS.findall(end):
            yield max(words, key=lambda run: (run.count(" "), len(run)))  # several words are not the template's own


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def first_lost(probes: Probes, rendered: str) -> int | None:
    """Number of the first message with a text that is not in the prompt; None if there is none."""
    place = 0
    for _, probe in probes:
        place = rendered.find(probe, place)
        if place < 0:
            break
        place += len(probe)
    else:
        return None
    needed = Counter(probe for _, probe in probes)  # a template may show texts in another order
    lost = {probe for probe, count in needed.items() if rendered.count(probe) < count}
    return next((number for number, probe in probes if probe in lost), None)


def complete_form(render: Render, shaped: Conversation, probes: Probes) -> tuple[Conversation | None, int | None]:
    """The first form of a conversation that loses no text in the prompt, else the first that the template takes.

    Returns:
        (form, number of the first message with a lost text): None without a form that the template takes; None
        without a loss.
    """
    taken: tuple[Conversation | None, int | None] = (None, None)
    for form in chain([shaped], folded(*shaped)):
        try:
            lost = first_lost(probes, render(*form))
        except Exception:  # a template may raise anything, such as a TypeError for a text that it adds to a list
            continue
        if lost is None:
            return form, None
        if taken[0] is None:
            taken = (form, lost)
    return taken
