"""A head in an engine: one more attention layer of the KV cache, and a hidden state of the model for each block.

A head's row at position q comes from the pair (hidden state of q - 1, token q), and predicts token q + 1. Its K and V
lie in the slot of position q, so they depend on nothing but the tokens up to q, like those of every layer: prefix hits,
forks, tiers and preemption carry them, and after a rejected draft the next step writes them anew::

    step            rows of tokens p .. q          hidden states h(p) .. h(q), and the head's K and V at p .. q
    drafts          (h(q), token q + 1) -> draft of q + 2, then the head's own output in the place of h, and so on

The pair of a step's first row needs a hidden state of an earlier step. The last ones of each block are kept with its K
and V, in the cache of a layer that computes nothing. Position 0 has no pair: zeros take the place of its hidden state,
where `transformers` has no row at all.

The heads are those of DeepSeek-V3 (2024), section 2.2, by the module of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from nanovllm.attention import LAYER_CACHE, LAYER_KIND, AttentionLayer, attention_function, step_tensors, write_states
from nanovllm.batch import NULL_BLOCK
from nanovllm.errors import UnsupportedModelError
from nanovllm.features.groups.mask_probe import MaskProbe
from nanovllm.features.speculation_options import HEADS_OF_MODEL
from nanovllm.kv_cache import KVCaches
from nanovllm.layout import BatchLayout
from nanovllm.model import AttributePatches, ModelBinding, redirected_to
from nanovllm.probe import PROBE_NAME, Probe

HEAD_ATTENTION = "nanovllm-head"
NONE = -1  # source of the hidden state before position 0; -2 - i is row i of the same step, others are kept ones


class _WrittenError(Exception):
    """Ends a head's pass once its K and V are written."""


class HeadLayer:
    """The head of a binding.

    Attributes:
        sources, targets: [num_rows] int64, places of the coming step's hidden states, see `places`; None outside of it.
    """

    def __init__(self, binding: ModelBinding, heads: Any) -> None:
        self._binding = binding
        self._heads = heads.to(binding.device)
        heads.tie_with_main_model(binding.model)  # the engine has moved it since
        self._layer = heads.layers[0]
        self.layer = self._probed()
        self._keeper = nn.Module()  # stand-in for an attention module
        self.sources: Tensor | None = None
        self.targets: Tensor | None = None
        self._hidden: Tensor | None = None
        AttributePatches().apply(self._changes(HEAD_ATTENTION))
        vars(self.layer.module)["nanovllm_head"] = self
        binding.layers += [
            self.layer,
            AttentionLayer(self._keeper, self.layer.traits, self.layer.dtype, self.layer.scaling),
        ]
        binding.caches = KVCaches(binding.layers, binding.device, binding.mixers.shapes)
        binding.model.base_model.register_forward_hook(self._follow, with_kwargs=True)

    def _changes(self, attention_name: str) -> Any:
        return redirected_to(self._layer, attention_name, self._binding._implementations)

    def _probed(self) -> AttentionLayer:
        """The head's attention layer; raises UnsupportedModelError for a head that has none, or another form."""
        binding = self._binding
        probe = Probe(masks=MaskProbe.from_config(self._heads.config))
        patches = AttributePatches()
        positions = torch.arange(2, device=binding.device)[None]
        with binding.probing(probe):
            try:
                patches.apply(self._changes(PROBE_NAME))
                embeds = self._heads.embed_tokens(torch.zeros_like(positions))
                probe.masks = MaskProbe.from_config(self._heads.config)
                masks = self._heads.create_masks_for_mtp_layer(0, embeds, None, positions)
                self._run(embeds, embeds, positions, **masks)
            finally:
                patches.undo()
        if len(probe.layers) != 1:
            raise UnsupportedModelError(
                f"speculation needs the head of {type(binding.model).__name__}, and {len(probe.layers)} layers of it "
                "reached the attention interface of `transformers`, not 1. Set speculation='suffix'."
            )
        return probe.layers[0]

    # -------------------------------------------------------------------------------------------- hidden states

    @property
    def num_kept(self) -> int:
        """Number of the last hidden states that a block keeps; drafts of a step are fewer."""
        return self._kept_of_block()[1]

    def _kept_of_block(self) -> tuple[Tensor, int]:
        """(hidden states [num_blocks, num_kept, hidden_size] in the keeper's cache of keys, num_kept)."""
        if self._hidden is None:
            raise RuntimeError("the head's caches are not allocated yet")
        return self._hidden, self._hidden.shape[1]

    def group_in(self, pools: Any) -> int:
        """The head's cache group."""
        groups = pools.kind_groups(self._binding.layers)
        return int(groups[self._binding.caches.kinds[-1]]) if groups else 0

    def new_states(self, num_rows: int) -> Tensor:
        """Zeros [num_rows, hidden_size]."""
        shape = num_rows, self._heads.config.hidden_size
        return torch.zeros(shape, dtype=self._heads.dtype, device=self._binding.device)

    def allocate(self, block_size: int) -> None:
        """Find the place of hidden states; raises ValueError for a block that holds fewer than two."""
        keys = self._binding.caches.of_layers[-1][0]
        rows = keys.view(torch.uint8).reshape(len(keys) // block_size, -1)
        dtype = self._heads.dtype
        size = self._heads.config.hidden_size
        num_kept = rows.shape[1] // (size * dtype.itemsize)
        if num_kept < 2:
            raise ValueError(
                f"block_size is {block_size}, and a block of the head's keys has {rows.shape[1]:,} bytes, less than "
                f"two hidden states ({2 * size * dtype.itemsize:,}). Raise block_size, or set speculation='suffix'."
            )
        self._hidden = rows[:, : num_kept * size * dtype.itemsize].view(dtype).unflatten(1, (num_kept, size))

    def places(self, layout: BatchLayout, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each row, the source of the hidden state before it, and the place to keep its own.

        Kept are the last states of each entry and of each block, each at its position modulo `num_kept`. A sequence
        with drafts may have several entries of one row.
        """
        num_kept = self.num_kept
        positions = layout.positions
        places = layout.slot_mapping // block_size * num_kept + positions % num_kept
        ends = np.repeat(positions[layout.row_starts[1:] - 1], np.diff(layout.row_starts))
        is_kept = (positions % block_size == block_size - 1) | (positions > ends - num_kept)
        sources = -1 - np.arange(len(positions))
        firsts = layout.row_starts[:-1].tolist()
        rows = {(entry.sequence, entry.start): row for entry, row in zip(layout.decodes, firsts, strict=False)}
        for entry, first in zip(layout.entries, firsts, strict=True):
            before = rows.get((entry.sequence, entry.start - 1))
            kept = self.place(entry.block_table, entry.start, block_size)
            sources[first] = kept if before is None else -2 - before
        return sources, np.where(is_kept, places, NULL_BLOCK)

    def place(self, block_table: list[int], position: int, block_size: int) -> int:
        """Place of the hidden state before a position; NONE at the first."""
        before = position - 1
        return NONE if before < 0 else block_table[before // block_size] * self.num_kept + before % self.num_kept

    def kept(self, places: Tensor) -> Tensor:
        """Hidden states [n, hidden_size] at places [n] int64; zeros for negative places."""
        hidden, num_kept = self._kept_of_block()
        wanted = places.clamp(min=0)
        return hidden[wanted // num_kept, wanted % num_kept].masked_fill(places[:, None] < 0, 0.0)

    # -------------------------------------------------------------------------------------------------- passes

    def _follow(self, base: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Hook of the base model: in a step of the engine, keep hidden states and write the head's K and V."""
        sources = self.sources
        targets = self.targets
        if sources is None or targets is None:
            return
        states = output.last_hidden_state[0]
        hidden, num_kept = self._kept_of_block()
        before = torch.where((sources < NONE)[:, None], states[(-2 - sources).clamp(min=0)], self.kept(sources))
        hidden.index_put_((targets // num_kept, targets % num_kept), states)
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            embeds = self._heads.embed_tokens(kwargs["input_ids"] if "input_ids" in kwargs else args[0])
        given = {name: value for name, value in kwargs.items() if name.startswith("nanovllm")}
        try:
            self._run(embeds, before[None], kwargs["position_ids"], **given)
        except _WrittenError:
            return
        raise RuntimeError("the head computed no K and V")

    def _run(self, embeds: Tensor, before: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        """The head's output [1, num_rows, hidden_size] for embeddings and hidden states of that shape."""
        heads = self._heads
        angles = None
        if heads.rotary_emb is not None:
            is_own = getattr(heads, "has_per_layer_rope", False)
            named = {"layer_type": heads.config.layer_types[0]} if is_own else {}
            angles = heads.rotary_emb(embeds, position_ids=positions, **named)
        mask = kwargs.pop("attention_mask", None)
        # Positional arguments, since versions of the library name the last one differently.
        states: Tensor = self._layer(embeds, before, angles, mask, positions, None, **kwargs)
        return heads.shared_post_norm(states) if heads.use_shared_post_norm else states

    def draft(self, token_ids: Tensor, positions: Tensor, before: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Logits [num_rows, vocab_size] of the tokens that follow, and the head's states [num_rows, hidden_size].

        Args:
            token_ids, positions: [1, num_rows] int64.
            before: [num_rows, hidden_size], the model's hidden state before each token, or the head's own.
        """
        states = self._run(self._heads.embed_tokens(token_ids), before[None], positions, **kwargs)
        logits = self._heads._project_to_logits(states)[0]
        return logits[:, : self._binding.vocab_size], states[0]


def head_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention of a head: within a step of its model only its K and V are needed."""
    if vars(module)["nanovllm_head"].sources is None:
        return attention_function(module, query, key, value, *args, **kwargs)
    _, slot_mapping = step_tensors(module, kwargs)
    slots = slot_mapping[getattr(module, LAYER_KIND)] if slot_mapping.dim() == 2 else slot_mapping
    write_states(key, value, getattr(module, LAYER_CACHE), slots)
    raise _WrittenError


AttentionInterface.register(HEAD_ATTENTION, head_attention)


def bind_head(binding: ModelBinding) -> None:
    """Give a binding the head that was loaded with its model, before its caches are allocated."""
    binding.passes.head_layer = HeadLayer(binding, vars(binding.model)[HEADS_OF_MODEL][0])


def launches_of(head: HeadLayer, launch: Callable[..., Any], block_size: int, group: int) -> Callable[..., Any]:
    """`Executor.launch` of steps in which the head's rows are written too.

    Args:
        group: cache group of the head's layer.
    """

    def launch_with_head(batch: Any, layout: BatchLayout, masks: Any, report: Any) -> Any:
        device = head._binding.device
        rows = (layout, *layout.others)[group]
        sources, targets = head.places(rows, block_size)
        head.sources = torch.from_numpy(sources).to(device)
        head.targets = torch.from_numpy(targets).to(device)
        try:
            return launch(batch, layout, masks, report)
        finally:
            head.sources = head.targets = None

    return launch_with_head
