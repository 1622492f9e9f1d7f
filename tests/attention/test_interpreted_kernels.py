"""Decodes by Triton's interpreter, those that read shared blocks together and those of layers beyond plain attention;
recurrent states in slots; and a sum over ranks.

tests/gpu/test_shared_decodes.py and test_layer_kinds_on_gpu.py are for a GPU.

Run with TRITON_INTERPRET=1 where Triton is installed.
"""

import importlib.util
import os
import threading

import pytest
import torch

from tests.support.gpu_steps import run
from tests.support.paged_cases import TRAITS, PagedCase
from tests.support.shared_decodes import SharedDecodes, random_case, wide_group_and_others

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton, and TRITON_INTERPRET=1",
)


@pytest.mark.parametrize("seed", range(10))
def test_random_groups_equal_dense_attention(seed):
    case = random_case(seed, "cpu", most=16)
    prefixes = case.prefixes()
    case.check(case.run(prefixes))
    assert int(case.kernel._arrivals.abs().sum()) == 0, "ready for the next layer"
    case.check(case.run(None))


def test_a_group_reads_its_blocks_once_for_each_bundle():
    """17 of 20 decodes share 8 blocks of 16 tokens: three bundles, of 16 query heads at most."""
    tables = [[*range(1, 9), 10 + number] for number in range(17)] + [[30 + number] for number in range(3)]
    case = SharedDecodes(tables, [8 * 16 + 3] * 17 + [5] * 3, heads=(1, 2, 64), gpu=(1, 232_448), padding=0)
    prefixes = case.prefixes()
    assert prefixes.bundles.tolist() == [[0, 5, 8], [5, 6, 8], [11, 6, 8]]
    case.check(case.run(prefixes))
    pieces = case.kernel._pieces[1 : 1 + case.num_pieces]
    assert pieces[pieces[:, 0] < 0, 0].unique().tolist() == [-6, -5]  # a bundle of so many members
    assert (pieces[:, 6] < 0).sum() >= 17  # of a decode behind a bundle


@pytest.mark.parametrize("heads, num_blocks", [((1, 1, 64), 9), ((2, 4, 48), 4), ((2, 3, 64), 30)])
def test_a_wide_group_beside_others_equals_dense_attention(heads, num_blocks):
    """A wide group of 45 decodes, five that share other blocks, seven that share nothing, and padding."""
    tables, contexts = wide_group_and_others(45, num_blocks, block_size=16)
    case = SharedDecodes(tables, contexts, heads=heads, gpu=(4, 232_448))
    prefixes = case.prefixes(wide_tokens=64)
    assert prefixes.wide is not None and len(prefixes.wide.bundles) > 0
    assert set(prefixes.wide.wide_parts.tolist()) >= {0, prefixes.wide.wide_pieces[:, 4].max() + 1}
    case.check(case.run(prefixes))
    assert int(case.kernel._arrivals.abs().sum()) == 0, "ready for the next layer"
    case.check(case.run(case.prefixes()))  # without wide programs, by the same kernel


@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_over_poisoned_blocks_equals_dense_attention(trait):
    """Contexts in one piece and in several, some of which begin within a tile."""
    for contexts in ([100, 7, 33, 0, 16], [300], [250, 120]):
        case = PagedCase([(context, 1) for context in contexts], head_dim=48, groups=2, **TRAITS[trait])
        case.check(run(case, "cpu", by_kernel=True))


def test_recurrent_states_in_slots_equal_torch():
    from nanovllm.fast.kernels.state_checks import first_wrong
    from nanovllm.fast.kernels.triton_states import load_state_kernels

    assert first_wrong(load_state_kernels()) is None


def test_a_sum_over_ranks_does_not_wait_for_a_peer_that_has_gone_on():
    from nanovllm.fast.kernels import one_shot_reduce as one_shot

    memory = torch.zeros(2, one_shot._FLAGS_AT + 4096, dtype=torch.uint8)
    memory[0, one_shot._FLAGS_AT :].view(torch.int32)[1] = 2  # of rank 1: in its second use
    memory[1, one_shot._HALF_BYTES :].view(torch.float32)[:5] = torch.arange(5.0)  # what it left of the first
    buffers = torch.tensor([part.data_ptr() for part in memory])
    uses, is_aborted = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    total = torch.zeros(5)
    end = threading.Timer(5, is_aborted.fill_, (1,))
    end.start()
    one_shot.pull_sum[(1,)](
        torch.arange(5.0), total, buffers, uses, is_aborted, 5, one_shot._HALF_BYTES, one_shot._FLAGS_AT,
        RANK=0, SIZE=2, BLOCK=one_shot._BLOCK, WORD_BYTES=one_shot._WORD_BYTES,
    )  # fmt: skip
    end.cancel()
    assert not is_aborted.item(), "it waited"
    assert total.tolist() == [0, 2, 4, 6, 8]
