"""Many machines on Ray: a Serve application, a stage for `ray.data`, and restartable batch jobs (`nanovllm[ray]`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.features.extras import check_extra

# Modules of public names, loaded on first use, so that ray is imported only if needed.
_HOMES = {
    "connect": "nanovllm.ray.cluster",
    "app": "nanovllm.ray.application",
    "build": "nanovllm.ray.application",
    "Stage": "nanovllm.ray.batches",
    "stage": "nanovllm.ray.batches",
    "batch": "nanovllm.ray.batches",
}

__all__ = ["Stage", "app", "batch", "build", "connect", "stage"]

if TYPE_CHECKING:
    from nanovllm.ray.application import app, build
    from nanovllm.ray.batches import Stage, batch, stage
    from nanovllm.ray.cluster import connect


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_extra(f"nanovllm.ray.{name}", "ray", "ray")
    return getattr(import_module(_HOMES[name]), name)
