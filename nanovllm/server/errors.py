"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}, without paths and stack traces."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from nanovllm.errors import EngineDeadError, PromptTooLongError, QueueFullError

logger = logging.getLogger("nanovllm")

RETRY_AFTER_SECONDS = 1  # of a server that ends: another may have its place soon
TOO_LONG = "context_length_exceeded"
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# Kinds of JSON that pydantic's messages name in Python's words.
_KINDS = {
    "valid dictionary or object to extract fields from": "JSON object",
    "valid dictionary": "JSON object",
    "valid list": "JSON array",
}
Place = tuple[str | int, ...]  # of a field in a body: names and numbers of items
# How pydantic names the forms of a field that may have several.
_FORM = re.compile(r"str|int|float|bool|list\[.*\]|constrained-.*|function-.*")


class ErrorDetails(BaseModel):
    """What went wrong; param is the field at fault, code tells programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetails


# Of every endpoint, for the app's description of itself.
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "bad input",
        401: "no key, or a wrong one",
        404: "no such model",
        413: "the body is too large",
        422: "not used: bad input is 400",
        429: "the queue is full",
        500: "the request failed",
        503: "the server is shutting down, or its engine is dead",
    }.items()
}


class ApiError(HTTPException):
    """A refusal, with its HTTP status.

    param: the field that is at fault.
    code: tells programs what is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def queue_full(retry_after: int = RETRY_AFTER_SECONDS) -> ApiError:
    """retry_after: seconds."""
    return ApiError(
        429,
        f"as many requests wait as the server allows; try again in {retry_after} s.",
        code="queue_full",
        headers={"Retry-After": str(retry_after)},
    )


def engine_stalled(seconds: float, limit: float) -> ApiError:
    return ApiError(
        503,
        f"no step has ended for {seconds:.0f} s while requests run; more than {limit:g} s (--stall-timeout) count as a "
        "stall.",
        code="engine_stalled",
    )


def engine_dead() -> ApiError:
    return ApiError(503, "the engine has failed, and the server is about to end.", code="engine_dead")


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down.",
        code="shutting_down",
        headers={"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"},
    )


def request_failed(request_id: str) -> ApiError:
    return ApiError(
        500, f"the request failed in the engine; the server's log says why under {request_id}.", code="request_failed"
    )


def from_engine(error: Exception, known: Sequence[str] = ()) -> ApiError:
    """What a client is told of an exception that the engine raised.

    Args:
        known: the request's fields.
    """
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return queue_full()
        case EngineDeadError():
            return engine_dead()
        case PromptTooLongError():
            return ApiError(400, str(error), code=TOO_LONG)
        case TypeError() | ValueError():
            return ApiError(400, str(error), param=_named(str(error), known))
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "the server failed to answer this request; its log says why.", code="internal_error")


def of_validation(found: Sequence[Any], known: Sequence[str] = ()) -> ApiError:
    """From pydantic's errors: the first field at fault, and what it may be.

    Args:
        known: fields that there are, to tell those that look like an unknown one.
    """
    error, place = found[0], _place_of(found[0])
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}.", code="invalid_json")
    # A field that may have several forms has an error for each; what was meant is the one that fits the furthest.
    places = [other for other in map(_place_of, found) if other[: len(place)] == place]
    place = max(places, key=len)
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(place[0]), known, n=2, cutoff=0.6) if len(place) == 1 else []
        message = "unknown field" + (f"; did you mean {' or '.join(near)}?" if near else ".")
    else:
        message = ", or: ".join(dict.fromkeys(_words(other) for other in found if _place_of(other) == place))
    if place:
        return ApiError(400, f"{_path(place)}: {message}", param=_path(place))
    if error["type"] != "value_error":
        message += ". Send an object as application/json"
    return ApiError(400, message, param=_named(message, known))


def _place_of(error: Any) -> Place:
    """Where the fault is in what was sent; pydantic's place names forms and kinds of messages too."""
    place = list(error["loc"][1:])  # behind "body"
    if len(place) > 2 and place[0] == "messages":
        del place[2]  # the role, by which the message's model was chosen
    last = [place.pop()] if place and error["type"] == "extra_forbidden" else []  # the client's, whatever its name
    place = [part for part in place if not _FORM.fullmatch(str(part))] + last
    match error["type"]:
        case "refused_field":
            place.append(error["ctx"]["field"])
        case "union_tag_invalid" | "union_tag_not_found":
            place.append("role")
    return tuple(place)


def _path(place: Place) -> str:
    """As OpenAI writes it: messages[0].content."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _words(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    for theirs, ours in _KINDS.items():
        message = message.replace(theirs, ours)
    return message


def _named(message: str, known: Sequence[str]) -> str | None:
    """The field that a message begins with, or what of it."""
    first = message.partition(" ")[0].rstrip(":")
    return first if re.split(r"[.\[]", first)[0] in known else None


def install(app: FastAPI) -> None:
    """Give every error of an app this form."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return of_validation(error.errors(), _fields_of(request)).response()

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return error.response()

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the server failed to answer this request; its log says why.").response()


def _fields_of(request: Request) -> list[str]:
    """The fields of the body that a request's endpoint takes."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return [] if model is None else model.names()
