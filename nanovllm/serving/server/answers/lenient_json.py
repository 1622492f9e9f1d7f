"""Lenient reader of a JSON object, or of a string: a growing text becomes strict JSON.

Also read: strings in single quotes or within Gemma's <|"|>, names without quotes, Python's True, False and None,
commas at the end, none after Gemma's strings, and, within strings, line breaks and backslashes that escape nothing.
White space between tokens is as `json.dumps` writes it.
"""

from __future__ import annotations

import json
import re

from nanovllm.serving.server.answers.reasoning import partial_marker

GEMMA_QUOTE = '<|"|>'
_QUOTES = ('"', "'", GEMMA_QUOTE)
_CLOSING = {"{": "}", "[": "]"}
_MAX_DEPTH = 100  # depth that the server takes back
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"""[^'"\\\x00-\x1f]+""")}
_SCALAR = re.compile(r"""[^\s"'{}\[\],:<]+""")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_UNICODE = re.compile("u[0-9a-fA-F]{4}")
_UNICODE_SO_FAR = re.compile("u[0-9a-fA-F]{0,3}")


class JsonScan:
    """Reads the object or string that begins at an index of a growing text; reads each character once.

    at: index of the first character that is not read yet.
    text: strict JSON of the characters read; it only grows.
    closed: length of `text` when the first container had closed to a depth, by that depth.
    is_whole: True once the value has ended.
    is_broken: True once the text at `at` cannot continue the value.
    """

    def __init__(self, start: int) -> None:
        self.at = start
        self.text = ""
        self.closed: dict[int, int] = {}
        self.is_whole = self.is_broken = False
        self._open: list[str] = []  # brackets that close the open containers
        self._expects = "value"  # name, colon, value, item or comma
        self._has_comma = False  # a comma is read, and written before the next member
        self._quote = ""  # delimiter of the string that is open
        self._last_quote = ""  # delimiter of the string before, if it was the last token

    @property
    def depth(self) -> int:
        """Number of containers that are open."""
        return len(self._open)

    @property
    def completed(self) -> str:
        """The text with the brackets that are still open closed."""
        return self.text + "".join(reversed(self._open))

    @property
    def is_between(self) -> bool:
        """Whether the last value is complete."""
        return self._expects == "comma" and not self._quote

    def read(self, text: str) -> None:
        """Read on, as far as the text decides."""
        while not (self.is_whole or self.is_broken) and self.at < len(text):
            if not (self._read_string(text) if self._quote else self._read_token(text)):
                return

    # ------------------------------------------------------------------------------------------------------ tokens

    def _read_token(self, text: str) -> bool:
        """Read one token; returns False if it may go on in text to come."""
        character = text[self.at]
        if character.isspace():
            self.at += 1
            return True
        if self._expects in ("colon", "comma"):
            return self._read_sign(character)
        if character in "}]" and self._expects in ("name", "item"):
            return self._close(character)
        for quote in _QUOTES:
            if text.startswith(quote, self.at):
                return self._open_string(quote)
        if GEMMA_QUOTE.startswith(text[self.at :]):
            return False
        if character in _CLOSING and self._expects != "name":
            return self._open_container(character)
        return self._read_scalar(text)

    def _read_sign(self, character: str) -> bool:
        if self._expects == "colon" and character == ":":
            self.text += ": "
            self._expects = "value"
        elif self._expects == "comma" and character == ",":
            self._has_comma = True
            self._expects = "name" if self._open[-1] == "}" else "item"
        elif self._last_quote == GEMMA_QUOTE and self._open[-1] == "}" and _SCALAR.match(character):
            self._has_comma = True
            self._expects = "name"
            return True
        elif self._expects == "comma":
            return self._close(character)
        else:
            return self._break()
        self.at += 1
        return True

    def _open_container(self, bracket: str) -> bool:
        if self.depth == _MAX_DEPTH or (not self._open and bracket == "["):
            return self._break()
        self._separate()
        self.text += bracket
        self._open.append(_CLOSING[bracket])
        self._expects = "name" if bracket == "{" else "item"
        self.at += 1
        return True

    def _close(self, bracket: str) -> bool:
        if bracket != self._open[-1]:
            return self._break()
        self.at += 1
        self.text += self._open.pop()
        self.closed.setdefault(self.depth, len(self.text))
        self._has_comma = False
        self._expects = "comma"
        self._last_quote = ""
        self.is_whole = not self._open
        return True

    def _read_scalar(self, text: str) -> bool:
        """Read a name without quotes, a number or a constant."""
        found = _SCALAR.match(text, self.at)
        if found is None or not self._open:
            return self._break()
        if found.end() == len(text):
            return False
        word = found[0]
        if self._expects == "name":
            written = json.dumps(word, ensure_ascii=False)
            expects = "colon"
        else:
            number = word if _NUMBER.fullmatch(word) else ""
            written = _WORDS.get(word, number)
            expects = "comma"
        if not written:
            return self._break()
        self._separate()
        self.text += written
        self._expects = expects
        self._last_quote = ""
        self.at = found.end()
        return True

    def _separate(self) -> None:
        if self._has_comma:
            self.text += ", "
            self._has_comma = False

    def _break(self) -> bool:
        self.is_broken = True
        return True

    # ----------------------------------------------------------------------------------------------------- strings

    def _open_string(self, quote: str) -> bool:
        self._separate()
        self.text += '"'
        self._quote = quote
        self.at += len(quote)
        return True

    def _close_string(self) -> bool:
        self.at += len(self._quote)
        self.text += '"'
        self._last_quote = self._quote if self._expects != "name" else ""
        self._quote = ""
        self.is_whole = not self._open
        self._expects = "colon" if self._expects == "name" else "comma"
        return True

    def _read_string(self, text: str) -> bool:
        """Read a piece of a string; returns False if it may go on in text to come."""
        if text.startswith(self._quote, self.at):
            return self._close_string()
        if self._quote == GEMMA_QUOTE:
            return self._read_verbatim(text)
        if plain := _PLAIN[self._quote].match(text, self.at):
            self.text += plain[0]
            self.at = plain.end()
            return True
        if text[self.at] == "\\":
            return self._read_escape(text)
        self.text += _escaped(text[self.at])
        self.at += 1
        return True

    def _read_verbatim(self, text: str) -> bool:
        end = text.find(GEMMA_QUOTE, self.at)
        if end < 0:
            end = len(text) - partial_marker(text, GEMMA_QUOTE)
        end = max(end, self.at)
        self.text += _escaped(text[self.at : end])
        self.at = end
        return text.startswith(GEMMA_QUOTE, end)

    def _read_escape(self, text: str) -> bool:
        behind = text[self.at + 1 : self.at + 6]
        if not behind or (len(behind) < 5 and _UNICODE_SO_FAR.fullmatch(behind)):
            return False
        length = 6 if _UNICODE.match(behind) else 2
        if length == 6 or behind[0] in '"\\/bfnrt':
            self.text += text[self.at : self.at + length]
        elif behind[0] in "'\n":
            self.text += _escaped(behind[0])
        else:  # a backslash that is meant
            self.text += "\\\\"
            length = 1
        self.at += length
        return True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
