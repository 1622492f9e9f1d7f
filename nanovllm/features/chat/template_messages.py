"""Shapes messages for one chat template.

::

    plain messages ──> no silent loss ──> render ──> refused: fold, and render again
                   `shaped`                      `template_folds`
"""

from __future__ import annotations

import json
from typing import Any

from nanovllm.features.chat.plain_messages import PICTURE, PlainMessage, as_parts, text_of
from nanovllm.features.chat.template_folds import (
    Conversation,
    Tools,
    as_user,
    fold_system,
    move_system,
    split_calls,
    split_text,
    with_calls_as_text,
)
from nanovllm.features.chat.template_trials import ContentKind, TemplateTrials


class TemplateMessages:
    """Shapes plain messages for one template.

    Args:
        content_format: "string" or "parts" for all content; "auto" keeps the client's form if the template reads it.
    """

    def __init__(self, trials: TemplateTrials, content_format: str = "auto") -> None:
        self._trials = trials
        self._content_format = content_format

    def shaped(self, messages: list[PlainMessage], tools: Tools) -> Conversation:
        """The conversation without parts that the template would leave out in silence."""
        if tools:
            messages, tools = self._tools_of_system(messages, tools)
        roles = [message["role"] for message in messages]
        if "system" in roles[1:] and self._trials.drops_late_system():
            messages = fold_system(messages, tools)[0]
        if "system" in roles[:1] and self._trials.drops_role("system"):
            messages = move_system(messages, tools)[0]
        if any("tool_calls" in message for message in messages):
            if self._trials.drops_calls():
                messages = [with_calls_as_text(message) for message in messages]
            elif self._trials.drops_text_beside_calls():
                messages = split_text(messages, tools)[0]
            if any(len(message.get("tool_calls", ())) > 1 for message in messages):
                messages = split_calls(messages, tools)[0] if self._trials.drops_second_call() else messages
        if "tool" in roles and self._trials.drops_role("tool"):
            messages = [as_user(message) if message["role"] == "tool" else message for message in messages]
        return messages, tools

    def _tools_of_system(self, messages: list[PlainMessage], tools: Tools) -> Conversation:
        """The tools as a field of the first system message, if the template reads them there."""
        if self._trials.reads_tools_of_system("parts"):
            shown: Any = tools
        elif self._trials.reads_tools_of_system("string"):
            shown = json.dumps(tools, ensure_ascii=False)
        else:
            return messages, tools
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": ""}, *messages]
        return [messages[0] | {"tools": shown}, *messages[1:]], None

    def finished(self, messages: list[PlainMessage]) -> list[PlainMessage]:
        """Messages with content, arguments and ids in the forms that the template reads."""
        names: dict[str, str] = {}  # new id of each call
        made = [message | {"content": self._content(message)} for message in messages]
        for message in made:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [self._call(call, names) for call in calls]
                if not text_of(message["content"]) and self._trials.wants_no_text():
                    message["content"] = None
            elif message.get("tool_call_id") in names:
                message["tool_call_id"] = names[message["tool_call_id"]]
        return made

    def _content(self, message: PlainMessage) -> Any:
        content = message["content"]
        if not isinstance(content, str) and any(PICTURE in part for part in content):
            return content
        if len(content) > 1 and not isinstance(content, str) and not self._trials.reads(message["role"], "second part"):
            content = as_parts(text_of(content))
        given: ContentKind = "string" if isinstance(content, str) else "parts"
        other: ContentKind = "parts" if given == "string" else "string"
        kind = self._content_format
        if kind == "auto":
            reads = self._trials.reads
            role = message["role"]
            kind = given if reads(role, given) else other if reads(role, other) else self._trials.usual_kind()
        if kind == given:
            return content
        return as_parts(content) if kind == "parts" else text_of(content)

    def _call(self, call: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        function = call["function"]
        if self._trials.takes_argument_text():
            function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        if self._trials.names_in_ids():
            prefix = f"functions.{function['name']}:"
            names[call["id"]] = call["id"] if call["id"].startswith(prefix) else f"{prefix}{len(names)}"
            call = call | {"id": names[call["id"]]}
        return call | {"function": function}
