"""Builds `Speculation` from its options, and refuses draft models that it does not work with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.state_kinds import StateKind
from nanovllm.features.headless import is_headless
from nanovllm.features.speculation.drafter import Drafter
from nanovllm.features.speculation.lengths import Acceptance, DraftLengths
from nanovllm.features.speculation.speculation import Speculation
from nanovllm.features.speculation.suffix import SuffixDrafter
from nanovllm.features.speculation_options import AUTO, HEADS, SUFFIX
from nanovllm.model import ModelBinding
from nanovllm.observability.step_records import StepObservers
from nanovllm.requests import InputProcessor, RequestLimits
from nanovllm.scheduler import Scheduler

SUFFIX_BYTES = 64 << 20


class Target(Protocol):
    """The model that verifies drafts; see `ModelRunner`."""

    config: EngineConfig
    binding: ModelBinding

    def close(self) -> None: ...


def add_drafts(
    scheduler: Scheduler,
    target: Target,
    input_processor: InputProcessor,
    observers: StepObservers,
    draft_model: Callable[[EngineConfig, InputProcessor], Drafter | None],
) -> None:
    """Give a scheduler of resolved options its drafts.

    Args:
        draft_model: builds the drafter of a draft model, None without one.

    Closes the target if it raises.
    """
    config = target.config
    limits = input_processor.limits
    try:
        if not limits.has_head:
            raise ValueError(
                f"speculation is {config.speculation!r}, but {limits.model_name} has no language model head, so it "
                "generates nothing. Leave speculation out."
            )
        drafter = draft_model(config, input_processor)
        most = config.num_speculative_tokens
        source: Any = config.speculation
        if (head := getattr(target.binding.passes, "head_layer", None)) is not None:
            from nanovllm.features.speculation.heads.head_drafter import open_heads

            drafter = open_heads(head, target, scheduler.block_manager)
            source = HEADS
            most = min(most, head.num_kept - 1)
        elif source == AUTO:
            source = SUFFIX
        acceptance = None if head is None else Acceptance(most)
        lengths = DraftLengths(most, overlap=config.overlap, acceptance=acceptance)
        scheduler.proposer = proposer = Speculation(
            config,
            scheduler.block_manager,
            drafter or (SuffixDrafter(SUFFIX_BYTES) if source == SUFFIX else source),
            lengths,
            vocab_size=min(limits.vocab_size, limits.num_logits),
            source=source if isinstance(source, str) else type(source).__name__,
        )
        observers.append(proposer)
        observers.append(lengths)
    except BaseException:
        target.close()  # this ends the processes of other ranks, too
        raise


def check_draft_model(
    config: EngineConfig, binding: ModelBinding, tokenizers: tuple[Any, Any], limits: RequestLimits
) -> None:
    """Raise ValueError for a draft model of another vocabulary, or with layers that do not keep every position.

    Args:
        binding: draft model, hooked.
        tokenizers: tokenizers of the draft model and of the engine; None without one.
    """
    name = f"draft_model is {config.draft_model!r}, but "
    if is_headless(binding.model):
        raise ValueError(f"{name}it has no language model head, so it drafts nothing. Name a model that generates.")
    if binding.mixers or any(
        not StateKind(*layer.traits.sight).within(config.max_model_len).is_full for layer in binding.layers
    ):
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
