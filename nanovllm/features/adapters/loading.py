"""Reads LoRA adapters (Hu et al. 2021) from folders as PEFT writes them: adapter_config.json and safetensors."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from nanovllm.config import text

logger = logging.getLogger("nanovllm")

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_NAME = 256  # characters of a name
MAX_BYTES = 16 * 2**30  # bytes of a file of weights, which is read as a whole
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
# Entries of a config that do not change the product; others change it where they are set.
_WITHOUT_EFFECT = {
    "alpha_pattern", "arrow_config", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core",
    "monteclora_config", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora", "velora_config",
}  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # initialisations that subtract from the base model's weights


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter.

    Attributes:
        digest: digest of the bytes of its config and weights, 32 hexadecimal digits.
        rank: largest rank of its factors.
        factors: module's name in the model -> (down [rank, in_features], up [rank, out_features]), contiguous, of the
            model's dtype, on the CPU; `up` includes the scale. Empty in a front with engines in other processes.
    """

    name: str
    path: str
    digest: str
    rank: int
    factors: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for pair in self.factors.values() for part in pair)


def check_name(name: Any) -> str:
    """The name of an adapter; raises TypeError or ValueError for one that no request could give."""
    if not isinstance(name, str):
        raise TypeError(f"an adapter's name must be a string, not {name!r}.")
    text("an adapter's name", name)
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(
            f"an adapter's name is {name[:MAX_NAME]!r}; it must have 1 to {MAX_NAME} characters, all printable."
        )
    return name


def read_adapter(name: str, path: Any, targets: Mapping[str, Any], dtype: torch.dtype, max_rank: int) -> Adapter:
    """Read an adapter for a model.

    Args:
        path: folder of the adapter.
        targets: in_features and out_features of the linear layers that adapters may change, by name.
        dtype: dtype of the factors.
        max_rank: largest rank that is accepted (max_lora_rank).

    Raises ValueError, naming file and entry, for a folder that is no LoRA adapter or fits another model.
    """
    folder = Path(path).expanduser()
    config_bytes, weights_bytes = (_bytes_of(folder / file, folder) for file in (CONFIG, WEIGHTS))
    try:
        config = json.loads(config_bytes)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is no JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG} holds {type(config).__name__}, not the entries of a LoRA config.")
    _check_config(folder / CONFIG, config)
    digest = digest_of(config_bytes, weights_bytes)  # the very bytes that are parsed below
    try:
        tensors = safetensors.torch.load(weights_bytes)
    except Exception as error:  # the library raises its own errors
        raise ValueError(f"{folder / WEIGHTS} is truncated or no safetensors file: {error}.") from error
    del weights_bytes
    factors = {
        module: _factors(folder / WEIGHTS, module, pair, targets, _scale(config, module), dtype, max_rank)
        for module, pair in _pairs(folder / WEIGHTS, tensors).items()
    }
    rank = max(len(down) for down, _ in factors.values())
    return Adapter(name, str(folder), digest, rank, factors)


def digest_of(config: bytes, weights: bytes) -> str:
    """`Adapter.digest` of the bytes of its two files."""
    digest = xxhash.xxh3_128(config)
    digest.update(weights)
    return digest.hexdigest()


def _bytes_of(file: Path, folder: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{file} has {size} bytes, more than an adapter may have ({MAX_BYTES}).")
        return file.read_bytes()
    except OSError as error:
        has_pickle = file.name == WEIGHTS and (folder / "adapter_model.bin").exists()
        remedy = (
            "Its adapter_model.bin may hold code; save it with safe_serialization=True."
            if has_pickle
            else f"Give a folder that PEFT has saved, with {CONFIG} and {WEIGHTS}."
        )
        raise ValueError(f"the adapter's file {file} cannot be read: {error.strerror}. {remedy}") from error


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError for anything but a LoRA adapter of linear layers."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{file} has peft_type {kind!r}; only LORA is served.")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"{file} has bias {bias!r}, which trains biases of the base model; only 'none' is served.")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{file} has init_lora_weights {init!r}, which changes the base model's weights. Convert the adapter to "
            "plain LoRA when you save it (path_initial_model_for_weight_conversion in PEFT)."
        )
    for entry, value in config.items():
        if entry not in _WITHOUT_EFFECT and value not in (None, False, {}, [], "none"):
            raise ValueError(
                f"{file} has {entry} {value!r}, which is not served: LoRA factors of linear layers alone are. Merge "
                "the adapter into its base model instead."
            )
    for entry in ("r", "lora_alpha"):
        value = config.get(entry)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{file} has {entry} {value!r}; it must be a number above 0.")
    for entry in ("alpha_pattern", "rank_pattern"):
        patterns = config.get(entry) or {}
        values = patterns.values() if isinstance(patterns, dict) else [patterns]
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            raise ValueError(f"{file} has {entry} {patterns!r}; it must map names of modules to numbers.")


def _scale(config: Mapping[str, Any], module: str) -> tuple[float, bool]:
    """(alpha of a module's factors, whether it is divided by the root of the rank instead of the rank)."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        except re.error as error:
            raise ValueError(f"alpha_pattern holds {pattern!r}, which is no regular expression: {error}.") from error
    return float(alpha), bool(config.get("use_rslora"))


def _pairs(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The factors "A" and "B" of each module, by its name in the base model."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if (found := _KEY.fullmatch(key)) is None:
            raise ValueError(
                f"{file} has the tensor {key}, which is no LoRA factor of a linear layer (lora_A or lora_B, .weight); "
                "saved modules, embeddings, biases and DoRA's magnitudes are not served."
            )
        pairs.setdefault(found["module"].removeprefix(_PREFIX), {})[found["factor"]] = tensor
    if not pairs:
        raise ValueError(f"{file} holds no tensors.")
    return pairs


def _factors(
    file: Path,
    module: str,
    pair: Mapping[str, Tensor],
    targets: Mapping[str, Any],
    scale: tuple[float, bool],
    dtype: torch.dtype,
    max_rank: int,
) -> tuple[Tensor, Tensor]:
    """The checked factors of one module; see `Adapter`."""
    where = f"{file}: {module}"
    linear: Any = targets.get(module)
    if linear is None:
        raise ValueError(f"{where} is no linear layer that adapters may change here; {_near(module, targets)}")
    if len(pair) != 2:
        raise ValueError(f"{where} has lora_{next(iter(pair))} alone; an adapter has both factors of each module.")
    down, up = pair["A"], pair["B"]
    rank = len(down) if down.dim() else 0
    for factor, shape in (("A", (rank, linear.in_features)), ("B", (linear.out_features, rank))):
        _check_factor(f"{where} has lora_{factor}", pair[factor], shape)
    if not 1 <= rank <= max_rank:
        raise ValueError(f"{where} has rank {rank}, and max_lora_rank is {max_rank}. Raise max_lora_rank.")
    alpha, by_root = scale
    down = down.to(dtype).contiguous()
    up = (up.float() * (alpha / (math.sqrt(rank) if by_root else rank))).t().to(dtype).contiguous()
    for factor, tensor in (("A", down), ("B", up)):
        if not tensor.isfinite().all():
            raise ValueError(f"{where} has values in lora_{factor} that are not finite in {dtype}.")
    return down, up


def _check_factor(what: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{what} of shape {tuple(tensor.shape)}, and this model needs {shape}: the adapter is of another model, or "
            "damaged."
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"{what} in {tensor.dtype}; 16, 32 or 64-bit floats are served.")


def _near(module: str, targets: Iterable[str]) -> str:
    if "experts" in module.split("."):
        return "adapters of experts are not served."
    last = module.rpartition(".")[2]
    kinds = sorted({name.rpartition(".")[2] for name in targets})
    if last in kinds:
        first = next(name for name in targets if name.endswith(f".{last}"))
        return f"the model's are named like {first}."
    return f"those are {', '.join(kinds) or 'none'}. Embeddings and the head are not served."
