"""Fields that requests may have and that cannot change an answer here: a table for each API, with the reason.

Any value passes: the field is dropped before validation, and logged once. `Strict.hints` of a request model holds the
fields of its place in the body, "" for the body itself. docs/guide/clients.md shows the tables to users.
"""

from __future__ import annotations

from collections.abc import Mapping

Hints = Mapping[str, Mapping[str, str]]  # place of a field -> field -> why it has no effect

_ONE_PLACE = "there is one engine, and one way to run it"
_CACHED = "every prompt's prefix is cached"
_SHOWN = "every tool is shown to the model"
_NO_PLACE = "chat templates have no place for it"
_ONE_CALLER = "tools are called by the model alone"
_NOT_STORED = "requests are not kept by it"
_OFF = "it belongs to a filter or penalty that is off"
_SPEED = "it changes the speed of an answer alone"
_LOADED = "the model is loaded already"

OPENAI: Hints = {
    "": {
        "user": _NOT_STORED,
        "metadata": _NOT_STORED,
        "store": _NOT_STORED,
        "safety_identifier": _NOT_STORED,
        "request_id": "x-request-id names a request in the log",
        "service_tier": _ONE_PLACE,
        "prompt_cache_key": _CACHED,
        "prompt_cache_retention": _CACHED,
        "prompt_cache_options": _CACHED,
        "cache_prompt": _CACHED,
        "id_slot": "there are no slots: prefixes are found by their content",
        "n_keep": "a prompt is taken whole",
        "n_discard": "a prompt is taken whole",
        "verbosity": _NO_PLACE,
        "prediction": _SPEED,
        "speculative.n_max": _SPEED,
        "speculative.n_min": _SPEED,
        "speculative.p_min": _SPEED,
        "keep_alive": "a server keeps its one model",
        "guided_decoding_backend": "there is one",
        "xtc_threshold": _OFF,
        "dynatemp_exponent": _OFF,
        "mirostat_tau": _OFF,
        "mirostat_eta": _OFF,
        "dry_base": _OFF,
        "dry_allowed_length": _OFF,
        "dry_penalty_last_n": _OFF,
        "dry_sequence_breakers": _OFF,
    },
    "stream_options": {
        "include_obfuscation": "no event is padded",
    },
    "messages[]": {
        "cache_control": _CACHED,
        "annotations": "sources of an earlier answer are no part of its text",
        "provider_specific_fields": "they belong to another server",
    },
    "messages[].content[]": {
        "cache_control": _CACHED,
        "prompt_cache_breakpoint": _CACHED,
    },
    "response_format.json_schema": {
        "strict": "an answer always matches",
    },
    "messages[].tool_calls[]": {
        "index": "calls are taken in their order",
    },
    "tools[]": {
        "cache_control": _CACHED,
        "defer_loading": _SHOWN,
        "input_examples": _NO_PLACE,
        "eager_input_streaming": "it says how a call arrives",
    },
}
RESPONSES: Hints = {
    "": {
        "service_tier": _ONE_PLACE,
        "max_tool_calls": "tools are called by the client",
        "prompt_cache_retention": _CACHED,
        "prompt_cache_options": _CACHED,
        "client_metadata": _NOT_STORED,
    },
    "text": {
        "verbosity": _NO_PLACE,
    },
    "reasoning": {
        "summary": "thought is shown whole",
        "generate_summary": "thought is shown whole",
    },
    "stream_options": {
        "include_obfuscation": "no event is padded",
    },
    "input[]": {
        "phase": _NO_PLACE,
        "caller": _ONE_CALLER,
    },
    "input[].content[]": {
        "annotations": "sources of an earlier answer are no part of its text",
        "logprobs": "they are no part of its text",
        "prompt_cache_breakpoint": _CACHED,
    },
    "tools[]": {
        "defer_loading": _SHOWN,
        "output_schema": _NO_PLACE,
    },
}
POOLING: Hints = {
    "": {
        "user": _NOT_STORED,
        "request_id": "x-request-id names a request in the log",
    },
}
ANTHROPIC: Hints = {
    "": {
        "cache_control": _CACHED,
        "metadata": _NOT_STORED,
        "service_tier": _ONE_PLACE,
        "speed": _ONE_PLACE,
        "inference_geo": _ONE_PLACE,
        "diagnostics": "there are none",
        "user_profile_id": "there are no profiles",
        "workspace_id": "there are no workspaces",
        "billing_policy": "nothing is billed",
        "fallbacks": "there is no other model",
        "fallback_credit_token": "there is no other model",
    },
    "thinking": {
        "display": "thought is shown whole",
        "block_binding": "thought is taken from any answer",
    },
    "messages[].content[]": {
        "cache_control": _CACHED,
        "citations": "they are no part of the text",
        "caller": _ONE_CALLER,
        "toolset_name": "there are no toolsets",
        "signature": "thought is taken from any answer",
    },
    "tools[]": {
        "cache_control": _CACHED,
        "defer_loading": _SHOWN,
        "input_examples": _NO_PLACE,
        "eager_input_streaming": "it says how a call arrives",
    },
}
OLLAMA: Hints = {
    "": {
        "keep_alive": "a server keeps its one model",
        "truncate": "a prompt that is too long is refused",
        "shift": "an answer ends where the context does",
    },
    "options": {
        "repeat_last_n": "penalties count every token",
        "penalize_newline": "penalties count every token",
        "typical_p": "Ollama's own engine leaves it out",
        "tfs_z": "Ollama's own engine leaves it out",
        "mirostat": "Ollama's own engine leaves it out",
        "mirostat_tau": "Ollama's own engine leaves it out",
        "mirostat_eta": "Ollama's own engine leaves it out",
        "num_keep": "a prompt is taken whole",
        "vocab_only": _LOADED,
        "embedding_only": _LOADED,
        "numa": _LOADED,
        "num_batch": _LOADED,
        "num_gpu": _LOADED,
        "main_gpu": _LOADED,
        "low_vram": _LOADED,
        "f16_kv": _LOADED,
        "logits_all": _LOADED,
        "use_mmap": _LOADED,
        "use_mlock": _LOADED,
        "num_thread": _LOADED,
    },
}
