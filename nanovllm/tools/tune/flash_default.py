"""Predicts whether attention_backend="auto" resolves to "flash", with its own block size, before a model is loaded."""

from __future__ import annotations

from typing import Any

from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.model.source import is_gguf


def auto_takes_flash(model: str, device: str, fixed: dict[str, Any]) -> bool:
    """Return whether "auto" resolves to "flash" as in `attention/backends.py`, given its block size.

    Args:
        model: folder, hub id or the embedded model; its configuration is read only if needed.
        device: "cpu" or "cuda".
        fixed: engine options.
    """
    # The embedded model's head_dim of 64 rules "flash" out.
    if device != "cuda" or fixed.get("enforce_eager") or model == DEFAULT_MODEL:
        return False
    import torch

    from nanovllm.attention.flash import has_tried_version, missing_for_flash
    from nanovllm.model.gguf.loading import config_of

    if not (has_tried_version() and torch.cuda.is_available()):
        return False
    from transformers import AutoConfig

    if is_gguf(model):
        config = config_of(model)
    else:
        remote = {name: fixed[name] for name in ("revision", "trust_remote_code") if name in fixed}
        config = AutoConfig.from_pretrained(model, **remote).get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = fixed.get("dtype", "auto")
    if dtype == "auto":
        dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    wanted = fixed.get("device", "auto")
    on = torch.device("cuda" if wanted == "auto" else wanted)
    return missing_for_flash(on, getattr(torch, dtype), head_dim) is None
