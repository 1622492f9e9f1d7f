"""Windows, chunks, soft-caps and sinks of layers by the engine's own attention, against dense float64."""

from __future__ import annotations

from itertools import count, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm import flex
from nanovllm.attention import (
    LAYER_CACHE,
    LAYER_KIND,
    LAYER_SHARES,
    STEP_HANDLE,
    STEP_SLOT_MAPPING,
    AttentionStep,
    SdpaAttention,
    attend_in_step,
    attention_function,
    step_in_force,
    write_states,
)
from nanovllm.batch import ScheduledSequence
from nanovllm.layout import BatchLayout, LayerTraits, Sight, build_layout
from tests.engine.blocks import make_sequence

SIZE, NUM_BLOCKS, NUM_KV_HEADS, GROUPS, WIDTH = 16, 40, 2, 2, 8
SPANS = [(33, 1), (0, 17), (48, 50), (7, 1), (100, 1), (21, 30), (0, 2)]  # (start, new tokens) of each sequence
TRAITS: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"sight": Sight(window=20)},
    "chunk": {"sight": Sight(chunk=24)},
    "soft-cap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "all": {"sight": Sight(20, 24), "softcap": 1.5, "has_sinks": True},
}


def traits_of(name: str) -> LayerTraits:
    return LayerTraits(NUM_KV_HEADS * GROUPS, NUM_KV_HEADS, WIDTH, WIDTH, **TRAITS[name])


def dense(traits: LayerTraits, query: Tensor, keys: Tensor, values: Tensor, start: int, sinks: Tensor | None) -> Tensor:
    """Attention of rows [num_rows, num_heads, width] from position `start` on over all keys of their sequence."""
    query, keys, values = (states.double() for states in (query, keys, values))
    keys, values = keys.repeat_interleave(GROUPS, 1), values.repeat_interleave(GROUPS, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * WIDTH**-0.5
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    key, own = torch.arange(len(keys)), start + torch.arange(len(query))[:, None]
    window, chunk = traits.sight
    hidden = (key > own) | (key <= own - (window or 1000)) | (key // (chunk or 1000) != own // (chunk or 1000))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)


def scores_in_float32(softcap: float | None) -> Any:
    """`Scores` of `SdpaAttention`."""

    def scores(rows: Tensor, keys: Tensor, values: Tensor, mask: Any, scaling: float, sinks: Any) -> Tensor:
        products = torch.einsum("skgrd,skcd->skgrc", rows, keys) * scaling
        products = products if softcap is None else softcap * torch.tanh(products / softcap)
        causal = torch.full(products.shape[-2:], -torch.inf).triu(products.shape[-1] - products.shape[-2] + 1)
        products += causal if mask is None else mask[:, :, None]
        if sinks is not None:
            column = sinks.view(1, NUM_KV_HEADS, GROUPS, 1, 1).expand(*products.shape[:-1], 1)
            products = torch.cat([products, column], -1)
        return products.softmax(-1)[..., : keys.shape[2]] @ values[:, :, None]

    return scores


def by_lists(query: Tensor, keys: Tensor, values: Tensor, *, score_mod: Any, block_mask: Any, scale: float) -> Tensor:
    """What compiled FlexAttention computes: a tile of rows reads the blocks that are listed for it, and no other."""
    output, (tile, width) = torch.zeros_like(query), block_mask.BLOCK_SIZE
    partial, full = block_mask.kv_num_blocks[0, 0], block_mask.full_kv_num_blocks[0, 0]
    for head in range(query.shape[1]):
        for number, first in enumerate(range(0, query.shape[2], tile)):
            rows = torch.arange(first, first + tile)
            in_part = block_mask.kv_indices[0, 0, number, : partial[number]].tolist()
            whole = block_mask.full_kv_indices[0, 0, number, : full[number]].tolist()
            slots = torch.tensor([block * width + slot for block in in_part + whole for slot in range(width)])
            if not len(slots):  # a tile that pads the call
                continue
            of_mods = None, torch.tensor(head), rows[:, None], slots[None]
            scores = query[0, head, rows] @ keys[0, head, slots].T * scale
            scores = scores if score_mod is None else score_mod(scores, *of_mods)
            is_seen = (torch.arange(len(slots)) >= len(in_part) * width) | block_mask.mask_mod(*of_mods)
            output[0, head, rows] = scores.where(is_seen, -torch.inf).softmax(1) @ values[0, head, slots]
    return output.nan_to_num()  # rows of a tile that the step lacks may see nothing


def computed(backend: Any, layout: BatchLayout, states: list[Any], sinks: Tensor | None) -> Tensor:
    """Attention of a step whose sequences have K and V before it in their slots; all other slots hold large values."""
    cache = torch.full((2, NUM_BLOCKS * SIZE, NUM_KV_HEADS, WIDTH), 50.0)
    cache[:, :SIZE] = 0  # the null block
    rows = []
    for entry in layout.entries:
        query, *both = states[int(entry.sequence.request_id)]
        rows.append((query, *(of_kind[entry.start :] for of_kind in both)))
        slots = [entry.block_table[p // SIZE] * SIZE + p % SIZE for p in range(entry.start)]
        cache[:, slots] = torch.stack([of_kind[: entry.start] for of_kind in both])
    query, key, value = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(*rows, strict=True))
    write_states(key, value, cache, torch.from_numpy(layout.slot_mapping))
    with step_in_force(-1, AttentionStep(backend.plan(layout), layout.num_tokens)):
        return attend_in_step(query, *cache, torch.tensor([-1]), WIDTH**-0.5, 0, sinks)[0]


def test_every_trait_of_a_layer_is_computed_as_dense_attention_does(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex, "flex_attention", by_lists)
    for name, by_flex in product(TRAITS, (False, True)):
        check_trait(name, by_flex)


def check_trait(name: str, by_flex: bool) -> None:
    traits, generator, blocks = traits_of(name), torch.Generator().manual_seed(3), count(1)
    entries, states = [], []
    for number, (start, num_new) in enumerate(SPANS):
        sequence = make_sequence([0] * (start + num_new), arrival=number, max_model_len=1000)
        table = [next(blocks) for _ in range(-(-(start + num_new) // SIZE))]
        entries.append(ScheduledSequence(sequence, start, num_new, 1, table, start))
        shapes = (num_new, traits.num_heads, WIDTH), *[(start + num_new, NUM_KV_HEADS, WIDTH)] * 2
        states.append([torch.randn(*shape, generator=generator) for shape in shapes])
    sinks = torch.randn(traits.num_heads, generator=generator) if traits.has_sinks else None
    layout, cpu = build_layout(entries, SIZE), torch.device("cpu")
    if by_flex:
        limits = {"num_blocks": NUM_BLOCKS, "block_size": SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 512}
        backend: Any = flex.FlexAttention(kinds=[traits], device=cpu, **limits)
    else:
        scores = scores_in_float32(traits.softcap) if traits.softcap or traits.has_sinks else None
        backend = SdpaAttention([traits], SIZE, 2 * SIZE * WIDTH * NUM_KV_HEADS * 4, torch.float32, cpu, [scores])
    found = computed(backend, layout, states, sinks)
    expected = [dense(traits, *states[int(entry.sequence.request_id)], entry.start, sinks) for entry in layout.entries]
    np.testing.assert_allclose(found.numpy(), torch.cat(expected).numpy(), 2e-5, 2e-5, err_msg=f"{name}, {by_flex=}")


class Seen:
    """A plan that notes the scaling and the kind that it is called with."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, kind: int, sinks: Any) -> Tensor:
        self.scaling, self.kind = scaling, kind
        return query


@pytest.mark.costly
@pytest.mark.parametrize("shares", [False, True])
def test_a_layer_writes_to_the_slots_of_its_kind_unless_it_shares_what_another_wrote(shares):
    module, plan, cache = torch.nn.Identity(), Seen(), torch.zeros(2, 4, 2, WIDTH)
    vars(module).update({LAYER_CACHE: cache, LAYER_KIND: 1, LAYER_SHARES: shares})
    states = torch.ones(1, 2, 1, WIDTH)
    given = {STEP_HANDLE: torch.tensor([-1]), STEP_SLOT_MAPPING: torch.tensor([[0], [3]])}
    with step_in_force(-1, AttentionStep(plan, 1)):
        attention_function(module, torch.ones(1, 4, 1, WIDTH), states, states, None, **given)
    assert cache[:, :, 0, 0].tolist() == [[0.0, 0.0, 0.0, 0.0 if shares else 1.0]] * 2
    assert (plan.kind, plan.scaling) == (1, WIDTH**-0.5)
