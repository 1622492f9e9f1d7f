"""Models of JSON that refuse what they do not know."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
# Of many bad items the first is named; an error for each would take seconds and memory.
Each = Annotated[list[Item], Field(fail_fast=True)]

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
