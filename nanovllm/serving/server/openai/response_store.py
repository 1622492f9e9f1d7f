"""Conversations of finished responses, by the id of the response: bounded in number and in bytes, oldest first out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.sse import compact

MESSAGE_BYTES = 512  # bytes of a message's Python objects, in addition to its text


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Messages of a chat request up to a response's answer, without instructions.

    owner: name of the API key that may continue it.
    num_bytes: bytes of its JSON plus MESSAGE_BYTES per message, see `size_of`.
    """

    owner: str
    messages: tuple[dict[str, Any], ...]
    num_bytes: int


class ResponseStore:
    """Conversations in the order of their last use; thread-safe, since long ones are looked up off the event loop.

    Args:
        max_responses, max_bytes: limits of all conversations together; 0 responses store nothing.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, StoredConversation] = OrderedDict()
        self.num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, response_id: str, owner: str) -> StoredConversation:
        """Return a conversation; raises ApiError (400, or 404 for one that is not kept or of another key)."""
        if not self.max_responses:
            raise ApiError(
                400,
                "previous_response_id: nothing is stored; send the whole conversation as input, or start the server "
                "with --store-responses.",
                param="previous_response_id",
            )
        with self._lock:
            found = self._kept.get(response_id)
            if found is not None and found.owner == owner:
                self._kept.move_to_end(response_id)
                return found
        raise ApiError(
            404,
            f"previous_response_id: {response_id[:128]!r} is not kept: the server keeps the last "
            f"{self.max_responses} responses (--store-responses) within --store-bytes. Send the whole "
            "conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )

    def keep(self, response_id: str, conversation: StoredConversation) -> None:
        """Keep a conversation, and drop the oldest beyond the limits; one above max_bytes alone is not kept."""
        if conversation.num_bytes > self._max_bytes or not self.max_responses:
            return
        with self._lock:
            self._kept[response_id] = conversation
            self.num_bytes += conversation.num_bytes
            while len(self._kept) > self.max_responses or self.num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.num_bytes -= dropped.num_bytes


def size_of(messages: list[dict[str, Any]]) -> int:
    """Bytes of messages: their JSON, and a share for each."""
    return sum(len(compact(message)) + MESSAGE_BYTES for message in messages)
