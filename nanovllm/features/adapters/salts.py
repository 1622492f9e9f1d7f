"""Salts of requests with adapters: KV depends on the adapter, so prefixes do too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.features.adapters.loading import Adapter

_MARK = "\0"  # no salt of a client begins with it


class AdapterSalt(str):
    """Salt of the prefixes that an adapter computes for requests of one salt.

    It spells the digest of the adapter's bytes, so that equal bytes under two names share prefixes, and other bytes
    under one name do not. A request holds its adapter by it.
    """

    __slots__ = ("adapter",)
    adapter: Adapter

    def __new__(cls, adapter: Adapter, salt: str) -> AdapterSalt:
        self = super().__new__(cls, f"{_MARK}adapter {adapter.digest} {salt}")
        self.adapter = adapter
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)


def adapter_of(salt: str) -> Adapter | None:
    """The adapter of a request by its salt."""
    return salt.adapter if isinstance(salt, AdapterSalt) else None


def digest_in(salt: str) -> str | None:
    """The digest of the adapter that a salt names, which may have come from another process."""
    return salt.split(" ", 2)[1] if salt.startswith(f"{_MARK}adapter ") else None


def client_salt(salt: str) -> str:
    """The salt that a client gave, without its adapter."""
    return salt.split(" ", 2)[2] if salt.startswith(_MARK) else salt


def salted(
    adapters: Mapping[str, Adapter], adapter: str | Sequence[str | None] | None, cache_salt: str | Sequence[str]
) -> Any:
    """The cache_salt of requests that name adapters: one for all, or a list of one each.

    Raises TypeError or ValueError for an unknown adapter, lists of different lengths, and a salt that could spell one.
    """
    given: dict[str, Any] = {"adapter": adapter, "cache_salt": cache_salt}
    counts = {name: len(values) for name, values in given.items() if isinstance(values, (list, tuple))}
    if not counts:
        return _one(adapters, adapter, cache_salt)
    if len({*counts.values()}) > 1:
        raise ValueError(
            f"adapter has {counts['adapter']} entries, and cache_salt {counts['cache_salt']}; give one for each prompt."
        )
    each = (values if name in counts else repeat(values) for name, values in given.items())
    return [_one(adapters, name, salt) for name, salt in zip(*each, strict=False)]


def _one(adapters: Mapping[str, Adapter], name: Any, salt: Any) -> Any:
    if isinstance(salt, str) and salt.startswith(_MARK) and not isinstance(salt, AdapterSalt):
        raise ValueError(f"cache_salt is {salt!r}; it must not begin with the null character.")
    if name is None:
        return salt
    if not isinstance(name, str):
        raise TypeError(
            f"adapter must be the name of an adapter, None, or a list of one for each prompt, not {name!r}."
        )
    if (found := adapters.get(name)) is None:
        known = ", ".join(sorted(adapters)[:8]) or "none"
        raise ValueError(f"no adapter is named {name!r}; loaded are: {known}. Load it with load_adapter.")
    return AdapterSalt(found, salt) if isinstance(salt, str) else salt
