"""Index of a replica's cached prefixes, built by the front from the replica's block events.

A replica sends one batch of bytes per step: runs of a kind (1 byte), a count (4 bytes) and `count` hashes. The index
may be stale. That costs a prefix hit, never an answer: a replica looks up its own blocks, token for token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from struct import Struct

from nanovllm.block_manager import HASH_BYTES
from nanovllm.features.kv_events.block_events import AllForgotten, BlockEvent, Findable, Forgotten
from nanovllm.features.prompt_hashes import num_leading_hits

MAX_EXPECTED = 256  # most blocks expected per prompt after its hits; bounds the hashing

_RUN = Struct("<BI")  # kind of the events, number of hashes
_KINDS: dict[type, int] = {AllForgotten: 0, Findable: 1, Forgotten: 2}


def encode(events: Iterable[BlockEvent]) -> bytes:
    """Encode a batch of events for `PrefixIndex.apply`, without token ids and recurrent states."""
    parts: list[bytes] = []
    of_blocks = (event for event in events if isinstance(event, AllForgotten) or not event.of_states)
    for kind, run in groupby(of_blocks, type):
        hashes = [] if kind is AllForgotten else [event.block_hash for event in run]  # type: ignore[union-attr]
        parts += (_RUN.pack(_KINDS[kind], len(hashes)), *hashes)
    return b"".join(parts)


class PrefixIndex:
    """Block hashes cached by a replica, and hashes expected from requests in flight.

    A prompt's blocks are expected from the moment it is sent, so that a burst of requests with a common prefix goes to
    one replica; `settle` ends that.
    """

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()  # hash -> number of requests
        self._hashes: dict[str, list[bytes]] = {}  # request id -> expected hashes

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self.held or block_hash in self._expected

    def num_hits(self, hashes: Sequence[bytes]) -> int:
        """Number of a prompt's leading blocks that the replica has or will have."""
        return num_leading_hits(hashes, self)

    def apply(self, batch: bytes) -> None:
        """Apply a batch of `encode`; batches must come in order."""
        offset = 0
        while offset < len(batch):
            kind, count = _RUN.unpack_from(batch, offset)
            offset += _RUN.size
            end = offset + count * HASH_BYTES
            hashes = [batch[at : at + HASH_BYTES] for at in range(offset, end, HASH_BYTES)]
            if kind == _KINDS[Findable]:
                self.held.update(hashes)
            elif kind == _KINDS[Forgotten]:
                self.held.difference_update(hashes)
            else:
                self.held.clear()
            offset = end

    def expect(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Expect the blocks of a request that was sent to the replica."""
        expected = list(islice(hashes, self.num_hits(hashes) + MAX_EXPECTED))
        self._hashes[request_id] = expected
        self._expected.update(expected)

    def settle(self, request_id: str) -> None:
        """Drop the expected blocks of a request with a first token, or an ended one: events now report its blocks."""
        for block_hash in self._hashes.pop(request_id, ()):
            self._expected[block_hash] -= 1
            if not self._expected[block_hash]:
                del self._expected[block_hash]

    def clear(self) -> None:
        """Forget all blocks of a restarted replica."""
        self.held.clear()
        self._expected.clear()
        self._hashes.clear()
