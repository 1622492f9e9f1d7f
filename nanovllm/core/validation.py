"""Validation of user input: each check returns the normalised value, or raises naming parameter, value and limit."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import numbers
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

MAX_INTEGER = 2**63 - 1
MIN_WEIGHT = 1e-3
MIN_GOAL_S = 1e-3  # of latencies: no step is shorter
MIN_AGEING_S = 1e-3  # keeps priority levels apart in floating point
MAX_PRIORITY = 2**31 - 1  # the smallest priority is -MAX_PRIORITY

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


def real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf  # an integer beyond float64, outside every range
    if not low <= number <= high or math.isinf(number):  # NaN fails the comparison too
        allowed = f"between {low:g} and {high:g}" if math.isfinite(high) else f"a finite number of at least {low:g}"
        raise ValueError(f"{name} is {number}; it must be {allowed}.")
    return number


def ageing(name: str, value: Any) -> float:
    ageing = real(name, value, 0.0, math.inf)
    if 0.0 < ageing < MIN_AGEING_S:
        raise ValueError(f"{name} is {value}; it must be at least {MIN_AGEING_S} seconds, or 0 for no ageing.")
    return ageing


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number; without `high` of 63 bits, so that it can be sent to another process."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}.")
    number = int(value)
    if not low <= number <= (MAX_INTEGER if high is None else high):
        allowed = f"at least {low}" if high is None and number < low else f"between {low} and {high or MAX_INTEGER}"
        raise ValueError(f"{name} is {number}; it must be {allowed}.")
    return number


def share(name: str, value: Any, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 < float(value) <= high:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0 and at most {high}.")
    return float(value)


def one_of(name: str, value: Any, choices: Collection[Any]) -> Any:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}.")
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {value!r}.")
    return value


def matching(name: str, value: Any, pattern: str, expected: str) -> str:
    """A string that a regular expression matches as a whole; `expected` describes it in the error."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"{name} is {value!r}; it must be {expected}.")
    return value


def biases(name: str, value: Any) -> FrozenDict[int, float]:
    if value is None:
        return FrozenDict()
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map token ids to numbers, not {value!r}.")
    found: dict[int, float] = {}
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON keys are strings
        found[integer(f"a token id of {name}", token_id, 0)] = real(name, bias, -100.0, 100.0)
    return FrozenDict(found)


def weights(name: str, value: Any) -> FrozenDict[str, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map names of clients to numbers, not {value!r}.")
    for client, weight in value.items():
        if not isinstance(client, str):
            raise TypeError(f"{name} holds {client!r}; name each client by a string.")
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not is_number or not MIN_WEIGHT <= weight <= 1 / MIN_WEIGHT:  # NaN fails the comparison too
            raise ValueError(
                f"{name} gives {client!r} the weight {weight!r}; it must be a number between {MIN_WEIGHT:g} and "
                f"{1 / MIN_WEIGHT:g}, such as 2 for twice the share of a client without a weight."
            )
    return FrozenDict({client: float(weight) for client, weight in value.items()})


def items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {expected}, not {value!r}.")
    return tuple(value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(name, item, 0) for item in items(name, value, "a list of token ids"))


def strings(name: str, value: Any, remedy: str) -> tuple[str, ...]:
    """Non-empty strings, from one string or several; `remedy` ends the error for an item of another type."""
    found = (value,) if isinstance(value, str) else items(name, value, "a string or a list of them")
    for item in found:
        if not isinstance(item, str):
            raise TypeError(f"{name} must hold strings, not {item!r}. {remedy}")
        if not item:
            raise ValueError(f"{name} holds an empty string, which every text contains. Remove it.")
        text(name, item)
    return found


def text(name: str, value: str) -> str:
    """A string without lone surrogates, which no tokenizer can encode."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code, where = ord(value[error.start]), f"as character {error.start}, which no tokenizer can encode."
        if 0xDC80 <= code <= 0xDCFF:  # so Python hands on bytes of arguments and files that are not UTF-8
            raise ValueError(
                f"{name} holds U+{code:04X} {where} It is the byte 0x{code - 0xDC00:02x} of a text that is not UTF-8, "
                "or half of a surrogate pair. Convert the text (iconv -f latin1 -t utf-8), or decode its source with "
                "errors='replace'."
            ) from None
        raise ValueError(
            f"{name} holds half of a surrogate pair, U+{code:04X}, {where} Remove it, or decode its source with "
            "errors='replace'."
        ) from None
    return value


def texts(name: str, value: Any) -> None:
    """Apply `text` to every string and key in nested mappings and sequences."""
    if isinstance(value, str):
        text(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            texts(f"a key of {name}", key)
            texts(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            texts(f"{name}[{number}]", item)


def is_pointer(data: bytes) -> bool:
    """Whether a file is a git-lfs pointer, which git has in place of a large file."""
    return data.startswith(b"version https://git-lfs.github.com/spec/") and b"\noid " in data[:1024]


def utf8(name: str, data: bytes) -> str:
    """The text of bytes, with "\\n" for each line end, without a BOM; raises ValueError that names the byte."""
    if is_pointer(data):
        raise ValueError(f"{name} is a git-lfs pointer, not the file itself. Run git lfs pull in its folder.")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at position {error.start}"
            f"{f', in line {line}' if line > 1 else ''}. Convert it, such as with iconv -f latin1 -t utf-8."
        ) from None


def text_file(name: str, value: Any) -> Any:
    """The path of a file of UTF-8 text, or None."""
    try:
        path = None if value is None else os.fspath(value)
        if path is not None:
            utf8(f"{name}, {path!r},", Path(path).expanduser().read_bytes())
    except (OSError, TypeError) as error:
        raise ValueError(f"{name} is {value!r}, which cannot be read: {error}. Name another file.") from None
    return path


def memory_bytes(name: str, value: Any) -> int | None:
    """A number of bytes, at most the machine's memory; or None."""
    if value is None:
        return None
    number, total = integer(name, value, 1), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if number > total:
        raise ValueError(f"{name} is {number:,} bytes, but the machine has {total:,} bytes of memory. Set less.")
    return number


def cache_folder(name: str, value: Any) -> Any:
    """A folder that exists and can be read, or can be made; or None."""
    if value is None:
        return None
    path, remedy = Path(string(name, value)).expanduser(), "Name another folder."
    if path.exists():
        if not path.is_dir():
            raise ValueError(f"{name} is {str(path)!r}, which is a file. {remedy}")
        if not os.access(path, os.R_OK | os.X_OK):
            raise ValueError(f"{name} is {str(path)!r}, which this user cannot read. {remedy}")
        return str(path)
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{name} is {str(path)!r}, which cannot be made: {str(parent)!r} is not writable. {remedy}")
    return str(path)


def packages(feature: str, names: Iterable[str], extra: str) -> None:
    """Raise RuntimeError if a package that a feature needs is missing; nothing but parents of packages is imported."""
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise RuntimeError(f"{feature} needs {', '.join(missing)}: pip install 'nanovllm[{extra}]'.")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent
        return False


def truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")
    return value


def functions(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    found = (value,) if callable(value) else items(name, value, "a function or a list of them")
    for item in found:
        if not callable(item):
            raise TypeError(f"{name} must hold functions, not {item!r}.")
    return found


CHECKS: dict[str, Callable[[str, Any], Any]] = {"int": partial(integer, low=1), "bool": truth}  # by annotation


def check_fields(options: Any, checks: dict[str, Callable[[str, Any], Any]]) -> None:
    """Check and normalise the fields of a frozen dataclass of `option`s, within its constructor; defaults are right.

    Args:
        checks: of further annotations, for fields that declare none.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is not field.default:
            check = field.metadata["check"] or (CHECKS | checks)[str(field.type).removesuffix(" | None")]
            object.__setattr__(options, field.name, check(field.name, value))


def check_kv_events(config: Any) -> None:
    """Raise ValueError for ports of an `EngineConfig`'s KV events that overlap."""
    ports = [int(end.rpartition(":")[2]) for end in (config.kv_events, config.kv_events_replay) if end and "tcp" in end]
    if len(ports) == 2 and all(ports) and abs(ports[0] - ports[1]) < config.data_parallel_size:
        raise ValueError(
            f"kv_events_replay has port {ports[1]} and kv_events port {ports[0]}, to which each replica adds its "
            f"number. Set ports that are at least {config.data_parallel_size} apart."
        )
    if (last := max(ports, default=0) + config.kv_events_rank + config.data_parallel_size - 1) > 65535:
        raise ValueError(
            f"kv_events and kv_events_replay have ports of up to {last}, with the number of the replica; 65535 is "
            "the highest. Set lower ones."
        )
