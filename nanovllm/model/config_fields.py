"""Fields of a model's config, under the names that the families give them."""

from __future__ import annotations

from typing import Any


def positions_of(config: Any) -> int | None:
    """Number of positions of a text model; None if its config has no such field."""
    return first_field(config, "max_position_embeddings", "n_positions", "max_sequence_length")


def _field(config: Any, name: str) -> Any:
    """A field of a config; None for one that it lacks, or that differs by layer, for which `transformers` raises."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def first_field(config: Any, *names: str) -> int | None:
    """The first of the fields that is a positive number; None if none is."""
    values = (_field(config, name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
