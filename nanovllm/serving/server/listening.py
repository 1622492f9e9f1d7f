"""Listening sockets, bound before the model is loaded, so that a port in use fails at once."""

from __future__ import annotations

import contextlib
import errno
import socket

# Errors of bind, and their remedies.
_REMEDIES = {
    errno.EADDRINUSE: "another process uses this port; stop it, or choose another with --port (0 takes a free one)",
    errno.EACCES: "this user may not bind this port; choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "no interface of this machine has this address; choose another with --host",
}


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket per address of a host; raises OSError with address and remedy.

    The sockets do not listen yet, so that clients are refused while the model loads.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"--host {host!r} does not resolve ({error}); give an address, such as 127.0.0.1.") from error
    bound: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            try:
                bound.append(_bind(family, address))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error  # "localhost" may name an IPv6 address that this machine lacks
        if missing is not None and not bound:
            raise missing
    except OSError as error:
        for listener in bound:
            listener.close()
        remedy = _REMEDIES.get(error.errno or 0, "choose another address with --host and --port")
        raise OSError(f"cannot listen on {format_address(host, port)} ({error.strerror}): {remedy}.") from error
    return bound


def format_address(host: str, port: int) -> str:
    """Format host and port for a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def allow_restart(listener: socket.socket) -> None:
    """Let a later process bind the port while connections of this one linger; call it right before `listen`."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _bind(family: int, address: object) -> socket.socket:
    """Bind a socket exclusively: with SO_REUSEADDR, a second process could bind the port until one of them listens."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(listener.close)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has its own socket
        try:
            listener.bind(address)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended server linger
            listener.bind(address)  # type: ignore[arg-type]
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        on_failure.pop_all()
    return listener
