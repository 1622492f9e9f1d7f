"""Bit masks in the logits, by C++ and by torch."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.fast.kernels.cpp_sampling import load_row_kernels
from nanovllm.features.token_masks import keep_bits, write_masks


@functools.cache
def by_kernels():
    return load_row_kernels().keep_bits


@pytest.mark.parametrize("form", ["torch", "C++"])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97, 1000])
def test_forbidden_tokens_get_minus_infinity_in_their_rows_alone(form, vocab_size):
    generator = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(generator.standard_normal((6, vocab_size), np.float32))
    is_allowed = generator.random((3, vocab_size)) < np.array([[0.03], [0.97], [1.0]])
    num_words = -(-vocab_size // 32) + 2  # of a tokenizer with more tokens than logits
    bits = np.ones((3, num_words * 32), np.uint8)
    bits[:, :vocab_size] = is_allowed
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits[4, 0] = torch.nan
    expected = logits.clone()
    rows = [4, 0, 3]
    for row, allowed in zip(rows, is_allowed, strict=True):
        expected[row, torch.from_numpy(~allowed)] += -torch.inf
    (keep_bits if form == "torch" else by_kernels())(logits, rows, masks)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
    assert logits[4, 0].isnan()


def test_a_row_without_a_structured_output_allows_all_tokens():
    masks = np.zeros((2, 3), np.int32)
    write_masks([SimpleNamespace(matcher=None, is_finished=False)] * 2, [4, 5], masks, {})
    assert (masks == -1).all()
