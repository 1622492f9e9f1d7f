"""The kernels' products with quantised weights, beside those with the dequantised ones."""

import ctypes
import platform

import pytest
import torch
from torch import nn

from nanovllm.fast.kernels import cpp
from nanovllm.fast.kernels.cpp import load_kernels
from nanovllm.fast.kernels.packed_product import PackedProduct, can_pack
from nanovllm.fast.kernels.processor_classes import targets
from nanovllm.models.packed_linears import PackedHead, PackedLinear, pack_linear_layers
from nanovllm.models.quantised.blocks import FORMATS
from tests.support.cpu_answers import ON_A_CPU
from tests.support.quantised import KINDS, exact_product, random_layer

pytestmark = ON_A_CPU
NUM_ROWS = [1, 2, 3, 4, 5, 12, 33, 400]
FEW_ROWS = 4  # that are multiplied as integers, in bfloat16
WHOLE_ROWS = ("int8", "W8 rows", "FP8 rows")  # numbers with a scale for a row
ROUNDED_TWICE = ("W4 exact zeros", "NVFP4 over")  # float32 scales times a zero point; a reciprocal
SOME_ROWS = 16  # that are multiplied with each run's whole numbers, in bfloat16 in matrix tiles
MORE_ROWS = 32  # that matrix tiles multiply at once


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def kernels(request):
    return load_kernels(request.param, 64, 3, exact_rows=targets()[0].name != "amx")  # else `test_byte_products.py`


def layer(kind, dtype, num_outputs=160, depth=512, *, bias=True):
    vector = torch.randn(num_outputs, generator=torch.Generator().manual_seed(1)).to(dtype) if bias else None
    return random_layer(kind, num_outputs, depth, vector, dtype=dtype)


def plain(quantised):
    """The same with dequantised weights."""
    linear = nn.Linear(quantised.in_features, quantised.out_features, bias=quantised.bias is not None)
    linear.weight.data = quantised.dequantise()
    if quantised.bias is not None:
        linear.bias.data = quantised.bias.data
    return linear.to(quantised.dtype)


def rows_of(num_rows, depth, dtype):
    return torch.randn(num_rows, depth, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_dequantised_weights(kind, kernels):
    """Equal bit for bit in float32 and for many rows, except kinds that round twice; kinds with a scale for a row are
    not, since it is multiplied with the sums, and int8 splits its rows (`test_int8_products.py`).

    In bfloat16 few rows are multiplied as integers, and some with integers, closer to the exact product than bfloat16
    weights are.
    """
    quantised = layer(kind, kernels.dtype)
    own, other = PackedHead(quantised, kernels), PackedHead(plain(quantised), kernels)
    with torch.no_grad():
        for num_rows in NUM_ROWS:
            rows = rows_of(num_rows, 512, kernels.dtype)
            expected = exact_product(quantised, rows)
            error = (own(rows).double() - expected).abs().max() / expected.abs().max()
            is_as_plain = error < 0.02 and (kind in ROUNDED_TWICE or torch.equal(own(rows), other(rows)))
            if kind in WHOLE_ROWS or kernels.dtype == torch.float32:
                assert error < (3e-6 if kernels.dtype == torch.float32 else 2e-4)
            elif num_rows <= SOME_ROWS or kernels.target != "amx":
                assert error < 2e-4 or is_as_plain  # a processor without VNNI or matrix tiles
            else:
                assert is_as_plain
            if kind not in (*WHOLE_ROWS, *ROUNDED_TWICE) and kernels.dtype == torch.float32:
                assert torch.equal(own(rows), other(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_no_product(kind, kernels):
    """A step that samples nothing asks the head for none."""
    for packed in (PackedHead, PackedLinear):
        assert packed(layer(kind, kernels.dtype), kernels)(torch.empty(0, 512, dtype=kernels.dtype)).shape == (0, 160)


@pytest.mark.parametrize("kind", [kind for kind, form in FORMATS.items() if form.elements <= 32])
def test_rows_of_a_single_block(kind, kernels):
    quantised, rows = layer(kind, kernels.dtype, depth=32), rows_of(3, 32, kernels.dtype)
    expected = exact_product(quantised, rows)
    with torch.no_grad():
        own, by_plain = PackedHead(quantised, kernels)(rows), PackedHead(plain(quantised), kernels)(rows)
    if kernels.dtype == torch.float32 or not torch.equal(own, by_plain):  # equal on a processor without VNNI
        torch.testing.assert_close(own.double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_is_the_same_among_others_on_any_number_of_threads(kind, num_threads, kernels):
    """In bfloat16 among few others, among some, among more, and among many."""
    quantised = layer(kind, kernels.dtype, bias=False)
    head, rows, before = PackedHead(quantised, kernels), rows_of(80, 512, kernels.dtype), torch.get_num_threads()

    def by(size, rows):
        return torch.cat([head(part).clone() for part in rows.split(size)])

    try:
        torch.set_num_threads(num_threads)
        assert head(rows).dtype == torch.float32
        assert torch.equal(by(80, rows), by(MORE_ROWS + 8, rows))
        assert torch.equal(by(MORE_ROWS - 5, rows), by(SOME_ROWS + 4, rows))
        assert torch.equal(by(8, rows), by(FEW_ROWS + 1, rows))
        assert torch.equal(by(FEW_ROWS, rows), by(1, rows))
        if kernels.dtype == torch.float32:
            assert torch.equal(by(80, rows), by(1, rows))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_nothing_or_no_number_stay_so(kind, kernels):
    head, rows = PackedHead(layer(kind, kernels.dtype), kernels), rows_of(3, 512, kernels.dtype)
    rows[0], rows[1, 7] = 0, torch.inf
    output = head(rows)
    assert torch.equal(output[0], layer(kind, kernels.dtype).bias.float())
    assert not output[1].isfinite().any() and output[2].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-30, 1e-36, 1e-38])
def test_tiny_activations_are_no_nan(kind, size, kernels):
    """The products of few rows scale each row by its largest number, whose inverse may be infinite."""
    quantised = layer(kind, kernels.dtype, bias=False)
    rows = (rows_of(3, 512, torch.float32) * size).to(kernels.dtype)
    output, expected = PackedHead(quantised, kernels)(rows), exact_product(quantised, rows)
    assert (output.double() - expected).abs().max() < max(0.03 * expected.abs().max(), 1e-36)


def huge_rows(num_rows, weight, dtype):
    """Rows whose products with the weight are as large as float32 can add in any order, and one of a single number."""
    rows = rows_of(num_rows, weight.shape[1], torch.float32)
    rows *= 1.5e38 / (rows.double().abs() @ weight.abs().T).max().item()
    rows[0] = 0
    rows[0, 7] = -3e38 / max(1.0, weight.abs().max().item())
    return rows.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_huge_activations_overflow_no_sooner_than_with_plain_weights(kind, kernels):
    """Sums of integers are larger than those of weights: each scale comes before a row's, or before the sum."""
    quantised = layer(kind, kernels.dtype, bias=False)
    weight = quantised.dequantise().double()
    own, other = PackedHead(quantised, kernels), PackedHead(plain(quantised), kernels)
    for num_rows in (1, FEW_ROWS, 5, 40):
        rows = huge_rows(num_rows, weight, kernels.dtype)
        expected = rows.double() @ weight.T
        for head in (own, other):
            distances = (head(rows).double() - expected).norm(dim=1) / expected.norm(dim=1)
            assert distances.max() < (1e-5 if kernels.dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_outputs", [7, 49])
def test_a_layer_of_any_number_of_outputs_is_packed(kind, num_outputs, kernels):
    """As a head of an odd vocabulary; the panel's other outputs are nobody's."""
    quantised = layer(kind, kernels.dtype, num_outputs, 256)
    model = nn.ModuleList([quantised])
    model.get_output_embeddings = lambda: None
    rows = rows_of(40, 256, kernels.dtype)
    exact = exact_product(quantised, rows)
    pack_linear_layers(model, kernels, unshared=(), packed=())
    assert quantised.blocks.numel() == 0
    for num_rows in (1, 3, 40):
        own = quantised(rows[None, :num_rows])
        assert own.shape == (1, num_rows, num_outputs) and own.is_contiguous() and own.dtype == kernels.dtype
        assert (own[0].double() - exact[:num_rows]).abs().max() < 0.02 * exact[:num_rows].abs().max()


def test_layers_of_several_kinds_lie_side_by_side(kernels):
    """As q, k and v of many files do; a plain one among them as well."""
    dtype = kernels.dtype
    layers = [layer("Q4_K", dtype), layer("Q6_K", dtype), plain(layer("Q8_0", dtype)), layer("int8", dtype, bias=False)]
    assert kernels.can_pack(layers)
    rows, product = rows_of(20, 512, dtype), PackedProduct(layers)
    output = torch.empty(20, 640, dtype=dtype)
    kernels.linear(ctypes.byref(product.struct), rows.data_ptr(), output.data_ptr(), 20, 2)
    with torch.no_grad():
        joined = [PackedLinear(one, kernels)(rows) for one in layers]
    assert torch.equal(output, torch.cat(joined, dim=1))


def test_what_cannot_lie_side_by_side_is_not_packed():
    four, eight = layer("Q4_0", torch.float32), layer("Q8_0", torch.float32)
    assert can_pack([four, four], torch.float32, interleave=True)
    assert not can_pack([four, eight], torch.float32, interleave=True)
    assert not can_pack([four], torch.bfloat16)
    assert not can_pack([layer("Q4_0", torch.float32, 48), layer("Q8_0", torch.float32, 16)], torch.float32)
    assert can_pack([layer("Q4_0", torch.float32, 48), layer("Q4_0", torch.float32, 16)], torch.float32)


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("flags", ["-mno-amx-bf16 -mno-amx-int8", "-mno-avx512f"])
def test_a_processor_without_the_newest_instructions_computes_the_same(monkeypatch, flags):
    monkeypatch.setattr(cpp, "FLAGS", (*cpp.FLAGS, *flags.split()))
    kernels = load_kernels(torch.bfloat16, 64, 3)
    for kind in KINDS:
        quantised = layer(kind, torch.bfloat16)
        exact = quantised.dequantise().double()
        for num_rows in (1, 20):
            rows = rows_of(num_rows, 512, torch.bfloat16)
            expected = exact_product(quantised, rows)
            with torch.no_grad():
                own = PackedLinear(quantised, kernels)(rows).double()
                huge = huge_rows(num_rows, exact, torch.bfloat16)
                largest = PackedLinear(quantised, kernels)(huge).double()
            assert (own - expected).abs().max() < 0.01 * expected.abs().max()
            exact_largest = exact_product(quantised, huge)
            assert (largest - exact_largest).norm() < 0.01 * exact_largest.norm()
