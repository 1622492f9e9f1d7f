"""Block hashes of a prompt, for routers that look it up in the prefix caches of several engines."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from typing import Any, overload

from nanovllm.block_manager import digest, root_hash


class PromptHashes(Sequence[bytes]):
    """Block hashes of a prompt, each computed when it is first read.

    It has as many as a prefix hit can: none for the block with the last token, which is always computed.

    Args:
        token_ids: the prompt; an array of int32 is not copied.
        block_size, hash_seed: arguments of the block managers that are searched.
        known: first hashes, if some are known; extended in place.
    """

    def __init__(
        self,
        token_ids: Iterable[int],
        block_size: int,
        *,
        hash_seed: str = "",
        cache_salt: str = "",
        known: list[bytes] | None = None,
    ) -> None:
        self._token_ids = token_ids if isinstance(token_ids, array) else array("i", token_ids)
        self._block_size = block_size
        self._root = hash_seed, cache_salt
        self._known = [] if known is None else known
        self._length = max(0, len(self._token_ids) - 1) // block_size
        self._media: Any = getattr(token_ids, "media", None)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"block {index} of a prompt with {self._length} blocks to look up")
        index %= self._length
        known = self._known
        size = self._block_size
        while len(known) <= index:
            first = len(known) * size
            parent = known[-1] if known else root_hash(*self._root)
            pictures = b"" if self._media is None else self._media.identity(first, first + size)
            known.append(digest(parent + self._token_ids[first : first + size].tobytes() + pictures))
        return known[index]


def num_leading_hits(hashes: Iterable[bytes], held: Container[bytes]) -> int:
    """Number of leading hashes that are in `held`."""
    count = 0
    for block_hash in hashes:
        if block_hash not in held:
            break
        count += 1
    return count
