"""Constraints of a chat request on its answer, and their errors under the names of the request's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.features.grammar.closed_objects import with_closed_objects
from nanovllm.features.grammar.compiler import schema_problem
from nanovllm.features.structured_output import StructuredOutput
from nanovllm.serving.server.answers.call_arguments import parameters_of
from nanovllm.serving.server.answers.grammar import AnswerConstraints
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.openai.constraints import ConstraintFields
from nanovllm.serving.server.openai.protocol import ChatRequest
from nanovllm.serving.server.openai.tool_choice import NamedTool


@contextmanager
def named_by(field: str | None) -> Iterator[None]:
    """Name the request's field in errors of its structured output."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if field is None or not str(error).startswith("structured_output"):
            raise
        raise ApiError(400, f"{field}: {error}", param=field) from error


def named_error(error: Exception, constraints: AnswerConstraints, field: str) -> Exception:
    """Name the request's field in an error of the answer's grammar, and the faulty schema instead of our grammar.

    Compiles the schemas of all tools: do not call it in the event loop.
    """
    if not str(error).startswith("structured_output"):
        return error
    message = _schema_error(constraints) if constraints.tools else str(error)
    return ApiError(400, f"{field}: {message}", param=field)


def _schema_error(constraints: AnswerConstraints) -> str:
    for tool in constraints.tools:
        name = f"the parameters of {tool['function']['name']!r}"
        if (problem := schema_problem(name, parameters_of(tool))) is not None:
            return str(problem).replace(" has keywords", " have keywords")
    if constraints.shape is not None and constraints.shape.kind == "json_schema":
        problem = schema_problem("response_format", json.loads(constraints.shape.json_schema))
        if problem is not None:
            return str(problem)
    return "the schemas together make a grammar that cannot be compiled, or is too large. Shorten them, or send fewer."


def output_form(body: ConstraintFields, *, open_objects: bool) -> StructuredOutput | None:
    """Build a request's structured output; raises ApiError (400) that names its field.

    Args:
        open_objects: the server's setting, if the request says nothing.
    """
    if (shape := body.shape) is None:
        return None
    opens = open_objects if body.open_objects is None else body.open_objects
    with named_by(shape.field):
        value = with_closed_objects(shape.value) if shape.is_document and not opens else shape.value
        return StructuredOutput(**{shape.kind: value})


def constraints_of(
    body: ChatRequest, tools: list[dict[str, Any]] | None, *, open_objects: bool = False
) -> AnswerConstraints:
    """Constraints of a chat request on its answer.

    Args:
        tools: tools that the model may call.
        open_objects: Default for objects, as `output_form` takes it.
    """
    offered = tools or []
    is_parallel = body.parallel_tool_calls is not False
    is_strict = any(tool["function"].get("strict") for tool in offered)
    if isinstance(body.tool_choice, NamedTool):
        offered = [tool for tool in offered if tool["function"]["name"] == body.tool_choice.function.name]
    # With a response_format, calls are constrained too: the answer is either a document or calls.
    is_constrained = body.must_call or is_strict or not is_parallel or body.shape is not None
    return AnswerConstraints(
        shape=output_form(body, open_objects=open_objects),
        tools=tuple(offered) if is_constrained else (),
        must_call=body.must_call,
        is_parallel=is_parallel and not isinstance(body.tool_choice, NamedTool),
        budget=body.thinking_token_budget,
    )


def error_field(body: ChatRequest, constraints: AnswerConstraints) -> str:
    """Field to name in errors of the answer's grammar."""
    return "tools" if constraints.tools or body.shape is None else body.shape.field
