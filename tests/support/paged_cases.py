"""Steps of paged attention over poisoned caches, and the dense float32 reference of each."""

import random

import numpy as np
import torch

from nanovllm.attention import (
    AttentionStep,
    SdpaAttention,
    attend_in_step,
    paged_attention,
    step_in_force,
    write_states,
)
from nanovllm.batch import ScheduledSequence
from nanovllm.fast.attention.cpp import CppAttention
from nanovllm.fast.attention.scores import scores_of
from nanovllm.fast.kernels.cpp import load_kernels
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.flex import FlexAttention
from nanovllm.layout import LayerTraits, Sight, build_layout
from nanovllm.sequence import NewRequest, Sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS = 40
HUGE = 1e4  # content of unfilled slots in a sequence's own blocks: finite, and never to be attended to


class PagedCase:
    """Random K and V of several sequences in a poisoned cache, and the step that extends them."""

    def __init__(
        self,
        spans,
        *,
        block_size=16,
        num_kv_heads=2,
        groups=3,
        head_dim=64,
        dtype=torch.float32,
        seed=0,
        shared=0,
        keeps_for_boundary=False,
        **traits,
    ):
        """spans: (start, num_new_tokens) of each sequence; the first `shared` blocks are the same for all.

        traits: of `LayerTraits`, beyond the sizes; `window` and `chunk`. Blocks that no row of a sequence sees are
        poisoned, but with `keeps_for_boundary`, as in a cache group, not those that a row at the block boundary before
        its start sees.
        """
        value_dim = traits.pop("value_dim", head_dim)
        sight = Sight(traits.pop("window", None), traits.pop("chunk", None))
        self.traits = LayerTraits(num_kv_heads * groups, num_kv_heads, head_dim, value_dim, sight, **traits)
        generator = torch.Generator().manual_seed(seed)
        self.block_size, self.num_kv_heads, self.dtype = block_size, num_kv_heads, dtype
        blocks = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(blocks)
        self.sinks = torch.randn(self.traits.num_heads, generator=generator) if self.traits.has_sinks else None
        self.caches = [  # foreign and free blocks
            torch.full((NUM_BLOCKS * block_size, num_kv_heads, dim), torch.nan, dtype=dtype)
            for dim in (head_dim, value_dim)
        ]
        for cache in self.caches:
            cache[:block_size] = 0  # the null block
        self.dense, self.queries, self.entries = [], [], []
        for number, (start, count) in enumerate(spans):
            end = start + count
            common = self.entries[0].block_table[:shared] if number else []
            table = common + [blocks.pop() for _ in range(-(-end // block_size) - len(common))]
            keys, values = (
                torch.randn(end, num_kv_heads, dim, generator=generator).to(dtype) for dim in (head_dim, value_dim)
            )
            if common:
                assert min(start, spans[0][0]) >= shared * block_size
                for own, first in zip((keys, values), self.dense[0], strict=True):
                    own[: shared * block_size] = first[: shared * block_size]
            self.dense.append((keys, values))
            self.queries.append(torch.randn(count, num_kv_heads * groups, head_dim, generator=generator).to(dtype))
            viewer = start // block_size * block_size if keeps_for_boundary else start
            first = int(self.traits.sight.first_seen(np.array([viewer]))[0]) // block_size * block_size
            for position in range(first, start):
                slot = self.slot(table, position)
                self.caches[0][slot], self.caches[1][slot] = keys[position], values[position]
            for position in range(start, len(table) * block_size):
                if position // block_size < -(-start // block_size):  # begun earlier: its rest is old, finite content
                    for cache in self.caches:
                        cache[self.slot(table, position)] = HUGE
            sequence = Sequence(
                NewRequest(str(number), [0] * end, SamplingParams()), arrival=number, max_model_len=10_000
            )
            self.entries.append(ScheduledSequence(sequence, start, count, 1, table, start))
        self.caches = [cache.to(DEVICE) for cache in self.caches]
        if head_dim == value_dim:
            self.caches = torch.stack(self.caches)
        self.layout = build_layout(self.entries, block_size)
        self.scaling = head_dim**-0.5

    def slot(self, table, position):
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def inputs(self, num_padding=0):
        """Return query, key and value as a transformers layer passes them, in the layout's row order."""
        order = [int(entry.sequence.request_id) for entry in self.layout.entries]
        new = [[states[self.entries[i].start :] for i in order for states in [self.dense[i][k]]] for k in range(2)]
        rows = [torch.cat([self.queries[i] for i in order]), *(torch.cat(states) for states in new)]
        padded = [torch.cat([r, torch.full((num_padding, *r.shape[1:]), torch.nan, dtype=r.dtype)]) for r in rows]
        return [r.transpose(0, 1)[None].to(DEVICE) for r in padded]

    def run(self, backend, num_padding=0, through_operator=False):
        step = AttentionStep(backend.plan(self.layout), self.layout.num_tokens)
        query, key, value = self.inputs(num_padding)
        if backend.reads_whole_blocks:
            blocks = torch.from_numpy(self.layout.blocks_to_clear).to(DEVICE)
            for cache in self.caches:
                cache.view(NUM_BLOCKS, -1).index_fill_(0, blocks, 0)
        slots = np.append(self.layout.slot_mapping, np.zeros(num_padding, np.int64))
        write_states(key, value, self.caches, torch.from_numpy(slots).to(DEVICE))
        with step_in_force(-1, step):
            attend = paged_attention if through_operator else attend_in_step
            return attend(query, *self.caches, torch.tensor([-1]), self.scaling, 0, self.sinks)[0]

    def expected(self):
        """Return the dense float32 reference, [num_tokens, num_heads, head_dim] in row order."""
        outputs = []
        for entry in self.layout.entries:
            number = int(entry.sequence.request_id)
            query = self.queries[number].float()
            keys, values = (states.float() for states in self.dense[number])
            groups = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scaling
            traits, positions = self.traits, entry.start + torch.arange(entry.num_new_tokens)[:, None]
            of_keys = torch.arange(len(keys))[None]
            if traits.softcap is not None:
                scores = traits.softcap * torch.tanh(scores / traits.softcap)
            scores.masked_fill_(of_keys > positions, float("-inf"))
            if traits.sight.window is not None:
                scores.masked_fill_(of_keys <= positions - traits.sight.window, float("-inf"))
            if traits.sight.chunk is not None:
                scores.masked_fill_(of_keys // traits.sight.chunk != positions // traits.sight.chunk, float("-inf"))
            if self.sinks is not None:
                column = self.sinks.float().cpu()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, column], -1)
            weights = scores.softmax(-1)[:, :, : len(keys)]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs)

    def check(self, output):
        tolerance = 2e-5 if self.dtype == torch.float32 else 2e-2
        expected = self.expected()
        assert output.shape[0] >= len(expected)
        torch.testing.assert_close(output[: len(expected)].float().cpu(), expected, atol=tolerance, rtol=tolerance)


def sdpa(case):
    block_bytes = 2 * case.caches[0][: case.block_size].nbytes
    kinds = [case.traits]
    return SdpaAttention(kinds, case.block_size, block_bytes, case.dtype, DEVICE, scores_of(kinds))


_flex_backends = {}


def flex(case):
    """Return the backend of a shape; it keeps its compiled kernels over steps, as in an engine."""
    key = (case.block_size, case.traits, case.dtype)
    if key not in _flex_backends:
        _flex_backends[key] = FlexAttention(
            num_blocks=NUM_BLOCKS,
            block_size=case.block_size,
            kinds=[case.traits],
            max_num_seqs=8,
            max_num_batched_tokens=512,
            device=DEVICE,
        )
    return _flex_backends[key]


def cpp(case):
    traits = case.traits
    kernels = load_kernels(case.dtype, traits.head_dim, traits.num_groups, traits.value_dim)
    return CppAttention([traits], [kernels], num_blocks=NUM_BLOCKS, block_size=case.block_size)


MIXED_STEPS = {
    "one decode": [(37, 1)],
    "one prompt of one token": [(0, 1)],
    "decodes of all lengths": [(0, 1), (15, 1), (16, 1), (17, 1), (100, 1)],
    "a whole prompt": [(0, 45)],
    "a prompt that fills its blocks": [(0, 48)],
    "a chunk behind computed blocks": [(32, 40)],
    "a chunk that starts within a block": [(21, 30)],
    "chunks and decodes": [(33, 1), (0, 17), (48, 50), (7, 1), (16, 16), (0, 2)],
}
SPANS = [(33, 1), (0, 17), (48, 50), (7, 1), (100, 1), (21, 30), (0, 2)]
TRAITS = {
    "window": {"window": 20},
    "a window of one block": {"window": 16},
    "a window of one token": {"window": 1},
    "chunks of whole blocks": {"chunk": 32},
    "chunks that end within blocks": {"chunk": 10},
    "soft-cap": {"softcap": 0.6},
    "sinks": {"has_sinks": True},
    "narrow values": {"value_dim": 32},
    "wide values": {"value_dim": 96},
    "all at once": {"window": 23, "softcap": 0.9, "has_sinks": True, "value_dim": 32},
}


def random_spans(seed, longest=60):
    """Up to five sequences of a step, each with up to so many tokens before it."""
    choice = random.Random(seed)
    spans = []
    for _ in range(choice.randint(1, 5)):
        start = choice.choice([0, choice.randint(0, longest)])
        spans.append((start, choice.choice([1, choice.randint(1, 40)])))
    return spans


def assert_dense(backend, spans, **options):
    """A step of these spans is, by a backend, what dense attention makes of it."""
    case = PagedCase(spans, **options)
    case.check(case.run(backend(case)))
