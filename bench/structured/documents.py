"""Sampled documents of random schemas, each validated by `jsonschema`: none that ended by itself may be invalid.

    python bench/structured/documents.py [--model FOLDER] [--documents 10000] [--schemas 200] [--suite PATH] [--overlap]

With --suite the schemas are those of the JSON Schema Test Suite at PATH (see `suite.py`) that the engine takes. Prints
one line of JSON; exits with 1 if a document is invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from suite import documents as documents_of_suite

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.requests.grammar.compiler import check_form

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5},
    {"top_p": 0.9},
    {"repetition_penalty": 1.1},
    {"temperature": 0},
]


def schema(choice: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose documents are short: strings, arrays and objects are bounded."""
    kinds = ["string", "pattern", "integer", "number", "boolean", "enum", "const", "null", "any of"]
    kind = choice.choice(kinds + ["array", "object"] * 4 * (depth < 3)) if depth else "object"
    if kind == "string":
        low = choice.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + choice.randrange(8)}
    if kind == "pattern":
        return {"type": "string", "pattern": choice.choice(["^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "^(yes|no)!?$"])}
    if kind in ("integer", "number"):
        low = choice.randrange(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + choice.randrange(1, 1000)}
    if kind == "enum":
        return {"enum": choice.sample(["red", "grün", 1, 2.5, None, True, [1, "a"]], choice.randint(1, 4))}
    if kind == "const":
        return {"const": choice.choice(["x", 7, {"a": [1]}, "\n\t\"'"])}
    if kind == "any of":
        return {"anyOf": [schema(choice, depth + 1) for _ in range(2)]}
    if kind == "array":
        low = choice.randrange(3)
        return {"type": "array", "items": schema(choice, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = choice.sample(["id", "name", "größe", "a b", "tags", "x-y", "z"], choice.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: schema(choice, depth + 1) for name in names},
            "required": choice.sample(names, choice.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


def schemas_of_suite(folder: Path) -> list[dict[str, Any]]:
    """Objects that the compiler takes, which refuses the others by name, and that `jsonschema` can check; each once."""
    found = {}
    for _, one, document, _, _ in documents_of_suite(folder):
        if not isinstance(one, dict):
            continue
        try:
            check_form(StructuredOutput(json_schema=one))
            jsonschema.validate(document, one)
        except jsonschema.ValidationError:
            pass
        except (TypeError, ValueError, jsonschema.SchemaError):  # such as a pattern that Python's `re` does not know
            continue
        found[json.dumps(one)] = one
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--suite", type=Path, help="take the schemas of the JSON Schema Test Suite in this folder")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--overlap", action="store_true")
    options = parser.parse_args()
    choice = random.Random(0)
    if options.suite is not None:
        given = schemas_of_suite(options.suite)
    else:
        given = [schema(choice) for _ in range(options.schemas)]
    schemas = [one | {"x-guidance": {"whitespace_flexible": False}} for one in given]
    chosen = [schemas[number % len(schemas)] for number in range(options.documents)]
    params = [
        SamplingParams(
            seed=number, max_tokens=options.max_tokens, structured_output=StructuredOutput(json_schema=one),
            **choice.choice(OPTIONS),
        )
        for number, one in enumerate(chosen)
    ]  # fmt: skip
    ends: Counter[str] = Counter()
    begin = time.monotonic()
    with LLM(options.model, overlap=options.overlap, max_model_len=512) as llm:
        outputs = llm.generate([[20 + n % 200, 40 + n % 31] for n in range(options.documents)], params)
    for one, output in zip(chosen, outputs, strict=True):
        completion = output.outputs[0]
        ends[completion.finish_reason or ""] += 1
        if completion.finish_reason != "stop":
            continue
        try:
            jsonschema.validate(json.loads(completion.text), one)
        except ValueError as error:  # of either library
            ends["invalid"] += 1
            print(json.dumps(one), repr(completion.text), error, file=sys.stderr)
        except jsonschema.ValidationError as error:
            ends["invalid"] += 1
            print(json.dumps(one), repr(completion.text), error.message, file=sys.stderr)
    seconds = round(time.monotonic() - begin, 1)
    counts = {"documents": options.documents, "schemas": len(schemas)}
    print(json.dumps(counts | {"ends": dict(ends), "seconds": seconds, "model": options.model}))
    return int(ends["invalid"] > 0)


if __name__ == "__main__":
    sys.exit(main())
