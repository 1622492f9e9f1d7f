"""Times the decode kernel beside FlexAttention: `MEASURED` of `fast/kernels/paged_decode.py` was read off here.

    python bench/machines/paged_decode.py 4x384 64x640 256x100-1500 64x640+8200 64x256@4096 --variants --cuts

Each case is count x context, the context fixed or drawn from a range, and longer contexts behind `+`; `64x256@4096` are
contexts of 256 tokens behind 4,096 that all 64 share, read once for several of them and, for comparison, by each. Times
are a layer's, of a replayed CUDA graph over several layers' caches, so that none of it is in the GPU's cache; heads of
128 by default, bfloat16, blocks of 64. With --fp8 the caches are of 8-bit floats, as `kv_cache_dtype="fp8"` has them.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from harness import Part, replayed_micros, why_not  # beside this file
from torch import Tensor

from nanovllm.batch import ScheduledSequence
from nanovllm.fast.attention.flex_decodes import FlexDecodes
from nanovllm.fast.attention.flex_gpu_options import Gpu, KernelOptions
from nanovllm.fast.attention.shared_prefixes import WIDE_TOKENS, SharedPrefixes, SharingRule
from nanovllm.fast.attention.step_tables import StepTables, TableInputs
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.gpu.step_inputs import RowInputs, SampleInputs, StepPacking
from nanovllm.fast.kernels.paged_decode import MEASURED, SCALED, DecodeSizes, PagedDecode
from nanovllm.features.costs.buckets import GraphShape
from nanovllm.features.kv_fp8.fp8_format import CACHE_DTYPE, SCALE_BYTES, write_rows
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.layout import build_layout
from nanovllm.sequence import NewRequest, Sequence

BLOCK_SIZE, CACHE_BYTES = 64, 160e6  # what all layers read together, at least: more than the GPU's cache holds
CUDA = torch.device("cuda")


def entries_of(case: str) -> list[ScheduledSequence]:
    """The decodes of a step, with blocks in disorder."""
    draw, decodes = random.Random(1), []
    for part in case.split("+"):
        part, _, shared = part.partition("@")
        count, _, span = part.rpartition("x")
        low, _, high = span.partition("-")
        common = [object() for _ in range(int(shared or 0) // BLOCK_SIZE)]
        for _ in range(int(count or 1)):
            own = draw.randint(int(low), int(high or low))
            decodes.append((common + [object() for _ in range(-(-own // BLOCK_SIZE))], len(common) * BLOCK_SIZE + own))
    blocks = list(dict.fromkeys(block for table, _ in decodes for block in table))
    numbers = dict(zip(blocks, draw.sample(range(1, len(blocks) + 1), len(blocks)), strict=True))
    entries = []
    for table, context in decodes:
        sequence = Sequence(NewRequest("", [0] * context, SamplingParams()), arrival=0, max_model_len=context + 1)
        own_blocks = [numbers[block] for block in table]
        entries.append(ScheduledSequence(sequence, context - 1, 1, 1, own_blocks, context - 1))
    return entries


class Case:
    def __init__(
        self, entries: list[ScheduledSequence], heads: tuple[int, int, int], rows: int, *, in_fp8: bool = False
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.layout = build_layout(entries, BLOCK_SIZE, longest_first=True)
        blocks = {block for entry in entries for block in entry.block_table}
        # All but the unused slots of last blocks.
        num_tokens = len(blocks) * BLOCK_SIZE - sum(-(entry.start + 1) % BLOCK_SIZE for entry in entries)
        self.num_bytes = num_tokens * 2 * num_kv_heads * (head_dim + 4 if in_fp8 else 2 * head_dim)
        num_layers = int(min(96, max(8, -(-CACHE_BYTES // self.num_bytes))))
        self.rows = max(rows, len(entries))
        self.caches = torch.empty(
            num_layers, 2, (len(blocks) + 1) * BLOCK_SIZE, num_kv_heads, head_dim, dtype=torch.bfloat16, device=CUDA
        ).normal_()
        if in_fp8:
            self.caches = torch.stack([torch.stack([*map(rounded, pair, (False, True))]) for pair in self.caches])
        self.query = torch.randn(self.rows, num_heads, head_dim, dtype=torch.bfloat16, device=CUDA)
        itemsize = self.caches.itemsize
        self.heads = num_kv_heads, num_heads // num_kv_heads, head_dim * itemsize, itemsize
        self.options = KernelOptions(Gpu.from_device(CUDA), *self.heads[:3], BLOCK_SIZE)

    def step(self, prefixes: SharedPrefixes | None = None) -> StepTables:
        shape = GraphShape(self.rows, self.rows, 0, is_wide=prefixes is not None and prefixes.wide is not None)
        packing = StepPacking(shape, self.rows, (SampleInputs(), RowInputs(), TableInputs(BLOCK_SIZE)))
        packed = np.empty(packing.num_words_for(self.layout), np.int32)
        packing.pack(self.layout, Tiles.from_layout(self.layout, BLOCK_SIZE, prefixes), None, packed)
        return StepTables.from_inputs(packing.views(torch.from_numpy(packed).to(CUDA)))

    def micros(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        """Of a layer, the median of some replays."""

        def run() -> None:
            for keys, values in self.caches:
                attend(self.query, keys, values)

        return replayed_micros(run) / len(self.caches)

    def flex(self) -> float:
        max_blocks = max(len(entry.block_table) for entry in self.layout.entries)
        flex = FlexDecodes(self.options, max_decodes=self.rows, max_blocks=max_blocks, device=CUDA)
        step = self.step()
        flex.fill(step.tables, step.decode_tables, step.decode_blocks, step.decode_positions)
        return self.micros(lambda query, keys, values: flex.attend(query, keys, values, query.shape[2] ** -0.5))

    def kernel(self, sizes: DecodeSizes, *, shares: bool = True, wide: str = "") -> float:
        """Args: wide: "hopper" or "triton" for wide groups by this kernel, if the prefix is long enough."""
        kernel = PagedDecode(
            self.heads, BLOCK_SIZE, gpu=self.options.gpu, max_decodes=self.rows, device=CUDA, sizes=sizes
        )
        kernel.uses_wide_kernel = wide == "hopper"
        prefixes = None
        if shares:
            rule = SharingRule.for_kernel(kernel, 1)._replace(member_tokens=0.0, step_tokens=0.0, wide_reads=0)
            rule = rule._replace(max_bundles=kernel.most_bundles(self.layout.num_decodes))
            prefixes = SharedPrefixes.from_layout(
                self.layout, BLOCK_SIZE, rule if wide else rule._replace(wide_members=0)
            )
        step = self.step(prefixes)
        kernel.fill(step.tables, step.decode_tables, step.decode_blocks, step.decode_positions, step.sharing)
        return self.micros(lambda query, keys, values: kernel.attend(query, keys, values, query.shape[2] ** -0.5))


def rounded(cache: Tensor, is_value: bool) -> Tensor:
    """A cache of 8-bit floats of the same content."""
    slots, heads, head_dim = cache.shape
    found = torch.zeros(slots, heads, head_dim + SCALE_BYTES, dtype=CACHE_DTYPE, device=CUDA)
    write_rows(cache, found, torch.arange(slots, device=CUDA), is_value=is_value)
    return found


def variants(*, in_fp8: bool) -> Iterator[DecodeSizes]:
    sizes = [(32, 4, 2), (64, 3, 4), (64, 2, 4), (32, 4, 4), (32, 3, 2)]
    if in_fp8:
        sizes += [(64, 4, 4), (64, 4, 2), (64, 3, 2), (64, 5, 2), (32, 6, 2), (32, 4, 1), (64, 5, 4)]
    for tile, num_stages, num_warps in sizes:
        yield MEASURED._replace(tile=tile, num_stages=num_stages, num_warps=num_warps)


def cuts(sizes: DecodeSizes) -> Iterator[DecodeSizes]:
    for least, most in itertools.combinations_with_replacement((1, 2, 3, 4, 6), 2):
        yield sizes._replace(least_programs=least, most_programs=most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="COUNTxCONTEXT")
    parser.add_argument("--heads", type=int, nargs=3, default=[16, 8, 128], help="query heads, KV heads, head size")
    parser.add_argument("--rows", type=int, default=0, help="decodes of the step with padding")
    parser.add_argument("--variants", action="store_true", help="tiles, stages and warps")
    parser.add_argument("--cuts", action="store_true", help="programs of a multiprocessor")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="caches of 8-bit floats")
    arguments = parser.parse_args()
    if reason := why_not(Part(main, gpu=True)):
        parser.error(f"paged_decode: {reason}")
    for name in arguments.cases:
        case = Case(entries_of(name), tuple(arguments.heads), arguments.rows, in_fp8=arguments.fp8)
        measured = SCALED if arguments.fp8 else MEASURED

        def show(label: str, micros: Any, case: Case = case, name: str = name) -> None:
            rate = case.num_bytes / micros / 1e6
            print(f"{name:>16} {label:74} {micros:8.1f} us {rate:6.2f} TB/s", flush=True)

        if not (arguments.no_flex or arguments.fp8):
            show("flex", case.flex())
        if "@" in name:
            show("each decode alone", case.kernel(measured, shares=False))
            for wide in ("triton", "hopper") if int(name.partition("@")[2]) >= WIDE_TOKENS else ():
                show(f"wide groups, {wide}", case.kernel(measured, wide=wide))
        for variant in variants(in_fp8=arguments.fp8) if arguments.variants else (measured,):
            found = sorted((case.kernel(sizes), sizes) for sizes in (cuts(variant) if arguments.cuts else (variant,)))
            for micros, sizes in found[:3]:
                show(" ".join(f"{key} {size}" for key, size in sizes._asdict().items()), micros)


if __name__ == "__main__":
    main()
