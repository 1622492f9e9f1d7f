"""The draw that a graph captures: its inputs, and its form in torch against the form for CPUs."""

import numpy as np
import pytest
import torch

from nanovllm.batch import NON_FINITE
from nanovllm.fast import fast_draws
from nanovllm.fast.fast_draws import fast_sampler, keep_likely
from nanovllm.fast.gpu.head_extras import DrawExtras, draw_extras
from nanovllm.sampler import FILTERED_AT_ONCE, FILTERS, DrawInputs, DrawTensors, draw, keep_likely_by_sort
from tests.support.nuclei import nuclei_that_end_exactly, random_logits
from tests.support.public_options import make_sequence
from tests.support.tiny_models import DTYPES

CPU = torch.device("cpu")
WAYS = [
    {}, {"temperature": 0.0}, {"temperature": 0.001}, {"top_k": 1}, {"top_k": 10}, {"top_k": 2**63 - 1}, {"top_p": 0.5},
    {"top_p": 0.9999}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.7}, {"top_p": 0.9, "min_p": 0.05, "temperature": 1.8},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "min_p": 0.02}, {"temperature": 0.0, "top_k": 3, "top_p": 0.2},
    {"temperature": 1e300, "top_k": 7},
]  # fmt: skip


def request(seed=0, **params):
    return make_sequence([1, 2], seed=seed, **params)


def requests_of(count):
    return [request(seed, **WAYS[seed % len(WAYS)]) for seed in range(count)]


def test_a_sort_keeps_what_the_form_for_cpus_keeps():
    logits = random_logits(len(WAYS), 300)
    logits[3:6] = logits[3:6].round()  # ties
    logits[7, :250] = -torch.inf
    inputs = DrawInputs.from_sequences(requests_of(len(WAYS)), [5] * len(WAYS))
    by_sort = logits.clone()
    floors = keep_likely_by_sort(by_sort, [torch.from_numpy(values) for values in inputs.filters])
    assert torch.equal(by_sort, keep_likely(logits.clone(), inputs.filters))
    assert torch.equal(by_sort, logits.masked_fill(logits < floors, -torch.inf))
    assert (by_sort == -torch.inf).any(dim=-1).sum() > 6


@pytest.mark.parametrize("logits", nuclei_that_end_exactly(), ids=["next to it", "far from it"])
def test_a_sort_ends_a_nucleus_where_its_mass_is_top_p_exactly(logits):
    rows, off = logits.expand(2, -1).clone(), torch.zeros(2)
    top_p = torch.tensor([0.5, np.nextafter(np.float32(0.5), np.float32(1.0))])
    keep_likely_by_sort(rows, [top_p if name == "top_p" else off.int() for name in FILTERS])
    kept = rows > -torch.inf
    assert kept.sum(dim=-1).tolist() == [1, len(logits)]


def test_the_kernels_of_a_gpu_get_floors_from_torch_where_they_lack_a_filter(monkeypatch):
    count = FILTERED_AT_ONCE + 30
    logits, inputs = random_logits(count, 300), DrawInputs.from_sequences(requests_of(count), [5] * count)
    known = {"draw_on_gpu": lambda logits, inputs, floors_of=None, **_: floors_of and floors_of(logits, inputs)}
    monkeypatch.setattr(fast_draws, "find_kernel", lambda file, name: known[name])
    known["FILTERS"] = FILTERS.keys()
    assert fast_sampler(compiles=True).draw(logits, inputs.to_device(CPU)) is None
    known["FILTERS"] = {"top_k", "top_p"}
    offsets, floors = fast_sampler(compiles=True).draw(logits, inputs.to_device(CPU))
    levels = (logits - offsets[:, None]) * torch.from_numpy(inputs.inverse_temperatures)[:, None]
    kept = keep_likely(levels.clone(), inputs.filters)
    assert torch.equal(kept > -torch.inf, levels >= floors[:, None])
    is_relative = sum(values != 0 for values in (*inputs.filters, inputs.is_cold)) > 0
    assert torch.equal(offsets != 0, torch.from_numpy(is_relative))


@DTYPES
def test_the_captured_draw_takes_the_tokens_that_a_cpu_takes(dtype):
    count = FILTERED_AT_ONCE + 30
    logits, requests, positions = random_logits(count, 500).to(dtype), requests_of(count), list(range(2, count + 2))
    logits[5, 3], logits[6, 3], logits[7] = torch.nan, torch.inf, -torch.inf
    drawn = draw(logits, DrawInputs.from_sequences(requests, positions).to_device(CPU)).tolist()
    assert drawn == fast_sampler().sample(logits, requests, positions).tolist()
    assert drawn[5:8] == [NON_FINITE] * 3 and min(drawn[8:]) >= 0


def test_without_filters_the_draw_needs_no_sort():
    logits, requests = random_logits(9, 500), [request(n, temperature=n % 3) for n in range(9)]
    inputs = DrawInputs.from_sequences(requests, [5] * 9)
    assert not inputs.has_filters()
    tensors = inputs.to_device(CPU)
    assert torch.equal(draw(logits, tensors, has_filters=False), draw(logits, tensors))


def test_a_row_of_zeros_is_a_greedy_one():
    logits = random_logits(3, 100)
    inputs = DrawInputs.from_sequences(requests_of(3), [5] * 3).to_device(CPU)
    zeros = DrawTensors(*(torch.zeros_like(tensor) for tensor in inputs))
    for has_filters in (False, True):
        assert torch.equal(draw(logits, zeros, has_filters=has_filters), logits.argmax(dim=-1))


def test_inputs_say_zero_for_what_is_off():
    inputs = DrawInputs.from_sequences(requests_of(len(WAYS)), [5] * len(WAYS))
    row_of = {str(way): row for row, way in enumerate(WAYS)}
    assert [int(v[0]) for v in inputs[2:]] == [1] + [0] * (len(FILTERS) + 1)
    assert not any(v[row_of[str(WAYS[12])]] for v in inputs[2:])  # a greedy row has no filters
    assert inputs.top_k.tolist() == [0, 0, 0, 1, 10, 0, 0, 0, 0, 20, 0, 50, 0, 7]
    assert inputs.is_cold.tolist() == [0, 0, 1] + [0] * 11
    assert (inputs.inverse_temperatures > 0).all()
    tensors = inputs.to_device(CPU)
    for array, tensor in zip(inputs, tensors, strict=True):
        assert torch.equal(torch.from_numpy(array), tensor)


@pytest.mark.parametrize("option", [
    {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [3]}, {"logits_processors": lambda ids, row: row},
    {"min_tokens": 3}, {"logit_bias": {3: 1.0}, "presence_penalty": 1.0},
], ids=", ".join)  # fmt: skip
def test_what_needs_the_samplers_own_code(option):
    plain, asking = requests_of(len(WAYS)), request(**option)
    assert draw_extras(plain, [2] * len(plain)) == DrawExtras()
    assert draw_extras([*plain, asking], [2] * len(plain) + [4]) is None
    assert (draw_extras([asking], [5]) is not None) == ("min_tokens" in option)


def test_penalties_and_log_probabilities_are_extras_of_the_draw():
    asking = [request(), request(logprobs=2), request(presence_penalty=1.0), request(logprobs=0)]
    assert draw_extras(asking, [4] * 4) == DrawExtras(penalises=True, num_top=2)
    assert draw_extras(asking[3:], [4]) == DrawExtras(num_top=0)
