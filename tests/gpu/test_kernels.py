"""The GPU's kernels against dense float32 references computed on the host."""

import random

import pytest
import torch
import torch.nn.functional as F

from nanovllm.attention import AttentionStep, paged_attention, step_in_force, write_states
from nanovllm.batch import NON_FINITE, Copy
from nanovllm.device import find_kernel
from nanovllm.fast.fast_draws import fast_sampler
from nanovllm.fast.kernels.kv_writes import store_states
from nanovllm.fast.kernels.skinny_linear import linear, linear_and_add
from nanovllm.kv_cache import KVCaches
from nanovllm.layout import build_layout
from nanovllm.model_runner import with_sampled
from nanovllm.sampler import DrawTensors, gumbel_noise, noise_keys, token_counters
from tests.support.dense_rotary import dense_rotate
from tests.support.gpu_steps import run
from tests.support.paged_cases import MIXED_STEPS, PagedCase

rotate_and_store = find_kernel("rotary", "rotate_and_store")  # by name, since its file needs Triton


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("spans", MIXED_STEPS.values(), ids=MIXED_STEPS.keys())
def test_a_step_over_shuffled_poisoned_blocks_equals_dense_attention(spans, by_kernel):
    case = PagedCase(spans)
    case.check(run(case, by_kernel=by_kernel))


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("block_size", [16, 64])
def test_any_split_of_any_sequences_equals_dense_attention(block_size, by_kernel):
    for seed in range(16):
        choice = random.Random(seed)
        spans = []
        for _ in range(choice.randint(1, 6)):
            start = choice.choice([0, choice.randint(0, 150)])
            spans.append((start, choice.choice([1, 1, choice.randint(1, 60)])))
        case = PagedCase(spans, seed=seed, block_size=block_size)
        case.check(run(case, by_kernel=by_kernel))


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_every_group_size_is_right(groups):
    case = PagedCase([(70, 1), (0, 1), (33, 1), (0, 67), (64, 40)], groups=groups, block_size=32, dtype=torch.bfloat16)
    case.check(run(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 32), (96, 64), (128, 128), (256, 64), (64, 256)])
def test_every_head_size_block_size_and_dtype_is_right(head_dim, block_size, dtype):
    spans = [(33, 1), (0, block_size + 3), (2 * block_size, 21), (block_size - 1, 1), (block_size, 1)]
    case = PagedCase(spans, head_dim=head_dim, block_size=block_size, dtype=dtype, groups=2)
    case.check(run(case))


def test_decodes_are_put_in_order_of_their_contexts_and_come_back_in_place():
    case = PagedCase([(5, 1), (100, 1), (33, 1), (0, 20)])
    case.layout = build_layout(case.entries, case.block_size, longest_first=True)
    assert [entry.start for entry in case.layout.decodes] == [100, 33, 5]
    assert case.layout.sample_rows.tolist() == [2, 0, 1, 22]
    case.check(run(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 15, 16, 17, 200])
@pytest.mark.parametrize(("num_outputs", "depth"), [(4096, 1024), (1024, 3072), (576, 1536), (16, 128)])
def test_skinny_products_equal_float32_products(num_rows, num_outputs, depth, dtype):
    generator = torch.Generator("cuda").manual_seed(num_rows)
    states = torch.randn(1, num_rows, depth, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(num_outputs, depth, generator=generator, device="cuda").to(dtype)
    exact = F.linear(states.double(), weight.double())
    error = (linear(states, weight).double() - exact).norm() / exact.norm()
    assert error < 4e-3
    residual = torch.randn(1, num_rows, num_outputs, generator=generator, device="cuda").to(dtype)
    together = linear_and_add(states, weight, residual)
    torch.testing.assert_close(together, residual + linear(states, weight), rtol=0, atol=0)
    wide = torch.randn(1, num_rows, 2 * depth, generator=generator, device="cuda").to(dtype)[..., :depth]
    torch.testing.assert_close(linear(wide, weight), linear(wide.contiguous(), weight), atol=0, rtol=0)


@pytest.mark.parametrize("heads", [(8, 128), (3, 80), (1, 64)])
def test_states_are_stored_as_plain_indexing_stores_them(heads):
    generator = torch.Generator("cuda").manual_seed(0)
    num_rows, num_slots = 77, 4096
    products = torch.randn(1, num_rows, 3, *heads, generator=generator, device="cuda", dtype=torch.bfloat16)
    _, key, value = products.permute(2, 0, 3, 1, 4)  # [1, num_heads, num_rows, head_dim], not contiguous
    slots = torch.randperm(num_slots, generator=generator, device="cuda")[:num_rows]
    expected, stored = (torch.zeros(2, num_slots, *heads, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    write_states(key, value, expected, slots)
    store_states(key, value, stored, slots)
    assert torch.equal(stored, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("sizes", [(16, 8, 128), (3, 1, 80), (5, 5, 96)])
@pytest.mark.parametrize("num_rows", [5, 1500])
def test_turned_queries_and_stored_states_equal_those_of_float64(num_rows, sizes, has_norms, dtype):
    num_heads, num_kv_heads, head_dim = sizes
    generator = torch.Generator("cuda").manual_seed(num_rows)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    products = randn(1, num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
    turns, norms = randn(2, 1, num_rows, head_dim), [randn(head_dim), randn(head_dim)] if has_norms else []
    slots = 1 + torch.randperm(2 * num_rows, generator=generator, device="cuda")[:num_rows]
    slots[num_rows - num_rows // 3 :] = 0  # padding
    stored = torch.zeros(2, 1 + 2 * num_rows, num_kv_heads, head_dim, dtype=dtype, device="cuda")
    expected = stored.clone()
    query = rotate_and_store(products, *turns, norms, 1e-6, stored, slots)
    right = dense_rotate(products, *turns, norms, 1e-6, expected, slots)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in ((query, right), (stored[:, 1:], expected[:, 1:])):  # what padding leaves is never read
        assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()
    assert query.shape == (num_rows, num_heads, head_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (4, 576), (37, 1024), (3000, 4096)])
def test_norms_sums_and_gates_between_products_are_those_of_pytorch(num_rows, size, dtype):
    torch.manual_seed(0)
    first, second = (3 * torch.randn(1, num_rows, size, device="cuda").to(dtype) for _ in range(2))
    weight, product = torch.randn(size, device="cuda").to(dtype), torch.randn(1, num_rows, 2 * size, device="cuda")
    product = (4 * product).to(dtype)
    total, normed = layer_part("add_and_norm")(first, second, weight, 1e-5)
    assert torch.equal(total, first + second)
    gate, up = product.double().chunk(2, dim=-1)
    pairs = [
        (layer_part("norm")(first, weight, 1e-5), first.double(), weight),
        (normed, total.double(), weight),
    ]
    expected = [F.rms_norm(states, (size,), scale.double(), 1e-5) for _, states, scale in pairs]
    own = [pair[0] for pair in pairs] + [layer_part("gated")(product)]
    for ours, right in zip(own, [*expected, F.silu(gate) * up], strict=True):
        torch.testing.assert_close(ours.double(), right, atol=1e-3, rtol=1e-5 if dtype == torch.float32 else 1e-2)


def test_angles_are_those_of_pytorch_at_every_position():
    frequencies = 1e6 ** (-torch.arange(0, 128, 2, device="cuda") / 128)
    positions = torch.tensor([[0, 1, 17, 4096, 40_000, 1_000_000]], device="cuda")
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    for ours, right in zip(
        layer_part("turns")(positions, frequencies, 1.25, torch.float32), (angles.cos(), angles.sin()), strict=True
    ):
        torch.testing.assert_close(ours, 1.25 * right, atol=1e-5, rtol=1e-5)


def test_tokens_of_the_step_before_are_put_in_place():
    token_ids = torch.tensor([3, -1, -3, 0, -900, 7] * 300, device="cuda")[1:]
    sampled = torch.tensor([5, -1, 9, 4], device="cuda")
    assert torch.equal(layer_part("with_sampled")(token_ids, sampled), with_sampled(token_ids, sampled))


def layer_part(name):
    return find_kernel("layer_parts", name)


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("shape", [(6, 64 * 40, 8, 128), (3, 16 * 9, 3, 80), (33, 64 * 1024, 8, 128)])  # 2^31 and more
def test_blocks_are_cleared_in_all_caches_and_no_others(shape, by_kernel):
    caches, block_size = torch.ones(shape, device="cuda", dtype=torch.bfloat16), 16 if shape[2] == 3 else 64
    blocks = torch.tensor([shape[1] // block_size - 1, 3, 0], device="cuda")
    pool = KVCaches([], torch.device("cuda"))
    pool._together = [(0, caches)]
    if by_kernel:
        pool.clear = find_kernel("kv_writes", "clear_blocks")
    pool.clear_blocks(blocks, block_size)
    sums = caches.view(shape[0], -1, block_size * shape[2] * shape[3]).float().sum(dim=2)
    sums = sums / (block_size * shape[2] * shape[3])
    expected = torch.ones_like(sums)
    expected[:, blocks] = 0
    torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("shape", [(6, 64 * 40, 8, 128), (33, 64 * 1024, 8, 128)])  # 2^31 and more
def test_blocks_are_copied_in_all_caches_and_no_others_change(shape):
    caches = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    blocks, last = caches.view(shape[0], -1, 64 * 8 * 128), shape[1] // 64 - 1
    for layer in range(shape[0]):
        blocks[layer, 3], blocks[layer, last] = layer, -layer
    pool = KVCaches([], torch.device("cuda"))
    pool._together = [(0, caches)]
    pool.copy_blocks((Copy(0, 3, last), Copy(0, last, 7)), 64)
    expected = torch.ones(blocks.shape[:2], device="cuda")
    of_layers = torch.arange(shape[0], device="cuda").float()
    expected[:, 3], expected[:, last], expected[:, 7] = of_layers, of_layers, -of_layers
    for number in (0, shape[0] - 1):
        torch.testing.assert_close(blocks[number].float(), expected[number][:, None].expand(-1, blocks.shape[2]))


def test_compiled_code_stores_states_without_a_copy_of_the_cache():
    layers = torch.zeros(4, 2**18, 8, 128, device="cuda", dtype=torch.bfloat16)  # 512 MiB each

    @torch.compile(fullgraph=True)
    def write_and_read(states, cache, slots, handle):
        store_states(2 * states, 3 * states, cache, slots)
        return paged_attention(states, cache[0], cache[1], handle, 1.0)

    states, slots = torch.ones(1, 8, 5, 128, device="cuda", dtype=torch.bfloat16), torch.arange(5, device="cuda")
    with step_in_force(-1, AttentionStep(_Reader(slots), 5)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        with torch.inference_mode():
            read = [write_and_read(states, cache, slots, torch.tensor([-1])) for cache in layers.split(2)]
    assert torch.cuda.max_memory_allocated() - before < layers[0].nbytes / 2
    assert all((output == 5).all() for output in read)


class _Reader:
    """In place of a plan: the sum of K and V in some slots."""

    def __init__(self, slots):
        self.slots = slots

    def attend(self, query, key_cache, value_cache, scaling, kind=0, sinks=None):
        return key_cache[self.slots] + value_cache[self.slots]


def drawn_with(keys, inverse_temperatures, noise_scales):
    """Without filters."""
    off = torch.zeros_like(noise_scales)
    return DrawTensors(keys, inverse_temperatures, noise_scales, off.int(), off, off, off.int())


@pytest.mark.parametrize("vocab_size", [512, 49_152, 50_257, 151_936])
@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_compiled_draws_take_the_token_that_the_formula_takes(vocab_size, num_rows):
    """Where the two best scores are not so near that rounding decides; the logits are of float32 and of bfloat16."""
    sampler = fast_sampler(compiles=True)
    generator = torch.Generator("cuda").manual_seed(vocab_size)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (4 * torch.randn(num_rows, vocab_size, generator=generator, device="cuda")).to(dtype)
        keys = torch.from_numpy(noise_keys(range(num_rows), [7] * num_rows)).cuda()
        temperatures = torch.linspace(0.5, 1.5, num_rows, device="cuda")
        scales = (torch.arange(num_rows, device="cuda") % 3 != 1).float()  # some rows are greedy
        tokens = sampler.draw(logits, drawn_with(keys, 1 / temperatures, scales))
        noise = gumbel_noise(keys, token_counters(vocab_size, logits.device))
        scores = logits.double() / temperatures[:, None] + scales[:, None] * noise
        best, expected = scores.topk(2)
        clear = best[:, 0] - best[:, 1] > 1e-4
        assert torch.equal(tokens[clear], expected[clear, 0])
        greedy = sampler.draw(logits, drawn_with(keys, torch.ones_like(scales), torch.zeros_like(scales)))
        assert torch.equal(logits.gather(1, greedy[:, None])[:, 0], logits.amax(dim=-1))


def test_rows_that_are_not_finite_give_no_token():
    sampler = fast_sampler(compiles=True)
    logits = torch.randn(5, 512, device="cuda")
    logits[0, 7] = torch.nan
    logits[1, 500] = torch.inf
    logits[2] = -torch.inf
    logits[3, :511] = -torch.inf  # one token is left
    keys, inverse = torch.from_numpy(noise_keys(range(5), range(5))).cuda(), torch.full((5,), 1.25, device="cuda")
    for scale in (1.0, 0.0):
        inputs = drawn_with(keys, inverse, torch.full((5,), scale, device="cuda"))
        drawn = sampler.draw(logits, inputs).tolist()
        assert drawn[:4] == [NON_FINITE] * 3 + [511] and drawn[4] >= 0
