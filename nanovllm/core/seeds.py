"""Seeds of requests and their samples, by SplitMix64: each is computed without the others."""

from __future__ import annotations

# SplitMix64 (Steele, Lea and Flood 2014, with Stafford's "Mix13" finaliser): output i is a mixed counter.
GAMMA = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK_64 = 2**64 - 1


def mix64(value: int) -> int:
    """SplitMix64's finaliser on a Python int, modulo 2**64."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK_64
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK_64
    return value ^ (value >> 31)


def sample_seeds(seed: int | None, count: int, *, engine_seed: int, request_number: int) -> list[int]:
    """Seeds of a request's samples; the first sample has the seed of the request.

    Args:
        seed: of the request; None derives one from the engine's seed and the number of the request.
    """
    if seed is None:
        seed = mix64(mix64(engine_seed + GAMMA) + (request_number + 1) * GAMMA)
    return [seed, *(mix64(mix64(seed ^ _MASK_64) + index * GAMMA) for index in range(1, count))]
