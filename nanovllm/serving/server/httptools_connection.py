"""Connection limits under httptools, which has none built in."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.serving.server.connections import BODY, HEAD, LINE_BYTES, MAX_PIPELINED, NOTHING, BoundedConnection


class _TooLargeError(Exception):
    """Stops the parser of a connection."""


class HttpToolsConnection(BoundedConnection, HttpToolsProtocol):
    """Counts complete headers, and the pending bytes of incomplete ones."""

    _num_header_bytes = _num_headers = 0  # counts of the current request, trailers included
    _num_pending = 0  # bytes since the parser last returned body bytes or the end of a part
    _num_given = 0  # number of such returns
    _is_too_large = False

    def _feed_parser(self, data: bytes) -> None:
        if self._part is NOTHING:  # bare line ends start no request, but stop uvicorn's idle timer
            self._part = HEAD
            self._number += 1
        num_given = self._num_given
        super()._feed_parser(data)
        if self._is_refused:
            return
        self._num_pending = self._num_pending + len(data) if num_given == self._num_given else 0
        if self._num_pending > self.settings.max_header_bytes:
            self.refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = self._num_headers = 0
        self._number += 1
        self._part = HEAD

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value) + LINE_BYTES)
        # Trailers come here too. They are dropped, as by h11: a gateway checks and sets headers alone.
        if self._part is HEAD:
            super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        limits = self.settings
        if self._num_header_bytes > limits.max_header_bytes or self._num_headers > limits.max_headers:
            self._is_too_large = True
            raise _TooLargeError

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._is_too_large = True
            raise _TooLargeError
        self._part = BODY
        self._num_given += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_given += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._part = NOTHING
        self._num_given += 1
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._is_too_large:
            self.refuse_headers()
        else:
            super().send_400_response(msg)
