"""Errors of a translated chat request, with the original request's field names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pydantic import ValidationError

from nanovllm.serving.server.errors import ApiError, from_engine, from_validation


@contextmanager
def translated(renamed: Mapping[str, str], known: Sequence[str]) -> Iterator[None]:
    """Convert the errors of a translated request to ApiError.

    Args:
        renamed: fields of the chat request -> fields of the original request.
        known: fields of the chat request.
    """
    try:
        yield
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_input=False)]
        raise _named(from_validation(found, known), renamed) from error
    except ApiError as error:
        raise _named(error, renamed) from error
    except (TypeError, ValueError) as error:
        raise _named(from_engine(error, known), renamed) from error


def _named(error: ApiError, renamed: Mapping[str, str]) -> ApiError:
    """Replace the chat request's field at the beginning of an error message by the original field."""
    first = error.message.partition(" ")[0].rstrip(":")
    for theirs, ours in renamed.items():
        if first == theirs or first.startswith((f"{theirs}.", f"{theirs}[")):
            message = ours + error.message[len(theirs) :]
            return ApiError(error.status_code, message, param=ours, code=error.code, headers=error.headers)
    return error
