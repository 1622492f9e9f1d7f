"""From the options of speculation to its `Speculation`, and the models that it does not work with."""

from __future__ import annotations

from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.core.config import EngineConfig
from nanovllm.core.speculation_options import SUFFIX
from nanovllm.model.binding import ModelBinding
from nanovllm.requests.input_processor import RequestLimits
from nanovllm.speculation.drafter import Drafter
from nanovllm.speculation.lengths import DraftLengths
from nanovllm.speculation.speculation import Speculation
from nanovllm.speculation.suffix import SuffixDrafter

SUFFIX_BYTES = 64 << 20


def build_speculation(
    config: EngineConfig, block_manager: BlockManager, limits: RequestLimits, drafter: Drafter | None = None
) -> Speculation:
    """The speculation of an engine whose options are resolved; it verifies every draft until it has costs.

    Args:
        drafter: of a draft model.
    """
    source = config.speculation
    return Speculation(
        config,
        block_manager,
        drafter or (SuffixDrafter(SUFFIX_BYTES) if source == SUFFIX else source),
        DraftLengths(None, config.num_speculative_tokens),
        vocab_size=min(limits.vocab_size, limits.num_logits),
        source=source if isinstance(source, str) else type(source).__name__,
    )


def check_model(binding: ModelBinding, limits: RequestLimits) -> None:
    """Raise ValueError for a model that drafts do not work with."""
    if binding.mixers:
        raise ValueError(
            f"speculation does not work with {limits.model_name}: rejected drafts would stay in its recurrent states. "
            "Leave speculation out."
        )


def check_draft_model(
    config: EngineConfig, binding: ModelBinding, tokenizers: tuple[Any, Any], limits: RequestLimits
) -> None:
    """Raise ValueError for a draft model of another vocabulary, or with layers that do not keep every position.

    Args:
        binding: of the draft model.
        tokenizers: its own, and the engine's; None without one.
    """
    name = f"draft_model is {config.draft_model!r}, but "
    if binding.mixers or any(not layer.traits.within(config.max_model_len).sight.is_full for layer in binding.layers):
        raise ValueError(
            f"{name}{type(binding.model).__name__} has layers that forget earlier tokens; rejected drafts must be "
            "taken back. Name a model with full attention alone."
        )
    own, engine = tokenizers
    if own is None or engine is None:
        is_same = binding.vocab_size == limits.num_logits
    else:
        is_same = own.get_vocab() == engine.get_vocab()
    if not is_same:
        raise ValueError(
            f"{name}its vocabulary ({binding.vocab_size} tokens) is not the model's ({limits.num_logits} tokens): its "
            "drafts would be other words. Name a model with the same tokenizer."
        )
