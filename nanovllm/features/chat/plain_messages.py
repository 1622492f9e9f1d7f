"""Messages in one spelling: clients and models write contents, calls, results and thought in many."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any

from nanovllm.features.option_checks import texts

PlainMessage = dict[str, Any]

MAX_NESTING = 100  # depth of a call's arguments: templates and json recurse into them
BREAK = "\n\n"  # separator of the texts of two messages that become one
THOUGHT = ("reasoning_content", "reasoning", "thinking")  # spellings of clients and of templates
_TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # key of the text

PICTURE = "picture"  # key of a plain part's picture, which templates do not see


def bytes_of_url(given: Any, where: str) -> bytes:
    """The bytes of a data URL, or of {"url": ...}; raises ValueError for any other address, which is not opened."""
    url = given.get("url") if isinstance(given, Mapping) else given
    try:
        data = data_of_url(str(url))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"{where}: an image's data URL is no base64: {error}.") from None


def data_of_url(url: str) -> str:
    """The base64 of a data URL; raises ValueError for any other address."""
    head, _, data = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise ValueError(f"an image's url must be a data URL in base64, not {url[:40]!r}.")
    return data


def pictures_taken(messages: list[PlainMessage]) -> tuple[list[PlainMessage], list[Any]]:
    """(messages with the mark of a picture in place of each, the pictures in order)."""
    pictures: list[Any] = []

    def taken(part: dict[str, Any]) -> dict[str, Any]:
        if PICTURE not in part:
            return part
        pictures.append(part[PICTURE])
        return {"type": "image"}

    shown = [
        message | {"content": [taken(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    return (shown, pictures) if pictures else (messages, pictures)


def as_parts(text: str) -> list[dict[str, Any]]:
    """A text as content of one part."""
    return [{"type": "text", "text": text}]


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """Content as one text; parts are joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content or ())


def joined(content: Any, text: str, separator: str = BREAK) -> Any:
    """Content with a text at its end."""
    if not text:
        return content
    if isinstance(content, str):
        return f"{content}{separator}{text}" if content else text
    return [*content, *as_parts(text)]


def call_text(name: str, arguments: Any) -> str:
    """A call as a model would write it; arguments that are a string stay as they are."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}'


def plain_messages(conversation: SequenceABC[Mapping[str, Any]]) -> list[PlainMessage]:
    """Messages in one spelling; raises ValueError that names a message without text.

    Content is a string, or a list of parts {"type": "text", "text": ...}. Arguments of calls are objects; a call
    with other ones becomes text of its message, since a client cannot take it back. Results have the name of their
    function, and thought has the names that templates read.
    """
    messages: list[PlainMessage] = []
    open_calls: list[tuple[str, str]] = []  # (id, name) of calls without a result
    for number, given in enumerate(conversation):
        message = dict(given)
        message["role"] = "system" if message["role"] == "developer" else message["role"]
        message["content"] = _content(given, f"messages[{number}]")
        if thought := next((given[name] for name in THOUGHT if given.get(name)), None):
            message |= dict.fromkeys(THOUGHT, thought)
        if message.pop("tool_calls", None):
            _set_calls(message, given["tool_calls"], f"messages[{number}]")
            open_calls += [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
        if message["role"] == "tool":
            _close_call(message, open_calls)
        messages.append(message)
    return messages


def _content(given: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    content = given.get("content")
    if content is None or content == []:
        return str(given.get("refusal") or "")
    if isinstance(content, str):
        return content
    if not isinstance(content, SequenceABC):
        raise ValueError(f"{where}.content must be a string or a list of parts, not {content!r}.")
    return [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image" and part.get("image") is not None:
        return {"type": "image", PICTURE: part["image"]}
    if kind in ("image_url", "input_image"):
        return {"type": "image", PICTURE: bytes_of_url(part.get("image_url"), where)}
    text = part.get(_TEXT_TYPES[kind]) if kind in _TEXT_TYPES else None
    if not isinstance(text, str):
        raise ValueError(f'{where} must be {{"type": "text", "text": ...}}, not {part!r}: the engine reads text alone.')
    return {"type": "text", "text": text}


def _set_calls(message: PlainMessage, calls: SequenceABC[Any], where: str) -> None:
    """Keep calls with an object as arguments, and append the others to the message's text."""
    kept = []
    malformed = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f'{where}.tool_calls[{number}] must have a "function" with a "name", not {call!r}.')
        arguments = _arguments(function.get("arguments"))
        if arguments is None:
            malformed.append(call_text(function["name"], function["arguments"]))
        else:
            call_id = call.get("id") or f"{where}.{number}"
            kept.append({**call, "id": call_id, "type": "function", "function": {**function, "arguments": arguments}})
    if malformed:
        message["content"] = joined(message["content"], "\n".join(malformed), "\n")
    if kept:
        message["tool_calls"] = kept


def _arguments(given: Any) -> dict[str, Any] | None:
    """Arguments as an object; None if they are none, are too deep, or hold a lone surrogate."""
    try:
        arguments = json.loads(given) if isinstance(given, str) and given.strip() else given
        arguments = {} if arguments in (None, "") else arguments
        texts("arguments", arguments)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) and _is_shallow(arguments) else None


def _is_shallow(arguments: dict[str, Any]) -> bool:
    level: list[Any] = [arguments]
    for _ in range(MAX_NESTING):
        level = [
            part
            for whole in level
            if isinstance(whole, (dict, list))
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
        if not level:
            return True
    return False


def _close_call(result: PlainMessage, open_calls: list[tuple[str, str]]) -> None:
    """Give a result the id and the name of its call, which some clients leave out."""
    by_id = result.get("tool_call_id")
    by_name = result.get("name")
    for call_id, name in open_calls:
        if by_id in (None, call_id) and by_name in (None, name):
            result |= {"tool_call_id": call_id, "name": name}
            open_calls.remove((call_id, name))
            return
