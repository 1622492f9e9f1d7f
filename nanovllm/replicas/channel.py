"""Messages over a socket between two processes of one host; neither sending nor receiving ever waits unless asked to.

A frame is the length of a message, four bytes little-endian, and the message. A peer that is stopped in the middle of a
frame, or reads nothing, holds up nobody: what could not be sent is kept.
"""

from __future__ import annotations

import os
import select
import socket

LENGTH_BYTES = 4
READ_BYTES = 1 << 18
MAX_READS = 8  # of one `receive`, so that one peer does not keep the others from their turn


class Channel:
    """One end of a connected socket. One thread may send while another receives.

    is_closed: the peer has ended; what it sent before was received.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._received = bytearray()
        self._unsent = bytearray()
        self.is_closed = False

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """One end, and the socket of the other."""
        own, other = socket.socketpair()
        return Channel(own), other

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, or keep what the peer has no room for."""
        self._unsent += len(message).to_bytes(LENGTH_BYTES, "little") + message
        self.flush()

    def flush(self) -> None:
        """Send more of what was kept."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # the peer is gone, which `receive` says
            self._unsent.clear()

    def send_all(self, message: bytes) -> None:
        """Send a message and wait until the peer has room for all of it."""
        self.send(message)
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._unsent:
            poll.poll()
            self.flush()

    def receive(self) -> list[bytes]:
        """The messages that have come whole."""
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
        """Wait until there is something to receive; returns whether there is."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def has_peer(self, timeout: float) -> bool:
        """Wait so long for the peer's end; whether it still lives. Any thread may ask."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(1000 * timeout)

    def close(self) -> None:
        self._socket.close()

    def _whole_messages(self) -> list[bytes]:
        messages, start, received = [], 0, self._received
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
    """The end that a process was started with, under the lowest number that is free.

    A process that dies closes its files in the order of their numbers: its peer knows before a GPU's are closed, which
    takes long.
    """
    lowest = os.dup(descriptor)
    os.close(descriptor)
    return Channel(socket.socket(fileno=lowest))
