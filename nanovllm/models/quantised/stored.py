"""Weights of a quantised checkpoint, found and checked by the headers of its files: no weight is read for it.

A checkpoint has several tensors for a weight, such as its values and their scales, next to each other by name. They are
put together here; missing tensors, other shapes and unknown ones are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from nanovllm.errors import ModelLoadError
from nanovllm.models.headers import StoredTensor, read_headers
from nanovllm.models.quantised.layout import Layout, Weight
from nanovllm.models.quantised.layouts import FP8, layouts_of
from nanovllm.models.quantised.stored_config import Checkpoint

# Names of a weight's tensors by method: (end of the name, end of the plain weight's name, role). A role of None is a
# scale of activations or of K and V, which no weight depends on.
_UNUSED = (
    *((f".{kind}", ".weight", None) for kind in (
        "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "input_scale_ub",
        "activation_scale", "qscale_act",
    )),
    *((f".{kind}_scale", "", None) for kind in "kvq"),
    ("_activation_scale", "", None),
)  # fmt: skip
_SCALED = (
    *_UNUSED, (".pre_quant_scale", ".weight", "pre_quant_scale"), (".qscale_weight", ".weight", "scales"),
    ("_scale_inv", "", "scales"), ("_scale_2", "", "unit"), ("_scale", "", "scales"), (".scale", ".weight", "scales"),
)  # fmt: skip
_COLUMNS = (
    (".qweight", ".weight", "values"), (".qzeros", ".weight", "zeros"), (".scales", ".weight", "scales"),
    (".g_idx", ".weight", "groups"),
)  # fmt: skip
NAMES: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    "compressed-tensors": (
        *_UNUSED, *((f".weight_{end}", ".weight", role) for end, role in (
            ("packed", "values"), ("scale", "scales"), ("zero_point", "zeros"), ("global_scale", "unit"),
            ("shape", "shape"), ("g_idx", "groups"), ("bitmask", "bitmask"),
        )),
    ),
    **dict.fromkeys(("fp8", "mxfp8", "fbgemm_fp8", "modelopt"), _SCALED),
    "mxfp4": (("_blocks", "", "values"), ("_scales", "", "scales")),
    "gptq": _COLUMNS,
    "awq": _COLUMNS,
}  # fmt: skip


FileOf = Callable[[StoredTensor], Any]


def open_files() -> FileOf:
    """Function that returns the open file of a tensor; it opens each file once, and all are closed with it."""
    opened = cache(partial(safe_open, framework="pt"))
    return lambda tensor: opened(tensor.path)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised weight in files: its tensors by role, and their layout."""

    parts: Mapping[str, StoredTensor]
    layout: Layout

    @property
    def num_elements(self) -> int:
        return math.prod(self.layout.shape)


class StoredWeights:
    """Weights of a quantised checkpoint.

    plain: tensors of weights that are stored as they are, by name. quantised: the others, by the plain weight's name.
    num_stored_bytes: bytes of all tensors. num_unused: scales of activations, K and V.
    """

    def __init__(self, source: str, folder: Path, checkpoint: Checkpoint) -> None:
        """Find and check the weights; nothing of them is read.

        Raises ModelLoadError for missing, damaged and contradictory tensors, and UnsupportedModelError for tensors of
        no layout, named.
        """
        layout_of = layouts_of(source, checkpoint.settings)
        headers = read_headers(folder)
        if not headers:
            raise ModelLoadError(
                f"{source} ({checkpoint}) has no *.safetensors, and quantised weights are read from these alone, not "
                "from pickled files (*.bin). Take a revision that has them, or convert each file: "
                "safetensors.torch.save_file(torch.load(FILE, weights_only=True), FILE.safetensors)."
            )
        groups: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in headers.items():
            plain, role = _role_of(name, checkpoint.method, headers)
            if role is not None:
                groups.setdefault(plain, {})[role] = tensor
        self.plain = {name: parts["values"] for name, parts in groups.items() if _is_plain(name, parts)}
        file_of = open_files()
        self.quantised = {
            name: Quantised(parts, layout_of(Weight(name, parts, lambda part: file_of(part).get_tensor(part.name))))
            for name, parts in groups.items()
            if name not in self.plain
        }
        if not self.quantised:
            raise ModelLoadError(
                f"the config.json of {source} says that its weights are quantised ({checkpoint}), and none of them is: "
                f"{next(iter(headers.values()))} is the first. Take both from one revision."
            )
        self.num_stored_bytes = sum(tensor.num_bytes for tensor in headers.values())
        self.num_unused = len(headers) - sum(map(len, groups.values()))

    @property
    def num_weights(self) -> int:
        quantised = sum(weight.num_elements for weight in self.quantised.values())
        return quantised + sum(tensor.num_elements for tensor in self.plain.values())

    @property
    def kept(self) -> tuple[int, int]:
        """(number, bytes in files) of quantised weights with kernels."""
        found = [weight for weight in self.quantised.values() if weight.layout.form.has_kernel]
        num_bytes = sum(part.num_bytes for weight in found for part in weight.parts.values())
        return sum(weight.num_elements for weight in found), num_bytes


def _role_of(name: str, method: str, headers: Mapping[str, StoredTensor]) -> tuple[str, str | None]:
    """(name of the plain weight, role of a tensor of this name)."""
    for end, plain_end, role in NAMES[method]:
        if name.endswith(end):
            plain = name.removesuffix(end) + plain_end
            if NAMES[method] is _SCALED and role in ("scales", "unit") and plain not in headers:
                break  # a norm's own parameter
            return plain, role
    return name, "values"


def _is_plain(name: str, parts: Mapping[str, StoredTensor]) -> bool:
    """Whether a weight is stored plain; one of bytes or packed integers lacks its scale."""
    dtype = parts["values"].dtype if parts.keys() == {"values"} else FP8[0]
    return dtype not in FP8 and not (dtype in ("I8", "U8", "I32") and name.endswith("weight"))
