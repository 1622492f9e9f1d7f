"""Token ids of prompts with known block hashes only: each block's ids follow from its hash."""

from __future__ import annotations

from typing import Any

import numpy as np

LOWEST_ID = 17  # first id after the special tokens of the default model
DRAWN = 256 - LOWEST_ID  # token ids from LOWEST_ID on: in the vocabulary of every model, bytes included
Numbers = np.ndarray[Any, np.dtype[np.uint64]]


def draw_prompt(hash_ids: list[int], length: int, block_tokens: int) -> list[int]:
    """Token ids of a prompt; each block's ids are drawn by its hash."""
    ids: Numbers = np.asarray(hash_ids, np.uint64)[:, None]  # [num_blocks, 1]
    places: Numbers = np.arange(block_tokens, dtype=np.uint64)
    mixed = _mix(np.add(_mix(ids), places, dtype=np.uint64))  # [num_blocks, block_tokens]
    token_ids: list[int] = (mixed.ravel()[:length] % np.uint64(DRAWN) + np.uint64(LOWEST_ID)).tolist()
    return token_ids


def _mix(values: Numbers) -> Numbers:
    """Scramble 64-bit numbers: the finalizer of splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
