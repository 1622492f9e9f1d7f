"""Checks of input that the engine itself never sees: options of features, files, folders, nested texts."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from nanovllm.config import integer, items, one_of, real, text

if TYPE_CHECKING:
    import torch

MIN_WEIGHT = 1e-3
MIN_GOAL_S = 1e-3  # no step is shorter
CONVERTS_FP8 = (8, 9)  # capability of the first GPUs that convert 8-bit floats

# Kinds of policies, and the option that each takes the place of.
REPLACED = {"queue": "client_weights", "budget": "itl_goal"}

Key = TypeVar("Key")
Value = TypeVar("Value")


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {value!r}.")
    return value


class FrozenDict(dict[Key, Value]):
    """Reads, compares, prints and pickles like the dict that it was made of; every change raises TypeError.

    A `types.MappingProxyType` would neither pickle nor go through `copy.deepcopy`, `dataclasses.asdict` and JSON.
    """

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this mapping is part of checked options and cannot be changed; build new options from a copy.")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:  # the default unpickling would set items one by one, which is refused
        return type(self), (dict(self),)


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


def policies(name: str, value: Any) -> FrozenDict[str, Any]:
    """Policies by kind; `features.policies.opening` tries each before a model is loaded."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map {' and '.join(REPLACED)} to policies, not {value!r}.")
    for kind, policy in value.items():
        one_of(f"a key of {name}", kind, REPLACED)
        if not (callable(policy) or isinstance(policy, str)):
            raise TypeError(f"{name} has {policy!r} as {kind}; it must be a callable, or its name as module:Class.")
    return FrozenDict(value)


def picture_limit(name: str, value: Any) -> FrozenDict[str, int]:
    if not isinstance(value, Mapping) or value.keys() != {"image"}:
        raise ValueError(f"{name} is {value!r}; it must be the most pictures of a prompt, such as {{'image': 4}}.")
    return FrozenDict({"image": integer(f"image of {name}", value["image"], 0)})


def named_values(name: str, value: Any) -> FrozenDict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must map names to values, not {value!r}.")
    return FrozenDict(value)


def functions(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    found = (value,) if callable(value) else items(name, value, "a function or a list of them")
    for item in found:
        if not callable(item):
            raise TypeError(f"{name} must hold functions, not {item!r}.")
    return found


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
    number = integer(name, value, 1)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if number > total:
        raise ValueError(f"{name} is {number:,} bytes, but the machine has {total:,} bytes of memory. Set less.")
    return number


def cache_folder(name: str, value: Any) -> Any:
    """A folder that exists and can be read, or can be made; or None."""
    if value is None:
        return None
    path = Path(string(name, value)).expanduser()
    remedy = "Name another folder."
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


def check_policies(config: Any) -> None:
    """Raise ValueError for an option of an `EngineConfig` that one of its policies takes the place of."""
    for kind in config.policies or ():
        if value := getattr(config, REPLACED[kind]):
            raise ValueError(
                f"{REPLACED[kind]} is {value!r}, but policies has another {kind}, which knows nothing of it. Leave one "
                "of them out."
            )


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


def check_kv_cache_dtype(config: Any, device: torch.device) -> None:
    """Raise ValueError for a device that does not keep K and V as the options say."""
    if config.kv_cache_dtype != "auto" and (reason := why_no_8_bit_kv(device)) is not None:
        raise ValueError(f"kv_cache_dtype is {config.kv_cache_dtype!r}, but {reason}. Leave it out.")


def why_no_8_bit_kv(device: torch.device) -> str | None:
    """The reason why a device keeps no K and V in 8-bit floats, in words; None if it does."""
    if device.type != "cuda":
        return "the device is a CPU, where attention over 8-bit K and V was measured to be slower"
    import torch

    found = torch.cuda.get_device_capability(device)
    if found < CONVERTS_FP8:
        return f"it is for GPUs of capability 8.9 and later, and {device} has {found[0]}.{found[1]}"
    return None
