"""Requests drawn from the OpenAPI schema succeed; no request gets a server error."""

import os
import re
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, reject, settings, strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import InvalidSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from nanovllm.features.scoring import scores
from nanovllm.sampling_params import MAX_SEED
from tests.support.serving import serving
from tests.support.tiny_models import code_tokenizer, tiny_model

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Examples per endpoint; the environment variable SCHEMA_EXAMPLES raises it.
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "6"))
OPERATIONS = """GET /health; GET /metrics; GET /version; GET /v1/models; GET /v1/models/{name}; POST /tokenize;
POST /detokenize; POST /v1/completions; POST /infill; POST /v1/chat/completions; POST /v1/embeddings; POST /v1/rerank;
POST /v1/score; POST /v1/responses; POST /v1/messages; POST /v1/messages/count_tokens""".replace("\n", " ").split("; ")
# Their requests are translated to chats; their descriptions do not repeat the limits of chats.
TRANSLATED = {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
# Refusals that a schema cannot express. Any other valid request must succeed.
NOT_TOLD = [
    # one field and another
    "stream_options is given, but stream is not true",
    "top_logprobs is given, but logprobs is not true",
    "max_tokens and max_completion_tokens differ",
    "prompt_logprobs is given, but a stream has none",
    "continue_final_message continues the last message; set add_generation_prompt to false",
    "tool_choice is .*, but there are no tools",
    "tool_choice names ",
    "an answer has one constraint",
    "suffix is given with echo",
    "filters act in the order",
    r"(itl|ttft)_goal of a request is",
    "structured_outputs is empty",
    "reasoning_effort is .* has no variable for it",
    "max_tokens is 0, which requires echo",
    r"n is \d+ and temperature 0: all samples would be the same",
    r"n: \d+ completions are too many for one request",  # n for each prompt
    r"there are \d+ queries and \d+ documents",
    "instruction and template belong to method='yes_no'",
    r"dimensions is \d+; the model's embeddings have",
    r"min_tokens is \d+, above max_tokens",
    r"min_tokens is \d+, but behind a prompt of",
    "no token is left to draw",  # allowed_token_ids against stop_token_ids with min_tokens, or bad_words
    # text and tokens, templates and texts that hold JSON
    "which leaves no room for a new one within max_model_len",
    r"bad_words holds .* no tokens",
    r"tool_calls\[\d+\].function.arguments: the arguments of .* are not valid JSON",
    "half of a surrogate pair",
    "it is nested too deeply",
    # known to the model, the server's hosts and a decoder alone
    "this engine reads text alone",
    "is not fetched: its host is not one of",
    "an image's data URL is no base64",
    "the chat template refuses this conversation: continue_final_message",  # where no text is last
    # known to the compiler alone
    "structured_output",
]


@pytest.fixture(scope="module")
def running():
    limits = {"max_prompts": 4, "max_samples": 4, "max_logprobs": 5, "request_timeout": 2.0}
    tokenizer = code_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    with pytest.MonkeyPatch.context() as patch, serving(limits, model=model, tokenizer=tokenizer) as running:
        patch.setattr(scores, "ANSWERS", ("y", "n"))  # which the tiny tokenizer has tokens for
        yield running


@pytest.fixture(scope="module")
def described(running):
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


def test_every_endpoint_is_described(described):
    found = [operation.ok() for operation in described.get_all_operations()]
    assert sorted(f"{operation.method.upper()} {operation.path}" for operation in found) == sorted(OPERATIONS)


def in_whole_numbers(value):
    """Write 256.0 as 256: JSON Schema counts it as an integer, the server does not."""
    match value:
        case float() if value.is_integer():
            return min(int(value), MAX_SEED)  # a float cannot hold MAX_SEED exactly
        case int() if value == float(MAX_SEED):  # nor a maximum that a generator rounded to one
            return MAX_SEED
        case list():
            return [in_whole_numbers(item) for item in value]
        case dict():
            return {name: in_whole_numbers(item) for name, item in value.items()}
    return value


@strategies.composite
def built(draw, cases):
    try:
        return draw(cases)
    except InvalidSchema:  # of the generator's: now and then it chooses an array that it cannot build
        reject()


def is_told(answer):
    """Whether the schema could express an error."""
    message = answer.json()["error"]["message"]
    return answer.status_code != 400 or not any(re.search(reason, message) for reason in NOT_TOLD)


@pytest.mark.costly
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_the_description_allows_succeeds_and_nothing_is_a_server_error(described, operation, mode):
    method, path = operation.split()
    operation = described[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("it takes nothing that could be wrong")
    statuses = Counter()

    @given(built(operation.as_strategy(generation_mode=mode)))
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def answers(case):
        if mode is GenerationMode.POSITIVE:
            case.body = in_whole_numbers(case.body)
        response = case.call(timeout=30.0)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        # A timeout may be tiny.
        if mode is GenerationMode.POSITIVE and response.status_code not in (200, 408) and path not in TRANSLATED:
            assert not is_told(response), (response.text, case.body)

    answers()
    assert max(statuses) < 500
    if mode is GenerationMode.POSITIVE and path not in TRANSLATED:
        assert statuses[200] > 0
    print(path, mode, dict(statuses))
