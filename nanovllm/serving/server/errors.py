"""API errors without paths and stack traces, in the forms of OpenAI, Anthropic and Ollama.

OpenAI's is {"error": {"message", "type", "param", "code"}}; Anthropic's has only `type` and `message` within (a
thread that is not found has `details`), Ollama's is {"error": message}.
"""

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
from nanovllm.features.updates.sleeping import AsleepError

logger = logging.getLogger("nanovllm")

RETRY_AFTER_SECONDS = 1  # a server that shuts down may be replaced soon
TOO_LONG = "context_length_exceeded"
NO_THREAD = "thread_not_found"  # Anthropic's clients send the whole conversation when they read it
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MESSAGES_PATH = "/v1/messages"  # errors of this path have Anthropic's form
OLLAMA_PATH = "/api/"  # errors below this path have Ollama's form
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
# pydantic's names of types -> JSON's.
_KINDS = {
    "valid dictionary or object to extract fields from": "JSON object",
    "valid dictionary": "JSON object",
    "valid list": "JSON array",
}
FieldPath = tuple[str | int, ...]  # path of a field in a body: names and indices
# Names of union members in pydantic's locations.
_FORM = re.compile(r"str|int|float|bool|list\[.*\]|constrained-.*|function-.*")


class ErrorDetails(BaseModel):
    """Details of an error: `param` is the invalid field, `code` is machine-readable."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Body of every error response."""

    error: ErrorDetails


# Error responses of every endpoint in /openapi.json.
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "invalid input",
        401: "missing or invalid API key",
        404: "unknown model",
        413: "body too large",
        422: "unused: invalid input is 400",
        429: "queue full",
        500: "request failed",
        503: "server shutting down, or engine asleep, dead or stalled",
    }.items()
}


class MessagesError(BaseModel):
    """Details of an error in Anthropic's form."""

    type: str
    message: str


class MessagesErrorAnswer(BaseModel):
    """Body of every error response of /v1/messages."""

    type: str
    error: MessagesError


MESSAGES_ANSWERS = {status: answer | {"model": MessagesErrorAnswer} for status, answer in ANSWERS.items()}


class ApiError(HTTPException):
    """An error response with its HTTP status.

    param: the invalid field.
    code: machine-readable reason.
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
        self.message = message
        self.param = param
        self.code = code

    def body(self, path: str = "") -> dict[str, Any]:
        """The error in the form of the API at a path."""
        if MESSAGES_PATH in path:
            kind = ANTHROPIC_TYPES.get(self.status_code, "api_error")
            # Anthropic's words: its clients shorten the conversation when they read them.
            begin = "prompt is too long: " if self.code == TOO_LONG else ""
            details = {"details": {"error_code": NO_THREAD}} if self.code == NO_THREAD else {}
            return {"type": "error", "error": {"type": kind, "message": begin + self.message} | details}
        if path.startswith(OLLAMA_PATH):
            return {"error": self.message}
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        return JSONResponse(self.body(path), self.status_code, self.headers)


def queue_full(retry_after: int = RETRY_AFTER_SECONDS) -> ApiError:
    """429: the queue is full; `retry_after` in seconds."""
    return ApiError(
        429,
        f"the queue is full (max_queue); try again in {retry_after} s.",
        code="queue_full",
        headers={"Retry-After": str(retry_after)},
    )


def engine_stalled(seconds: float, limit: float) -> ApiError:
    return ApiError(
        503,
        f"the engine has stalled: no step has ended for {seconds:.0f} s while requests run, above {limit:g} s "
        "(--stall-timeout).",
        code="engine_stalled",
    )


def no_replica(count: int) -> ApiError:
    return ApiError(
        503,
        f"none of the {count} replicas is up; they are being started again, and requests wait for them.",
        code="no_replica",
    )


def engine_asleep() -> ApiError:
    return ApiError(
        503, "the engine sleeps and has no memory for requests. Wake it by POST /wake_up.", code="engine_asleep"
    )


def engine_dead() -> ApiError:
    return ApiError(503, "the engine has failed; the server is shutting down.", code="engine_dead")


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down.",
        code="shutting_down",
        headers={"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"},
    )


def request_failed(request_id: str) -> ApiError:
    return ApiError(
        500, f"the request failed in the engine; see {request_id} in the server's log.", code="request_failed"
    )


def from_engine(error: Exception, known: Sequence[str] = ()) -> ApiError:
    """Convert an exception of the engine to an error response.

    Args:
        known: fields of the request, for `param`.
    """
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return queue_full()
        case EngineDeadError():
            return engine_dead()
        case AsleepError():
            return engine_asleep()
        case PromptTooLongError():
            return ApiError(400, str(error), code=TOO_LONG)
        case TypeError() | ValueError():
            return ApiError(400, str(error), param=_named(str(error), known))
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "the server failed to answer this request; see its log.", code="internal_error")


def from_validation(found: Sequence[Any], known: Sequence[str], body: Any = None) -> ApiError:
    """Convert pydantic's errors: the first invalid field and its allowed values.

    Args:
        known: fields of the request, to suggest similar names for an unknown one.
        body: the body as given, to tell its fields from the names of union members.
    """
    error = found[0]
    path = _path_in_body(found[0], body)
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}.", code="invalid_json")
    # A union field has an error per member; report the member that matched deepest.
    paths = [other for other in (_path_in_body(each, body) for each in found) if other[: len(path)] == path]
    path = max(paths, key=len)
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[0]), known, n=2, cutoff=0.6) if len(path) == 1 else []
        message = "unknown field" + (f"; did you mean {' or '.join(near)}?" if near else ".")
    else:
        message = ", or: ".join(dict.fromkeys(_words(other) for other in found if _path_in_body(other, body) == path))
    if path:
        return ApiError(400, f"{_format_path(path)}: {message}", param=_format_path(path))
    if error["type"] != "value_error":
        message += ". Send an object as application/json"
    return ApiError(400, message, param=_named(message, known))


def _path_in_body(error: Any, body: Any) -> FieldPath:
    """Return the path of an error in the body; pydantic's location also names union members and their tags."""
    path = list(error["loc"][1:])  # loc[0] is "body"
    if isinstance(body, dict):
        return tuple(_given_parts(error, path, body))
    last = [path.pop()] if path and error["type"] == "extra_forbidden" else []  # the client's field, whatever its name
    path = [part for part in path if not _FORM.fullmatch(str(part))] + last
    return tuple(path + _inner_field(error))


def _given_parts(error: Any, path: list[str | int], body: Any) -> list[str | int]:
    """Parts of a location that exist in the body, and the invalid field."""
    given: list[str | int] = []
    value = body
    for number, part in enumerate(path):
        is_there = isinstance(value, dict) and part in value
        if is_there or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            given.append(part)
            value = value[part]
        elif error["type"] == "missing" and number == len(path) - 1 and isinstance(value, dict):
            given.append(part)
    return given + _inner_field(error)


def _inner_field(error: Any) -> list[str | int]:
    """The field named in an error about its whole object."""
    match error["type"]:
        case "refused_field":
            return [error["ctx"]["field"]]
        case "union_tag_invalid" | "union_tag_not_found":
            return [error["ctx"]["discriminator"].strip("'")]
    return []


def _format_path(path: FieldPath) -> str:
    """Format a path as OpenAI does: messages[0].content."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _words(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    for theirs, ours in _KINDS.items():
        message = message.replace(theirs, ours)
    return message


def _named(message: str, known: Sequence[str]) -> str | None:
    """Return the known field that a message begins with, with its path."""
    first = message.partition(" ")[0].rstrip(":")
    return first if re.split(r"[.\[]", first)[0] in known else None


def install(app: FastAPI) -> None:
    """Register the exception handlers of an app."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error.errors(), _body_fields(request), error.body).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return error.response(request.url.path)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        answer = ApiError(500, "the server failed to answer this request; see its log.").response(request.url.path)
        if (request_id := request.scope.get("nanovllm.request_id")) is not None:  # this is outside of `RequestLog`
            answer.headers["x-request-id"] = request_id
        return answer


def _body_fields(request: Request) -> list[str]:
    """Return the body fields of a request's endpoint."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return [] if model is None else model.names()
