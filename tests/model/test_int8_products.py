"""Products with int8 weights in bfloat16: in integer matrix tiles where the processor has them, else widened."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nanovllm import LLM
from nanovllm.fast.kernels.cpp import load_kernels
from nanovllm.fast.kernels.packed_product import PackedProduct
from nanovllm.fast.kernels.processor_classes import processor_flags, targets
from nanovllm.models.packed_linears import PackedHead, PackedLinear
from nanovllm.models.quantised.blocks import QuantisedLinear
from tests.support.cpu_answers import ON_A_CPU
from tests.support.llms import generate, greedy
from tests.support.quantised import exact_product, random_blocks
from tests.support.tiny_models import random_prompts, save_tiny

pytestmark = ON_A_CPU


@pytest.fixture(scope="module")
def kernels():
    return load_kernels(torch.bfloat16, 64, 3, exact_rows=targets()[0].name != "amx")  # else `test_byte_products.py`


def has_integer_tiles(kernels):
    return kernels.target == "amx" and {"amx_int8", "avx512_vnni", "avx512vbmi"} <= processor_flags()


def layer(num_outputs, depth, *, bias=False, seed=0):
    vector = torch.randn(num_outputs, generator=torch.Generator().manual_seed(seed)).bfloat16() if bias else None
    blocks = random_blocks("int8", num_outputs, depth, seed=seed)
    return QuantisedLinear("int8", blocks, vector, dtype=torch.bfloat16)


def rows_of(num_rows, depth):
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(num_rows)
    sizes = 10 ** (8 * torch.rand(num_rows, 1, generator=generator) - 4)
    return (torch.randn(num_rows, depth, generator=generator) * sizes).bfloat16()


def numbers_of_rows(num_threads):
    """Every one up to 70, and where many threads wait for one another some."""
    return range(1, 71) if num_threads == 1 else (1, 4, 5, 16, 17, 33, 47, 70)


def check(own, quantised, rows):
    sizes = rows.double().norm(dim=1, keepdim=True) * quantised.dequantise().double().norm(dim=1)
    assert ((own.double() - exact_product(quantised, rows)).abs() <= 3e-4 * sizes + 1e-6).all()


@pytest.fixture(params=[1, 2, 4])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_outputs", [32, 224])
@pytest.mark.parametrize("depth", [2, 42, 64, 96, 192, 576, 1536])
def test_every_number_of_rows_gives_the_product_of_the_dequantised_weights(num_outputs, depth, num_threads, kernels):
    """Depths that fill integer tiles, and others; those that are no multiple of four are padded."""
    quantised, rows = layer(num_outputs, depth, bias=depth == 192), rows_of(70, depth)
    head = PackedHead(quantised, kernels)
    for num_rows in numbers_of_rows(num_threads):
        check(head(rows[:num_rows]), quantised, rows[:num_rows])


@pytest.mark.parametrize("depth", [64, 576])
def test_a_row_has_the_same_bits_among_any_others(depth, num_threads, kernels):
    """Without integer tiles up to four rows are integers of 15 bits, and more are not."""
    head, rows = PackedHead(layer(96, depth, bias=True), kernels), rows_of(70, depth)
    alone = torch.cat([head(row[None]).clone() for row in rows])
    for num_rows in numbers_of_rows(num_threads) if has_integer_tiles(kernels) else range(1, 5):
        parts = [head(part).clone() for part in rows.split(num_rows)]
        assert torch.equal(torch.cat(parts), alone)


@pytest.mark.parametrize("depth", [65536, 65600])
def test_sums_of_the_deepest_weights_do_not_overflow(depth, kernels):
    """Both planes and all weights as large as they can be, of either sign; beyond a depth panels are widened."""
    blocks = torch.full((32, 4 + depth), 127, dtype=torch.int8).view(torch.uint8)
    blocks[16:] = 128  # the least byte
    blocks[:, :4] = torch.full((32, 1), 2.0**-20).view(torch.uint8)
    head = PackedHead(QuantisedLinear("int8", blocks, dtype=torch.bfloat16), kernels)
    for size in (1.0, -1.0, 127.9 / 128):
        rows = torch.full((6, depth), size).bfloat16()
        rows[:, 0] = 1.0
        expected = exact_product(QuantisedLinear("int8", blocks, dtype=torch.bfloat16), rows)
        for some in (rows[:2], rows):
            torch.testing.assert_close(head(some).double(), expected[: len(some)], rtol=1e-4, atol=0)


def test_rows_among_many_that_are_nothing_tiny_or_no_number(kernels):
    quantised, rows = layer(64, 192, bias=True), rows_of(20, 192)
    rows[0], rows[1, 7], rows[2, 70], rows[3, 191] = 0, torch.inf, -torch.inf, torch.nan
    rows[4], rows[5], rows[6] = 1e-39, 1e-36, 1e33
    output = PackedHead(quantised, kernels)(rows)
    assert torch.equal(output[0], quantised.bias.float())
    assert not output[1:4].isfinite().any() and output[4:].isfinite().all()
    check(output[4:], quantised, rows[4:])


def test_gate_and_up_interleaved_beside_layers_side_by_side(kernels):
    first, second, rows = layer(64, 192, bias=True), layer(64, 192, seed=1), rows_of(21, 192)
    parts = [PackedLinear(one, kernels)(rows) for one in (first, second)]

    def product(*, interleave):
        packed, output = PackedProduct([first, second], interleave=interleave), rows.new_empty(21, 128)
        kernels.linear(ctypes.byref(packed.struct), rows.data_ptr(), output.data_ptr(), 21, 2)
        return output

    assert torch.equal(product(interleave=False), torch.cat(parts, dim=1))
    halves = [part.unflatten(1, (-1, 16)) for part in parts]
    assert torch.equal(product(interleave=True), torch.stack(halves, dim=2).flatten(1))


def test_engines_of_several_threads_keep_their_rows_apart(kernels):
    """Each thread that calls the kernels has memory of its own for split rows, which grows when it has to."""
    layers = [layer(64, depth, seed=depth) for depth in (64, 1536, 192)]
    heads, counts = [PackedLinear(one, kernels) for one in layers], [6, 70, 17]
    rows = [rows_of(count, one.in_features) for count, one in zip(counts, layers, strict=True)]
    expected = [head(one) for head, one in zip(heads, rows, strict=True)]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            found = pool.map(lambda index: heads[index](rows[index]), [0, 1, 2] * 2)
            assert all(torch.equal(own, expected[index % 3]) for index, own in enumerate(found))


def test_greedy_tokens_do_not_depend_on_the_number_of_requests(tmp_path, kernels):
    """Fused layers and head; log-probabilities have the same bits too."""
    shape = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    folder = save_tiny(tmp_path, "qwen2", dtype=torch.bfloat16, **shape)
    prompts = random_prompts(18, low=1, high=60, seed=5)
    params = greedy(12, ignore_eos=True, logprobs=1)
    with LLM(folder, quantization="int8", num_kv_blocks=200, block_size=16, max_num_seqs=32) as llm:
        assert len(llm._engine.model_runner.binding.fused_layers) == 2
        alone = [generate(llm, [prompt], params)[0].outputs[0] for prompt in prompts]
        llm.reset_prefix_cache()
        together = [output.outputs[0] for output in generate(llm, prompts, params)]
    for one, other in zip(alone, together, strict=True):
        if has_integer_tiles(kernels):
            assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        assert len(one.token_ids) == len(other.token_ids) == 12
