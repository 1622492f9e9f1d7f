"""What a request demands of its answers, and errors of it under the names of the request's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.core.structured_output import StructuredOutput
from nanovllm.requests.grammar.compiler import schema_problem
from nanovllm.server.answers.call_grammars import parameters_of
from nanovllm.server.answers.grammar import Demand
from nanovllm.server.errors import ApiError
from nanovllm.server.openai.constraints import Shape
from nanovllm.server.openai.protocol import ChatRequest
from nanovllm.server.openai.tool_choice import NamedTool


@contextmanager
def named_by(field: str | None) -> Iterator[None]:
    """Name the request's field in errors of its structured output."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if field is None or not str(error).startswith("structured_output"):
            raise
        raise ApiError(400, f"{field}: {error}", param=field) from error


def error_of(error: Exception, demand: Demand, field: str) -> Exception:
    """The same error under the name of the request's field; for what nobody but us wrote, of the part that is to blame.

    It looks at the schemas of all tools, so that it must not run in the event loop.

    Args:
        error: of an answer's grammar.
    """
    if not str(error).startswith("structured_output"):
        return error
    message = _to_blame(demand) if demand.tools else str(error)
    return ApiError(400, f"{field}: {message}", param=field)


def _to_blame(demand: Demand) -> str:
    for tool in demand.tools:
        name = f"the parameters of {tool['function']['name']!r}"
        if (problem := schema_problem(name, parameters_of(tool))) is not None:
            return str(problem).replace(" has keywords", " have keywords")
    if demand.shape is not None and demand.shape.kind == "json_schema":
        problem = schema_problem("response_format", json.loads(demand.shape.json_schema))
        if problem is not None:
            return str(problem)
    return "the schemas together make a grammar that cannot be compiled, or is too large. Shorten them, or send fewer."


def output_form(shape: Shape | None) -> StructuredOutput | None:
    """The form that a request asks for; raises ApiError (400) that names its field."""
    if shape is None:
        return None
    with named_by(shape.field):
        return StructuredOutput(**{shape.kind: shape.value})


def demand_of(body: ChatRequest, tools: list[dict[str, Any]] | None) -> Demand:
    """What a chat request demands.

    Args:
        tools: those that may be called.
    """
    offered = tools or []
    is_parallel = body.parallel_tool_calls is not False
    is_strict = any(tool["function"].get("strict") for tool in offered)
    if isinstance(body.tool_choice, NamedTool):
        offered = [tool for tool in offered if tool["function"]["name"] == body.tool_choice.function.name]
    # Beside a document calls are constrained too: the answer is one of them.
    is_constrained = body.must_call or is_strict or not is_parallel or body.shape is not None
    return Demand(
        shape=output_form(body.shape),
        tools=tuple(offered) if is_constrained else (),
        must_call=body.must_call,
        is_parallel=is_parallel and not isinstance(body.tool_choice, NamedTool),
        budget=body.thinking_token_budget,
    )


def field_of(body: ChatRequest, demand: Demand) -> str:
    """The field that an error of the whole answer's grammar is about."""
    return "tools" if demand.tools or body.shape is None else body.shape.field
