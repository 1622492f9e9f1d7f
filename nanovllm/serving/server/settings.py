"""`ServerSettings`, the server's options: validated on construction, immutable. `EngineConfig` has the engine's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.config import (
    MAX_PRIORITY,
    NOT_SET,
    check_fields,
    documented,
    integer,
    matching,
    one_of,
    option,
    real,
    strings,
)
from nanovllm.features.option_checks import named_values, utf8

AdapterName = str  # its flag takes NAME=PATH
MAX_SECONDS = 86400.0  # upper bound of timeouts with a timer
# Engine defaults of a server: an unbounded queue would grow with its clients, and streams would wait for long prompts.
ENGINE_DEFAULTS: dict[str, Any] = {"max_queue": 1024, "itl_goal": "auto"}
TOOL_FORMATS = (
    "auto", "hermes", "llama", "mistral", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2",
    "cohere", "gemma4", "qwen_xml", "seed", "glm", "minimax_m2", "harmony", "none",
)  # fmt: skip
LOG_LEVELS = ("debug", "info", "warning", "error")
REASONING_FORMATS = ("auto", "think", "mistral", "seed", "kimi", "cohere", "gemma4", "harmony", "none")


def with_defaults(engine_options: dict[str, Any]) -> dict[str, Any]:
    """Engine options of a server; a token budget that is set, or a policy that is one, needs no goal."""
    has_budget = "max_num_batched_tokens" in engine_options or "budget" in (engine_options.get("policies") or ())
    defaults = {name: value for name, value in ENGINE_DEFAULTS.items() if name != "itl_goal" or not has_budget}
    return defaults | engine_options


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be a non-empty string, not {value!r}.")
    return value


def _names(name: str, value: Any) -> tuple[str, ...]:
    return () if value is None else strings(name, value, "Give names as text.")


def _folders(name: str, value: Any) -> Mapping[str, str]:
    return {key: _name(f"{name} {key}", path) for key, path in named_values(name, value).items()}


def _address(name: str, value: Any) -> str:
    if value is None:
        raise TypeError(f"{name} must be an address, such as 127.0.0.1, not None.")
    return _name(name, value)


def _keys(name: str, value: Any) -> tuple[str, ...]:
    """Check like `strings`, without values in errors: keys must not appear in a log."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    keys = tuple(value) if is_list else (None,)  # a copy, since the check exhausts an iterator
    if not all(isinstance(key, str) and key for key in keys):
        raise TypeError(f"{name} must hold strings that are not empty.")
    return keys


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Options of one server."""

    host: str = option(
        "127.0.0.1", "address to listen on; only a loopback address keeps other machines out.", check=_address
    )
    port: int = option(8000, "port to listen on; 0 takes a free one.", check=partial(integer, low=0, high=65535))
    served_model_name: tuple[str, ...] = option(
        (),
        "name of the model in requests and answers, or several: answers have the first; may be repeated. Not "
        "set: the last part of its path.",
        check=_names,
    )
    adapter: dict[AdapterName, str] | None = option(
        None,
        "LoRA adapter that is loaded at the start, such as summaries=/srv/adapters/summaries: its name, which requests "
        "give as the model, and its folder; may be repeated.",
        check=_folders,
    )
    adapter_folder: str | None = option(
        None,
        "folder with adapters in folders of their own, which requests may load and unload at /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter. Not set: none.",
    )
    allow_weight_updates: bool = option(
        False,
        "let requests pause the engine, send it to sleep and replace its weights, at /pause, /sleep and "
        "/update_weights; needs an API key.",
    )
    weights_folder: str | None = option(
        None,
        "folder with safetensors files in folders of their own, which /update_weights may read. Not set: none.",
    )
    any_model_name: bool = option(False, "answer requests for every model name.")
    api_key: tuple[str, ...] = option(
        (),
        'key that requests must send as "Authorization: Bearer KEY"; may be repeated. Other users can read the '
        "command line: prefer NANOVLLM_API_KEY or api_key_file.",
        repr=False,
        check=_keys,
    )
    api_key_file: str | None = option(
        None,
        'file with one key a line; empty lines and lines that begin with # are ignored. What follows " #" is the '
        "key's name in logs and metrics, else key-1, key-2 and so on.",
    )
    cache_salt_per_key: bool = option(False, "share cached prefixes only among requests with the same API key.")
    client_header: str | None = option(
        None,
        "request header that names the client, whose requests get one share, such as x-client-id. Any caller can set "
        "it: use it behind a gateway that does. Not set: the API key is the client.",
        check=partial(matching, pattern=r"[A-Za-z0-9-]+", expected="the name of a header, such as 'x-client-id'"),
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "web origin whose pages may call the server, such as https://example.org; may be repeated.",
        check=partial(strings, remedy="Give origins as text."),
    )
    max_connections: int = option(
        4096,
        "maximum number of open sockets; beyond it the one that waited longest for its request is closed, or a new one "
        "gets 503 if all have answers to send; /health is answered in any case.",
    )
    max_header_bytes: int = option(
        65536, "maximum size of a request's line and headers in bytes, trailers included; 431 above it."
    )
    max_headers: int = option(100, "maximum number of headers of a request, trailers included; 431 above it.")
    header_timeout: float = option(
        10.0, "seconds from the connection, or a request's first byte, to the end of its headers; 408 after it."
    )
    body_timeout: float = option(60.0, "seconds from the end of the headers to the end of the body; 408 after it.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "accepted name in the Host header, beside the loopback names; may be repeated; * accepts any. Not set: any, "
        "unless host is a loopback address.",
        check=partial(strings, remedy="Give host names as text."),
    )
    allowed_media_hosts: tuple[str, ...] = option(
        (),
        "host from which pictures are fetched that a request names by an http or https address; may be repeated. Not "
        "set: data URLs alone.",
        check=partial(strings, remedy="Give host names as text."),
    )
    min_priority: int = option(
        0,
        "smallest, that is most urgent, priority that a request may set.",
        check=partial(integer, low=-MAX_PRIORITY, high=MAX_PRIORITY),
    )
    max_body_bytes: int = option(8 * 2**20, "maximum size of a request body in bytes.")
    max_client_bytes: int = option(
        2**28, "maximum size in bytes of the bodies of all open requests of one client; 429 above it."
    )
    max_body_items: int = option(
        65536,
        "maximum number of strings, arrays and objects in a body, and of fractions, booleans and nulls, beside 2 per "
        "prompt of max_prompts; token ids are bounded by max_prompts prompts of max_model_len.",
    )
    max_messages: int = option(4096, "maximum number of messages in a conversation.")
    max_tools: int = option(512, "maximum number of tools in a request.")
    max_word_chars: int = option(
        16384, "maximum number of characters in all stop strings of a request, and in all its bad_words."
    )
    max_prompts: int = option(128, "maximum number of prompts in a request.")
    max_prompt_chars: int | None = option(
        None,
        "maximum length of a prompt in characters, checked before tokenization; for a conversation the length of the "
        "chat template's input as JSON. Not set: 32 per token of max_model_len.",
    )
    max_samples: int = option(128, "maximum number of completions of a request, prompts x n.")
    max_logprobs: int = option(
        20, "maximum value of logprobs and top_logprobs in a request.", check=partial(integer, low=0)
    )
    request_timeout: float | None = option(
        None,
        "seconds after which a request ends with its text so far. Not set: no limit.",
        check=partial(real, low=1e-3, high=math.inf),
    )
    send_timeout: float = option(60.0, "seconds after which a client that does not read its stream is disconnected.")
    keep_alive_interval: float = option(
        15.0, "seconds without an event after which a stream sends a comment, which keeps proxies from closing it."
    )
    stall_timeout: float = option(
        120.0, "seconds without the end of a step, while requests run, after which /health returns 503."
    )
    drain_timeout: float = option(
        30.0,
        "seconds for open requests to finish after SIGTERM or SIGINT.",
        check=partial(real, low=0.0, high=math.inf),
    )
    tool_format: str = option(
        "auto",
        "format of the model's tool calls: hermes (also Qwen), llama, mistral, qwen_xml, seed, glm, harmony "
        "(gpt-oss), none (tool calls stay text), or auto (detected from the chat template).",
        check=partial(one_of, choices=TOOL_FORMATS),
    )
    reasoning_format: str = option(
        "auto",
        "markers of the model's thought: think, mistral, seed, kimi, cohere, harmony, none (thought stays content), "
        "or auto (detected from the chat template).",
        check=partial(one_of, choices=REASONING_FORMATS),
    )
    unknown_fields: str = option(
        "refuse",
        "what happens to fields of a request that are not known: refuse, or warn (ignored, and logged once each).",
        check=partial(one_of, choices=("refuse", "warn")),
    )
    open_objects: bool = option(
        False,
        "let objects of a json_schema, and of Ollama's format, have further properties unless the schema forbids them, "
        "as the standard does; off, they have those that it names. A request's open_objects comes first.",
    )
    store_responses: int = option(
        0,
        "number of answers of /v1/responses whose conversations are kept in memory, for previous_response_id; 0 keeps "
        "none.",
        check=partial(integer, low=0),
    )
    store_bytes: int = option(2**28, "size of all kept conversations in bytes, above which the oldest are dropped.")
    engine_process: bool = option(
        NOT_SET,
        "run the engine in a process of its own: it does not wait for the server's work, and is started again if it "
        "dies, while its requests go on. Default: on with one GPU, else off.",
    )
    log_prompts: bool = option(False, "log prompts and messages.")
    access_log: bool = option(
        True, "log a line per request: time, client, status, duration, the key's name, x-request-id."
    )
    log_format: str = option(
        "text", "form of the log: text, or json for an object a line.", check=partial(one_of, choices=("text", "json"))
    )
    log_level: str = option(
        "info",
        "least severe lines of the log: debug, info, warning or error; lines of requests are info.",
        check=partial(one_of, choices=LOG_LEVELS),
    )
    ssl_certfile: str | None = option(
        None, "PEM file with the server's certificate, and those between it and a known one: HTTPS instead of HTTP."
    )
    ssl_keyfile: str | None = option(None, "PEM file with the certificate's private key, without a password.")
    root_path: str = option(
        "",
        "path below which a reverse proxy serves this server, such as /llm; the proxy may remove it or not.",
        check=partial(matching, pattern=r"(/[\w.~-]+)*", expected="a path without a slash at its end, such as '/llm'"),
    )
    otlp_traces_endpoint: str | None = option(
        None, "URL that spans of requests are sent to, such as http://localhost:4318/v1/traces; needs nanovllm[otel]."
    )
    record: str | None = option(
        None,
        "append arrivals, lengths and hashed prefixes of all requests, without text, to this file, which nanovllm "
        "tune and simulate read as --trace.",
    )
    record_max_bytes: int = option(
        2**28, "size in bytes above which the record is renamed to FILE.1, in place of an older one, and begun anew."
    )
    ui: bool = option(True, "serve the live view at /.")

    def __post_init__(self) -> None:
        check_fields(self, {"str": _name, "float": partial(real, low=1e-2, high=MAX_SECONDS)})
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, missing = sorted(("ssl_certfile", "ssl_keyfile"), key=lambda name: getattr(self, name) is None)
            raise ValueError(f"{given} is set, but {missing} is not. HTTPS needs both.")
        if self.cache_salt_per_key and not (self.api_key or self.api_key_file):
            raise ValueError("cache_salt_per_key is set, but no API key is. Set api_key or api_key_file.")
        if self.allow_weight_updates and not (self.api_key or self.api_key_file):
            raise ValueError(
                "allow_weight_updates is set, but no API key is: anybody could replace the model. Set api_key or "
                "api_key_file."
            )
        if self.weights_folder is not None and not self.allow_weight_updates:
            raise ValueError("weights_folder is set, but allow_weight_updates is not. Set both.")

    def api_keys(self) -> tuple[str, ...]:
        """Return the accepted keys, from options and file; empty if no key is required."""
        if self.api_key_file is None:
            return self.api_key
        return (*self.api_key, *self._read_keys())

    def key_names(self) -> dict[str, str]:
        """Return the file's names of keys, for logs and metrics."""
        named = {} if self.api_key_file is None else self._read_keys()
        return {key: name for key, name in named.items() if name}

    def _read_keys(self) -> dict[str, str]:
        """Keys of the file with their names, empty without a name."""
        path = Path(str(self.api_key_file))
        lines = utf8(f"api_key_file {path}", path.read_bytes()).splitlines()
        parts = [line.partition(" #") for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not parts:
            raise ValueError(f"api_key_file {self.api_key_file} holds no key; write one key a line.")
        return {key.strip(): name.strip() for key, _, name in parts}


def cache_salt(key: str) -> str:
    """Return the cache salt of a key's requests: a one-way hash of the key."""
    return hashlib.sha256(b"nanovllm cache salt\0" + key.encode()).hexdigest()


def request_salt(settings: ServerSettings, key: str | None, own: str) -> str:
    """Prefix the client's salt with its key's salt under cache_salt_per_key."""
    return own if key is None or not settings.cache_salt_per_key else f"{cache_salt(key)}:{own}"
