"""OpenAPI schema (/openapi.json) with the limits of the running engine and the server's settings.

`SamplingParams`, the engine and `ServerState` check the ranges; the schema repeats them, so that it accepts valid
requests only. It omits relations between fields, such as top_logprobs requiring logprobs, and the limits of tokenizer
and chat template.
"""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI

from nanovllm.config import MAX_PRIORITY
from nanovllm.features.chat.chat import NOT_FOR_TEMPLATES
from nanovllm.features.sampling_params import CHECKS
from nanovllm.sampling_params import MIN_TEMPERATURE
from nanovllm.serving.server.openai import embeddings
from nanovllm.serving.server.openai.protocol import PLAIN_OPTIONS
from nanovllm.serving.server.state import ServerState

Schema = dict[str, Any]


def describe(app: FastAPI, state: ServerState) -> None:
    """Add a server's limits to its app's OpenAPI schema."""
    generate = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            schema = generate()
            (name,) = schema["paths"]["/v1/models/{name}"]["get"]["parameters"]
            if not state.settings.any_model_name:
                name["schema"]["enum"] = [*state.names]
            models = schema["components"]["schemas"]
            for model, limits in (_limits(state) | embeddings.limits(state)).items():
                for field, limit in limits.items():
                    _narrow(models[model]["properties"][field], limit)
            _require_prompt_or_messages(models["TokenizeRequest"])
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _narrow(field: Schema, limit: Schema) -> None:
    """Add keywords to a field's schema; each applies to one type only, so a union keeps its other types."""
    if "anyOf" in limit:
        del field["anyOf"]
    field |= limit


def _limits(state: ServerState) -> dict[str, dict[str, Schema]]:
    """Return the limits of each request model's fields."""
    settings = state.settings
    config = state.engine.config
    token = _token(state.engine.vocab_size)
    sampling = _sampling_limits(state)
    text = {"type": "string", "minLength": 1, "maxLength": state.max_prompt_chars}
    several = {"type": "array", "minItems": 1, "maxItems": settings.max_prompts}
    token_ids = {"type": "array", "minItems": 1, "items": token}
    prompts = [text, token_ids, {**several, "items": text}, {**several, "items": token_ids}]
    model = sampling["model"]
    positive = {"minimum": 1}
    conversation = {"messages": {"maxItems": settings.max_messages}, "tools": {"maxItems": settings.max_tools}}
    tokenizer = state.engine.tokenizer
    num_known = 0 if tokenizer is None else len(tokenizer)
    return {
        "CompletionRequest": sampling | {"prompt": {"anyOf": prompts}, "logprobs": {"maximum": settings.max_logprobs}},
        "InfillRequest": sampling | {"n": {"minimum": 1, "maximum": 1}},
        "ChatRequest": sampling
        | {
            **conversation,
            "max_tokens": positive,
            "max_completion_tokens": positive,
            "top_logprobs": {"maximum": settings.max_logprobs},
            "prompt_logprobs": {"maximum": settings.max_logprobs},
            "chat_template_kwargs": {"propertyNames": _variables(state)},
        },
        "TokenizeRequest": {
            "model": model,
            "prompt": {"minLength": 1, "maxLength": state.max_prompt_chars},
            **conversation,
            "chat_template_kwargs": {"propertyNames": _variables(state)},
        },
        "DetokenizeRequest": {
            "model": model,
            "tokens": {"items": {**token, "maximum": num_known - 1}, "maxItems": config.max_model_len},
        },
    }


def model_limit(state: ServerState) -> Schema:
    """Return the limit of the field `model`."""
    return {} if state.settings.any_model_name else {"enum": [*state.names, None]}


def _variables(state: ServerState) -> Schema:
    """Return a schema of the names that chat_template_kwargs may have."""
    if state.template_variables is None:
        return {"not": {"enum": sorted(NOT_FOR_TEMPLATES)}}
    names = sorted(state.template_variables - NOT_FOR_TEMPLATES)
    return {"enum": names} if names else {"not": {}}


def _token(limit: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": limit - 1}


def _sampling_limits(state: ServerState) -> dict[str, Schema]:
    """Return the limits of the fields that both generating endpoints share."""
    settings = state.settings
    config = state.engine.config
    num_logits = state.engine.num_logits
    token = _token(num_logits)
    null = {"type": "null"}
    return {
        "model": model_limit(state),
        **{name: _range(CHECKS[name]) for name in PLAIN_OPTIONS},
        "n": {"minimum": 1, "maximum": state.max_samples},
        "temperature": {"anyOf": [{"const": 0}, {"type": "number", "minimum": MIN_TEMPERATURE}, null]},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "min_tokens": {"minimum": 0, "maximum": config.max_model_len - 1},
        "stop": {"minLength": 1, "items": {"type": "string", "minLength": 1}},
        "bad_words": {"items": {"type": "string", "pattern": r"\S"}},
        "stop_token_ids": {"items": token},
        "allowed_token_ids": {"items": token, "maxItems": num_logits},
        "logit_bias": {
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "propertyNames": {"pattern": f"^(?:{_below(num_logits)})$"},
        },
        "truncate_prompt_tokens": {"minimum": -1, "maximum": 2**63 - 1, "not": {"const": 0}},
        "priority": {"minimum": settings.min_priority, "maximum": MAX_PRIORITY},
        "timeout": {"exclusiveMinimum": 0},
    }


def _range(check: Any) -> Schema:
    """Return the limits of a check of `SamplingParams`."""
    ends = {"minimum": "low", "maximum": "high"}
    limits = getattr(check, "keywords", {})
    return {word: limits[end] for word, end in ends.items() if math.isfinite(limits.get(end, math.inf))}


def _require_prompt_or_messages(tokenize: Schema) -> None:
    """Require exactly one of prompt and messages, and allow the chat template's fields only with messages."""
    none = {"type": "null"}
    of_prompt: Schema = {"tools": {"enum": [None, []]}, "chat_template_kwargs": {"enum": [None, {}]}}
    of_prompt |= {"continue_final_message": {"const": False}, "add_generation_prompt": {"const": True}}
    of_prompt |= {"prompt": {"type": "string"}, "messages": none}
    of_messages: Schema = {"prompt": none, "messages": {"type": "array"}, "add_special_tokens": {"enum": [None, False]}}
    tokenize["oneOf"] = [
        {"required": ["prompt"], "properties": of_prompt},
        {"required": ["messages"], "properties": of_messages},
    ]


def _below(limit: int) -> str:
    """Return a regular expression for the decimal numbers below a limit."""
    last = str(limit - 1)
    forms = [f"[0-9]{{1,{len(last) - 1}}}"] if len(last) > 1 else []
    for index, digit in enumerate(last):
        if digit != "0":
            forms.append(f"{last[:index]}[0-{int(digit) - 1}][0-9]{{{len(last) - index - 1}}}")
    return "|".join([*forms, last])
