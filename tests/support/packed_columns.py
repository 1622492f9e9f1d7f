"""Checkpoints of GPTQ and AWQ, packed by hand after their readers: the producers need packages of their own.

Words hold integers of 4 or 8 bits. GPTQ packs neighbouring inputs of an output, and zero points less one in its first
version; AWQ packs eight outputs of an input in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from pathlib import Path

import torch

from tests.support.quantised_checkpoints import rewrite, small_llama

GROUP = 128
_INTERLEAVED = [0, 2, 4, 6, 1, 3, 5, 7]
# form: the config's quantization_config
_GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
FORMS = {
    "gptq": _GPTQ,
    "gptq act-order": _GPTQ | {"desc_act": True},
    "gptq v2": _GPTQ | {"checkpoint_format": "gptq_v2"},
    "gptq 8 bits": _GPTQ | {"bits": 8, "sym": True, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
}


def save_columns(folder, form, model=None):
    """Save a model, `small_llama()` by default, in one of FORMS; returns (folder, dequantised weights by module)."""
    folder = Path(folder)
    settings = FORMS[form] | {"group_size": GROUP}
    (small_llama() if model is None else model).save_pretrained(folder)
    weights = {}

    def packed(name, tensor):
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        parts, weights[module] = _packed(tensor.float(), settings)
        return {f"{module}.{part}": value for part, value in parts.items()}

    rewrite(folder, packed, settings)
    return folder, weights


def _packed(weight, settings):
    """(tensors of a weight [outputs, inputs], the weight that they stand for, by the readers' formula in float16)."""
    bits, width = settings["bits"], weight.shape[1]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    order = order if settings.get("desc_act") else torch.arange(width)
    group_of = torch.empty(width, dtype=torch.int32)
    group_of[order] = torch.arange(width, dtype=torch.int32) // GROUP
    groups = weight[:, order].unflatten(1, (-1, GROUP))
    if settings.get("sym"):
        scales = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (groups.amax(2) - groups.amin(2)) / (2**bits - 1)
        zeros = (-groups.amin(2) / scales).round().clamp(1, 2**bits - 1)
    scales = scales.half()
    scale, zero = scales[:, group_of.long()], zeros[:, group_of.long()].half()
    codes = (weight / scale.float() + zero.float()).round().clamp(0, 2**bits - 1)
    dequantised = (codes.half() - zero) * scale
    if settings["quant_method"] == "awq":
        parts = {"qweight": _in_words(codes.T, 4, _INTERLEAVED), "qzeros": _in_words(zeros.T, 4, _INTERLEAVED)}
        return parts | {"scales": scales.T}, dequantised
    offset = 0 if settings["checkpoint_format"] == "gptq_v2" else 1
    parts = {"qweight": _in_words(codes, bits).T, "qzeros": _in_words(zeros.T - offset, bits)}
    return parts | {"scales": scales.T, "g_idx": group_of}, dequantised


def _in_words(numbers, bits, order=None):
    """[rows, columns] whole numbers -> [rows, columns * bits / 32] int32: of a word's the one at `order`[0] first."""
    each = numbers.long().unflatten(1, (-1, 32 // bits))
    each = each if order is None else each[..., order]
    words = (each << bits * torch.arange(32 // bits)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()
