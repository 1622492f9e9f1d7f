"""Recurrent states in host memory and in files: tokens are those of `transformers`, and a state replaces its prefix."""

import contextlib
import json
import random
from functools import cache

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.errors import StepError
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.kv_events.kv_events import KvEventPublisher, in_schema
from nanovllm.features.tiers import segments
from nanovllm.features.tiers.books import TierBooks
from nanovllm.features.tiers.costs import LoadCosts
from nanovllm.features.tiers.tiered_blocks import TieredGroups
from tests.support.class_cases import own_answers
from tests.support.llms import check_engine, fail_in_step, generate, greedy, token_ids
from tests.support.prefixes import cached
from tests.support.public_options import make_config
from tests.support.scheduling import Loop, shared_scheduler
from tests.support.tiny_classes import VOCAB_SIZE, tiny_class_model
from tests.support.tiny_models import tiny_tokenizer

# Of each kind of state: the delta rule, Mamba-2 beside attention and by itself, convolutions.
FAMILIES = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "Mamba2ForCausalLM", "Lfm2ForCausalLM")
DELTA = FAMILIES[0]
SIZE, NUM_TOKENS = 64, 4  # of a block, and of an answer
SHARED = 2 * SIZE + 5
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 2, "num_kv_blocks": 12, "block_size": SIZE,
    "max_num_batched_tokens": 90,
}  # fmt: skip
HOST = {"prefix_cache_host_bytes": 2**24}


def drawn(seed, *lengths):
    choice = random.Random(seed)
    return [[choice.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


SHARED_TOKENS, *ENDS = drawn(1, SHARED, 7, 30)
PROMPTS = [SHARED_TOKENS + end for end in ENDS]
OTHERS = drawn(2, 200, 220, 180, 210, 190, 215)  # enough to evict all else


@cache
def model_and_answers(class_name):
    model = tiny_class_model(class_name)
    return model, own_answers(model, PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """A saved model of each kind of state, and its own answers."""
    return save(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def delta(tmp_path_factory):
    return save(DELTA, tmp_path_factory.mktemp("delta"))


def save(class_name, folder):
    model, expected = model_and_answers(class_name)
    model.save_pretrained(folder)
    return folder, expected


def check_books(llm):
    check_engine(llm)
    if llm._engine.tiers is not None:
        llm._engine.tiers.books.check()


def answers(llm, prompts=PROMPTS):
    """Tokens and numbers of cached tokens."""
    outputs = generate(llm, prompts, GREEDY)
    check_books(llm)
    return token_ids(outputs), cached(outputs)


def open_saved(folder, **options):
    return LLM(folder, tokenizer=tiny_tokenizer(), **(OPTIONS | options))


@contextlib.contextmanager
def evicted(class_name=DELTA, **options):
    """An engine whose prefixes are in host memory alone, and the model's own answers."""
    model, expected = model_and_answers(class_name)
    with LLM(model, **OPTIONS, **HOST, **options) as llm:
        answers(llm)
        answers(llm, OTHERS)
        yield llm, expected


def contents(llm):
    """Bytes of every findable block and state, by group and block hash."""
    manager, memory = llm._engine.tiers.manager, llm._engine.tiers.memory
    names = {entry.prefix_id: entry.block_hash for entry in manager.entries.values()}
    return {
        (group, names[prefix_id]): memory.read_block(group, next(iter(blocks))).tobytes()
        for group, pool in enumerate(manager.pools)
        if llm._engine.tiers.books.block_bytes[group]
        for prefix_id, blocks in pool.holders.items()
    }


# -------------------------------------------------------------------------------------------------------- host memory


@pytest.mark.costly
def test_tokens_are_those_of_transformers_without_tiers_with_them_and_from_a_former_process(saved, tmp_path):
    folder, expected = saved
    with open_saved(folder) as llm:
        assert answers(llm)[0] == expected
    with open_saved(folder, **HOST) as llm:
        assert answers(llm)[0] == expected
        before = contents(llm)
        answers(llm, OTHERS)
        again, num_cached = answers(llm)
        assert again == expected and min(num_cached) >= 2 * SIZE
        assert llm.stats().tiers.num_loaded_blocks > 0
        common = before.keys() & (after := contents(llm)).keys()
        assert {group for group, _ in common} == {
            g for g, size in enumerate(llm._engine.tiers.books.block_bytes) if size
        }
        assert all(before[name] == after[name] for name in common)
    for number in range(2):
        with open_saved(folder, prefix_cache_dir=str(tmp_path / "kept")) as llm:
            found, num_cached = answers(llm)
            assert found == expected and (min(num_cached) >= 2 * SIZE) == bool(number)


def test_a_state_alone_is_loaded_for_a_whole_prefix():
    """Mamba has no K and V: its blocks are but tokens."""
    with evicted("Mamba2ForCausalLM") as (llm, expected):
        assert answers(llm, PROMPTS[:1]) == (expected[:1], [2 * SIZE])
        tiers = llm._engine.tiers
        _, record_bytes = tiers.books.block_bytes
        assert tiers.costs.last.num_bytes == record_bytes and tiers.costs.last.num_tokens == 2 * SIZE
        assert tiers.books.used_bytes <= tiers.books.num_bytes <= HOST["prefix_cache_host_bytes"]


def test_states_of_a_sequence_that_went_on_are_not_stored():
    """One is kept at the end of the prompt and one at the last boundary, not one a block."""
    config = make_config(num_kv_blocks=20, max_model_len=40, max_num_seqs=2)
    limits = {"max_model_len": 40, "max_chunk_tokens": config.long_prefill_token_threshold}
    manager = TieredGroups([FULL, StateKind.record(1)], [20, 20], 4, **limits)
    manager.attach(TierBooks([1, 1], 100), LoadCosts(), root_seed="model", stores_while_busy=False)
    loop = Loop(shared_scheduler(config, manager))
    loop.add(range(6), max_tokens=30)
    while loop.unfinished:
        loop.launch()
        loop.read()
    manager.stores(1, 100)
    lengths = sorted(path_length(node) for node in manager.books._used[1])
    assert lengths == [1, 8], "boundaries of 4 tokens: the prompt's last one, and the answer's"


def path_length(node):
    length = 0
    while node.parent is not None:
        node, length = node.parent, length + 1
    return length


def test_bytes_that_hold_no_state_are_refused_with_the_numbers():
    model, _ = model_and_answers(DELTA)
    with pytest.raises(ValueError, match=r"prefix_cache_host_bytes is 1,000, of which recurrent states .* at least \d"):
        LLM(model, **OPTIONS, prefix_cache_host_bytes=1000)


# -------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def kept(delta, tmp_path):
    """A directory with the prefixes of an engine that has ended."""
    with open_saved(delta[0], prefix_cache_dir=str(tmp_path / "kept")) as llm:
        answers(llm)
    return tmp_path / "kept"


def places_of_states(kept):
    for index in sorted(kept.glob("*.index")):
        data = index.read_bytes()
        _, begin = segments.read_header(data)
        for record, _ in segments.read_records(data, begin, int(index.stem)):
            if record.group == 1:
                yield index.with_suffix(".kv"), record.place


def test_a_damaged_state_is_a_miss(delta, kept):
    folder, expected = delta
    places = [*places_of_states(kept)]
    assert places
    for number, (segment, place) in enumerate(places):
        data = bytearray(segment.read_bytes())
        data[place.offset + number * 977 % place.length] ^= 1 << number % 8
        segment.write_bytes(data)
    with open_saved(folder, prefix_cache_dir=str(kept)) as llm:
        assert answers(llm) == (expected, [0, 2 * SIZE])  # the second goes on from the first
        assert llm.stats().tiers.num_failed_reads > 0
    with open_saved(folder, prefix_cache_dir=str(kept)) as llm:
        assert answers(llm)[0] == expected


@pytest.mark.costly
@pytest.mark.parametrize("change", ["states", "blocks", "block_size"])
def test_files_of_another_layout_are_a_miss(change, delta, kept):
    """A header that names other states, shapes or blocks, with checksums that are right."""
    folder, expected = delta
    for path in [*kept.glob("*.kv"), *kept.glob("*.index")]:
        data = path.read_bytes()
        header, begin = segments.read_header(data)
        assert header[change]
        header[change] = json.loads(json.dumps(header[change]).replace("conv_states", "other_states"))
        if change != "states":
            header[change] = 2 * header[change]
        path.write_bytes(segments.encode_header(header) + data[begin:])
    with open_saved(folder, prefix_cache_dir=str(kept)) as llm:
        assert answers(llm) == (expected, [0, 2 * SIZE])
        assert llm.stats().tiers.num_read_blocks == 0


def test_a_server_writes_states_in_idle_time_with_the_blocks_before_them(delta, tmp_path):
    folder, expected = delta
    with open_saved(folder, prefix_cache_dir=str(tmp_path)) as llm:
        for prompt in (PROMPTS[0], PROMPTS[1]):  # the second finds the first's
            answers(llm, [prompt])
        while llm._engine.tiers.save_idle():
            pass
        written = llm.stats().tiers.num_written_blocks
        with open_saved(folder, prefix_cache_dir=str(tmp_path)) as other:
            found, num_cached = answers(other)
            assert found == expected and min(num_cached) >= 2 * SIZE
            assert 3 <= other.stats().tiers.num_read_blocks <= written


# ---------------------------------------------------------------------------------------------------------- crossings


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_find_their_states_in_host_memory(overlap):
    model, expected = model_and_answers(DELTA)
    scarce = {"num_kv_blocks": 6, "max_num_seqs": 2, "overlap": overlap}
    with LLM(model, **(OPTIONS | scarce), **HOST) as llm:
        for _ in range(3):
            assert answers(llm)[0] == expected
            answers(llm, OTHERS)
        assert llm.stats().tiers.num_loaded_blocks > 0


@pytest.mark.costly
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_failed_step_with_loads_leaves_no_wrong_state(monkeypatch, number):
    with evicted(overlap=True) as (llm, expected):
        with monkeypatch.context() as patch:
            fail_in_step(patch, llm, number, RuntimeError("once"))
            with pytest.raises((StepError, RuntimeError)):
                answers(llm)
        check_books(llm)
        assert answers(llm)[0] == expected


def test_samples_and_aborted_streams_change_no_token():
    with evicted() as (llm, expected):
        aborted = llm.stream(PROMPTS[1], GREEDY)
        next(aborted)
        aborted.close()
        samples = SamplingParams(n=2, top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = generate(llm, PROMPTS, samples)
        assert [[sample.token_ids for sample in output.outputs] for output in outputs] == [[e, e] for e in expected]
        assert llm.stats().tiers.num_loaded_blocks > 0
        check_books(llm)


def test_changed_weights_and_a_reset_make_stored_states_unreachable():
    model = tiny_class_model(DELTA)
    with LLM(model, **OPTIONS, **HOST) as llm:
        answers(llm)
        answers(llm, OTHERS)
        llm.reset_prefix_cache()
        assert answers(llm, PROMPTS[:1])[1] == [0]
        answers(llm, OTHERS)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        llm.weights_changed()
        assert answers(llm, PROMPTS[:1]) == (own_answers(model, PROMPTS[:1], NUM_TOKENS), [0])


def test_events_tell_states_in_host_memory_from_k_and_v(monkeypatch, tmp_path):
    batches = []

    def receive(publisher, events):
        batches.append(in_schema(events, publisher._kinds))

    monkeypatch.setattr(KvEventPublisher, "receive", receive)
    with evicted(kv_events=f"ipc://{tmp_path}/events") as (llm, _):
        llm.reset_prefix_cache()
        answers(llm)
    events = [event for batch in batches for event in batch if event.get("medium") == "CPU"]
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert {event["kv_cache_spec_kind"] for event in stored} == {"full_attention", "mamba"}
    state = next(event for event in stored if event["kv_cache_spec_kind"] == "mamba")
    assert state["token_ids"] == SHARED_TOKENS[SIZE : 2 * SIZE]
    first = next(event for event in stored if event["token_ids"] == SHARED_TOKENS[:SIZE])
    assert (first["parent_block_hash"], first["block_size"]) == (None, SIZE)
    assert [state["parent_block_hash"]] == first["block_hashes"]
    told = {(event["group_idx"], name) for event in stored for name in event["block_hashes"]}
    removed = [event for event in events if event["type"] == "BlockRemoved"]
    assert removed
    assert {(event["group_idx"], name) for event in removed for name in event["block_hashes"]} <= told


def test_the_end_of_a_stored_prefix_becomes_a_junction(delta, kept):
    """A third prompt leaves the stored path at its first block: its own state is kept there for those to come."""
    folder, _ = delta
    ends = drawn(7, 150, 150)
    prompts = [SHARED_TOKENS[:SIZE] + end for end in ends]
    with open_saved(folder, prefix_cache_dir=str(kept)) as llm:
        expected = own_answers(model_and_answers(DELTA)[0], prompts, NUM_TOKENS)
        assert answers(llm, prompts[:1]) == (expected[:1], [0])
        assert answers(llm, prompts[1:]) == (expected[1:], [SIZE])
