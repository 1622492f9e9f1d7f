"""Request router for Serve with our routing policies: by queue lengths and cached prefixes of replicas."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanovllm.features.prompt_hashes import num_leading_hits
from nanovllm.ray.prompt import Prompt
from nanovllm.serving.replicas.routing import POLICIES

STATS_SECONDS = 1.0  # seconds between two reports of a replica
# Bytes per block hash in a report: with 65,536 blocks one in 65,536 lookups finds a missing block, at the cost of a
# cache miss.
FINGERPRINT_BYTES = 4
MAX_REPORTED = 65536  # most recent findable blocks
# Seconds for which a sent prompt's blocks are expected in its replica: its prefill, and a report or two.
EXPECTED_SECONDS = 15.0
PROMPT = "prompt"  # argument of a request that holds its `Prompt`


def fingerprints(hashes: Iterable[bytes]) -> bytes:
    return b"".join(block_hash[:FINGERPRINT_BYTES] for block_hash in hashes)


def with_model(replicas: list[RunningReplica], prompt: Prompt | None) -> list[RunningReplica]:
    """Replicas with the prompt's model; all replicas if none has it: they refuse the request with a reason.

    During an update to another model an application has replicas of both.
    """
    if prompt is None or prompt.model is None:
        return replicas
    return [r for r in replicas if r.replica_metadata.get("hash_seed") == prompt.model] or replicas


class HeldBlocks:
    """Blocks cached by a replica: blocks of its reports, and expected blocks of prompts just sent to it.

    Reports are seconds old, so both may be wrong: that costs a prefix hit, never an answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported: frozenset[bytes] = frozenset()
        self._expected: OrderedDict[bytes, float] = OrderedDict()  # block hash -> end, in order of their ends

    def report(self, report: bytes) -> None:
        """Replace the reported blocks by a new report of `fingerprints`."""
        size = FINGERPRINT_BYTES
        self._reported = frozenset(report[start : start + size] for start in range(0, len(report), size))
        now = self._clock()
        while self._expected and next(iter(self._expected.values())) <= now:
            self._expected.popitem(last=False)

    def expect(self, hashes: Iterable[bytes]) -> None:
        """Expect the blocks of a prompt that was sent to the replica."""
        end = self._clock() + EXPECTED_SECONDS
        for block_hash in hashes:
            self._expected[block_hash] = end
            self._expected.move_to_end(block_hash)
        while len(self._expected) > MAX_REPORTED:
            self._expected.popitem(last=False)

    def __contains__(self, block_hash: object) -> bool:
        if not isinstance(block_hash, bytes):
            return False
        return block_hash[:FINGERPRINT_BYTES] in self._reported or self._expected.get(block_hash, 0.0) > self._clock()


class KnownReplica:
    """`ReplicaView` of a replica, from its last report and this router's requests.

    num_ongoing: number of running and queued requests, by Serve's count.
    """

    def __init__(self) -> None:
        self.held = HeldBlocks()
        self.num_ongoing = 0
        self._max_running = 1
        self._last_stats: dict[str, Any] | None = None

    def update(self, stats: dict[str, Any], max_running: int, num_ongoing: int | None) -> None:
        """Update from Serve's data; `num_ongoing` is None if unknown to Serve."""
        self._max_running = max_running
        if stats is not self._last_stats and "blocks" in stats:
            self._last_stats = stats
            self.held.report(stats["blocks"])
        if num_ongoing is None:
            num_ongoing = stats.get("num_waiting", 0) + stats.get("num_running", 0)
        self.num_ongoing = num_ongoing

    @property
    def num_running(self) -> int:
        return min(self.num_ongoing, self._max_running)

    @property
    def num_waiting(self) -> int:
        return self.num_ongoing - self.num_running

    def num_hits(self, hashes: Sequence[bytes]) -> int:
        return num_leading_hits(hashes, self.held)


class PolicyRouter(RequestRouter):
    """Routes each request by a policy of `serving.replicas.routing`, or to any other replica if that one is full."""

    def initialize_state(self, policy: str = "prefix-aware") -> None:
        self._route = POLICIES[policy]()
        self._known: dict[ReplicaID, KnownReplica] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        candidate_replicas = with_model(candidate_replicas, _prompt(pending_request))
        self._known = {r.replica_id: self._known.get(r.replica_id) or KnownReplica() for r in candidate_replicas}
        for replica in candidate_replicas:
            self._known[replica.replica_id].update(
                replica.routing_stats,
                replica.replica_metadata.get("max_num_seqs", 1),
                self.replica_queue_len_cache.get(replica.replica_id),
            )
        hashes = self._hashes(pending_request, candidate_replicas[0])
        index = self._route(hashes, [self._known[replica.replica_id] for replica in candidate_replicas])
        return [[candidate_replicas[index]], [*candidate_replicas[:index], *candidate_replicas[index + 1 :]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        replica = self.curr_replicas.get(replica_id)
        known = self._known.get(replica_id)
        if replica is not None and known is not None:
            known.held.expect(self._hashes(pending_request, replica))
        if (prompt := _prompt(pending_request)) is not None:
            prompt.routed(replica_id.unique_id, [running.unique_id for running in self.curr_replicas])

    def _hashes(self, pending_request: PendingRequest | None, replica: RunningReplica) -> Sequence[bytes]:
        prompt = _prompt(pending_request)
        metadata = replica.replica_metadata
        if prompt is None or "hash_seed" not in metadata:
            return ()
        return prompt.hashes(metadata["hash_seed"], metadata["block_size"])


def _prompt(request: PendingRequest | None) -> Prompt | None:
    prompt = None if request is None else request.kwargs.get(PROMPT)
    return prompt if isinstance(prompt, Prompt) else None
