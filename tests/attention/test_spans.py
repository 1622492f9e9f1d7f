"""Spans of rows that a GPU's kernel for prompts reads: each row of a chunk once, longest context first."""

import math

import numpy as np
import pytest
import torch

from nanovllm.fast.attention.tiles import GROUP_ROWS, SPAN_ROWS, spans_of
from nanovllm.fast.kernels import prompt_attention
from nanovllm.fast.kernels.prompt_attention import TOLERANCE, AttentionSizes, PromptAttention, why_not
from nanovllm.fast.kernels.wide_attention import WideAttention

CHUNKS = {
    "one row": [(0, 1)],
    "a whole span": [(64, 128)],
    "one row more": [(64, 129)],
    "several": [(0, 300), (640, 1), (5, 256), (4096, 1000)],
}


@pytest.mark.parametrize("name", CHUNKS)
def test_each_row_is_in_one_span(name):
    starts, rows = (np.array(part) for part in zip(*CHUNKS[name], strict=True))
    first_rows = np.cumsum(rows) - rows
    spans = spans_of(first_rows, starts, starts + rows)
    found = {}
    for chunk, first, position, count in spans.tolist():
        assert 0 < count <= SPAN_ROWS
        found |= {first + row: (chunk, position + row) for row in range(count)}
    assert len(found) == spans[:, 3].sum() == rows.sum()
    expected = [(chunk, start + row) for chunk, (start, count) in enumerate(CHUNKS[name]) for row in range(count)]
    assert [found[row] for row in range(len(found))] == expected


@pytest.mark.parametrize("block_size", [8, 64, 128])
def test_there_are_no_more_spans_than_tiles(block_size):
    for start in range(0, 300, 7):
        for count in (1, 127, 128, 129, 1000):
            spans = spans_of(np.array([0]), np.array([start]), np.array([start + count]))
            assert len(spans) <= -(-(start + count) // block_size) - start // block_size


def test_long_contexts_come_first():
    spans = spans_of(np.array([0, 300]), np.array([0, 4000]), np.array([300, 4200]))
    assert (np.diff(spans[:, 2]) <= 0).all()


def test_prompts_that_are_read_at_the_same_time_are_few():
    """Eight prompts of 1,024: two at a time, so that their keys stay in the GPU's cache, the longest spans first."""
    starts, ends = np.zeros(8, np.int64), np.full(8, GROUP_ROWS // 2)
    spans = spans_of(np.arange(8) * ends, starts, ends)
    for pair in range(4):
        own = spans[16 * pair : 16 * pair + 16]
        assert set(own[:, 0].tolist()) == {2 * pair, 2 * pair + 1}
        assert (np.diff(own[:, 2]) <= 0).all()


class KernelOnCpu(PromptAttention):
    """Dense attention in the kernel's place, perhaps wrong."""

    def __init__(self, sizes, *, has_sinks=True, scale=1.0, **wrong):
        self._sizes, self._device = sizes, torch.device("cpu")
        self._computed, self._has_sinks, self._scale = sizes._replace(**wrong), has_sinks, scale

    def attend(self, query, keys, values, step, scaling, output, sinks=None):
        spans, starts, tables = step
        block = self._sizes.block_size
        for (row, position, num_rows), start in zip(spans.tolist(), starts.tolist(), strict=True):
            if num_rows:
                seen = torch.arange(position + num_rows)
                slots = tables[start + seen // block].long() * block + seen % block
                attended = prompt_attention._dense_attention(
                    self._scale * query[row : row + num_rows].float(), keys[slots], values[slots], self._computed,
                    sinks if self._has_sinks else None,
                )  # fmt: skip
                output[row : row + num_rows] = attended.to(output.dtype)


@pytest.mark.parametrize("softcap", [None, 20.0, 50.0])
@pytest.mark.parametrize("window", [None, 100, 1024, 4096])
@pytest.mark.parametrize("chunk, value_dim", [(None, None), (128, None), (2048, 96)])
def test_the_check_at_start_sees_windows_chunks_soft_caps_sinks_and_scales(chunk, value_dim, window, softcap):
    sizes = AttentionSizes(8, 2, 64, 64, torch.bfloat16, window, softcap, chunk, value_dim)
    assert KernelOnCpu(sizes).error_at_start() <= TOLERANCE
    assert KernelOnCpu(sizes, has_sinks=False).error_at_start() > TOLERANCE
    assert KernelOnCpu(sizes, scale=0.9).error_at_start() > TOLERANCE
    if softcap is not None:
        assert KernelOnCpu(sizes, softcap=None).error_at_start() > TOLERANCE
        assert KernelOnCpu(sizes, softcap=1.1 * softcap).error_at_start() > TOLERANCE
    if window is not None and window < (chunk or window + 1):
        assert KernelOnCpu(sizes, window=None).error_at_start() > TOLERANCE
    if chunk is not None and chunk < (window or chunk + 1):
        assert KernelOnCpu(sizes, chunk=None).error_at_start() > TOLERANCE


class WideKernelOnCpu(WideAttention):
    """Dense attention to pieces of a prefix in the kernel's place, perhaps wrong."""

    def __init__(self, sizes, *, scale=1.0, shift=0, lost=0):
        self._sizes, self._device = sizes, torch.device("cpu")
        self._scale, self._shift, self._lost = scale, shift, lost

    def attend(self, query, caches, step, workspace, num_pieces, scaling):
        tables, pieces, members, splits = step
        outputs, logarithms, _ = workspace
        block, softcap = self._sizes.block_size, self._sizes.softcap
        for first, count, start, end, table, part, *_ in pieces[:num_pieces].tolist():
            if count == 0:
                continue
            tokens = torch.arange(start, end - self._lost)
            slots = (tables[table + tokens // block].long() * block + tokens % block)[: len(tokens)]
            keys, values = (cache[slots].float().repeat_interleave(self._groups, 1) for cache in caches)
            for decode in members[first : first + count].tolist():
                scores = self._scale * scaling * torch.einsum("hd,khd->hk", query[decode].float(), keys)
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                place = int(splits[decode, 0]) + part + self._shift
                outputs[place] = torch.einsum("hk,khd->hd", scores.softmax(1), values)
                logarithms[place] = scores.logsumexp(1) / math.log(2)

    @property
    def _groups(self):
        return self._sizes.num_heads // self._sizes.num_kv_heads


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128), (6, 2, 64)], ids=str)
@pytest.mark.parametrize("block_size, value_dim", [(16, None), (64, 96), (128, None)])
def test_the_check_of_wide_groups_sees_scales_places_and_lost_tokens(block_size, value_dim, heads, softcap):
    sizes = AttentionSizes(*heads, block_size, torch.bfloat16, None, softcap, None, value_dim)
    assert WideKernelOnCpu(sizes).error_at_start() <= TOLERANCE
    for wrong in ({"scale": 0.9}, {"shift": -1}, {"lost": 1}):
        assert not WideKernelOnCpu(sizes, **wrong).error_at_start() <= TOLERANCE


@pytest.mark.costly
@pytest.mark.parametrize("softcap, is_taken", [(None, True), (1000.0, True), (1000.5, False)], ids=str)
def test_a_soft_cap_too_coarse_for_float32_is_left_to_another_kernel(monkeypatch, softcap, is_taken):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("nanovllm.fast.kernels.nvrtc.is_available", lambda: True)
    sizes = AttentionSizes(8, 2, 64, 64, torch.bfloat16, None, softcap)
    reason = why_not(sizes, torch.device("cuda"))
    assert reason is None if is_taken else reason is not None and "soft-cap 1000.5 exceeds 1000" in reason
