"""Recurrent states: linear attention, state spaces and convolutions over a pool of states."""

NEEDS = ("fast.kernels", "features.engine_config", "features.unsupported")
