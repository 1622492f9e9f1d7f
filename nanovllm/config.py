"""`EngineConfig` of the engine alone: the options that its own files read, validated on construction and frozen.

None means "not set": the option takes the device's default and yields to options that were set. Only options that
were set can contradict each other. `features.engine_config` has the public class, with the options of features.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self, TypeVar

Options = TypeVar("Options")
Check = Callable[[str, Any], Any]  # (name, value) -> the normalised value


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    check: Check | None = None,
    flag: str | None = None,
    refused: Mapping[str, str] | None = None,
    needs: str = "",
    **more: Any,
) -> Any:
    """Declare a field of an option dataclass with its help; `more` as for `dataclasses.field`.

    Args:
        help: text of flags, `help()` and the reference.
        check: function (name, value) -> normalised value, called by `check_fields`; None takes the annotation's.
        flag: name of the flag, and in a server's file; None: the field's.
        refused: mode of `features.refusals` that the option does not work with -> reason and remedy.
        needs: module without which the option is refused, such as "speculation.build".
        more: arguments of `dataclasses.field`.
    """
    metadata = {"help": help, "check": check, "flag": flag, "refused": refused or {}, "needs": needs}
    return dataclasses.field(default=default, metadata=metadata, **more)


def documented(cls: type[Options]) -> type[Options]:
    """Append the help of each field to the docstring of a dataclass."""
    lines = [f"{field.name}: {field.metadata['help']}" for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", *lines])
    return cls


MAX_INTEGER = 2**63 - 1
MIN_AGEING_S = 1e-3  # keeps priority levels apart in floating point
MAX_PRIORITY = 2**31 - 1  # the smallest priority is -MAX_PRIORITY


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
    """A whole number from `low` to `high`, by default 2^63 - 1, so that it can be sent to another process."""
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


def matching(name: str, value: Any, pattern: str, expected: str) -> str:
    """A string that a regular expression matches as a whole; `expected` describes it in the error."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"{name} is {value!r}; it must be {expected}.")
    return value


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
        code = ord(value[error.start])
        where = f"as character {error.start}, which no tokenizer can encode."
        if 0xDC80 <= code <= 0xDCFF:  # Python's form of bytes in arguments and files that are not UTF-8
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


def truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")
    return value


CHECKS: dict[str, Callable[[str, Any], Any]] = {"int": partial(integer, low=1), "bool": truth}  # keys are annotations


def check_fields(options: Any, checks: dict[str, Callable[[str, Any], Any]]) -> None:
    """Check and normalise the fields of a frozen dataclass of `option`s, in its constructor. Defaults are not checked.

    Args:
        checks: checks of further annotations, for fields that declare none.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is not field.default:
            check = field.metadata["check"] or (CHECKS | checks)[str(field.type).removesuffix(" | None")]
            object.__setattr__(options, field.name, check(field.name, value))


NOT_SET: Any = None  # Any, since the option is a number once resolved
ATTENTION_BACKENDS = ("auto", "flex", "sdpa", "cpp")
DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Default limits of a device, as measured in docs/guide/tuning.md."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int = 64
    overlap: bool = False


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(max_num_batched_tokens=1024, max_num_seqs=64),
    "cuda": DeviceDefaults(max_num_batched_tokens=8192, max_num_seqs=1024, overlap=True),
}


def fit_budget(
    budget: int | None, num_seqs: int | None, block_size: int | None, defaults: DeviceDefaults
) -> tuple[int, int, int]:
    """Return token budget, max_num_seqs and block_size, such that budget >= max_num_seqs + block_size.

    A step then has room for max_num_seqs decodes and one block of a prompt, so prefills always proceed.

    Args:
        budget, num_seqs, block_size: the limits as set; None yields to the others.

    Raises ValueError for limits that contradict each other.
    """
    fitted_seqs = num_seqs or defaults.max_num_seqs
    fitted_block = block_size or defaults.block_size
    if budget is None:
        budget = max(defaults.max_num_batched_tokens, fitted_seqs + fitted_block)
    elif budget < fitted_seqs + fitted_block:
        if block_size is None:
            fitting = [size for size in BLOCK_SIZES if size <= fitted_block and size + (num_seqs or 1) <= budget]
            fitted_block = max(fitting, default=BLOCK_SIZES[0])
        if num_seqs is None:
            fitted_seqs = max(1, min(fitted_seqs, budget - fitted_block))
    if budget < fitted_seqs + fitted_block:
        raise ValueError(
            f"max_num_batched_tokens is {budget}, but max_num_seqs ({fitted_seqs}) running sequences and one block of "
            f"{fitted_block} prompt tokens must fit into a step. Set it to at least {fitted_seqs + fitted_block}, or "
            f"lower max_num_seqs or block_size (smallest: {BLOCK_SIZES[0]})."
        )
    return budget, fitted_seqs, fitted_block


def _block_size(name: str, value: Any) -> Any:
    return one_of(name, integer(name, value, 1), BLOCK_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine."""

    dtype: str = option(
        "auto",
        'type of weights and KV cache: "auto" (the checkpoint\'s), "float32", "bfloat16" or "float16".',
        check=partial(one_of, choices=DTYPES),
    )
    device: str = option(
        "auto",
        '"auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".',
        check=partial(matching, pattern=r"auto|cpu|cuda(:\d+)?", expected="'auto', 'cpu', 'cuda' or 'cuda:N'"),
    )
    max_model_len: int = option(
        NOT_SET, "longest sequence in tokens, prompt and output together; default and maximum: the model's own limit."
    )
    max_num_batched_tokens: int = option(
        NOT_SET,
        "token budget of a step; smaller bounds the latency of a step, larger raises throughput. Default: 1024 on a "
        "CPU, 8192 on a GPU.",
    )
    max_num_seqs: int = option(NOT_SET, "maximum number of running sequences. Default: 64 on a CPU, 1024 on a GPU.")
    max_queue: int | None = option(
        None,
        "most unfinished requests (each sample counts) beyond max_num_seqs, else QueueFullError. None: no limit.",
        check=partial(integer, low=0),
    )
    priority_ageing_s: float | None = option(
        None,
        "seconds of waiting that raise a request's priority by one level, so that none starves. None or 0: no ageing.",
        check=ageing,
    )
    block_size: int = option(
        NOT_SET,
        "tokens per KV block: 16, 32, 64, 128 or 256. Default: 64.",
        check=_block_size,
    )
    num_kv_blocks: int = option(
        NOT_SET,
        "blocks in the KV cache, the null block included; overrides kv_cache_memory_bytes and gpu_memory_utilization.",
        check=partial(integer, low=2),
    )
    kv_cache_memory_bytes: int | None = option(
        None, "memory for the KV cache in bytes; overrides gpu_memory_utilization."
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory for this process, weights and activations included.",
        check=partial(share, high=1),
    )
    kv_cache_touch: str = option(
        "idle",
        'when a CPU\'s KV cache takes memory: "idle" (ahead of use, while no request runs) or "none" (when blocks are '
        "first written).",
        check=partial(one_of, choices=("idle", "none")),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes.")
    max_num_partial_prefills: int = option(
        NOT_SET, "maximum number of partially computed prompts at the end of a step. Default: 4."
    )
    max_long_partial_prefills: int = option(
        NOT_SET,
        "maximum number among them with more than `long_prefill_token_threshold` tokens left to compute. Default: 1.",
    )
    long_prefill_token_threshold: int = option(
        NOT_SET,
        "per-prompt token cap per step while others wait, for a prompt or for their next token. Default: half of "
        "max_num_batched_tokens.",
    )
    attention_backend: str = option(
        "auto",
        '"flex", "sdpa", "cpp" (CPU only) or "auto".',
        check=partial(one_of, choices=ATTENTION_BACKENDS),
    )
    enforce_eager: bool = option(False, "disable compilation.")
    overlap: bool = option(NOT_SET, "schedule and launch a step while the previous one runs. Default: on a GPU.")
    cuda_graphs: bool = option(
        NOT_SET,
        'launch a step as captured CUDA graphs; requires compiled layers on a GPU and attention_backend="flex". '
        "Default: wherever it is supported.",
    )
    skip_tokenizer_init: bool = option(
        False,
        "load no tokenizer: prompts are token ids, and outputs have no text. A folder without a tokenizer needs it.",
    )
    record_itl: bool = option(False, "keep each inter-token latency of a request in its metrics.")
    seed: int = option(
        0,
        "seed of the sampling noise for requests without a seed, 0 to 2**64 - 1. Engines with the same seed repeat "
        "one another, in other processes and forked children too.",
        check=partial(integer, low=0, high=2**64 - 1),
        flag="engine_seed",
    )

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Build a config from keyword options; raises TypeError with similar names for an unknown one."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                hint = f"Did you mean {' or '.join(near)}?" if near else f"The options are: {', '.join(known)}."
                raise TypeError(f"unknown engine option {name!r}. {hint}")
        return cls(**options)

    def __post_init__(self) -> None:
        check_fields(self, {})
        if self.enforce_eager and self.attention_backend in ("flex", "cpp"):
            raise ValueError(
                f"attention_backend={self.attention_backend!r} needs compilation, which enforce_eager=True forbids. "
                "Use attention_backend='sdpa' or 'auto', or drop enforce_eager."
            )

    def resolve_limits(self, device_type: str, num_positions: int, *, block_size: int | None = None) -> Self:
        """Resolve all but num_kv_blocks, for a type of device ("cpu", "cuda") and a model's longest sequence.

        Args:
            block_size: default where the user set none; None for the device's.

        Raises ValueError for options that contradict each other or the model.
        """
        if self.max_model_len is not None and self.max_model_len > num_positions:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but the model has positions for {num_positions} "
                f"tokens. Set max_model_len to at most {num_positions}."
            )
        defaults = DEVICE_DEFAULTS[device_type]
        defaults = replace(defaults, block_size=block_size or defaults.block_size)
        budget, num_seqs, block_size = fit_budget(
            self.max_num_batched_tokens, self.max_num_seqs, self.block_size, defaults
        )
        threshold = self.long_prefill_token_threshold or max(block_size, budget // 2 // block_size * block_size)
        if threshold < block_size:
            raise ValueError(
                f"long_prefill_token_threshold is {threshold}, less than one block of {block_size} tokens, so a long "
                f"prompt could never proceed. Set it to at least {block_size}, or set a smaller block_size."
            )
        partial = self.max_num_partial_prefills
        long = self.max_long_partial_prefills
        if partial is not None and long is not None and long > partial:
            raise ValueError(
                f"max_long_partial_prefills is {long}, above max_num_partial_prefills ({partial}), which counts the "
                "long ones too. Lower the first or raise the second."
            )
        return replace(
            self,
            device=device_type if self.device == "auto" else self.device,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            block_size=block_size,
            max_model_len=self.max_model_len or num_positions,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=partial or max(4, long or 0),
            max_long_partial_prefills=long or 1,
            overlap=defaults.overlap if self.overlap is None else self.overlap,
        )


def positions_of(config: Any) -> int | None:
    """Number of positions of a text model; None if its config has no such field."""
    return first_field(config, "max_position_embeddings", "n_positions", "max_sequence_length")


def _field(config: Any, name: str) -> Any:
    """A field of a config; None for one that it lacks, or that differs by layer, for which `transformers` raises."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def first_field(config: Any, *names: str) -> int | None:
    """The first of the fields that is a positive number; None if none is."""
    values = (_field(config, name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
