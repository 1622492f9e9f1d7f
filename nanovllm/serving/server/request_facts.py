"""Facts of a request for logs, metrics and spans: its id, the name of its API key, its trace headers."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from nanovllm.outputs import RequestOutput
from nanovllm.sequence import NewRequest

logger = logging.getLogger("nanovllm")

REQUEST_ID = "x-request-id"
PAGE_ID = "live-"  # prefix of the x-request-ids of the live view's page
NO_KEY = "none"  # name of the key if none is required
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestFacts:
    """A request of a client.

    request_id: the client's x-request-id, or a new one.
    key: name of its API key.
    headers: traceparent and tracestate.
    answer_id: id of its answer, the prefix of its prompts' engine ids; empty until they are queued.
    """

    request_id: str
    key: str = NO_KEY
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    answer_id: str = ""
    start_time: float = field(default_factory=time.time)


CURRENT: ContextVar[RequestFacts | None] = ContextVar("request", default=None)

# Callback of the engine thread for a request and its last output; None if the engine died.
OnRequestEnd = Callable[[RequestFacts, NewRequest, RequestOutput | None], None]


def given_id(headers: Headers) -> str:
    """The request's x-request-id; a new one if it is missing or unfit for a log line."""
    given = headers.get(REQUEST_ID, "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


class InFlight:
    """Facts of the requests in the engine, by engine request id.

    listeners: callbacks that receive the facts of each ended request.
    questions: x-request-ids of requests from the live view's pages, by engine request id.
    """

    def __init__(self) -> None:
        self.listeners: list[OnRequestEnd] = []
        self.questions: dict[str, str] = {}
        self._facts: dict[str, RequestFacts] = {}

    def add(self, ids: Sequence[str]) -> None:
        """Add the prompts of the current request, before they are queued."""
        facts = CURRENT.get()
        if facts is not None:
            facts.answer_id = facts.answer_id or ids[0]
            self._facts |= dict.fromkeys(ids, facts)
            if facts.request_id.startswith(PAGE_ID):
                self.questions |= dict.fromkeys(ids, facts.request_id)

    def forget(self, ids: Sequence[str]) -> None:
        """Remove prompts that were never queued."""
        for request_id in ids:
            self._facts.pop(request_id, None)
            self.questions.pop(request_id, None)

    def end(self, request: NewRequest, output: RequestOutput | None) -> None:
        """Report an ended request to the listeners, see `OutputRouter.on_end`; removes a listener that raises."""
        facts = self._facts.pop(request.request_id, None)
        self.questions.pop(request.request_id, None)
        if facts is None:
            return
        for listener in tuple(self.listeners):
            try:
                listener(facts, request, output)
            except Exception:  # further listeners are still called
                self.listeners.remove(listener)
                logger.exception("%s raised at the end of a request; it is not called again", listener)
