"""Meaning of each format of quantised weights: shapes that belong together, and the plain weight in float32.

Products of values and scales are those of `transformers` and `compressed-tensors`, bit for bit, where these read the
same format right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.errors import ModelLoadError
from nanovllm.models.quantised.stored import (
    FP8,
    Parts,
    Quantised,
    Reader,
    blocks_of,
    check_dtype,
    check_shape,
    need,
    settings_error,
)
from nanovllm.models.quantised.stored_config import Checkpoint

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENTS = ("F8_E8M0", "U8")
_SCALES = ("F32", "BF16", "F16", *_EXPONENTS)
_FP4_FORMATS = {"nvfp4-pack-quantized": FP8, "mxfp4-pack-quantized": ("U8",)}  # dtypes of their scales
_FP8_BLOCK = (128, 128)
_MX_BLOCK = (1, 32)
_NVFP4_BLOCK = (1, 16)


def reader_of(source: Any, checkpoint: Checkpoint) -> Reader:
    """The reader of a checkpoint's weights; raises ModelLoadError for settings that contradict themselves."""
    return _READERS[checkpoint.method](source, checkpoint)


# ---------------------------------------------------------------------------------------------- values and scales


def fp4_values(packed: Tensor) -> Tensor:
    """Two e2m1 numbers a byte, the low half first: [..., bytes] -> [..., 2 * bytes] float32."""
    numbers = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)  # one for each byte
    return pairs.index_select(0, packed.contiguous().view(torch.uint8).flatten().int()).view(*packed.shape[:-1], -1)


def scale_values(scales: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents with a bias of 127."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def times_blocks(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Values [..., rows, columns] times the scale of their block; the last blocks may be cut by the weight's end."""
    rows, columns = values.shape[-2:]
    if rows % block[0] == 0 and columns % block[1] == 0:
        values.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).mul_(scales[..., :, None, :, None])
        return values
    each = scales.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return values.mul_(each.repeat_interleave(block[1], dim=-1)[..., :columns])


# ------------------------------------------------------------------------------- fp8, mxfp8, fbgemm_fp8, modelopt


def _fp8_reader(source: Any, checkpoint: Checkpoint) -> Reader:
    blocks = _stated_blocks(source, checkpoint)

    def read(name: str, parts: Parts) -> Quantised:
        need(name, parts, "weight", "scale")
        return _in_blocks(name, parts, blocks)

    return read


def _stated_blocks(source: Any, checkpoint: Checkpoint) -> list[tuple[int, int]]:
    """weight_block_size of the settings, as `transformers` reads them; empty for a scale a weight or a row."""
    block = checkpoint.settings.get("weight_block_size", _FP8_BLOCK)
    if checkpoint.method == "fbgemm_fp8" or not block:
        return []
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise settings_error(source, checkpoint, f"has weight_block_size {block!r}, which is no pair of sizes.")
    return [(block[0], block[1])]


def _in_blocks(name: str, parts: Parts, blocks: list[tuple[int, int]]) -> Quantised:
    """A weight of 8 bits, or of 4 in pairs a byte, with a scale a block, a row, or a weight.

    Args:
        blocks: sizes of blocks that the settings state; empty for a scale a weight or a row.
    """
    weight = parts["weight"]
    check_dtype(weight, *FP8, "I8", "U8")
    check_dtype(parts["scale"], *_SCALES, *FP8)
    if len(weight.shape) < 2:
        raise ModelLoadError(f"{weight} of {weight.path.name} has a scale, {parts['scale']}, but is no matrix.")
    is_packed = weight.dtype not in FP8
    shape = (*weight.shape[:-1], weight.shape[-1] * 2) if is_packed else weight.shape
    if is_packed:
        blocks = [_NVFP4_BLOCK if "scale_2" in parts else _MX_BLOCK]
    elif not blocks:
        blocks = [(1, shape[-1]), (shape[-2], shape[-1])]
    block = _block_of(parts, shape, blocks)

    def widen(tensors: Mapping[str, Tensor]) -> Tensor:
        values = fp4_values(tensors["weight"]) if is_packed else tensors["weight"].float()
        scales = scale_values(tensors["scale"]).reshape(blocks_of(shape, block))
        if "scale_2" in tensors:
            scales = scales * tensors["scale_2"].float().reshape(-1)
        return times_blocks(values, scales, block)

    return Quantised(name, shape, parts, widen)


def _block_of(parts: Parts, shape: tuple[int, ...], blocks: list[tuple[int, int]]) -> tuple[int, int]:
    """The block, of those possible, that the scales of a weight are for; raises ModelLoadError for another number."""
    scale = parts["scale"]
    if scale.dtype in _EXPONENTS:
        blocks = [*blocks, _MX_BLOCK]  # experts in MXFP4 or MXFP8, other layers in larger blocks
    shapes = [blocks_of(shape, block) for block in blocks]
    given = scale.shape
    if scale.num_elements == math.prod(shape[:-2]):
        given = (*shape[:-2], 1, 1)  # one for each matrix, however it is shaped
    if given not in shapes:
        check_shape(scale, shapes[0], parts["weight"], *shapes[1:])
    return blocks[shapes.index(given)]


def _modelopt_reader(source: Any, checkpoint: Checkpoint) -> Reader:
    def read(name: str, parts: Parts) -> Quantised:
        need(name, parts, "weight", "scale", optional=("scale_2",))
        if parts["weight"].dtype == "U8":
            need(name, parts, "weight", "scale", "scale_2")
            check_shape(parts["scale_2"], (), parts["weight"], (1,))
        return _in_blocks(name, parts, [])

    return read


# ---------------------------------------------------------------------------------------------------------- mxfp4


def _mxfp4_reader(source: Any, checkpoint: Checkpoint) -> Reader:
    return _mxfp4_experts


def _mxfp4_experts(name: str, parts: Parts) -> Quantised:
    """Experts: blocks [experts, out, runs, 16] and scales [experts, out, runs] are the plain [experts, in, out]."""
    need(name, parts, "blocks", "scales")
    blocks = parts["blocks"]
    check_dtype(blocks, "U8")
    check_dtype(parts["scales"], "U8")
    if len(blocks.shape) != 4 or blocks.shape[-1] != 16:
        raise ModelLoadError(f"{blocks} of {blocks.path.name} must be [experts, outputs, runs, 16] bytes.")
    check_shape(parts["scales"], blocks.shape[:-1], blocks)
    experts, outputs, runs, _ = blocks.shape

    def widen(tensors: Mapping[str, Tensor]) -> Tensor:
        values = fp4_values(tensors["blocks"].flatten(2))
        plain = times_blocks(values, scale_values(tensors["scales"]), _MX_BLOCK)
        return plain.transpose(1, 2).contiguous()

    return Quantised(name, (experts, runs * 32, outputs), parts, widen)


# --------------------------------------------------------------------------------------------- compressed-tensors


def _compressed_reader(source: Any, checkpoint: Checkpoint) -> Reader:
    from compressed_tensors.quantization import QuantizationConfig

    settings = {key: value for key, value in checkpoint.settings.items() if key in QuantizationConfig.model_fields}
    try:
        config = QuantizationConfig.model_validate(settings)
    except ValueError as error:
        first = " ".join(str(error).split()[:40])
        raise settings_error(source, checkpoint, f"is not one of compressed-tensors: {first}") from None
    status = getattr(config.quantization_status, "value", config.quantization_status)
    if status != "compressed" or not config.config_groups:
        raise settings_error(
            source, checkpoint, f"has quantization_status {status!r} and {len(config.config_groups or ())} "
            "config_groups; weights in the files are understood with 'compressed' and at least one.",
        )  # fmt: skip
    if any((checkpoint.settings.get("transform_config") or {}).values()):
        raise settings_error(source, checkpoint, "has a transform_config: inputs are rotated, which is not done here.")
    schemes: dict[str, Any] = {}
    for group in config.config_groups.values():
        for target in group.targets:
            schemes.setdefault(target, group)

    def read(name: str, parts: Parts) -> Quantised:
        return _decompressed(name, parts, _scheme_of(name, parts, schemes, source), config.format)

    return read


def _scheme_of(name: str, parts: Parts, schemes: Mapping[str, Any], source: Any) -> Any:
    """The group of the config that quantised a module: by name, else by pattern, else by class."""
    from compressed_tensors.utils.match import match_targets

    path = name.removesuffix(".weight")
    embeds = "embed" in path.rpartition(".")[2] or path.endswith("wte")
    module = nn.Embedding(1, 1, device="meta") if embeds else nn.Linear(1, 1, device="meta")
    matches = match_targets(path, module, schemes)
    if not matches or schemes[matches[0]].weights is None:
        seen = next(iter(parts.values()))
        raise ModelLoadError(
            f"{seen} of {seen.path.name} belongs to a quantised weight, but no group of the quantization_config of "
            f"{source} names {path}; its targets are {', '.join(schemes)}."
        )
    return schemes[matches[0]]


def _decompressed(name: str, parts: Parts, scheme: Any, form: str) -> Quantised:
    """A weight that the format's own compressor widens."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    weights = scheme.weights
    form = scheme.format or (
        form if form not in ("mixed-precision", "dense") else infer_module_format(nn.Linear, scheme)
    )
    form = str(getattr(form, "value", form))
    try:
        compressor = BaseCompressor.get_value_from_registry(form)
        decompress: Callable[..., dict[str, Tensor]] = compressor.decompress
    except (KeyError, AttributeError):
        raise ModelLoadError(f"{name} has the format {form!r}, which compressed-tensors does not read.") from None
    roles = ["weight_packed" if "pack" in form else "weight", "weight_scale"]
    roles += ["weight_zero_point"] if not weights.symmetric else []
    roles += ["weight_shape"] if form == "pack-quantized" else []
    roles += ["weight_global_scale"] if weights.strategy == "tensor_group" else []
    need(name, parts, *roles)
    shape = _compressed_shape(parts[roles[0]], parts, form, weights)
    _check_scales(parts, shape, form, weights)
    if form in _FP4_FORMATS:
        return Quantised(name, shape, parts, _widen_fp4)

    def widen(tensors: Mapping[str, Tensor]) -> Tensor:
        return decompress(dict(tensors), scheme)["weight"]

    return Quantised(name, shape, parts, widen)


def _widen_fp4(tensors: Mapping[str, Tensor]) -> Tensor:
    """NVFP4 and MXFP4 as compressed-tensors widens them, which takes 3.5 times as long: rounded to bfloat16."""
    values = fp4_values(tensors["weight_packed"])
    scales = scale_values(tensors["weight_scale"])
    if "weight_global_scale" in tensors:  # its reciprocal is stored
        scales = scales / tensors["weight_global_scale"].float().reshape(-1)
    return times_blocks(values, scales, (1, values.shape[1] // scales.shape[1])).bfloat16()


def _compressed_shape(values: Any, parts: Parts, form: str, weights: Any) -> tuple[int, ...]:
    """Shape of the plain weight; raises ModelLoadError for values of another dtype or shape."""
    if len(values.shape) != 2:
        raise ModelLoadError(f"{values} of {values.path.name} is no matrix, which its format {form!r} would have.")
    rows, width = values.shape
    if form == "pack-quantized":
        from safetensors import safe_open

        check_dtype(values, "I32")
        stored = parts["weight_shape"]
        check_shape(stored, (2,), values)
        with safe_open(stored.path, framework="pt") as file:
            wanted = tuple(file.get_tensor(stored.name).tolist())
        if wanted[0] != rows or math.ceil(wanted[1] * weights.num_bits / 32) != width:
            raise ModelLoadError(
                f"{stored} of {stored.path.name} says {list(wanted)}, which {weights.num_bits} bits do not make "
                f"{values}. The checkpoint is damaged, or its config.json is another's."
            )
        return wanted
    if "pack" in form:
        check_dtype(values, "U8", "I8")
        return rows, width * 8 // weights.num_bits
    check_dtype(values, *(FP8 if weights.type == "float" else ("I8",)))
    return rows, width


def _check_scales(parts: Parts, shape: tuple[int, ...], form: str, weights: Any) -> None:
    """Raise ModelLoadError for scales, zero points or a global scale of another number than the weight has."""
    scale = parts["weight_scale"]
    of = parts.get("weight_packed") or parts["weight"]
    rows, columns = shape
    strategy = str(getattr(weights.strategy, "value", weights.strategy))
    check_dtype(scale, *_FP4_FORMATS.get(form, (*_SCALES, *FP8)))
    if strategy == "tensor":
        check_shape(scale, (1,), of, ())
        return
    if strategy in ("group", "tensor_group") and not columns % (weights.group_size or 1):
        wanted = (rows, columns // weights.group_size)
    elif strategy == "block":
        wanted = (math.ceil(rows / weights.block_structure[0]), math.ceil(columns / weights.block_structure[1]))
    elif strategy == "channel":
        wanted = (rows, 1)
    else:
        raise ModelLoadError(
            f"{of} of {of.path.name} has {columns} inputs with scales by {strategy!r} of {weights.group_size}, which "
            "leaves a part of a group. Such weights are not read here."
        )
    check_shape(scale, wanted, of)
    if "weight_zero_point" in parts:
        packed = (math.ceil(rows * weights.num_bits / 32), wanted[1])
        check_shape(parts["weight_zero_point"], packed if form == "pack-quantized" else wanted, of)
    if "weight_global_scale" in parts:
        check_shape(parts["weight_global_scale"], (1,), of, ())


_READERS: dict[str, Callable[[Any, Checkpoint], Reader]] = {
    "compressed-tensors": _compressed_reader,
    "fp8": _fp8_reader,
    "mxfp8": _fp8_reader,
    "fbgemm_fp8": _fp8_reader,
    "modelopt": _modelopt_reader,
    "mxfp4": _mxfp4_reader,
}
