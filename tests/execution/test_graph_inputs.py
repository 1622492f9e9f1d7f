"""Shapes and inputs of CUDA graphs, in plain arithmetic: every bound, and what each row attends to."""

import random

import numpy as np
import pytest
import torch

from nanovllm.batch import ScheduledSequence
from nanovllm.fast.attention.flex_gpu_options import Gpu, KernelOptions
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.gpu.forward_graphs import MAX_GRAPHS, STEPS_TO_CAPTURE, ForwardGraphs
from nanovllm.features.costs.buckets import MIN_ROWS, Buckets, GraphShape, RowSizes
from nanovllm.features.costs.cost_model import StepWork as StepCosts
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.logprobs.logprobs import PromptRows, StepLogprobs
from nanovllm.layout import build_layout
from nanovllm.model_runner import with_sampled
from nanovllm.sampler import DrawInputs
from tests.support.gpu_steps import packing_of
from tests.support.public_options import make_sequence
from tests.support.scheduling import Loop, make_scheduler

H200 = Gpu(132, 232_448)


def random_entries(choice, block_size, max_num_seqs, budget, max_model_len):
    """A step within the limits, and the sequences whose newest token is in flight, with their places."""
    pages = list(range(1, 5000))
    entries, in_flight = [], []
    for number in range(choice.randint(1, max_num_seqs)):
        start = choice.choice([0, choice.randint(0, max_model_len - 1)])
        count = min(choice.choice([1, 1, 1, choice.randint(1, max_model_len - start)]), budget)
        if not count:
            break
        budget -= count
        end = start + count
        waits = count == 1 and start > 0 and choice.random() < 0.5
        tokens = [choice.randrange(1000) for _ in range(start if waits else end)]
        sequence = make_sequence(tokens, arrival=number, seed=choice.randrange(2**64))
        if waits:
            in_flight.append(sequence)
        table = [pages.pop(choice.randrange(len(pages))) for _ in range(-(-end // block_size))]
        entries.append(ScheduledSequence(sequence, start, count, int(waits or choice.random() < 0.8), table, start))
    choice.shuffle(in_flight)
    return entries, {sequence: place for place, sequence in enumerate(in_flight)}


def shape_of(buckets, layout, block_size):
    return buckets.shape(layout, len(Tiles.from_layout(layout, block_size).blocks))


def config_of(max_num_seqs, budget, block_size, max_model_len=4096):
    return EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=block_size, max_model_len=max_model_len
    )


def assert_fits(shape, buckets, block_size):
    largest = buckets.largest()
    assert all(size <= bound for size, bound in zip(shape[:3], largest[:3], strict=True)), (shape, largest)
    assert packing_of(shape, block_size, 8).num_words <= packing_of(largest, block_size, 8).num_words
    assert shape.num_rows >= MIN_ROWS
    assert not shape.num_decodes or shape.num_decodes >= MIN_ROWS


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 5, 7, 8, 16, 21, 256, 300, 1024, 4096])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_every_step_within_the_limits_has_a_shape_that_holds_it(max_num_seqs, block_size):
    choice = random.Random(max_num_seqs)
    for budget in (max_num_seqs + block_size, max_num_seqs + block_size + 1, 8192, 12_345):
        if budget < max_num_seqs + block_size:
            continue
        buckets = Buckets(config_of(max_num_seqs, budget, block_size))
        for shape in buckets.common():
            assert_fits(shape, buckets, block_size)
        for _ in range(4):
            entries, in_flight = random_entries(choice, block_size, min(max_num_seqs, 60), budget, 300)
            layout = build_layout(entries, block_size, in_flight)
            tiles = Tiles.from_layout(layout, block_size)
            shape = buckets.shape(layout, len(tiles.blocks))
            assert_fits(shape, buckets, block_size)
            assert shape.num_decodes >= layout.num_decodes and shape.num_tiles >= len(tiles.blocks)
            assert shape.num_rows >= shape.num_decodes + layout.num_tokens - layout.num_decodes


def test_the_cost_model_counts_the_rows_that_a_step_is_computed_as():
    for seed in range(20):
        choice = random.Random(seed)
        limits = {"max_num_seqs": choice.choice([3, 8, 30]), "max_num_batched_tokens": choice.choice([40, 64, 200])}
        loop = Loop(make_scheduler(block_size=16, **limits))
        sizes, buckets = RowSizes(*limits.values()), Buckets(config_of(*limits.values(), 16))
        for _ in range(40):
            for _ in range(choice.choice([0, 0, 1, 4])):
                loop.add(choice.choices(range(8), k=choice.choice([1, 5, choice.randint(1, 50)])), max_tokens=6)
            if loop.scheduler.waiting or loop.scheduler.running:
                batch = loop.step()
                layout = build_layout(batch.entries, 16)
                assert StepCosts.from_batch(batch, 16, sizes).num_tokens == shape_of(buckets, layout, 16).num_rows


def test_padding_stays_moderate():
    buckets = Buckets(config_of(1024, 8192, 64))
    entry = ScheduledSequence(make_sequence([1] * 9), 5, 1, 1, [1], 5)
    for count in range(1, 1025):
        shape = buckets.shape(build_layout([entry] * count, 64), 0)
        assert shape.num_decodes <= max(4, 2 * count) and (count < 64 or 2 * shape.num_decodes <= 3 * count)
    prompts = [ScheduledSequence(make_sequence([1] * 130, arrival=n), 0, 130, 1, [1, 2, 3], 0) for n in range(60)]
    layout = build_layout(prompts, 64)
    assert buckets.shape(layout, 180).num_tiles <= 400


def test_a_step_of_a_missing_shape_runs_as_the_smallest_captured_one_that_holds_it():
    captured = [GraphShape(16, 16, 0), GraphShape(64, 64, 0), GraphShape(0, 128, 20), GraphShape(16, 256, 20),
                GraphShape(256, 9000, 200), GraphShape(64, 256, 24)]  # fmt: skip

    def stand_in(*shape, **options):
        return Buckets.stand_in(GraphShape(*shape), captured, **options)

    assert stand_in(24, 24, 0) == captured[1]
    assert stand_in(16, 192, 17) == captured[3]
    assert stand_in(0, 160, 8) == captured[3]  # decodes' rows are padding
    assert stand_in(64, 256, 24) == captured[5]
    assert stand_in(64, 256, 25) is stand_in(65, 65, 0) is None  # but for one that takes longer than no graph
    assert stand_in(64, 256, 25, at_any_cost=True) == captured[4]
    assert stand_in(64, 6200, 25) == captured[4]
    assert stand_in(257, 257, 0, at_any_cost=True) is stand_in(16, 300, 201, at_any_cost=True) is None


def test_a_step_with_a_wide_group_runs_in_a_graph_of_either_kind_and_rather_of_its_own():
    narrow, wide = [GraphShape(16, 16, 0), GraphShape(64, 64, 0)], GraphShape(64, 64, 0, is_wide=True)
    for captured, own, other in ((narrow, narrow[1], narrow[0]), ([*narrow, wide], wide, narrow[0])):
        assert Buckets.stand_in(GraphShape(48, 48, 0, is_wide=True), captured) == own
        assert Buckets.stand_in(GraphShape(8, 8, 0), captured) == other
    large = GraphShape(1024, 1024, 0, is_wide=True)
    assert Buckets.stand_in(GraphShape(48, 48, 0, is_wide=True), [*narrow, large]) == narrow[1], "not 21 times the rows"


def test_the_graph_of_a_wide_group_is_captured_after_some_of_its_steps():
    config = config_of(64, 2048, 64)
    forwards = ForwardGraphs(Buckets(config))
    narrow, wide, captured = GraphShape(64, 64, 0), GraphShape(64, 64, 0, is_wide=True), []
    forwards.add(narrow, None)

    def capture(shape):
        captured.append(shape)
        forwards.add(shape, None)

    for number in range(STEPS_TO_CAPTURE + 1):
        assert forwards.shape_for_step(wide, at_any_cost=False) == (narrow if number < STEPS_TO_CAPTURE else wide)
        forwards.capture_due(wide, capture)
        assert forwards.shape_for_step(narrow, at_any_cost=False) == narrow
        forwards.capture_due(narrow, capture)
    assert captured == [wide]


@pytest.mark.parametrize("max_num_seqs", [1, 8, 256])
@pytest.mark.parametrize("captures", ["coarse", "usual"])
def test_every_step_with_few_chunks_is_held_by_what_is_captured(max_num_seqs, captures):
    """At start-up, and while idle: with padding, but fast enough to beat a step without a graph."""
    choice = random.Random(max_num_seqs)
    buckets = Buckets(config_of(max_num_seqs, 2048, 64))
    captured = [*buckets.common(), *getattr(buckets, captures)()]
    for _ in range(100):
        entries, in_flight = random_entries(choice, 64, min(max_num_seqs, 60), 2048, 900)
        layout = build_layout(entries, 64, in_flight)
        num_tiles = len(Tiles.from_layout(layout, 64).blocks)
        if len(layout.chunks) <= 8:
            stand_in = buckets.stand_in(buckets.shape(layout, num_tiles), captured)
            assert stand_in.num_rows <= max(2048, layout.num_tokens * 3)
        assert buckets.num_samples(len(layout.sample_rows)) in (0, *buckets.sample_counts)


@pytest.mark.costly
@pytest.mark.parametrize("max_num_seqs, budget", [(1024, 8192), (1024, 2560), (64, 192), (3, 70), (4096, 65_536)])
@pytest.mark.parametrize("block_size", [64, 128])
def test_steps_that_are_prepared_are_steps_that_come(max_num_seqs, budget, block_size):
    """All of them fit among the graphs that are kept, and need few kernels that are compiled for a size."""
    budget = max(budget, max_num_seqs + block_size)
    buckets = Buckets(config_of(max_num_seqs, budget, block_size, 10**6))
    usual = buckets.usual()
    assert len(set(usual)) == len(usual) < MAX_GRAPHS - 8
    assert len({shape.num_decodes for shape in usual}) <= 32 and len({shape.num_tiles for shape in usual}) <= 20

    def shape_with(num_decodes, length, context=6):
        """Of a step of decodes, the first of them behind a context, and a chunk."""
        tokens, table = [1] * max(length, context), list(range(1, 2 + max(length, context) // block_size))
        sequence = make_sequence(tokens)
        starts = [context - 1] * min(num_decodes, 1) + [5] * (num_decodes - 1)
        entries = [ScheduledSequence(sequence, start, 1, 1, table, start) for start in starts]
        entries += [ScheduledSequence(sequence, 0, length, 1, table, 0)] * (length > 0)
        return shape_of(buckets, build_layout(entries, block_size), block_size)

    for shape in usual:
        assert_fits(shape, buckets, block_size)
        length = shape.num_rows - shape.num_decodes if shape.num_tiles else 0
        assert shape_with(shape.num_decodes, length) == shape
    for num_decodes in range(min(65, max_num_seqs)):
        for length in (2, block_size, budget // 2, budget - num_decodes):
            assert shape_with(num_decodes, length) in usual
        for context in (6, 8192, 100_000):
            assert not num_decodes or shape_with(num_decodes, 0, context) in usual


@pytest.mark.parametrize(
    "gpu", [Gpu(108, 166_912), Gpu(148, 232_448), Gpu(132, 101_376)], ids=["A100", "B200", "small"]
)
def test_other_gpus_take_the_table_in_proportion_and_what_fits(gpu):
    of_gpu, of_h200 = (KernelOptions(each, 8, 2, 256, 64) for each in (gpu, H200))
    for count in range(4, 1025, 4):
        alike = -(-count * H200.num_multiprocessors // gpu.num_multiprocessors)
        options, measured = (of.for_decodes(n) for of, n in ((of_gpu, count), (of_h200, alike)))
        assert (options.kv_tile, options.kernel["SPLIT_KV"]) == (measured.kv_tile, measured.kernel["SPLIT_KV"])
        tiles = 16 + 2 * options.kernel["num_stages"] * options.kernel["BLOCK_N"]
        assert 256 * tiles <= gpu.shared_memory
        assert of_gpu.most_splits(count) >= count * options.kernel["SPLIT_KV"]
    chunks = of_gpu.for_chunks()
    assert 256 * (chunks["BLOCK_M"] + 2 * chunks["num_stages"] * chunks["BLOCK_N"]) <= gpu.shared_memory


@pytest.mark.full
def test_each_row_of_a_packed_step_has_its_own_token_position_slot_and_noise():
    """Also with dirty buffers, which earlier steps leave, and with tokens that the host does not know.

    What each row attends to, tests/attention/test_flex_gpu.py compares.
    """
    num_steps = 0
    for seed in range(60):
        choice = random.Random(seed)
        block_size, max_num_seqs = choice.choice([16, 32, 64, 256]), choice.choice([1, 3, 8, 21, 40])
        longest = choice.choice([5, block_size - 1, block_size, block_size + 1, 3 * block_size + 7])
        budget = max_num_seqs + block_size + choice.randint(0, 200)
        buckets = Buckets(config_of(max_num_seqs, budget, block_size, longest))
        for _ in range(4):
            entries, in_flight = random_entries(choice, block_size, max_num_seqs, budget, longest)
            layout = build_layout(entries, block_size, in_flight, longest_first=True)
            shape = shape_of(buckets, layout, block_size)
            packing = packing_of(shape, block_size, buckets.max_decodes)
            sampling = [entry for entry in entries if entry.num_samples]
            positions = [entry.start + entry.num_new_tokens for entry in sampling]
            draws = DrawInputs.from_sequences([entry.sequence for entry in sampling], positions)
            packed = np.full(packing.num_words_for(layout), 12345, np.int32)
            packing.pack(layout, Tiles.from_layout(layout, block_size), draws, packed)
            inputs = packing.views(torch.from_numpy(packed))
            sampled = torch.randint(0, 999, (buckets.max_decodes,))
            token_ids = with_sampled(inputs.token_ids, sampled)
            used, last_row = set(), {}
            row = 0
            for entry in layout.entries:
                if entry.num_new_tokens > 1 and row < shape.num_decodes:
                    row = shape.num_decodes
                for position in range(entry.start, entry.start + entry.num_new_tokens):
                    known = entry.sequence.token_ids
                    right = known[position] if position < len(known) else int(sampled[in_flight[entry.sequence]])
                    slot = entry.block_table[position // block_size] * block_size + position % block_size
                    assert int(token_ids[row]) == right and int(inputs.positions[row]) == position
                    assert int(inputs.slot_mapping[row]) == slot
                    used.add(row)
                    last_row[entry.sequence] = row
                    row += 1
            for row in set(range(shape.num_rows)) - used:
                assert int(inputs.slot_mapping[row]) == 0 == int(token_ids[row])
            count = len(sampling)
            assert inputs.sample_rows[:count].tolist() == [last_row[entry.sequence] for entry in sampling]
            assert inputs.noise_keys[:count].tolist() == draws.noise_keys.tolist()
            assert inputs.noise_scales[:count].tolist() == [1.0] * count
            num_steps += 1
    assert num_steps > 200


def test_a_token_in_flight_that_is_none_is_replaced_by_a_valid_one():
    token_ids = torch.tensor([7, -1, -2, -3])
    assert with_sampled(token_ids, torch.tensor([5, -1, 9])).tolist() == [7, 5, 0, 9]


def test_rows_for_prompt_logprobs_are_found_behind_the_padding_of_the_decodes():
    def entry(number, start, count, num_prompt_tokens, asks):
        tokens = [1000 * number + place for place in range(num_prompt_tokens)]
        sequence = make_sequence(tokens, arrival=number, prompt_logprobs=0 if asks else None)
        sequence.token_ids.extend(range(start + count - num_prompt_tokens))
        return ScheduledSequence(sequence, start, count, 1, [10 * number + n for n in range(1, 9)], start)

    entries = [
        entry(0, 40, 32, 100, asks=True),  # a chunk in the middle of a prompt
        entry(1, 9, 1, 9, asks=True),  # decodes
        entry(2, 30, 1, 20, asks=True),
        entry(3, 0, 20, 20, asks=False),
        entry(4, 0, 23, 20, asks=True),  # a preempted one, computed again up to its generated tokens
        entry(5, 31, 1, 20, asks=False),
    ]
    layout = build_layout(entries, 16, longest_first=True)
    shape = shape_of(Buckets(config_of(16, 256, 16)), layout, 16)
    assert shape.num_decodes > layout.num_decodes
    packing = packing_of(shape, 16, 16)
    buffer = np.zeros(packing.num_words_for(layout), np.int32)
    packing.pack(layout, Tiles.from_layout(layout, 16), None, buffer)

    report = StepLogprobs(PromptRows.from_layout(layout))
    report.shift_prompt_rows(shape.num_decodes - layout.num_decodes)
    told_of = list(range(41, 73)) + list(range(4001, 4020))
    assert report.prompt.token_ids.tolist() == told_of
    assert packing.views(buffer).token_ids[report.prompt.rows].tolist() == [token_id - 1 for token_id in told_of]
