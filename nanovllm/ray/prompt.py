"""Prompt of a request for Serve's router, which computes its block hashes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from nanovllm.features.prompt_hashes import PromptHashes


class Prompt:
    """Prompt for the router in the front's process; pickling empties it, so nothing is sent to a replica.

    Args:
        token_ids: empty if the request has no prompt.
        model: hash seed of the model that tokenized the prompt; None for any.
        on_routed: callback with the chosen replica and all running replicas, in the router's thread.
    """

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        cache_salt: str = "",
        model: str | None = None,
        on_routed: Callable[[str, Collection[str]], None] | None = None,
    ) -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self.model = model
        self._on_routed = on_routed
        self._hashes: dict[tuple[str, int], PromptHashes] = {}

    def hashes(self, hash_seed: str, block_size: int) -> PromptHashes:
        """Block hashes of a replica with this seed and block size."""
        key = hash_seed, block_size
        if key not in self._hashes:
            self._hashes[key] = PromptHashes(
                self._token_ids, block_size, hash_seed=hash_seed, cache_salt=self._cache_salt
            )
        return self._hashes[key]

    def routed(self, replica: str, running: Collection[str]) -> None:
        if self._on_routed is not None:
            self._on_routed(replica, running)

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompt, ()
