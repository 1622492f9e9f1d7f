"""Limits of request bodies: checked before parsing and validation; large bodies are parsed in their client's turn.

json and pydantic hold the GIL in C code, so a thread alone would not free the event loop: numbers, objects and lists
of token ids pass through a Python function, where the interpreter can switch threads. Strings, arrays, fractions and
constants are counted first. Scans of all bytes run in pieces.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from nanovllm.errors import EngineClosedError, EngineDeadError
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server.errors import ApiError, from_validation
from nanovllm.serving.server.settings import ServerSettings
from nanovllm.serving.server.sse import while_connected
from nanovllm.serving.server.strict import TELL_HINT, TELL_UNKNOWN, Strict

logger = logging.getLogger("nanovllm")

Result = TypeVar("Result")

LARGE_BYTES = 16384  # bytes; parsing a smaller body takes less time than a thread switch
PIECE_BYTES = 2**18  # bytes that one C call scans in a millisecond
# Each value except strings, containers and whole numbers has one of them: 1.5, 1e5, 1E5, true, false, null, NaN.
OTHERS = (b".", b"e", b"E", b"n", b"N")
MAX_LEFT_OUT = 256  # fields that are logged as left out
LARGE = "nanovllm.large"  # key in the ASGI scope of a request with a large body


class BodyLimits:
    """Body limits of one server, and the thread that parses large bodies.

    max_items: maximum number of strings, arrays and objects, and of fractions and constants.
    max_values: maximum number of values, numbers included; fits `max_prompts` prompts of max_model_len token ids.
    """

    def __init__(self, settings: ServerSettings, engine: AsyncLLM) -> None:
        self._settings = settings
        self._max_model_len = engine.config.max_model_len
        self.max_items = settings.max_body_items + 2 * settings.max_prompts
        self.max_values = self.max_items + settings.max_prompts * self._max_model_len + engine.vocab_size
        self._lengths = {
            "messages": (settings.max_messages, "the server's max_messages. Shorten the conversation"),
            "input": (settings.max_messages, "the server's max_messages. Shorten the conversation"),
            "tools": (settings.max_tools, "the server's max_tools. Offer fewer"),
            "allowed_token_ids": (engine.vocab_size, "the size of the vocabulary. Name each token once"),
        }
        self._left_out: set[str] = set()  # fields already logged
        self._engine = engine

    async def off_loop(self, request: Request, work: Callable[[], Result]) -> Result:
        """Run `work`, in a thread and its client's turn if the request's body is large."""
        if not request.scope.get(LARGE):
            return work()
        try:
            return await while_connected(request.receive, self._engine.prepare(work, await request.body()))
        except (EngineClosedError, EngineDeadError):  # the server drains
            return work()

    def check_size(self, body: bytes) -> None:
        """Raise ApiError (400) for a body with more values than the limits, estimated without parsing."""
        num_items, num_others, num_values = _count(body)
        settings = self._settings
        if num_items > self.max_items:
            raise _too_many(
                f"{num_items} strings, arrays and objects; the server takes {self.max_items}: max_body_items "
                f"({settings.max_body_items}) and 2 per prompt of max_prompts. Send smaller requests, or raise it."
            )
        if num_others > self.max_items:
            raise _too_many(
                f"{num_others} fractions, booleans and nulls; the server takes {self.max_items}: max_body_items "
                f"({settings.max_body_items}) and 2 per prompt of max_prompts. Send smaller requests, or raise it."
            )
        if num_values > self.max_values:
            raise _too_many(
                f"{num_values} values; the server takes {self.max_values}, enough for {settings.max_prompts} prompts "
                f"(max_prompts) of {self._max_model_len} token ids (max_model_len). Send fewer prompts per request."
            )

    def check_fields(self, given: Any) -> None:
        """Raise ApiError (400) for a list or string above its limit, before validation."""
        if not isinstance(given, dict):
            return
        for name, (limit, remedy) in self._lengths.items():
            value = given.get(name)
            if isinstance(value, list) and len(value) > limit:
                raise ApiError(
                    400, f"{name}: {len(value)} entries are too many; at most {limit}, {remedy}.", param=name
                )
        limit = self._settings.max_word_chars  # Ollama's
        options = given.get("options")
        for name in ("bad_words", "stop", "stop_sequences", "options.stop"):
            value = given.get(name)
            if name == "options.stop":
                value = options.get("stop") if isinstance(options, dict) else None
            words = value if isinstance(value, list) else [value]
            num_chars = sum(len(word) for word in words if isinstance(word, str))
            if num_chars > limit:
                raise ApiError(
                    400,
                    f"{name}: {num_chars} characters in all are too many; at most {limit} (max_word_chars). Give fewer "
                    "or shorter strings, or raise the server's max_word_chars.",
                    param=name,
                )

    def expect_unknown(self) -> None:
        """Set whether the next validated models log unknown fields or refuse them, and where they tell hints."""
        TELL_UNKNOWN.set(self._log_unknown if self._settings.unknown_fields == "warn" else None)
        TELL_HINT.set(self._log_hint)

    def _log_unknown(self, name: str) -> None:
        if self._is_new(name):
            logger.warning("the field %.100r is ignored, here and in later requests (unknown_fields)", name)

    def _log_hint(self, name: str, reason: str) -> None:
        if self._is_new(name):
            logger.info("%.100r has no effect, here and in later requests: %s", name, reason)

    def _is_new(self, name: str) -> bool:
        if name in self._left_out or len(self._left_out) >= MAX_LEFT_OUT:
            return False
        self._left_out.add(name)
        return True

    def parse(self, body: bytes, model: type[Strict]) -> Strict:
        """Parse a large body into its model; raises ApiError, and the errors of `json.loads`."""
        self.check_size(body)
        encoding = json.detect_encoding(body)
        if not encoding.startswith("utf-8"):  # `check_size` counts bytes of UTF-8
            raise ApiError(400, f"the body is {encoding}; send UTF-8.", code="invalid_json")
        try:
            text = "".join(codecs.iterdecode(_pieces(body), encoding))
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the body is not UTF-8: {error.reason}.", code="invalid_json") from error
        try:
            given = json.loads(text, parse_int=_integer, parse_float=_fraction, object_hook=_same)
        except RecursionError as error:
            raise ApiError(400, "the body is nested too deeply.", code="invalid_json") from error
        self.check_fields(given)
        self.expect_unknown()  # context variables are per thread
        try:
            return model.model_validate(given)
        except ValidationError as error:
            found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_input=False)]
            raise from_validation(found, model.names(), given) from error


class LimitedRequest(Request):
    """Request that applies the app's `BodyLimits` to its JSON; a large body is returned as its model."""

    def __init__(self, request: Request, model: type[Strict]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        limits: BodyLimits = self.app.state.body_limits
        body = await self.body()
        if len(body) < LARGE_BYTES:
            given = await super().json()
            limits.check_fields(given)
            limits.expect_unknown()
            return given
        self.scope[LARGE] = True
        return await limits.off_loop(self, partial(limits.parse, body, self._model))


class LimitedRoute(APIRoute):
    """Route that applies the body limits; its body, if any, is a `Strict` model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: Any = self.body_field.field_info.annotation

        async def limited(request: Request) -> Response:
            return await handle(LimitedRequest(request, model))

        return limited


def _too_many(what: str) -> ApiError:
    return ApiError(400, f"the body holds {what}", code="too_many_values")


def _pieces(body: bytes) -> Iterator[bytes]:
    """Split a body into pieces; none ends between a backslash and the escaped byte."""
    first = 0
    while piece := body[first : first + PIECE_BYTES]:
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2 and first + len(piece) < len(body):
            piece = body[first : first + len(piece) + 1]
        yield piece
        first += len(piece)


def _count(body: bytes) -> tuple[int, int, int]:
    """Numbers of (strings, arrays and objects), of (fractions and constants, at most), and of all values."""
    num_quotes = num_containers = num_others = num_commas = 0
    for piece in _pieces(body):
        # Without escaped quotes, every second part between quotes is inside a string.
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b" ".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        num_containers += outside.count(b"[") + outside.count(b"{")
        num_commas += outside.count(b",")
        num_others += sum(map(outside.count, OTHERS))
    # A value is the first of its container or follows a comma.
    return num_quotes // 2 + num_containers, num_others, num_containers + num_commas + 1


def _integer(digits: str) -> int:
    return int(digits)


def _fraction(digits: str) -> float:
    return float(digits)


def _same(given: dict[str, Any]) -> dict[str, Any]:
    return given
