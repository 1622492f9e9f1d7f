"""Pictures of other servers: fetched from allowed hosts alone, from an address that was checked."""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

MAX_BYTES = 32 * 2**20  # all pictures of a conversation
MAX_SECONDS = 10.0  # all pictures of a conversation
MAX_REDIRECTS = 3
_PIECE_BYTES = 2**16
_FETCHES = ThreadPoolExecutor(32, "fetch-pictures")  # separate threads: a slow address delays no other work


@dataclass(frozen=True, slots=True)
class RemotePicture:
    """A picture that a request names by its address."""

    url: str


def checked_host(url: str, hosts: Collection[str]) -> SplitResult:
    """The parts of an address; raises ValueError for another scheme or host than the server allows."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname not in hosts:
        raise ValueError(
            f"image_url: {url[:80]!r} is not fetched: its host is not one of --allowed-media-hosts. Send a data URL."
        )
    return parts


def remote_pictures(conversation: list[dict[str, Any]], hosts: Collection[str]) -> list[RemotePicture]:
    """The remote pictures of a conversation; raises ValueError for one of a host that is not allowed."""
    contents = [message["content"] for message in conversation if isinstance(message.get("content"), list)]
    images = [part.get("image") for content in contents for part in content if isinstance(part, dict)]
    found = [image for image in images if isinstance(image, RemotePicture)]
    for picture in found:
        checked_host(picture.url, hosts)
    return found


async def fetched(conversation: list[dict[str, Any]], hosts: Collection[str]) -> list[dict[str, Any]]:
    """The conversation with the bytes of its remote pictures; raises ValueError for one that cannot be fetched."""
    return await asyncio.get_running_loop().run_in_executor(_FETCHES, _fetched, conversation, hosts)


def _fetched(conversation: list[dict[str, Any]], hosts: Collection[str]) -> list[dict[str, Any]]:
    end = time.monotonic() + MAX_SECONDS
    num_left = MAX_BYTES

    def whole(part: Any) -> Any:
        nonlocal num_left
        if isinstance(part, dict) and isinstance(part.get("image"), RemotePicture):
            image = fetch(part["image"].url, hosts, end, num_left)
            num_left -= len(image)
            return part | {"image": image}
        return part

    return [
        message | {"content": [whole(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in conversation
    ]


def fetch(url: str, hosts: Collection[str], end: float, max_bytes: int) -> bytes:
    """The bytes at an address, which each redirect may change.

    Args:
        end: time of `time.monotonic` at which the connection is cut.
    """
    try:
        for _ in range(MAX_REDIRECTS + 1):
            parts = checked_host(url, hosts)
            with _connected(parts, end) as connection:
                connection.request("GET", f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}")
                response = connection.getresponse()
                if response.status == 200:
                    return _body(response, max_bytes)
                target = response.getheader("location")
                if target is None or response.status not in (301, 302, 303, 307, 308):
                    raise OSError(f"its answer is {response.status}")
                url = urljoin(url, target)
        raise OSError(f"it is redirected more than {MAX_REDIRECTS} times")
    except (OSError, http.client.HTTPException) as error:
        is_late = time.monotonic() > end
        reason = f"the pictures of the conversation take over {MAX_SECONDS:g} s" if is_late else error
        raise ValueError(f"image_url: {url[:80]!r} cannot be fetched: {reason}") from error


@contextmanager
def _connected(parts: SplitResult, end: float) -> Iterator[http.client.HTTPConnection]:
    """A connection to the address that was checked: a name may have another one a moment later."""
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if not is_public(address):
        raise OSError(f"{address} is an address of a private network")
    connection = http.client.HTTPConnection(host, port)
    wait = max(0.1, end - time.monotonic())
    with socket.create_connection((address, port), timeout=wait) as plain, plain.dup() as twin:
        # A timeout of the socket bounds the wait for each byte, and not for the answer.
        timer = threading.Timer(wait, _cut, [twin])
        timer.start()
        try:
            connection.sock = plain
            if parts.scheme == "https":
                connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            yield connection
        finally:
            timer.cancel()
            timer.join()
            connection.close()


def _cut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def is_public(address: str) -> bool:
    """Whether an address is one of the public network; one that stands for an IPv4 address is read as that."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None)
    return found.is_global and not found.is_multicast and (mapped is None or is_public(str(mapped)))


def _body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    body = bytearray()
    while piece := response.read1(_PIECE_BYTES):
        body += piece
        if len(body) > max_bytes:
            raise OSError(f"the pictures of the conversation have over {MAX_BYTES} bytes")
    if response.length:
        raise OSError("it ends early")
    return bytes(body)
