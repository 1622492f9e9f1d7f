"""Models of JSON that refuse what they do not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
# Of many bad items the first is named; an error for each would take seconds and memory.
Each = Annotated[list[Item], Field(fail_fast=True)]

MAX_NESTING = 100


def check_nesting(given: Item) -> Item:
    """What was given; raises ValueError for JSON that is nested so deeply that it is a mistake or an attack."""
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


# Of any content. Templates, logs and JSON itself recurse into it.
AnyObject = Annotated[dict[str, Any], AfterValidator(check_nesting)]
NO_CONSTRAINTS = "answers cannot be constrained to a form yet"


class Strict(BaseModel):
    """Takes what it knows and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True)
    # Fields of OpenAI's that are refused unless they hold one of these values, and why.
    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @classmethod
    def names(cls) -> list[str]:
        """The fields that errors may name."""
        return [*cls.model_fields, *cls.refused]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        rest = dict(given)
        for name, (harmless, reason) in cls.refused.items():
            if name in rest and rest.pop(name) not in harmless:
                raise PydanticCustomError(
                    "refused_field", "not supported: {reason}.", {"field": name, "reason": reason}
                )
        for name in [name for name in rest if name not in cls.model_fields][1:]:
            del rest[name]  # pydantic refuses the first, and would write an error for each
        return rest
