"""The GPU's `flex` backend by its tables and masks, on a CPU; tests/gpu/test_layer_kinds_on_gpu.py has its kernels."""

import pytest

from tests.support.gpu_steps import compute_without_kernels, run
from tests.support.paged_cases import MIXED_STEPS, SPANS, TRAITS, PagedCase, random_spans


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    compute_without_kernels(monkeypatch)


@pytest.mark.parametrize("trait", [{}, *TRAITS.values()], ids=["none", *TRAITS])
def test_every_trait_over_poisoned_blocks_equals_dense_attention(trait):
    for spans in (SPANS, MIXED_STEPS["one decode"], MIXED_STEPS["a whole prompt"]):
        case = PagedCase(spans, head_dim=48, groups=2, keeps_for_boundary=True, **trait)
        case.check(run(case, "cpu"))


@pytest.mark.costly
@pytest.mark.parametrize(
    "trait", ["window", "chunks that end within blocks", "chunks of whole blocks", "all at once", "none"]
)
@pytest.mark.parametrize("block_size", [16, 64, 32, 256])
def test_any_split_of_any_sequences_equals_dense_attention(trait, block_size):
    for seed in range(6):
        sizes = {"block_size": block_size, "head_dim": 16, "groups": 2}
        spans = random_spans(seed, longest=150)
        case = PagedCase(spans, seed=seed, keeps_for_boundary=True, **sizes, **TRAITS.get(trait, {}))
        case.check(run(case, "cpu"))
