"""What a server knows of a request beside its body: its id, its key's name, its trace; for logs, metrics and spans."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from nanovllm.core.outputs import RequestOutput
from nanovllm.core.sequence import NewRequest

logger = logging.getLogger("nanovllm")

REQUEST_ID = "x-request-id"
PAGE_ID = "live-"  # what the live view's page begins the x-request-id of its questions with
NO_KEY = "none"  # name of the key where none is required
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestFacts:
    """A request of a client.

    request_id: the client's x-request-id, or a new one.
    key: name of its API key.
    headers: traceparent and tracestate.
    answer_id: id of its answer, which those of its prompts in the engine begin with; empty before.
    """

    request_id: str
    key: str = NO_KEY
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    answer_id: str = ""
    start_time: float = field(default_factory=time.time)


CURRENT: ContextVar[RequestFacts | None] = ContextVar("request", default=None)

# Called in the engine thread with a request and its last output; None if the engine died.
OnRequestEnd = Callable[[RequestFacts, NewRequest, RequestOutput | None], None]


def given_id(headers: Headers) -> str:
    """The request's x-request-id; a new one if it has none, or one that does not fit into a line of the log."""
    given = headers.get(REQUEST_ID, "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


class InFlight:
    """Facts of the requests in the engine, by the ids that they have there.

    listeners: called with the facts of each that ends.
    questions: x-request-id of those that pages of the live view ask.
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
        """As `OutputRouter.on_end`."""
        facts = self._facts.pop(request.request_id, None)
        self.questions.pop(request.request_id, None)
        if facts is None:
            return
        for listener in tuple(self.listeners):
            try:
                listener(facts, request, output)
            except Exception:  # the others go on
                self.listeners.remove(listener)
                logger.exception("%s raised at the end of a request; it is not called again", listener)
