"""Default limits of each device; a default yields to limits that the user set."""

from __future__ import annotations

from dataclasses import dataclass

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
    fitted_seqs, fitted_block = num_seqs or defaults.max_num_seqs, block_size or defaults.block_size
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
