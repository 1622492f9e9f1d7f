"""One Lark grammar for a whole answer: thought, then text, tool calls or a document, as a request demands.

::

    start: thought answer
    thought: free text up to its closing marker, at most `budget` tokens of it
    answer: text | document | calls, each call in the model's own format, its arguments by the tool's schema

In llguidance's dialect: `<[7]>` is token 7, which free text cannot hold; `[lazy]` ends a terminal as early as it can;
`[max_tokens=n]` ends one after n tokens. A marker of several tokens is text, up to which a lazy terminal reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.features.structured_output import StructuredOutput, with_white_space
from nanovllm.serving.server.answers import harmony
from nanovllm.serving.server.answers.answer_format import AnswerFormat
from nanovllm.serving.server.answers.call_grammars import CALLS, calls_to_channels
from nanovllm.serving.server.answers.rules import ANY_TEXT, Rules


@dataclass(frozen=True, slots=True)
class AnswerConstraints:
    """Constraints of a request on its answer.

    shape: StructuredOutput of the content; None for free text.
    tools: tools with constrained calls, in OpenAI's form; empty for none.
    must_call: the answer consists of tool calls only.
    is_parallel: True if the answer may hold several calls.
    budget: maximum number of thought tokens; None for no limit.
    """

    shape: StructuredOutput | None = None
    tools: Sequence[dict[str, Any]] = field(default=())
    must_call: bool = False
    is_parallel: bool = True
    budget: int | None = None

    @property
    def is_needed(self) -> bool:
        """Whether anything is constrained."""
        return self.shape is not None or bool(self.tools) or self.budget is not None


def build_form(
    constraints: AnswerConstraints, form: AnswerFormat, tokenizer: Any, *, is_open: bool
) -> StructuredOutput:
    """Build the structured output of a whole answer.

    Args:
        is_open: True if the prompt opens the thought, so that the answer begins within it.

    Raises ValueError for a tool that the format cannot constrain, and for a thought budget without a closing token.
    """
    if constraints.shape is not None and not constraints.tools and form.reasoning is None and not form.is_harmony:
        return constraints.shape
    rules = Rules(tokenizer)
    if form.is_harmony:
        start = _harmony_start(rules, constraints)
    else:
        start = f"{_thought(rules, constraints, form, is_open=is_open)} {_answer(rules, constraints, form)}"
    return StructuredOutput(grammar=rules.text(start))


def _thought(rules: Rules, constraints: AnswerConstraints, form: AnswerFormat, *, is_open: bool) -> str:
    if form.reasoning is None:
        return ""
    opening = form.reasoning.open
    closing = form.reasoning.close
    if constraints.budget is None:
        body = rules.until(closing)
    elif rules.token_id(closing) is None:
        raise ValueError(
            f"thinking_token_budget needs an end of thought that is one token; {closing!r} is several to this model's "
            "tokenizer. Leave it out, or limit the whole answer by max_tokens."
        )
    else:
        body = f"{rules.add(ANY_TEXT, f'max_tokens={constraints.budget}')} {rules.marker(closing)}"
    space = rules.add(r"/[ \n]{0,4}/")
    thought = f"{body} {space}" if _is_constrained(constraints) else body
    if is_open:
        return thought
    before = rules.add(r"/[ \n]{0,2}/")  # GLM-4.6 begins with a line break
    label = rules.literal(form.reasoning.label) if form.reasoning.label else ""
    return f"({before} {rules.marker(opening)} {label} {thought})?"


def _is_constrained(constraints: AnswerConstraints) -> bool:
    """Whether the answer begins with constrained text."""
    return constraints.must_call or constraints.shape is not None


def _answer(rules: Rules, constraints: AnswerConstraints, form: AnswerFormat) -> str:
    if not constraints.tools or form.tools is None:
        return _content(rules, constraints)
    calls = CALLS[form.tools.name](rules, constraints.tools)
    several = calls.joined if constraints.is_parallel else calls.one
    if constraints.must_call:
        return several
    if constraints.shape is not None:
        return f"({several} | {_content(rules, constraints)})"
    if calls.plain is not None:  # an answer is text or calls
        return f"({several} | {calls.plain})"
    # Free text up to each call's marker, and after the last call.
    body = calls.body if constraints.is_parallel or calls.single is None else calls.single
    pair = f"{rules.until(calls.opening)} {body}"
    return f"({pair})* {rules.free_text()}" if constraints.is_parallel else f"({pair} | {rules.free_text()})"


def _content(rules: Rules, constraints: AnswerConstraints) -> str:
    return rules.free_text() if constraints.shape is None else shape_rule(rules, constraints.shape)


def _harmony_start(rules: Rules, constraints: AnswerConstraints) -> str:
    """Analysis, preambles, then calls or the final message; the end of the last message ends the answer."""
    channel, message, start = map(rules.marker, (harmony.CHANNEL, harmony.MESSAGE, harmony.START))
    next_message = f'{rules.marker("<|end|>")} {start} "assistant"'
    limit = "" if constraints.budget is None else f"max_tokens={constraints.budget}"
    thought = f'({channel} "analysis" {message} {rules.add(ANY_TEXT, limit)} {next_message})?'
    final = f'{channel} "final" {message} {_content(rules, constraints)}'
    if not constraints.tools:
        return f"{thought} {final}"
    call = calls_to_channels(rules, constraints.tools)
    if constraints.must_call:
        return f"{thought} {call}"
    preamble = f'({channel} "commentary" {message} {rules.free_text()} {next_message})?'
    return f"{thought} {preamble} ({call} | {final})"


def shape_rule(rules: Rules, shape: StructuredOutput) -> str:
    """Rule for the content's structured output."""
    match shape.kind:
        case "json_schema":
            return rules.json(with_white_space(json.loads(shape.json_schema)))
        case "json_object":
            return rules.json(with_white_space({"type": "object"}))
        case "choice":
            return rules.add(" | ".join(map(rules.literal, shape.choice)))
        case "regex":
            return rules.add(f"/{_escaped_slashes(shape.regex or '')}/")
        case _:
            return rules.add(f"%lark {{\n{shape.grammar}\n}}")


def _escaped_slashes(regex: str) -> str:
    """Escape slashes and line breaks for Lark's /regex/."""
    # One pass, so that an escaped line break, which stands for itself, loses its backslash.
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda found: escapes.get(found[0], found[0]), regex, flags=re.DOTALL)
