"""Staggered start of requests that arrive together, so that running streams and /health need not wait for all."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

PER_TURN = 4  # requests per turn of the event loop, 0.5 to 2 ms each
AT_ONCE = frozenset({"/health"})


class Turns:
    """Middleware that starts at most PER_TURN requests in each turn of the event loop, in order of arrival."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_begun = 0  # in this turn
        self._is_due = False  # whether `_next` is scheduled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in AT_ONCE:
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._next)
        if self._num_begun < PER_TURN:
            self._num_begun += 1
            return
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _next(self) -> None:
        self._num_begun, self._is_due = 0, False
        while self._waiting and self._num_begun < PER_TURN:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else it was cancelled
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)
