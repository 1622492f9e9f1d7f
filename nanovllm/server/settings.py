"""The server's own options: checked when they are given, frozen afterwards. The engine's are `EngineConfig`'s."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nanovllm.validation import MAX_PRIORITY, integer, real, strings, truth

MAX_SECONDS = 86400.0  # of what is watched by a timer
TOOL_FORMATS = ("auto", "hermes", "llama", "mistral", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Options of one server.

    host: address to listen on; others than the loopback's are reached from outside.
    port: to listen on; 0 takes one that is free.
    served_model_name: the model's name in requests and answers; the last part of its path if not set.
    api_key: a key that requests must bring as "Authorization: Bearer KEY"; give it again for more. Others can read the
        command line, so better the environment's NANOVLLM_API_KEY or api_key_file.
    api_key_file: a file with one key a line; empty lines and those that begin with # do not count.
    cache_salt_per_key: requests share cached prefixes only with those of the same key.
    cors_origin: a web origin whose pages may call the server, such as https://example.org; give it again for more.
    max_connections: open sockets; further ones get 503 and are closed.
    max_header_bytes: bytes of a request's line and headers, trailers included; more get 431.
    max_headers: headers of a request, trailers included; more get 431.
    header_timeout: seconds from a request's first byte, or from the connection, to the end of its headers; then 408.
    body_timeout: seconds from there to the end of its body; then 408.
    allowed_hosts: a name that the Host header of requests may hold, beside those of the loopback; give it again for
        more, or * for any. Not set: any, unless host is the loopback's.
    min_priority: the smallest, that is most urgent, priority that a request may ask for.
    max_body_bytes: the largest body of a request.
    max_body_items: strings, arrays and objects in a body, beside 2 for each of max_prompts; of token ids there may be
        what max_prompts prompts of max_model_len hold.
    max_messages: messages of a conversation.
    max_tools: tools of a request.
    max_word_chars: characters of all stop strings of a request, and of all its bad_words.
    max_prompts: prompts in one request.
    max_prompt_chars: the longest prompt in characters, of a conversation all that its template gets, as JSON; longer
        ones are refused before they are tokenised. Not set: 32 for each token of max_model_len.
    max_samples: completions of one request, prompts times n.
    max_logprobs: the most probable tokens that a request may ask for beside each token.
    request_timeout: seconds after which an answer ends with what there is of it; not set: no limit.
    send_timeout: seconds after which a client that does not read its stream is cut off, as if it had left.
    keep_alive_interval: seconds of silence in a stream after which a comment is sent, for the proxies on the way.
    stall_timeout: seconds without the end of a step, while requests run, after which /health says 503.
    drain_timeout: seconds that open answers are given to end by themselves once the server is told to stop.
    tool_format: how the model writes tool calls: hermes (also Qwen), llama, mistral, none (they stay text), or auto
        (by the chat template).
    log_prompts: write prompts and messages to the log.
    access_log: write a line for each request to the log.
    ui: serve the live view at /.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    cache_salt_per_key: bool = False
    cors_origin: tuple[str, ...] = ()
    max_connections: int = 4096
    max_header_bytes: int = 65536
    max_headers: int = 100
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    allowed_hosts: tuple[str, ...] = ()
    min_priority: int = 0
    max_body_bytes: int = 8 * 2**20
    max_body_items: int = 65536
    max_messages: int = 4096
    max_tools: int = 512
    max_word_chars: int = 16384
    max_prompts: int = 128
    max_prompt_chars: int | None = None
    max_samples: int = 128
    max_logprobs: int = 20
    request_timeout: float | None = None
    send_timeout: float = 60.0
    keep_alive_interval: float = 15.0
    stall_timeout: float = 120.0
    drain_timeout: float = 30.0
    tool_format: str = "auto"
    log_prompts: bool = False
    access_log: bool = True
    ui: bool = True

    def __post_init__(self) -> None:
        for name in ("host", "served_model_name", "api_key_file"):
            value = getattr(self, name)
            if not isinstance(value, str | None) or value == "":
                raise TypeError(f"{name} must be a string that is not empty, not {value!r}.")
        if self.host is None:
            raise TypeError("host must be an address, such as 127.0.0.1, not None.")
        self._set("port", integer("port", self.port, 0, 65535))
        # Their values must not show in a log, so the errors of `strings` will not do.
        is_list = isinstance(self.api_key, Iterable) and not isinstance(self.api_key, str)
        keys = tuple(self.api_key) if is_list else (None,)  # once: an iterator that was checked would be empty after
        if not all(isinstance(key, str) and key for key in keys):
            raise TypeError("api_key must hold strings that are not empty.")
        self._set("api_key", keys)
        self._set("cors_origin", strings("cors_origin", self.cors_origin, "Give origins as text."))
        for name in (
            "max_connections", "max_header_bytes", "max_headers", "max_body_items", "max_messages", "max_tools",
            "max_word_chars",
        ):  # fmt: skip
            self._set(name, integer(name, getattr(self, name), 1))
        self._set("allowed_hosts", strings("allowed_hosts", self.allowed_hosts, "Give host names as text."))
        self._set("min_priority", integer("min_priority", self.min_priority, -MAX_PRIORITY, MAX_PRIORITY))
        for name in ("max_body_bytes", "max_prompts", "max_samples", "max_prompt_chars"):
            value = getattr(self, name)
            if value is not None or name != "max_prompt_chars":
                self._set(name, integer(name, value, 1))
        self._set("max_logprobs", integer("max_logprobs", self.max_logprobs, 0))
        if self.request_timeout is not None:
            self._set("request_timeout", real("request_timeout", self.request_timeout, 1e-3, float("inf")))
        for name in ("header_timeout", "body_timeout", "send_timeout", "keep_alive_interval", "stall_timeout"):
            self._set(name, real(name, getattr(self, name), 1e-2, MAX_SECONDS))
        self._set("drain_timeout", real("drain_timeout", self.drain_timeout, 0.0, float("inf")))
        if self.tool_format not in TOOL_FORMATS:
            raise ValueError(f"tool_format is {self.tool_format!r}; it must be one of {', '.join(TOOL_FORMATS)}.")
        for name in ("cache_salt_per_key", "log_prompts", "access_log", "ui"):
            truth(name, getattr(self, name))
        if self.cache_salt_per_key and not (self.api_key or self.api_key_file):
            raise ValueError("cache_salt_per_key is set, but no API key is. Set api_key or api_key_file too.")

    def api_keys(self) -> tuple[str, ...]:
        """The keys that are accepted, those of the file included; none means that no key is asked for."""
        if self.api_key_file is None:
            return self.api_key
        lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ValueError(f"api_key_file {self.api_key_file} holds no key; write one a line.")
        return (*self.api_key, *keys)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this is its constructor at work


def salt_of(key: str) -> str:
    """The cache salt of a key's requests, from which the key cannot be told."""
    return hashlib.sha256(b"nanovllm cache salt\0" + key.encode()).hexdigest()
