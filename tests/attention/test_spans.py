"""Spans of rows that a GPU's kernel for prompts reads: each row of a chunk once, longest context first."""

from __future__ import annotations

import numpy as np
import pytest

from nanovllm.attention.tiles import SPAN_ROWS, spans_of

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
