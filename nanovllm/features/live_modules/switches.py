"""Switches of a live module's adapters by its owner: each adapter keeps its prefixes, under another root."""

from __future__ import annotations

import weakref
from hashlib import blake2b
from typing import Any

from nanovllm.engine import Engine


def follow(engine: Engine) -> None:
    """Let an engine compute under another root of its prefixes whenever the flags of its live module have changed."""
    reference = weakref.ref(engine)  # the owner's module outlives the engine
    watch: Any = engine.model_runner.binding.watch
    root = _root(watch.flags)
    _move(engine, "", root)

    def switch() -> None:
        nonlocal root
        if (live := reference()) is not None:
            before, root = root, _root(watch.flags)
            live.model_runner.executor.model_changed(in_place=False)
            live.restart_running()
            _move(live, before, root)

    watch.on_switch = switch


def _root(flags: Any) -> str:
    """A part of the seed of prefixes; flags that come again have the former one, and find their prefixes."""
    return f"\0{blake2b(repr(flags).encode(), digest_size=16).hexdigest()}"


def _move(engine: Engine, before: str, root: str) -> None:
    """Give all requests and later ones another root; none runs."""
    manager: Any = engine.block_manager
    for name in ("hash_seed", "root_seed"):  # the latter in managers with tiers
        if seed := getattr(manager, name, ""):
            setattr(manager, name, seed.replace(before, root) if before else seed + root)
    for request in engine.requests.values():
        for sequence in request.sequences:
            manager.wanted.remove(sequence)
            sequence.block_hashes.clear()
            if not sequence.is_finished:
                manager.want(sequence)
