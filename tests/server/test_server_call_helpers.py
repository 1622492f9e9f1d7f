"""The helpers of OpenAI's and Anthropic's clients for streamed and repeated tool calls."""

import json

import openai
import pytest
from anthropic import beta_tool

from tests.support.scripted import TOOL_TEMPLATE, prompt_of, says
from tests.support.serving import MODEL, served, thinking_server, user

CALL = '<tool_call>{"name": "read", "arguments": {"path": "a.txt"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "additionalProperties": False}
FUNCTION = {"name": "read", "parameters": SCHEMA | {"required": ["path"]}, "strict": True}
ASK = [user("Hello")]


running = served(lambda: thinking_server(TOOL_TEMPLATE))


@beta_tool
def read(path):
    """Read a file.

    Args:
        path: Its name.
    """
    return f"the text of {path}"


@pytest.mark.costly
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_calls_the_tool_and_returns_its_result(running, monkeypatch, stream):
    says(running, monkeypatch, f"So. {CALL}")
    prompts = prompt_of(running, monkeypatch)
    with running.anthropic() as client:
        options = {"model": MODEL, "max_tokens": 100, "messages": ASK, "tools": [read], "max_iterations": 3}
        for answer in client.beta.messages.tool_runner(stream=stream, **options):
            message = answer.get_final_message() if stream else answer
            assert [block.type for block in message.content] == ["text", "tool_use"]
            assert message.content[1].input == {"path": "a.txt"}
    assert [prompt.count("the text of a.txt") for prompt in prompts] == [0, 1, 2], "the whole conversation each time"


def test_openais_helpers_join_the_arguments_of_a_stream(running, monkeypatch):
    says(running, monkeypatch, f"So. {CALL}")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        tools = [{"type": "function", "function": FUNCTION}]
        with client.chat.completions.stream(model=MODEL, messages=ASK, tools=tools, max_tokens=100) as chat:
            parts = [event.arguments_delta for event in chat if event.type.endswith("arguments.delta")]
            (call,) = chat.get_final_completion().choices[0].message.tool_calls
        with client.responses.stream(model=MODEL, input=ASK, tools=[FUNCTION | {"type": "function"}]) as response:
            deltas = [event.delta for event in response if event.type.endswith("arguments.delta")]
            (item,) = [item for item in response.get_final_response().output if item.type == "function_call"]
    for own, given in ((call.function, parts), (item, deltas)):
        assert own.arguments == "".join(given)
        assert json.loads(own.arguments) == own.parsed_arguments == {"path": "a.txt"}
