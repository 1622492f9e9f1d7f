"""Decode attention by the Triton kernel against dense float32 attention, and in place of FlexAttention in a step."""

import itertools

import pytest
import torch

from nanovllm.fast.attention.flex_decodes import FlexDecodes
from nanovllm.fast.attention.flex_gpu_options import Gpu, KernelOptions
from nanovllm.fast.kernels.paged_decode import MEASURED, PagedDecode

CUDA = torch.device("cuda")
MAX_DECODES = 300
RAGGED = [1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 300, 511]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Decodes:
    """Decodes with contexts in shuffled blocks, NaN behind them and everywhere else, and padding rows at the end."""

    def __init__(self, contexts, *, heads=(2, 3, 64), block_size=64, dtype=torch.bfloat16, padding=2, seed=0):
        num_kv_heads, groups, head_dim = heads
        generator = torch.Generator().manual_seed(seed)
        self.contexts, self.block_size, self.groups, self.scaling = contexts, block_size, groups, head_dim**-0.5
        counts = [-(-context // block_size) for context in contexts]
        self.tables = (torch.randperm(sum(counts), generator=generator) + 1).int()
        caches = torch.full((2, (sum(counts) + 1) * block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
        starts = [sum(counts[:number]) for number in range(len(counts))]
        self.slots = []
        for start, count, context in zip(starts, counts, contexts, strict=True):
            blocks = self.tables[start : start + count].long()
            self.slots.append((blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:context])
            caches[:, self.slots[-1]] = torch.randn(
                2, context, num_kv_heads, head_dim, generator=generator
            ).to(dtype)  # fmt: skip
        self.caches = caches.to(CUDA)
        num_rows = len(contexts) + padding
        self.query = torch.randn(num_rows, num_kv_heads * groups, head_dim, generator=generator).to(dtype).to(CUDA)
        head_bytes = head_dim * dtype.itemsize
        self.heads = num_kv_heads, groups, head_bytes
        self.options = KernelOptions(Gpu.from_device(CUDA), num_kv_heads, groups, head_bytes, block_size)
        self.step = [
            self.tables.to(CUDA),
            torch.tensor([*starts, *[0] * padding], dtype=torch.int32, device=CUDA),
            torch.tensor([*counts, *[0] * padding], dtype=torch.int32, device=CUDA),
            torch.tensor([*(context - 1 for context in contexts), *[0] * padding], device=CUDA),
        ]

    def kernel(self, sizes=MEASURED):
        return PagedDecode(
            self.heads, self.block_size, gpu=self.options.gpu, max_decodes=MAX_DECODES, device=CUDA, sizes=sizes
        )

    def run(self, decodes):
        decodes.fill(*self.step)
        output = torch.full_like(self.query, torch.nan)
        return decodes.attend(self.query, *self.caches, self.scaling, output)

    def check(self, output):
        expected = torch.zeros(output.shape, device=CUDA)
        for row, slots in enumerate(self.slots):
            keys, values = (cache[slots.to(CUDA)].float().repeat_interleave(self.groups, 1) for cache in self.caches)
            weights = (torch.einsum("hd,khd->hk", self.query[row].float(), keys) * self.scaling).softmax(-1)
            expected[row] = torch.einsum("hk,khd->hd", weights, values)
        tolerance = TOLERANCE[output.dtype]
        torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 32), (96, 64), (128, 128), (256, 64), (128, 256)])
def test_ragged_contexts_and_padding_equal_dense_attention(head_dim, block_size, dtype):
    case = Decodes(RAGGED, heads=(2, 2, head_dim), block_size=block_size, dtype=dtype)
    case.check(case.run(case.kernel()))


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 7, 8, 16, 20, 48])
def test_every_group_size_is_right(groups):
    case = Decodes([*RAGGED, 3000], heads=(1, groups, 64))
    case.check(case.run(case.kernel()))


@pytest.mark.parametrize("padding", [2, 250])  # with many decodes the last program of each merges its pieces
@pytest.mark.parametrize("num_kv_heads", [1, 8, 40])
def test_pieces_of_any_length_equal_dense_attention(num_kv_heads, padding):
    """Contexts in one piece and in many, and one long context among short ones."""
    for contexts in ([4000], [7, 4000, 40], [64] * 33 + [2000], [500] * 40):
        case = Decodes(contexts, heads=(num_kv_heads, 2, 64), padding=padding)
        kernel = case.kernel()
        case.check(case.run(kernel))
        tiles = -(-torch.tensor(contexts) // kernel._sizes.tile)
        bound = min(max(len(contexts), kernel._least_pieces), kernel._most_pieces)
        counts = (-(-tiles // -(-int(tiles.sum()) // bound))).tolist()
        assert int(kernel._pieces[0, 0]) == sum(counts) + padding  # an empty one for each row of padding
        expected = [[row, count] for row, count in enumerate(counts) for _ in range(count)]
        assert kernel._pieces[1 : 1 + sum(counts), [0, 6]].tolist() == expected


@pytest.mark.parametrize("padding", [2, 60])
def test_a_step_gives_the_same_bits_whenever_it_is_computed(padding):
    case = Decodes([7, 4000, 40, 900], heads=(8, 2, 128), padding=padding)
    kernel = case.kernel()
    first = case.run(kernel).clone()
    for _ in range(50):
        assert torch.equal(case.run(kernel), first)


def test_a_captured_graph_serves_steps_of_any_contexts():
    cases = [Decodes(contexts, heads=(8, 2, 128), padding=4 - len(contexts)) for contexts in ([9, 700], [4000, 1, 64])]
    kernel, tables = cases[0].kernel(), torch.zeros(200, dtype=torch.int32, device=CUDA)
    caches = torch.zeros(2, 80 * 64, 8, 128, dtype=torch.bfloat16, device=CUDA)
    step, query = [tables, *(part.clone() for part in cases[0].step[1:])], cases[0].query.clone()
    output = torch.empty_like(query)

    def run():
        kernel.fill(*step)
        for _ in range(3):  # the layers share what `fill` made
            output.fill_(torch.nan)
            kernel.attend(query, *caches, cases[0].scaling, output)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in (*cases, cases[0]):
        tables[: len(case.tables)] = case.step[0]
        for to, part in zip(step[1:], case.step[1:], strict=True):
            to.copy_(part)
        query.copy_(case.query)
        caches[:, : case.caches.shape[1]] = case.caches
        graph.replay()
        case.check(output)


def test_every_number_of_decodes_is_served_by_the_same_compiled_kernels():
    from nanovllm.fast.kernels import decode_pieces_triton, paged_decode_triton

    def num_compiled():
        kernels = (
            decode_pieces_triton.cut_contexts, paged_decode_triton.attend_pieces, paged_decode_triton.merge_pieces
        )  # fmt: skip
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    kernel, before = None, None
    for count, offset in itertools.product([1, 60, 2, 3, 16, 33], [0, 1, 2]):
        case = Decodes([70] * count, padding=4)
        kernel = kernel or case.kernel()
        # The parts of a packed step begin anywhere.
        case.step = [torch.cat([part.new_zeros(offset), part])[offset:] for part in case.step]
        case.check(case.run(kernel))
        if count == 60 and before is None:  # from the few on, whose pieces a kernel of its own merges
            before = num_compiled()
        assert before is None or num_compiled() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_and_flex_attention_agree(dtype):
    case = Decodes([*RAGGED, 3000], heads=(4, 2, 128), dtype=dtype)
    flex = FlexDecodes(case.options, max_decodes=MAX_DECODES, max_blocks=50, device=CUDA)
    case.caches = case.caches.nan_to_num()  # FlexAttention reads whole blocks
    flex.fill(*case.step)
    of_flex = flex.attend(case.query, *case.caches, case.scaling)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(case.run(case.kernel()), of_flex, atol=tolerance, rtol=tolerance)
