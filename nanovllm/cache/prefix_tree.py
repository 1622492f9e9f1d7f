"""Prefix tree: which prefixes the cache groups know, each under an id of its own.

A group that keeps only what lies within a window holds the end of a prefix without its beginning, so that its blocks
alone cannot show what they stand behind. The tree can: a prefix is known as long as some group holds its last block,
or a longer prefix is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nanovllm.core.prefix_entry import PrefixEntry


@dataclass(slots=True)
class PrefixNode(PrefixEntry):
    """A known prefix, by its last block; `blocks` stays empty, since each group has its own.

    above: the prefix that is one block shorter; None for a first block.
    num_users: groups that hold its last block, and known prefixes that are one block longer.
    """

    above: PrefixNode | None = None
    num_users: int = 0


class PrefixTree:
    """Known prefixes by the hash and by the id of their last block.

    Args:
        on_known, on_unknown: called with each node that appears, and that disappears.
    """

    def __init__(self, on_known: Callable[[PrefixNode], None], on_unknown: Callable[[PrefixNode], None]) -> None:
        self.nodes: dict[bytes, PrefixNode] = {}  # in order of appearance, so parents come before children
        self._by_id: dict[int, PrefixNode] = {}
        self._last_id = 0
        self._on_known, self._on_unknown = on_known, on_unknown

    def find(self, blocks: Iterable[tuple[bytes, bytes]], parent: int | str | None) -> list[PrefixNode]:
        """The longest known prefix of `blocks` (hash and tokens of each) behind `parent`, block by block."""
        found: list[PrefixNode] = []
        for block_hash, tokens in blocks:
            node = self.nodes.get(block_hash)
            if node is None or node.parent != parent or node.tokens != tokens:
                break
            found.append(node)
            parent = node.prefix_id
        return found

    def add(self, block_hash: bytes, tokens: bytes, parent: int | str) -> PrefixNode | None:
        """The prefix that is `tokens` longer than `parent`; None if another content has this hash: it keeps it."""
        if (node := self.nodes.get(block_hash)) is not None:
            return node if node.parent == parent and node.tokens == tokens else None
        self._last_id += 1
        above = self._by_id[parent] if isinstance(parent, int) else None
        node = PrefixNode(self._last_id, block_hash, parent, tokens, above=above)
        self.nodes[block_hash] = self._by_id[node.prefix_id] = node
        if above is not None:
            above.num_users += 1
        self._on_known(node)
        return node

    def release(self, node: PrefixNode | None) -> None:
        """One user less; a prefix without users is no longer known."""
        while node is not None:
            node.num_users -= 1
            if node.num_users > 0:
                return
            del self.nodes[node.block_hash], self._by_id[node.prefix_id]
            self._on_unknown(node)
            node = node.above

    def and_longer(self, prefixes: Iterable[PrefixNode]) -> Iterator[PrefixNode]:
        """These prefixes, and all that begin with one of them."""
        ids: set[int | str] = {node.prefix_id for node in prefixes}
        for node in list(self.nodes.values()):
            if node.prefix_id in ids or node.parent in ids:
                ids.add(node.prefix_id)
                yield node

    def node(self, entry: PrefixEntry) -> PrefixNode:
        return self._by_id[entry.prefix_id]

    def clear(self) -> None:
        self.nodes.clear()
        self._by_id.clear()
