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

from nanovllm.core.structured_output import StructuredOutput, with_white_space
from nanovllm.server.answers import harmony
from nanovllm.server.answers.answer_format import AnswerFormat
from nanovllm.server.answers.call_grammars import CALLS, calls_to_channels
from nanovllm.server.answers.rules import ANY_TEXT, Rules


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request demands of an answer.

    shape: the form of the content; None for free text.
    tools: tools whose calls are constrained, in OpenAI's form; empty for none.
    must_call: the answer is calls alone.
    is_parallel: whether there may be several calls.
    budget: maximum number of tokens of thought; None for no limit.
    """

    shape: StructuredOutput | None = None
    tools: Sequence[dict[str, Any]] = field(default=())
    must_call: bool = False
    is_parallel: bool = True
    budget: int | None = None

    @property
    def is_needed(self) -> bool:
        """Whether it constrains anything."""
        return self.shape is not None or bool(self.tools) or self.budget is not None


def build_form(demand: Demand, form: AnswerFormat, tokenizer: Any, *, is_open: bool) -> StructuredOutput:
    """Build the form of an answer.

    Args:
        is_open: whether thought was opened before the answer.

    Raises ValueError for a tool that the format cannot constrain, and for a budget of thought whose end is no token.
    """
    if demand.shape is not None and not demand.tools and form.reasoning is None and not form.is_harmony:
        return demand.shape
    rules = Rules(tokenizer)
    if form.is_harmony:
        start = _harmony_start(rules, demand)
    else:
        start = f"{_thought(rules, demand, form, is_open=is_open)} {_answer(rules, demand, form)}"
    return StructuredOutput(grammar=rules.text(start))


def _thought(rules: Rules, demand: Demand, form: AnswerFormat, *, is_open: bool) -> str:
    if form.reasoning is None:
        return ""
    opening, closing = form.reasoning.open, form.reasoning.close
    if demand.budget is None:
        body = rules.until(closing)
    elif rules.token_id(closing) is None:
        raise ValueError(
            f"thinking_token_budget needs an end of thought that is one token; {closing!r} is several to this model's "
            "tokenizer. Leave it out, or limit the whole answer by max_tokens."
        )
    else:
        body = f"{rules.add(ANY_TEXT, f'max_tokens={demand.budget}')} {rules.marker(closing)}"
    space = rules.add(r"/[ \n]{0,4}/")
    thought = f"{body} {space}" if _is_constrained(demand) else body
    if is_open:
        return thought
    before = rules.add(r"/[ \n]{0,2}/")  # GLM-4.6 begins with a line break
    return f"({before} {rules.marker(opening)} {thought})?"


def _is_constrained(demand: Demand) -> bool:
    """Whether the answer does not begin with free text."""
    return demand.must_call or demand.shape is not None


def _answer(rules: Rules, demand: Demand, form: AnswerFormat) -> str:
    if not demand.tools or form.tools is None:
        return _content(rules, demand)
    calls = CALLS[form.tools.name](rules, demand.tools)
    several = calls.joined if demand.is_parallel else calls.one
    if demand.must_call:
        return several
    if demand.shape is not None:
        return f"({several} | {_content(rules, demand)})"
    if calls.plain is not None:  # an answer is text or calls
        return f"({several} | {calls.plain})"
    # Text up to a call's marker, and any text behind the last call.
    pair = f"{rules.until(calls.opening)} {calls.body}"
    return f"({pair})* {rules.free_text()}" if demand.is_parallel else f"({pair} | {rules.free_text()})"


def _content(rules: Rules, demand: Demand) -> str:
    return rules.free_text() if demand.shape is None else shape_rule(rules, demand.shape)


def _harmony_start(rules: Rules, demand: Demand) -> str:
    """Analysis, preambles, then calls or the final message; the end of the last message ends the answer."""
    channel, message, start = map(rules.marker, (harmony.CHANNEL, harmony.MESSAGE, harmony.START))
    next_message = f'{rules.marker("<|end|>")} {start} "assistant"'
    limit = "" if demand.budget is None else f"max_tokens={demand.budget}"
    thought = f'({channel} "analysis" {message} {rules.add(ANY_TEXT, limit)} {next_message})?'
    final = f'{channel} "final" {message} {_content(rules, demand)}'
    if not demand.tools:
        return f"{thought} {final}"
    call = calls_to_channels(rules, demand.tools)
    if demand.must_call:
        return f"{thought} {call}"
    preamble = f'({channel} "commentary" {message} {rules.free_text()} {next_message})?'
    return f"{thought} {preamble} ({call} | {final})"


def shape_rule(rules: Rules, shape: StructuredOutput) -> str:
    """The form of a document as a rule."""
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
    """A regular expression between slashes, on one line."""
    # In one pass: a line break that a backslash escapes stands for itself, so it loses the backslash.
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda found: escapes.get(found[0], found[0]), regex, flags=re.DOTALL)
