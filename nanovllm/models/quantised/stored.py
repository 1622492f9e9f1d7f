"""Weights of quantised checkpoints, found and checked by the headers of their files: no weight is read for it.

A checkpoint has several tensors for a weight, such as its values and their scales, next to each other by name. `find`
puts them together, and refuses by name missing tensors, other shapes, and unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanovllm.errors import ModelLoadError
from nanovllm.models.headers import StoredTensor
from nanovllm.models.quantised.stored_config import Checkpoint

FP8 = ("F8_E4M3", "F8_E5M2")
# Names of a weight's tensors by method: (end of the name, end of the plain weight's name, role). A role of None is a
# scale of activations or of K and V, which no weight depends on.
_OF_CACHE = ((".k_scale", "", None), (".v_scale", "", None), (".q_scale", "", None))
_INPUTS = tuple((f".{kind}", ".weight", None) for kind in ("input_scale", "input_zero_point", "input_global_scale",
                "output_scale", "output_zero_point"))  # fmt: skip
_FP8_NAMES = (
    ("_scale_inv", "", "scale"), (".qscale_weight", ".weight", "scale"), (".scale", ".weight", "scale"),
    ("_activation_scale", "", None), (".activation_scale", ".weight", None), (".qscale_act", ".weight", None),
    *_INPUTS, *_OF_CACHE,
)  # fmt: skip
NAMES: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    "compressed-tensors": (
        *((f".{part}", ".weight", part) for part in (
            "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape", "weight_g_idx",
            "weight_bitmask",
        )),
        *_INPUTS, *_OF_CACHE,
    ),
    "fp8": _FP8_NAMES,
    "mxfp8": _FP8_NAMES,
    "fbgemm_fp8": (("_scale", "", "scale"), (".input_scale_ub", ".weight", None)),
    "modelopt": (
        (".pre_quant_scale", ".weight", "pre_quant_scale"), *_INPUTS, *_OF_CACHE, ("_scale_2", "", "scale_2"),
        ("_scale", "", "scale"),
    ),
    "mxfp4": (("_blocks", "", "blocks"), ("_scales", "", "scales")),
}  # fmt: skip

Parts = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised weight in files.

    name, shape: the plain weight's. parts: its tensors by role.
    widen: the plain weight from the tensors of `parts`.
    """

    name: str
    shape: tuple[int, ...]
    parts: Parts
    widen: Callable[[Mapping[str, Tensor]], Tensor]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


# Finds a weight of a method among tensors; raises ModelLoadError for tensors that are no weight of its format.
Reader = Callable[[str, Parts], Quantised]


def find(headers: Mapping[str, StoredTensor], method: str, read: Reader) -> dict[str, Quantised | StoredTensor]:
    """Weights by their plain names, quantised or stored as they are; scales of activations are left out.

    Raises ModelLoadError, naming the tensor, for parts without a weight, and as `read`.
    """
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in headers.items():
        plain, role = _role_of(name, method, headers)
        if role is not None:
            groups.setdefault(plain, {})[role] = tensor
    found: dict[str, Quantised | StoredTensor] = {}
    for name, parts in groups.items():
        found[name] = parts["weight"] if _is_plain(name, parts) else read(name, parts)
    return found


def _is_plain(name: str, parts: Parts) -> bool:
    """Whether a weight is stored plain; one of bytes or packed integers lacks its scale."""
    dtype = parts["weight"].dtype if set(parts) == {"weight"} else FP8[0]
    return dtype not in FP8 and not (dtype in ("I8", "U8", "I32") and name.endswith("weight"))


def _role_of(name: str, method: str, headers: Mapping[str, StoredTensor]) -> tuple[str, str | None]:
    """(name of the plain weight, role of a tensor of this name)."""
    for end, plain_end, role in NAMES[method]:
        if name.endswith(end):
            plain = name.removesuffix(end) + plain_end
            if end == ".scale" and plain not in headers:
                break  # a norm's own parameter
            return plain, role
    return name, "weight"


def need(name: str, parts: Parts, *roles: str, optional: tuple[str, ...] = ()) -> None:
    """Raise ModelLoadError unless a weight has tensors of these roles, and of no others than the optional ones."""
    seen = next(iter(parts.values()))
    if missing := [role for role in roles if role not in parts]:
        raise ModelLoadError(
            f"{name} has no {missing[0]} in {seen.path.parent}, but {', '.join(map(str, parts.values()))}. The "
            "checkpoint is incomplete: fetch it again."
        )
    for role, tensor in parts.items():
        if role not in (*roles, *optional):
            raise ModelLoadError(
                f"{tensor} of {tensor.path.name} is a part of {name} that is not understood here, and leaving it out "
                "would change the weight. Take another checkpoint of the model."
            )


def check_shape(tensor: StoredTensor, wanted: tuple[int, ...], of: StoredTensor, *others: tuple[int, ...]) -> None:
    """Raise ModelLoadError unless a tensor has the shape that another one asks for."""
    if tensor.shape not in (wanted, *others):
        raise ModelLoadError(
            f"{tensor} of {tensor.path.name} does not fit {of}: its shape would be "
            f"{' or '.join(str(list(shape)) for shape in (wanted, *others))}. The checkpoint is damaged, or its "
            "config.json is another's."
        )


def check_dtype(tensor: StoredTensor, *wanted: str) -> None:
    """Raise ModelLoadError unless a tensor is stored in one of these dtypes."""
    if tensor.dtype not in wanted:
        raise ModelLoadError(
            f"{tensor} of {tensor.path.name} is stored in {tensor.dtype}, and its format has {' or '.join(wanted)}. "
            "The checkpoint is damaged, or its config.json is another's."
        )


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., rows, columns], one for each block of it."""
    return (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))


def settings_error(source: Any, checkpoint: Checkpoint, reason: str) -> ModelLoadError:
    """The error for a quantization_config that contradicts itself or the files."""
    return ModelLoadError(f"the quantization_config of {source} ({checkpoint}) {reason}")
