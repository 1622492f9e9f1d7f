"""The traits of layers that a backend or a faster layer may not serve, in words."""

from __future__ import annotations

from nanovllm.layout import LayerTraits


def first_beyond(traits: LayerTraits, *served: str) -> str | None:
    """Description of the first trait beyond plain attention that is not in `served`; None without one.

    Args:
        served: names of traits: "window", "chunk", "softcap", "sinks", "widths".
    """
    found = {
        "window": traits.sight.window is not None and f"a sliding window of {traits.sight.window} tokens",
        "chunk": traits.sight.chunk is not None and f"attention in chunks of {traits.sight.chunk} tokens",
        "softcap": traits.softcap is not None and f"scores capped at {traits.softcap:g} (softcap)",
        "sinks": traits.has_sinks and "attention sinks",
        "widths": traits.head_dim != traits.value_dim
        and f"keys of {traits.head_dim} and values of {traits.value_dim} elements",
    }
    return next((words for name, words in found.items() if words and name not in served), None)
