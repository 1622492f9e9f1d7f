"""Strict pydantic models: unknown and unsupported fields are errors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
# Only the first invalid item is reported; an error per item would take seconds and memory.
Each = Annotated[list[Item], Field(fail_fast=True)]

# Unsupported fields: values without effect (None always is one), and the reason for refusing others.
Refused = dict[str, tuple[Container[Any], str]]

MAX_NESTING = 100
# Types of content parts in the APIs of OpenAI and Anthropic, by their first word.
_MEDIA = {"image": "an image", "audio": "audio", "video": "video", "file": "a file", "document": "a file"}

# Callback for a field, as Model.field, that is dropped instead of refused; None: such fields are errors.
TELL_UNKNOWN: ContextVar[Callable[[str], None] | None] = ContextVar("tell_unknown", default=None)
# Callback for a part of a request that has no effect, such as Model.field, and the reason.
TELL_HINT: ContextVar[Callable[[str, str], None] | None] = ContextVar("tell_hint", default=None)


def tell_hint(name: str, reason: str) -> None:
    """Log once that a part of a request has no effect."""
    if (tell := TELL_HINT.get()) is not None:
        tell(name, reason)


def lets_pass(name: str) -> bool:
    """Whether a part of a request that would be refused is left out instead (unknown_fields), and log that."""
    if (tell := TELL_UNKNOWN.get()) is not None:
        tell(name)
    return tell is not None


def check_nesting(given: Item) -> Item:
    """Return the value; raises ValueError if it is nested deeper than MAX_NESTING."""
    level: list[Any] = [given]
    for _ in range(MAX_NESTING):
        level = [part for whole in level for part in _parts(whole)]
        if not level:
            return given
    raise ValueError(f"it is nested too deeply; at most {MAX_NESTING} levels.")


def _parts(whole: Any) -> Iterable[Any]:
    if isinstance(whole, dict):
        return whole.values()
    return whole if isinstance(whole, list) else ()


# Any JSON object, of limited depth: templates, logs and json recurse into it.
AnyObject = Annotated[dict[str, Any], AfterValidator(check_nesting)]


def text_alone(kind: str, *others: str) -> BeforeValidator:
    """Validator of a content part that must be of type `kind`, or one of `others`: names other media in its error."""

    def refuse_media(part: Any) -> Any:
        given = part.get("type") if isinstance(part, dict) else None
        word = given.removeprefix("input_").partition("_")[0] if isinstance(given, str) else ""
        if word in _MEDIA and given not in others:
            read = "text and images" if others else "text alone"
            reason = f"{given!r} is {_MEDIA[word]}, and the engine reads {read}. Send its text, as type {kind!r}"
            raise PydanticCustomError("refused_field", "not supported: {reason}.", {"field": "type", "reason": reason})
        return part

    return BeforeValidator(refuse_media)


def _add_hints(schema: dict[str, Any], model: type[Strict]) -> None:
    """Describe the fields without effect, which take any value."""
    described = {name: {"description": f"without effect: {reason}"} for name, reason in model.hints.items()}
    if described:
        schema["properties"] = schema.get("properties", {}) | described


class Strict(BaseModel):
    """Model that refuses unknown fields, or leaves them out if `TELL_UNKNOWN` is set.

    hints: fields without effect, left out whatever their value; see `nanovllm.serving.server.hints`.
    refused: fields that are errors unless they have a value without effect.
    """

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_add_hints)
    hints: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Refused] = {}

    @classmethod
    def names(cls) -> list[str]:
        """Return the fields that errors can name."""
        return [*(field.alias or name for name, field in cls.model_fields.items()), *cls.hints, *cls.refused]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        rest = dict(given)
        for name, reason in cls.hints.items():
            if name in rest and rest.pop(name) is not None:
                tell_hint(f"{cls.__name__}.{name}", reason)
        for name, (harmless, reason) in cls.refused.items():
            if name not in rest or (value := rest.pop(name)) is None or value in harmless:
                continue
            if not lets_pass(f"{cls.__name__}.{name}"):
                raise PydanticCustomError(
                    "refused_field", "not supported: {reason}.", {"field": name, "reason": reason}
                )
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in rest if name not in known]
        for name in unknown[1:] if TELL_UNKNOWN.get() is None else unknown:
            del rest[name]  # pydantic reports the first; further ones would each cost an error
            lets_pass(f"{cls.__name__}.{name}")
        return rest
