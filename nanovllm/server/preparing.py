"""Files, packages and sockets of a server, checked and bound before the import of torch, which takes seconds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.core.validation import packages
from nanovllm.server.listening import bind
from nanovllm.server.settings import ServerSettings

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
SPANS_NEED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_packages(feature: str) -> None:
    """Raise RuntimeError without the packages of the extra `serve`."""
    packages(feature, NEEDS, "serve")


@contextmanager
def prepared(settings: ServerSettings) -> Iterator[list[socket.socket]]:
    """Yield the bound sockets of a server, and close them at the end.

    Raises RuntimeError for missing packages, OSError for a file that cannot be read or written, or an address that
    cannot be bound, ValueError for a file with other contents.
    """
    check_packages("the server")
    settings.api_keys()
    if settings.otlp_traces_endpoint is not None:
        packages("otlp_traces_endpoint", SPANS_NEED, "otel")
    listeners = bind(settings.host, settings.port)
    try:
        if settings.record is not None:
            from nanovllm.server.recorder import Recorder  # needs the packages

            Recorder.check(settings.record)
        yield listeners
    finally:
        for listener in listeners:
            listener.close()
