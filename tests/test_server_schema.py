"""Whatever the server's own description allows, and what it does not: an answer, and never a 500."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving import Serving, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# As many as fit into some seconds; more with the environment's SCHEMA_EXAMPLES.
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "6"))
OPERATIONS = [
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/version", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
]


@pytest.fixture(scope="module")
def running() -> Iterator[Serving]:
    with serving({"request_timeout": 2.0, "max_prompts": 4, "max_samples": 4, "max_logprobs": 5}) as running:
        yield running


@pytest.fixture(scope="module")
def described(running):
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


def test_every_endpoint_is_described(described):
    found = [operation.ok() for operation in described.get_all_operations()]
    assert sorted((operation.path, operation.method.upper()) for operation in found) == sorted(OPERATIONS)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_is_answered_by_a_server_error_or_outside_of_the_description(described, path, method, mode):
    operation = described[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("it takes nothing that could be wrong")
    statuses: Counter[int] = Counter()

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def answers(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # which would be another than is served
        response = case.call(timeout=30.0)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    answers()
    assert max(statuses) < 500
    print(path, mode, dict(statuses))
