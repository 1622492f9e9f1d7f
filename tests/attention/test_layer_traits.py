"""Windows, chunks, soft-caps, sinks and values of another width, for every backend, against the dense reference.

Blocks that no row of a sequence sees hold NaN, as all foreign ones do: a backend that visits them fails.
"""

import numpy as np
import pytest
import torch

from nanovllm import EngineConfig
from nanovllm.attention import AttentionLayer
from nanovllm.defaults import PlainAttention
from nanovllm.fast.attention.layer_traits import first_beyond
from nanovllm.layout import FULL, LayerTraits, Sight, kinds_of
from tests.support.paged_cases import MIXED_STEPS, SPANS, TRAITS, assert_dense, cpp, flex, random_spans, sdpa

# FlexAttention compiles two kernels for each shape and kind, and the C++ ones are compiled for each shape and dtype:
# for some seconds each. A quick test takes a shape that another has too.
SLOW_FLEX = pytest.param(flex, marks=pytest.mark.slow)
BACKENDS = pytest.mark.parametrize("backend", [sdpa, cpp, SLOW_FLEX])
WIDE = TRAITS["all at once"] | TRAITS["wide values"]


@pytest.mark.parametrize(
    "backend, trait",
    [
        pytest.param(
            backend,
            trait,
            marks=[pytest.mark.slow] if backend is flex or (backend, trait) == (cpp, "wide values") else [],
        )
        for backend in (sdpa, cpp, flex)
        for trait in TRAITS
    ],
)
def test_every_trait_over_poisoned_blocks_equals_dense_attention(backend, trait):
    for spans in (SPANS, MIXED_STEPS["one decode"], MIXED_STEPS["a whole prompt"]):
        assert_dense(backend, spans, **TRAITS[trait])


@pytest.mark.full
def test_flex_attention_with_every_trait_at_once_equals_dense_attention():
    for seed, spans in enumerate([SPANS, *MIXED_STEPS.values()]):
        assert_dense(flex, spans, seed=seed, **TRAITS["all at once"])


@pytest.mark.slow
def test_flex_attention_in_chunks_equals_dense_attention():
    for spans in (SPANS, *MIXED_STEPS.values()):
        assert_dense(flex, spans, **TRAITS["chunks that end within blocks"])


@pytest.mark.costly
@BACKENDS
@pytest.mark.parametrize("traits", [TRAITS["window"], TRAITS["all at once"]], ids=["window", "all"])
def test_any_split_of_any_sequences_equals_dense_attention(backend, traits):
    for seed in range(8):
        assert_dense(backend, random_spans(seed), seed=seed, **traits)


@pytest.mark.costly
@BACKENDS
def test_bfloat16_large_groups_and_wide_values_are_right_with_every_trait(backend):
    assert_dense(backend, SPANS, num_kv_heads=1, groups=8, dtype=torch.bfloat16, **WIDE)


@pytest.mark.parametrize("backend", [sdpa, pytest.param(cpp, marks=pytest.mark.slow), SLOW_FLEX])
@pytest.mark.parametrize("trait", ["window", "soft-cap", "sinks", "all at once"])
def test_bfloat16_and_large_groups_are_right(backend, trait):
    assert_dense(backend, SPANS, num_kv_heads=1, groups=8, dtype=torch.bfloat16, **TRAITS[trait])


@BACKENDS
def test_decodes_behind_one_prefix_equal_dense_attention(backend):
    """With a window each reads its own end, whatever blocks their tables begin with in common."""
    for traits in (TRAITS["window"], TRAITS["soft-cap"], TRAITS["sinks"]):
        assert_dense(backend, [(70 + number, 1) for number in range(6)], shared=4, **traits)


@pytest.mark.parametrize("sight", [FULL, Sight(window=1), Sight(window=7), Sight(chunk=5), Sight(9, 12)])
def test_the_first_position_seen_is_that_of_the_mask(sight):
    positions = np.arange(40)
    for position, first in zip(positions.tolist(), sight.first_seen(positions).tolist(), strict=True):
        seen = [p for p in range(position + 1) if sight.window is None or p > position - sight.window]
        seen = [p for p in seen if sight.chunk is None or p // sight.chunk == position // sight.chunk]
        assert first == seen[0] and seen == list(range(first, position + 1))


def test_kinds_are_the_different_traits_in_order_whoever_shares_with_whom():
    full, window = LayerTraits(4, 2, 64, 64), LayerTraits(4, 2, 64, 64, Sight(window=8))
    sharing = LayerTraits(4, 2, 64, 64, Sight(window=8), shares=1)
    assert kinds_of([full, window, full, sharing]) == (full, window)


def test_what_is_beyond_plain_attention_is_told_in_words():
    assert first_beyond(LayerTraits(4, 2, 64, 64)) is None
    assert first_beyond(LayerTraits(4, 2, 64, 64, Sight(window=8))) == "a sliding window of 8 tokens"
    assert first_beyond(LayerTraits(4, 2, 64, 64, Sight(window=8)), "window") is None
    assert first_beyond(LayerTraits(4, 2, 64, 32, softcap=5.0), "softcap") == "keys of 64 and values of 32 elements"


@pytest.mark.costly
@pytest.mark.parametrize("trait", [{"softcap": 5.0}, {"has_sinks": True}], ids=str)
def test_the_engines_own_sdpa_refuses_layers_that_change_scores(trait):
    config = EngineConfig(attention_backend="sdpa")
    traits = [LayerTraits(4, 2, 64, 64, **own) for own in ({}, trait)]
    layers = [AttentionLayer(torch.nn.Identity(), own, torch.float32, 1.0) for own in traits]
    assert PlainAttention.for_model(layers[:1], torch.device("cpu"), config).backend == "sdpa"
    with pytest.raises(ValueError, match=r"soft-cap or sinks.*attention_backend='flex'"):
        PlainAttention.for_model(layers, torch.device("cpu"), config)
