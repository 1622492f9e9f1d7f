"""Reasoning parser: splits an answer's text into thought and content, by the markers of the model's chat template.

    think      <think> ... </think>                          DeepSeek, GLM, Qwen3, SmolLM3 and most others
    mistral    [THINK] ... [/THINK]                          Magistral, Ministral
    seed       <seed:think> ... </seed:think>                Seed-OSS
    kimi       ◁think▷ ... ◁/think▷                          Kimi-VL
    cohere     <|START_THINKING|> ... <|END_THINKING|>       Command A
    gemma4     <|channel>thought ... <channel|>              Gemma 4
    harmony    <|channel|>analysis<|message|> ...            gpt-oss, see `harmony`

Thought begins at the start of an answer, or before it: many templates end the prompt with the opening marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_TAIL = 24  # tokens; more than any marker has


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around the thought of one model family.

    open, close: empty for harmony, which `harmony` parses.
    label: name of the channel, in plain text next to the opening marker; models may leave it out.
    """

    name: str
    open: str = ""
    close: str = ""
    label: str = ""

    @property
    def opening(self) -> str:
        return self.open + self.label

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close) if self.open else ()


HARMONY = ReasoningFormat("harmony")
REASONING_FORMATS: dict[str, ReasoningFormat | None] = {
    "think": ReasoningFormat("think", "<think>", "</think>"),
    "mistral": ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    "seed": ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    "kimi": ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
    "cohere": ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ReasoningFormat("gemma4", "<|channel>", "<channel|>", "thought"),
    "harmony": HARMONY,
    "none": None,
}


def detect_reasoning(template: str) -> str:
    """Name the reasoning format by the markers in a chat template; "none" without any."""
    if "<|channel|>" in template and "analysis" in template:
        return HARMONY.name
    for name, form in REASONING_FORMATS.items():
        if form is not None and form.open and form.open in template:
            return name
    return "none"


def ends_in_thought(form: ReasoningFormat, tokenizer: Any, prompt_token_ids: Sequence[int]) -> bool:
    """Whether the rendered template left the thought open at the end of the prompt."""
    if not form.open:
        return False
    tail = tokenizer.decode(list(prompt_token_ids[-PROMPT_TAIL:]), skip_special_tokens=False)
    return bool(tail.rstrip().endswith(form.opening))


def is_left_open(form: ReasoningFormat, text: str) -> bool:
    """Whether the partial answer, which the model will continue, ends within thought."""
    return bool(form.open) and text.rfind(form.opening) > text.rfind(form.close)


class ReasoningStream:
    """Splits one answer into thought and content while it streams, independent of how the text is cut.

    Text that may become a marker is held back. White space at the thought's ends is dropped.

    Args:
        is_open: True if the prompt opens the thought, so that the answer begins within it.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        self._form = form
        self.is_open = is_open
        self._may_open = not is_open
        self._text = ""  # not yet returned
        self._space = ""  # white space that ends the thought so far; shown only if more thought follows
        self._has_thought = False
        self._drops_space = False  # True until the first content after the closing marker

    def add(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Add text; returns new thought and new content."""
        self._text += text
        if self._may_open:
            self._look_for_opening(is_last=is_last)
        if self._may_open:
            return "", ""
        thought = self._take_thought(is_last=is_last) if self.is_open else ""
        return thought, "" if self.is_open else self._take_content()

    def _look_for_opening(self, *, is_last: bool) -> None:
        begin = self._text.lstrip()
        opening = self._form.opening
        is_whole = is_last or not self._form.opening.startswith(begin)
        if begin.startswith(opening) or (is_whole and begin.startswith(self._form.open)):
            self._text = begin.removeprefix(self._form.open).removeprefix(self._form.label)
            self.is_open = True
            self._may_open = False
        elif is_whole:
            self._may_open = False

    def _take_thought(self, *, is_last: bool) -> str:
        close = self._form.close
        end = self._text.find(close)
        if end >= 0:
            thought = self._text[:end]
            self._text = self._text[end + len(close) :]
            self.is_open = False
            self._drops_space = True
        else:
            kept = 0 if is_last else partial_marker(self._text, close)
            end = len(self._text) - kept
            thought = self._text[:end]
            self._text = self._text[end:]
        thought = self._space + thought
        shown = thought.rstrip() if self._has_thought else thought.strip()
        self._space = "" if not shown and not self._has_thought else thought[len(thought.rstrip()) :]
        self._has_thought = self._has_thought or bool(shown)
        return shown

    def _take_content(self) -> str:
        content = self._text
        self._text = ""
        if self._drops_space:
            content = content.lstrip()
            self._drops_space = not content
        return content


def partial_marker(text: str, marker: str) -> int:
    """Length of the longest end of a text that may become a marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
