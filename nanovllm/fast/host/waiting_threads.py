"""Waiting threads of OpenMP, which reads from the environment how they wait when PyTorch is imported."""

from __future__ import annotations

import os

_SPINS = "1000"  # some 50 µs


def limit_spins() -> None:
    """Let threads that wait sleep soon, unless the user decided how they wait. To be called before torch is imported.

    GNU's OpenMP, which PyTorch brings, would spin for 16 ms or more, while the thread that they wait for has no core.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
