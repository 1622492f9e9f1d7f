"""Staggered start of requests that arrive together: streams, /health and other clients need not wait for all."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm.features.intake.intake import CLIENT, Account, Accounts

PER_TURN = 4  # requests per turn of the event loop, 0.5 to 2 ms each
AT_ONCE = frozenset({"/health"})


class Turns:
    """Middleware that names the client of each request, and starts at most PER_TURN in each turn of the event loop.

    The client with the fewest seconds of the event loop comes first, then the order of arrival.

    Args:
        client_of: returns the name of a request's client.
    """

    def __init__(self, app: ASGIApp, client_of: Callable[[Scope], str]) -> None:
        self._app = app
        self._client_of = client_of
        self._accounts = Accounts()
        self._waiting: dict[Account, deque[asyncio.Future[None]]] = {}
        self._begun: list[Account] = []  # accounts of requests that began in this turn
        self._began = 0.0  # time at which the turn began
        self._is_due = False  # True if `_next` is scheduled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in AT_ONCE:
            client = self._client_of(scope)
            token = CLIENT.set(client)
            account = self._accounts.open(client)
            try:
                await self._turn(account)
                await self._app(scope, receive, send)
            finally:
                self._accounts.close(account)
                CLIENT.reset(token)
        else:
            await self._app(scope, receive, send)

    async def _turn(self, account: Account) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due, self._began = True, time.perf_counter()
            loop.call_soon(self._next)
        if len(self._begun) < PER_TURN and not self._waiting:
            self._begun.append(account)
            return
        waiter = loop.create_future()
        self._waiting.setdefault(account, deque()).append(waiter)
        await waiter

    def _next(self) -> None:
        now = time.perf_counter()
        for account in self._begun:
            account.served += (now - self._began) / len(self._begun)
        self._begun = []
        self._began = now
        self._is_due = False
        while self._waiting and len(self._begun) < PER_TURN:
            account = min(self._waiting, key=lambda account: (self._begun.count(account), account.served))
            waiter = self._waiting[account].popleft()
            if not self._waiting[account]:
                del self._waiting[account]
            if not waiter.done():  # a client that left has cancelled its waiter
                waiter.set_result(None)
                self._begun.append(account)
        if self._begun:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)
