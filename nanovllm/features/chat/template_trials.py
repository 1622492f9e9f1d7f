"""Finds which forms of messages a chat template reads, by rendering small conversations with marked texts.

A trial sees through macros and filters, and sees text that a template leaves out in silence; the syntax tree shows
neither. Each finding is one or two renderings of a few words, in the library's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

from nanovllm.features.chat.plain_messages import PlainMessage, as_parts

Render = Callable[[list[PlainMessage]], str]
ContentKind = Literal["string", "parts", "second part"]

MARK = "qmarkq"
NAME = "qnameq"
VALUE = "qvalueq"
OTHER_NAME = "qothernameq"
OTHER_VALUE = "qothervalueq"
# nine letters and digits: no known template refuses them
CALL_ID = "qcall0001"
OTHER_ID = "qcall0002"
_LIST_AS_TEXT = re.compile(rf"""text['"]\s*:\s*['"]{MARK}""")  # a list as Python or JSON prints it
_OBJECT_AS_PYTHON = re.compile(rf"'key'\s*:\s*'{VALUE}'")
_NAMED_ARGUMENT = re.compile(r"""\barguments(?:\.|\[['"])(\w+)""")  # an argument that a template shows alone


def new_call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class TemplateTrials:
    """Findings about one chat template, each made at its first use and kept.

    Args:
        source: Jinja source of the template.
        render: text of a conversation through the template, ready for an answer; raises if the template refuses it.
    """

    def __init__(self, source: str, render: Render) -> None:
        self._names_calls = "tool_calls" in source
        self._argument_names = "key", *_NAMED_ARGUMENT.findall(source)
        self._render = render
        self._found: dict[str, Any] = {}

    def reads(self, role: str, kind: ContentKind) -> bool | None:
        """Whether the template shows the text of such content; None if it refuses the trial."""
        return self._kept(f"{role} {kind}", lambda: self._shows_content(role, kind))

    def usual_kind(self) -> ContentKind:
        """Content of users' messages: a string, unless the template reads parts alone."""
        return "parts" if not self.reads("user", "string") and self.reads("user", "parts") else "string"

    def drops_role(self, role: str) -> bool:
        """Whether messages of a role are left out in silence."""
        return self.reads(role, "string") is False and self.reads(role, "parts") is False

    def drops_late_system(self) -> bool:
        """Whether a system message after another message is left out in silence, hides the first, or is moved."""
        system, user, answer = (self._text(role, NAME) for role in ("system", "user", "assistant"))
        rest = [self._text("system", MARK), self._text("user")]
        begins = ([user], [user, answer], [system], [system, self._text("user"), answer])

        def trial() -> bool:
            return any(self._shows([*begin, *rest], NAME, MARK) is False for begin in begins)

        return self._kept("late", trial) is True

    def reads_tools_of_system(self, kind: ContentKind) -> bool:
        """Whether tools are shown as a field of the system message, as a list ("parts") or as JSON."""
        tools = [{"type": "function", "function": {"name": NAME, "description": "", "parameters": {}}}]
        system = self._text("system") | {"tools": tools if kind == "parts" else json.dumps(tools)}
        return self._kept(f"tools {kind}", lambda: self._shows([system, self._text("user")], NAME)) is True

    def drops_calls(self) -> bool:
        """Whether tool calls are left out in silence."""
        return not self._names_calls or self._shows_calls("") is self._shows_calls(None) is False

    def wants_no_text(self) -> bool:
        """Whether the template drops the calls of a message that has text, even an empty one."""
        return self._shows_calls("") is False and not self.drops_calls()

    def drops_text_beside_calls(self) -> bool:
        """Whether a message shows its text or its calls, while two messages may show both."""

        def trial() -> bool:
            text = self._text("assistant", MARK)
            user, *exchange = self._exchange()
            together = self._exchange(content=text["content"])
            shows_both = self._shows(together, MARK) and self._shows(together, VALUE)
            return shows_both is False and self._shows([user, text, *exchange], MARK) is not False

        return self._kept("text beside calls", trial) is True

    def names_in_ids(self) -> bool:
        """Whether a call is shown by its id without its function's name."""

        def trial() -> bool:
            conversation = self._exchange()
            return self._shows(conversation, NAME) is False and self._shows(conversation, CALL_ID) is True

        return self._kept("ids", trial) is True

    def takes_argument_text(self) -> bool:
        """Whether arguments must be JSON as a string: an object is refused, or printed as Python prints it."""

        def trial() -> bool:
            as_object = self._try(self._exchange())
            if as_object is not None and not _OBJECT_AS_PYTHON.search(as_object):
                return False
            arguments = json.dumps({"key": VALUE})
            return self._shows(self._exchange(arguments), arguments) is True

        return self._kept("arguments", trial) is True

    def drops_second_call(self) -> bool:
        """Whether one message can show one call alone, while two messages show both."""

        def trial() -> bool:
            together = self._shows(self._exchange(others=1), VALUE, OTHER_VALUE)
            return not together and self._shows(self._exchange(others=2), VALUE, OTHER_VALUE) is True

        return self._kept("second call", trial) is True

    # ------------------------------------------------------------------------------------------------------ trials

    def _kept(self, name: str, trial: Callable[[], bool | None]) -> bool | None:
        if name not in self._found:  # two threads may both find it, and find the same
            self._found[name] = trial()
        found: bool | None = self._found[name]
        return found

    def _shows_calls(self, content: str | None) -> bool | None:
        """Whether the calls of a message with such content are shown; None if the template refuses it."""
        return self._kept(f"calls {content}", lambda: self._shows(self._exchange(content=content), VALUE))

    def _shows_content(self, role: str, kind: ContentKind) -> bool | None:
        parts = [*as_parts("a text"), *as_parts(MARK)] if kind == "second part" else as_parts(MARK)
        marked = {"role": role, "content": MARK if kind == "string" else parts}
        match role:
            case "system":
                conversation = [marked, self._text("user")]
            case "assistant":
                conversation = [self._text("user"), marked, self._text("user")]
            case "tool":
                conversation = [*self._exchange()[:2], marked | {"name": NAME, "tool_call_id": CALL_ID}]
            case _:
                conversation = [marked]
        rendered = self._try(conversation)
        if rendered is None:
            return None
        return MARK in rendered and not _LIST_AS_TEXT.search(rendered)

    def _shows(self, conversation: list[PlainMessage], *texts: str) -> bool | None:
        """Whether texts are shown in this order; None if the template refuses the conversation."""
        rendered = self._try(conversation)
        return None if rendered is None else bool(re.search("(?s)" + ".*".join(map(re.escape, texts)), rendered))

    def _try(self, conversation: list[PlainMessage]) -> str | None:
        """The rendered conversation; None if the template refuses it."""
        try:
            return self._render(conversation)
        except Exception:  # templates raise errors of any kind
            return None

    def _text(self, role: str, text: str = "a text") -> PlainMessage:
        """A message with content as users' messages have it."""
        return {"role": role, "content": as_parts(text) if self.usual_kind() == "parts" else text}

    def _exchange(self, arguments: Any = None, *, others: int = 0, content: Any = ...) -> list[PlainMessage]:
        """A question, a call and its result.

        Args:
            arguments: Arguments of the call; an object by default.
            others: 1 adds a second call to the message, 2 in another message.
            content: Content of the message with the call; by default none, in the form that the template wants.
        """
        if content is ...:
            content = None if self.wants_no_text() else self._text("assistant", "")["content"]
        arguments = dict.fromkeys(self._argument_names, VALUE) if arguments is None else arguments
        call = new_call(NAME, arguments, CALL_ID)
        other = new_call(OTHER_NAME, dict.fromkeys(self._argument_names, OTHER_VALUE), OTHER_ID)
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = self._text("tool") | {"name": NAME, "tool_call_id": CALL_ID}
        other_result = self._text("tool") | {"name": OTHER_NAME, "tool_call_id": OTHER_ID}
        match others:
            case 1:
                return [self._text("user"), answer | {"tool_calls": [call, other]}, result, other_result]
            case 2:
                return [self._text("user"), answer, result, answer | {"tool_calls": [other]}, other_result]
        return [self._text("user"), answer, result]
