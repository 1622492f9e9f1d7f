"""The sizes of the GPU's decode kernel, in plain arithmetic; tests/gpu/test_paged_decode.py runs it."""

import itertools

import numpy as np
import pytest
import torch

from nanovllm.fast.attention.flex_gpu_options import Gpu
from nanovllm.fast.kernels import paged_decode
from nanovllm.fast.kernels.paged_decode import MEASURED, MEASURED_WIDE, PagedDecode, fitting, fitting_wide

A100, H200, SMALL = Gpu(108, 166_912), Gpu(132, 232_448), Gpu(36, 101_376)


@pytest.mark.parametrize("gpu", [A100, H200, SMALL])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_bytes", [64, 128, 160, 192, 256, 512, 1024])
def test_tiles_divide_a_block_and_fit_into_shared_memory(gpu, block_size, head_bytes):
    sizes = fitting(MEASURED, block_size, head_bytes, gpu.shared_memory)
    assert sizes.tile >= 16 and block_size % sizes.tile == 0 and sizes.num_stages >= 2
    assert sizes.tile <= MEASURED.tile and sizes.num_stages <= MEASURED.num_stages
    padded = 1 << (head_bytes - 1).bit_length()
    assert 2 * (sizes.num_stages - 1) * sizes.tile * padded < gpu.shared_memory


@pytest.mark.parametrize("gpu", [A100, H200, SMALL])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("head_bytes", [64, 128, 192, 256, 512, 1024])
def test_wide_programs_fit_into_shared_memory(gpu, block_size, head_bytes):
    sizes = fitting_wide(MEASURED_WIDE, block_size, head_bytes, gpu.shared_memory)
    assert sizes.tile >= 16 and block_size % sizes.tile == 0 and sizes.num_stages >= 1
    padded = 1 << (head_bytes - 1).bit_length()
    assert (2 * sizes.num_stages * sizes.tile + sizes.rows) * padded <= 0.9 * gpu.shared_memory


def test_an_h200_takes_what_was_measured_on_it():
    assert fitting(MEASURED, 64, 256, H200.shared_memory) == MEASURED
    assert fitting_wide(MEASURED_WIDE, 64, 256, H200.shared_memory) == MEASURED_WIDE


def test_split_decodes_have_no_more_pieces_than_the_workspace_holds():
    """Each piece but one of a decode is as long as all contexts over the most pieces, or longer."""
    for num_kv_heads in (1, 3, 8, 40, 96):
        most = PagedDecode.most_splits((num_kv_heads, 16), H200.num_multiprocessors, 1000)
        for contexts in ([1] * 300 + [100_000], [500] * 40, [4096], [33] * 1000, [5000, 5000, 1]):
            tiles = -(-np.array(contexts) // MEASURED.tile)
            counts = -(-tiles // -(-tiles.sum() // (most // 2)))
            assert counts[counts > 1].sum() <= most and counts.sum() <= most // 2 + len(contexts)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 40])
def test_pieces_of_shared_blocks_fit_among_the_programs_and_the_workspace(num_kv_heads, num_groups):
    """As many bundles as may be, each of as many members; a member leaves its bundle's pieces and its own."""
    kernel = PagedDecode.__new__(PagedDecode)
    kernel._least_pieces, kernel._most_pieces = paged_decode._bounds(H200.num_multiprocessors, num_kv_heads, MEASURED)
    members = paged_decode._bundle_members(num_groups)
    for num_decodes in (2, 7, 30, 64, 200, 1000):
        most_bundles = kernel.most_bundles(num_decodes)
        bound = PagedDecode.most_splits((num_kv_heads, num_groups), H200.num_multiprocessors, num_decodes)
        for shared, own, num_bundles in itertools.product(
            [1, 70, 3000], [1, 40], {1, most_bundles // 2, most_bundles} - {0}
        ):
            counts = np.full(num_bundles, members)
            counts[-1] = min(members, num_decodes - counts[:-1].sum())
            if counts.min() < 1:
                continue
            target = min(max(num_decodes, kernel._least_pieces), kernel._most_pieces)
            assert target > num_bundles
            length = -(-(num_bundles * shared + num_decodes * own) // (target - num_bundles))
            of_bundle, of_decode = -(-shared // length), -(-own // length)
            assert num_bundles * of_bundle + num_decodes * of_decode <= target + num_decodes
            alone = (num_decodes - counts.sum()) * (of_decode if of_decode > 1 else 0)
            assert counts.sum() * (of_bundle + of_decode) + alone <= bound


@pytest.mark.costly
@pytest.mark.parametrize("head_dim, dtype, is_served", [
    (128, torch.bfloat16, True), (80, torch.float32, True), (256, torch.float16, True),
    (512, torch.bfloat16, False), (64, torch.float64, False),
])  # fmt: skip
def test_other_heads_and_dtypes_are_left_to_flex_attention(head_dim, dtype, is_served):
    assert PagedDecode.suits(head_dim, dtype) == is_served
