"""Fields that constrain an answer: OpenAI's `response_format`, and vLLM's `guided_*` and `structured_outputs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nanovllm.serving.server.hints import OPENAI
from nanovllm.serving.server.strict import AnyObject, Each, Strict


@dataclass(frozen=True, slots=True)
class Shape:
    """Structured output that an answer must match.

    kind: name of `StructuredOutput`'s field: json_schema, json_object, regex, choice or grammar.
    field: the request's field, for errors.
    """

    kind: str
    value: Any
    field: str
    is_document: bool = False  # OpenAI's json_schema: objects are closed unless the schema says otherwise


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    hints: ClassVar = OPENAI["response_format.json_schema"]

    name: str
    description: str | None = None
    schema_: Annotated[AnyObject | None, Field(alias="schema")] = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
Choices = Annotated[Each[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Strict):
    """vLLM's object; exactly one of its fields."""

    refused: ClassVar = {
        "structural_tag": ((None,), "use tools, whose calls are constrained by tool_choice and strict"),
        "whitespace_pattern": ((None,), "the grammar has white space of its own"),
        "disable_fallback": ((None, True), "there is one backend"),
        "disable_any_whitespace": ((None, False), "the grammar has white space of its own"),
        "disable_additional_properties": ((None, False), "say it in the schema: additionalProperties"),
    }

    json_: Annotated[str | AnyObject | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    def shapes(self) -> list[Shape]:
        given = {
            "json": ("json_schema", self.json_),
            "json_object": ("json_object", self.json_object or None),
            "regex": ("regex", self.regex),
            "choice": ("choice", self.choice),
            "grammar": ("grammar", self.grammar),
        }
        return [Shape(kind, v, f"structured_outputs.{name}") for name, (kind, v) in given.items() if v is not None]


class ConstraintFields(Strict):
    """Constraints of both generating endpoints; at most one per request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | AnyObject | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    open_objects: bool | None = None  # None: the server's setting

    @model_validator(mode="after")
    def _check_one_constraint(self) -> ConstraintFields:
        shapes = self._shapes()
        if len(shapes) > 1:
            raise ValueError(f"{shapes[0].field} and {shapes[1].field} are given; an answer has one constraint.")
        if self.structured_outputs is not None and not self.structured_outputs.shapes():
            raise ValueError("structured_outputs is empty: give one of json, json_object, regex, choice, grammar.")
        return self

    @property
    def shape(self) -> Shape | None:
        """The constraint; None for free text."""
        return next(iter(self._shapes()), None)

    def _shapes(self) -> list[Shape]:
        shapes = [] if self.structured_outputs is None else self.structured_outputs.shapes()
        for kind, field in (
            ("json_schema", "guided_json"),
            ("regex", "guided_regex"),
            ("choice", "guided_choice"),
            ("grammar", "guided_grammar"),
        ):
            if (value := getattr(self, field)) is not None:
                shapes.append(Shape(kind, value, field))
        form = self.response_format
        if isinstance(form, JsonObjectFormat):
            shapes.append(Shape("json_object", True, "response_format"))
        elif isinstance(form, JsonSchemaFormat):
            schema = form.json_schema.schema_
            field = "response_format.json_schema.schema"
            shapes.append(Shape("json_schema", {} if schema is None else schema, field, is_document=True))
        return shapes
