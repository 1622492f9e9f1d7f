"""Quantised weights made of random bytes."""

import torch

from nanovllm.models.quantised.blocks import FORMATS

# Where the float16 scales of a block lie, by kind.
_SCALES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(kind, num_rows, in_features, *, seed=0):
    """[num_rows, bytes a row] uint8: random bits, and scales of the size of a model's."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (num_rows, FORMATS[kind].row_bytes(in_features)), generator=generator).to(torch.uint8)
    if kind == "int8":
        scales = 0.001 + 0.001 * torch.rand(num_rows, 1, generator=generator)
        blocks[:, :4] = scales.view(torch.uint8)
        return blocks
    each = blocks.view(-1, FORMATS[kind].num_bytes)
    for at in _SCALES[kind]:
        scales = (0.01 + 0.01 * torch.rand(len(each), 1, generator=generator)) / (16 if kind.endswith("K") else 1)
        if at == 2 and kind in ("Q4_1", "Q5_1"):
            scales = (-8 if kind == "Q4_1" else -16) * scales  # so that values of both signs occur
        each[:, at : at + 2] = scales.half().view(torch.uint8)
    return blocks
