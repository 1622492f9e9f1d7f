"""Messages over a socket between two processes of one host, sent and received without blocking.

A frame is the length of a message, four bytes little-endian, and the message. Unsent bytes are kept, so that a peer
that stops within a frame, or reads nothing, blocks nobody.
"""

from __future__ import annotations

import os
import select
import socket

LENGTH_BYTES = 4
READ_BYTES = 1 << 18
MAX_READS = 8  # reads per `receive`, so that one peer cannot starve the rest


class Channel:
    """One end of a connected socket. One thread may send while another receives.

    is_closed: the peer has ended, and all its messages were received.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._received = bytearray()
        self._unsent = bytearray()
        self.is_closed = False

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """Create a channel, and the socket for its other end."""
        own, other = socket.socketpair()
        return Channel(own), other

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message; keeps the bytes that do not fit into the socket's buffer."""
        self._unsent += len(message).to_bytes(LENGTH_BYTES, "little") + message
        self.flush()

    def flush(self) -> None:
        """Send kept bytes, as many as fit into the socket's buffer."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # the peer is gone; `receive` sets `is_closed`
            self._unsent.clear()

    def send_all(self, message: bytes) -> None:
        """Send a message and wait until all of it is in the socket's buffer."""
        self.send(message)
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._unsent:
            poll.poll()
            self.flush()

    def receive(self) -> list[bytes]:
        """Return the complete messages."""
        for _ in range(MAX_READS):
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
                break
            self._received += data
        return self._whole_messages()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for data, at most `timeout` seconds; returns whether there is any."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def has_peer(self, timeout: float) -> bool:
        """Wait `timeout` seconds for the peer to end; returns whether it still lives. Any thread may call it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(1000 * timeout)

    def close(self) -> None:
        self._socket.close()

    def _whole_messages(self) -> list[bytes]:
        messages = []
        start = 0
        received = self._received
        while len(received) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            end = body + int.from_bytes(received[start:body], "little")
            if end > len(received):
                break
            messages.append(bytes(received[body:end]))
            start = end
        del received[:start]
        return messages


def inherited(descriptor: int) -> Channel:
    """Wrap the inherited end of a channel, moved to the lowest free descriptor.

    A dying process closes descriptors in ascending order: so its peer learns of the death before the GPU's files are
    closed, which takes long.
    """
    lowest = os.dup(descriptor)
    os.close(descriptor)
    return Channel(socket.socket(fileno=lowest))
