"""A dict that nobody can change: what a frozen dataclass hands out where its field maps something."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class FrozenDict(dict[Key, Value]):
    """Reads, compares, prints and pickles like the dict that it was made of; every change raises TypeError.

    A `types.MappingProxyType` would neither pickle nor go through `copy.deepcopy`, `dataclasses.asdict` and JSON.
    """

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this mapping is part of checked options and cannot be changed; build new options from a copy.")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:  # by default an unpickler sets the items one by one
        return type(self), (dict(self),)
