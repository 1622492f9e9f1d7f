"""`StructuredOutput`, the form that a request's output must have: validated on construction, immutable afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.config import items, text, truth
from nanovllm.features.option_checks import string

MAX_FORM_BYTES = 256 * 1024  # limit of a schema, a regex, a grammar or all choices, in UTF-8
MAX_SCHEMA_DEPTH = 100  # levels of objects and arrays in a schema
MAX_CHOICES = 10_000


# Between the parts of a document: room to indent it, and an end, which small models may not find by themselves.
WHITE_SPACE = r"\n?[ \t]{0,24}"


class GrammarError(Exception):
    """An output cannot follow its grammar any further: a limit on work was met, or a token is none of the grammar's."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of a request's whole output, by exactly one of its fields.

    json_schema: a JSON document that this schema accepts: a dict, JSON text, True, or a pydantic model class. Kept as
        JSON text. Properties come in the schema's order.
    json_object: a JSON object of any content.
    regex: a text that the whole expression matches (Rust's syntax: no look-around but at the end, no back-references;
        `\\d`, `\\w` and `\\s` are ASCII).
    grammar: a text of this Lark grammar from `start`, in llguidance's dialect: `%json {...}` embeds a schema, and
        `[lazy]` ends a rule of one expression as early as it can.
    choice: one of these texts.

    Raises TypeError or ValueError that names field, fault and limit. Faults that only a compiler finds, such as
    an error in a grammar or an unsupported keyword, are a ValueError of the call that makes the request.
    """

    json_schema: Any = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        truth("json_object", self.json_object)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        object.__setattr__(self, "choice", _choices(self.choice))
        given = [name for name in KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            found = " and ".join(given) or "no field that is set"
            raise ValueError(f"structured_output has {found}; give exactly one of {', '.join(KINDS)}.")
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None:
                if not string(f"structured_output.{name}", value):
                    raise ValueError(f"structured_output.{name} is empty; give one, or leave it out.")
                _check_size(name, value)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False, ()))

    def to_dict(self) -> dict[str, Any]:
        """The field that is given, by its name: `StructuredOutput(**form.to_dict())` equals `form`."""
        return {self.kind: getattr(self, self.kind)}


KINDS = tuple(field.name for field in fields(StructuredOutput))


def with_white_space(schema: Any) -> Any:
    """The schema with a limit on white space in its documents, unless its `x-guidance` sets one."""
    if schema is True:  # any document
        schema = {}
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict) or own.keys() & {"whitespace_pattern", "whitespace_flexible"}:
        return schema
    return schema | {"x-guidance": own | {"whitespace_pattern": WHITE_SPACE}}


def structured_output(name: str, value: Any) -> StructuredOutput | None:
    """The check of the sampling parameter of this name; a dict is taken for the fields."""
    if value is None or isinstance(value, StructuredOutput):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a StructuredOutput or None, not {value!r}.")
    unknown = [key for key in value if key not in KINDS]
    if unknown:
        raise ValueError(f"{name} has no field {unknown[0]!r}; it has {', '.join(KINDS)}.")
    return StructuredOutput(**value)


def _schema_text(schema: Any) -> str:
    """The schema as JSON text, its keys in their order."""
    name = "structured_output.json_schema"
    if isinstance(schema, type) and callable(of_model := getattr(schema, "model_json_schema", None)):
        schema = of_model()
    if isinstance(schema, str):
        _check_size("json_schema", schema)
        try:
            schema = json.loads(schema)
        except RecursionError:
            raise _too_deep() from None
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}.") from None
    if not isinstance(schema, bool | Mapping):
        raise TypeError(f"{name} must be a dict, JSON text of an object, or a pydantic model class, not {schema!r}.")
    if schema is False:
        raise ValueError(f"{name} is false, which no document satisfies. Give another, or leave it out.")
    if isinstance(schema, Mapping) and 2 * _measure(schema, 1, {})[1] > MAX_FORM_BYTES:  # it might fill the memory
        raise _too_large("json_schema", f"more than {MAX_FORM_BYTES}")
    try:
        found = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}.") from None
    _check_size("json_schema", found)
    return found


def _choices(values: Any) -> tuple[str, ...]:
    name = "structured_output.choice"
    found = items(name, values, "a list of strings")
    for item in found:
        if not isinstance(item, str):
            raise TypeError(f"{name} must hold strings, not {item!r}.")
        if not item:
            raise ValueError(f"{name} holds an empty string, which is no output. Remove it.")
    if len(found) > MAX_CHOICES:
        raise ValueError(f"{name} has {len(found)} strings; at most {MAX_CHOICES}.")
    _check_size("choice", *found)
    return found


def _check_size(field: str, *values: str) -> None:
    size = sum(len(text(f"structured_output.{field}", value).encode()) for value in values)
    if size > MAX_FORM_BYTES:
        raise _too_large(field, str(size))


def _too_large(field: str, size: str) -> ValueError:
    return ValueError(f"structured_output.{field} has {size} bytes in UTF-8; at most {MAX_FORM_BYTES}. Shorten it.")


def _too_deep() -> ValueError:
    return ValueError(
        f"structured_output.json_schema nests objects and arrays deeper than {MAX_SCHEMA_DEPTH} levels (or holds "
        "itself). Name its parts in $defs, and refer to them by $ref."
    )


def _measure(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Levels of the JSON text of an object or array, and objects and arrays in it, which repeats shared parts.

    `known` has those found so far, by identity. Raises ValueError below MAX_SCHEMA_DEPTH.
    """
    if depth <= MAX_SCHEMA_DEPTH and id(value) not in known:
        parts = value.values() if isinstance(value, Mapping) else value
        inner = [_measure(part, depth + 1, known) for part in parts if isinstance(part, Mapping | list | tuple)]
        known[id(value)] = 1 + max((levels for levels, _ in inner), default=0), 1 + sum(count for _, count in inner)
    if depth > MAX_SCHEMA_DEPTH or depth - 1 + known[id(value)][0] > MAX_SCHEMA_DEPTH:
        raise _too_deep()
    return known[id(value)]
