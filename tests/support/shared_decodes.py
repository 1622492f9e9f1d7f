"""Steps of decodes whose block tables share beginnings, from their entries to the kernel, and their dense reference."""

import random
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.batch import ScheduledSequence
from nanovllm.fast.attention.shared_prefixes import SharedPrefixes, SharingRule
from nanovllm.fast.attention.step_tables import StepTables
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.kernels.paged_decode import PagedDecode
from nanovllm.features.costs.buckets import GraphShape
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.layout import build_layout
from nanovllm.sequence import NewRequest, Sequence
from tests.support.fp8_caches import kept, rounded
from tests.support.gpu_steps import packing_of

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
MAX_DECODES = 300


def decode_entries(tables, contexts):
    """Each decode computes the last token of its context."""
    entries = []
    for number, (table, context) in enumerate(zip(tables, contexts, strict=True)):
        request = NewRequest(str(number), [0] * context, SamplingParams())
        sequence = Sequence(request, arrival=number, max_model_len=10**6)
        entries.append(ScheduledSequence(sequence, context - 1, 1, 1, table, context - 1))
    return entries


def changing_steps(seed):
    """Sequences come, go, change places, compute one token or more, and have their last tokens undone."""
    choice = random.Random(seed)
    running = []
    for _ in range(60):
        if len(running) < 2 or choice.random() < 0.2:
            running.append(([], choice.randrange(200)))
        if choice.random() < 0.1:
            running.pop(choice.randrange(len(running)))
        if choice.random() < 0.1:
            choice.shuffle(running)
        entries = []
        for index, (table, start) in enumerate(running):
            if choice.random() < 0.1:
                start = max(0, start - choice.randint(1, 3))
                del table[-(-start // 16) :]
            count, before = choice.choice([1, 1, 1, 1, 5]), start if table else 0
            table += choice.choices(range(1, 40), k=-(-(start + count) // 16) - len(table))
            (entry,) = decode_entries([table], [start + count])
            entries.append(entry._replace(start=start, num_new_tokens=count, num_computed_before=before))
            running[index] = table, start + count
        yield entries


def random_tables(choice, count, block_size):
    """Block tables and contexts of so many decodes; new ones go on from the beginning of another, or share nothing."""
    blocks = iter(choice.sample(range(1, 2000), 1999))
    tables = []
    contexts = []
    for _ in range(count):
        beginning = []
        if tables and choice.random() < 0.8:
            other = choice.choice(tables[-6:])
            beginning = other[: choice.choice([len(other), len(other) - 1, choice.randint(0, len(other))])]
            # The block of its own token is the decode's own.
            of_other = contexts[tables.index(other)] - 1
            beginning = beginning[: of_other // block_size]
        own = choice.choice([1, choice.randint(1, block_size), choice.randint(1, 5 * block_size)])
        contexts.append(len(beginning) * block_size + own)
        tables.append(beginning + [next(blocks) for _ in range(-(-own // block_size))])
    return tables, contexts


def wide_group_and_others(num_members, num_blocks, *, block_size, num_others=7):
    """Block tables and contexts: decodes with `num_blocks` common blocks, five with three, and some without any."""
    choice = random.Random(num_members * num_blocks)
    own = [choice.randint(1, 5 * block_size) for _ in range(num_members + 5 + num_others)]
    num_used = num_blocks + 3 + 5 * len(own)
    blocks = iter(choice.sample(range(1, num_used + 1), num_used))
    prefix, short = [next(blocks) for _ in range(num_blocks)], [next(blocks) for _ in range(3)]
    begins = [prefix] * num_members + [short] * 5 + [[]] * num_others
    decodes = [
        ([*begin, *(next(blocks) for _ in range(-(-n // block_size)))], len(begin) * block_size + n)
        for begin, n in zip(begins, own, strict=True)
    ]
    choice.shuffle(decodes)
    return [table for table, _ in decodes], [context for _, context in decodes]


class SharedDecodes:
    """Decodes with contexts in shuffled blocks, NaN behind them and everywhere else, and padding rows at the end.

    Args:
        heads: number of KV heads, query heads per KV head, head size.
        gpu: of which the kernel cuts contexts.
        in_fp8: True for caches in 8-bit floats.
    """

    def __init__(
        self, tables, contexts, *, heads=(2, 2, 64), block_size=16, dtype=torch.float32, padding=3, seed=0,
        device="cpu", gpu=(4, 232_448), in_fp8=False,
    ):  # fmt: skip
        num_kv_heads, groups, head_dim = heads
        generator = torch.Generator().manual_seed(seed)
        self.tables, self.contexts, self.block_size, self.groups = tables, contexts, block_size, groups
        self.scaling, self.padding, self.device = head_dim**-0.5, padding, torch.device(device)
        self.layout = build_layout(decode_entries(tables, contexts), block_size, longest_first=True)
        num_slots = (max(block for table in tables for block in table) + 1) * block_size
        caches = torch.full((2, num_slots, num_kv_heads, head_dim), torch.nan, dtype=dtype)
        self.slots = []
        for entry in self.layout.entries:
            blocks = torch.tensor(entry.block_table)
            slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[: entry.start + 1]
            fresh = slots[caches[0, slots, 0, 0].isnan()]
            caches[:, fresh] = torch.randn(2, len(fresh), num_kv_heads, head_dim, generator=generator).to(dtype)
            self.slots.append(slots)
        if in_fp8:  # read in runs of 16 slots
            caches[1] = caches[1].nan_to_num(300.0)
        self.kept = rounded(caches) if in_fp8 else caches
        self.caches = torch.stack([*map(kept, caches, (False, True))]) if in_fp8 else caches
        self.caches = self.caches.to(self.device)
        num_rows = len(tables) + padding
        self.query = torch.randn(num_rows, num_kv_heads * groups, head_dim, generator=generator).to(dtype)
        self.query = self.query.to(self.device)
        self.idle = []  # rows that see no blocks
        self.kernel = PagedDecode(
            (num_kv_heads, groups, head_dim * self.caches.itemsize, min(2, self.caches.itemsize)), block_size, gpu=gpu,
            max_decodes=MAX_DECODES, device=self.device,
        )  # fmt: skip

    def prefixes(self, *, wide_tokens=None):
        """Whatever can be shared is. Args: wide_tokens: fewest of a group with wide programs; None without these."""
        rule = SharingRule.for_kernel(self.kernel, token_bytes=1)
        rule = rule._replace(max_bundles=self.kernel.most_bundles(len(self.tables)), member_tokens=0.0, step_tokens=0.0)
        wide = {"wide_members": 0} if wide_tokens is None else {"wide_tokens": wide_tokens, "wide_reads": 0}
        rule = rule._replace(**wide)
        return SharedPrefixes.from_layout(self.layout, self.block_size, rule)

    def run(self, prefixes):
        """[num_rows, num_heads, head_dim] as in an engine's step, padding included."""
        num_rows = len(self.query)
        shape = GraphShape(num_rows, num_rows, 0, is_wide=prefixes is not None and prefixes.wide is not None)
        packing = packing_of(shape, self.block_size, num_rows)
        packed = np.full(packing.num_words_for(self.layout), 12345, np.int32)
        packing.pack(self.layout, Tiles.from_layout(self.layout, self.block_size, prefixes), None, packed)
        step = StepTables.from_inputs(packing.views(torch.from_numpy(packed).to(self.device)))
        step.decode_blocks[self.idle] = 0
        self.kernel.fill(step.tables, step.decode_tables, step.decode_blocks, step.decode_positions, step.sharing)
        output = torch.full_like(self.query, torch.nan)
        return self.kernel.attend(self.query, *self.caches, self.scaling, output)

    def check(self, output):
        expected = torch.zeros(output.shape)
        query, caches = self.query.float().cpu(), self.kept.float()
        for row, slots in enumerate(self.slots):
            if row in self.idle:
                continue
            keys, values = (cache[slots].repeat_interleave(self.groups, 1) for cache in caches)
            weights = (torch.einsum("hd,khd->hk", query[row], keys) * self.scaling).softmax(-1)
            expected[row] = torch.einsum("hk,khd->hd", weights, values)
        tolerance = TOLERANCE[output.dtype]
        torch.testing.assert_close(output.float().cpu(), expected, atol=tolerance, rtol=tolerance)

    @property
    def num_pieces(self):
        return int(self.kernel._pieces[0, 0])


class KernelSizes(NamedTuple):
    """What the kernel is compiled for: number of KV heads, query heads per KV head, head size; block size; dtype."""

    heads: tuple[int, int, int]
    block_size: int
    dtype: torch.dtype = torch.float32

    @classmethod
    def drawn(cls, choice):
        heads = choice.choice([1, 2, 3]), choice.choice([1, 2, 3, 4, 8]), choice.choice([64, 128])
        return cls(heads, choice.choice([16, 64, 128]))


def random_case(seed, device, *, most=40, sizes=None, **options):
    """Args: sizes: drawn by default, which on a GPU takes a compilation for nearly every seed."""
    choice = random.Random(seed)
    heads, block_size, dtype = sizes or KernelSizes.drawn(choice)
    tables, contexts = random_tables(choice, choice.randint(2, most), block_size)
    case = SharedDecodes(
        tables, contexts, heads=heads, block_size=block_size, dtype=dtype, padding=choice.choice([0, 1, 5]), seed=seed,
        device=device, gpu=(choice.choice([1, 4, 20, 132]), 232_448), **options,
    )  # fmt: skip
    prefixes = case.prefixes()
    alone = [row for row in range(len(tables)) if prefixes is None or not prefixes.shared[row]]
    case.idle = choice.sample(alone, min(len(alone), choice.choice([0, 2])))
    return case
