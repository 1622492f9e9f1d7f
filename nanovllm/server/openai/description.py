"""The server's description of itself (/openapi.json), with the limits of this very engine and these settings.

Ranges are checked where they belong, by `SamplingParams`, the engine and `ServerState`; here they are told, so that
what the description calls valid is valid. What it does not tell are relations between fields, such as top_logprobs,
which wants logprobs, and what only the tokenizer or the chat template knows.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from nanovllm.sampling_params import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, MIN_TEMPERATURE
from nanovllm.server.openai.protocol import NOT_FOR_TEMPLATES
from nanovllm.server.state import ServerState
from nanovllm.validation import MAX_PRIORITY

Schema = dict[str, Any]


def describe(app: FastAPI, state: ServerState) -> None:
    """Put a server's limits into its app's description."""
    generate = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            schema = generate()
            (name,) = schema["paths"]["/v1/models/{name}"]["get"]["parameters"]
            name["schema"]["enum"] = [state.model_name]
            models = schema["components"]["schemas"]
            for model, limits in _limits(state).items():
                for field, limit in limits.items():
                    _narrow(models[model]["properties"][field], limit)
            _tell_prompt_from_messages(models["TokenizeRequest"])
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _narrow(field: Schema, limit: Schema) -> None:
    """A keyword of JSON Schema speaks of values of one type alone, so it may stand beside the types of a field."""
    if "anyOf" in limit:
        del field["anyOf"]
    field |= limit


def _limits(state: ServerState) -> dict[str, dict[str, Schema]]:
    """For each model of a body, what its fields may hold beside their types."""
    settings, config = state.settings, state.engine.config
    token = {"type": "integer", "minimum": 0, "maximum": state.engine.vocab_size - 1}
    text = {"type": "string", "minLength": 1, "maxLength": state.max_prompt_chars}
    null = {"type": "null"}
    model = {"enum": [state.model_name, None]}
    positive = {"minimum": 1}
    sampling: dict[str, Schema] = {
        "model": model,
        "n": {"minimum": 1, "maximum": state.max_samples},
        "temperature": {"anyOf": [{"const": 0}, {"type": "number", "minimum": MIN_TEMPERATURE}, null]},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "top_k": {"minimum": -1},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
        "min_tokens": {"minimum": 0, "maximum": config.max_model_len - 1},
        "truncate_prompt_tokens": positive,
        "stop": {"minLength": 1, "items": {"type": "string", "minLength": 1}},
        "bad_words": {"items": {"type": "string", "pattern": r"\S"}},
        "stop_token_ids": {"items": token},
        "allowed_token_ids": {"items": token, "maxItems": state.engine.vocab_size},
        "logit_bias": {
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "propertyNames": {"pattern": f"^(?:{_below(state.engine.vocab_size)})$"},
        },
        "priority": {"minimum": settings.min_priority, "maximum": MAX_PRIORITY},
        "timeout": {"exclusiveMinimum": 0},
    }
    several = {"type": "array", "minItems": 1, "maxItems": settings.max_prompts}
    token_ids = {"type": "array", "minItems": 1, "items": token}
    prompts = [text, token_ids, {**several, "items": text}, {**several, "items": token_ids}]
    conversation = {"messages": {"maxItems": settings.max_messages}, "tools": {"maxItems": settings.max_tools}}
    tokenizer = state.engine.tokenizer
    num_known = 0 if tokenizer is None else len(tokenizer)
    return {
        "CompletionRequest": sampling | {"prompt": {"anyOf": prompts}, "logprobs": {"maximum": settings.max_logprobs}},
        "ChatRequest": sampling
        | {
            **conversation,
            "max_tokens": positive,
            "max_completion_tokens": positive,
            "top_logprobs": {"maximum": settings.max_logprobs},
            "tool_choice": {"enum": [None, "auto", "none"]},
            "chat_template_kwargs": {"propertyNames": {"not": {"enum": sorted(NOT_FOR_TEMPLATES)}}},
        },
        "Function": {"strict": {"enum": [None, False]}},
        "TokenizeRequest": {
            "model": model,
            "prompt": {"minLength": 1, "maxLength": state.max_prompt_chars},
            **conversation,
        },
        "DetokenizeRequest": {
            "model": model,
            "tokens": {"items": {**token, "maximum": num_known - 1}, "maxItems": config.max_model_len},
        },
    }


def _tell_prompt_from_messages(tokenize: Schema) -> None:
    """One of the two, and tools with messages only."""
    none = {"type": "null"}
    tokenize["oneOf"] = [
        {
            "required": ["prompt"],
            "properties": {"prompt": {"type": "string"}, "messages": none, "tools": {"enum": [None, []]}},
        },
        {"required": ["messages"], "properties": {"prompt": none, "messages": {"type": "array"}}},
    ]


def _below(limit: int) -> str:
    """A pattern of the decimal numbers below a limit."""
    last = str(limit - 1)
    forms = [f"[0-9]{{1,{len(last) - 1}}}"] if len(last) > 1 else []
    for place, digit in enumerate(last):
        if digit != "0":
            forms.append(f"{last[:place]}[0-{int(digit) - 1}][0-9]{{{len(last) - place - 1}}}")
    return "|".join([*forms, last])
