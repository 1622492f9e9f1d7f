"""Files, packages and sockets of a server, checked and bound before the import of torch, which takes seconds."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.features.extras import check_extra
from nanovllm.serving.server.listening import bind
from nanovllm.serving.server.settings import ServerSettings

NEEDS = ("fastapi", "uvicorn", "prometheus_client", "msgspec", "psutil")
SPANS_NEED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_packages(feature: str) -> None:
    """Raise MissingLibraryError without the packages of the extra `serve`."""
    check_extra(feature, "serve", *NEEDS)


@contextmanager
def prepared(settings: ServerSettings) -> Iterator[list[socket.socket]]:
    """Yield the bound sockets of a server, and close them at the end.

    Raises MissingLibraryError, OSError for a file that cannot be read or written, or an address that
    cannot be bound, ValueError for a file with other contents.
    """
    check_packages("the server")
    settings.api_keys()
    _check_certificate(settings)
    for flag, folder in (("adapter", settings.adapter_folder), ("weights", settings.weights_folder)):
        if folder is not None and not os.path.isdir(folder):
            raise ValueError(f"--{flag}-folder is {folder!r}, and there is no such folder. Create it first.")
    if settings.otlp_traces_endpoint is not None:
        check_extra("otlp_traces_endpoint", "otel", *SPANS_NEED)
    listeners = bind(settings.host, settings.port)
    try:
        if settings.record is not None:
            from nanovllm.serving.server.recorder import Recorder  # needs the packages

            Recorder.check(settings.record)
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def _check_certificate(settings: ServerSettings) -> None:
    """Raise OSError or ValueError for files that hold no certificate with its key."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return
    for path in (settings.ssl_certfile, settings.ssl_keyfile):
        with open(path, "rb"):  # names the file in its error, as ssl does not
            pass

    def password() -> str:
        raise ValueError(f"ssl_keyfile {settings.ssl_keyfile} needs a password; store the key without one.")

    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password)
    except ssl.SSLError as error:
        raise ValueError(
            f"ssl_certfile {settings.ssl_certfile} and ssl_keyfile {settings.ssl_keyfile} are no certificate in PEM "
            f"form with its private key ({error.reason or error})."
        ) from error
