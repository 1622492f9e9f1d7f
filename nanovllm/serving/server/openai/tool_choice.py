"""`tool_choice`: which tools a model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nanovllm.serving.server.openai.messages import Tool
from nanovllm.serving.server.strict import Strict


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """The one function to call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def check_tool_choice(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> None:
    """Raise ValueError for a choice without the tools that it needs, or for two tools of one name."""
    names = [tool.function.name for tool in tools or ()]
    if repeated := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise ValueError(f"tools has two functions of the name {repeated!r}; calls could not tell them apart.")
    if choice not in (None, "none") and not names:
        named = choice if isinstance(choice, str) else "a function"
        raise ValueError(f"tool_choice is {named!r}, but there are no tools.")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ValueError(
            f"tool_choice names {choice.function.name!r}, which is not among the tools: {', '.join(names)}."
        )
