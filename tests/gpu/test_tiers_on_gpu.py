"""Tiers of the prefix cache on a GPU: pinned memory and files; float32 tokens are those without tiers."""

from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.tiers.host_memory import HostMemory
from nanovllm.features.tiers.prefix_tiers import PrefixTiers
from tests.support.layer_kinds import model
from tests.support.llms import check_engine
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import save_tiny, tiny_tokenizer

SIZE = 16
OPTIONS = {
    "block_size": SIZE, "num_kv_blocks": 30, "max_model_len": 160, "max_num_seqs": 6, "max_num_batched_tokens": 64,
    "enforce_eager": True, "dtype": "float32",
}  # fmt: skip
HOST = {"prefix_cache_host_bytes": 2**26}
PREFIXES = [list(range(first, first + 64)) for first in (3, 40, 80, 120, 150, 180)]
PROMPTS = [[*prefix, *range(5 + tail, 14 + tail)] for tail in range(3) for prefix in PREFIXES]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KINDS = ["Gemma3Text", "Gemma4Text", "DeepseekV2"]


class Checked:
    """Compares every block after its load with the bytes that were stored for its slot."""

    def __init__(self, monkeypatch):
        self.stored = {}
        self.num_loads = self.num_stores = 0
        store, load = HostMemory.store, HostMemory.load

        def note(memory, copies):
            for copy in copies:
                if copy.destination < 0:
                    self.stored[copy.group, ~copy.destination] = memory.read_block(copy.group, copy.source).tobytes()
                    self.num_stores += 1
            return store(memory, copies)

        def compare(memory, copies):
            load(memory, copies)
            for copy in copies:
                if copy.source < 0:
                    found = memory.read_block(copy.group, copy.destination).tobytes()
                    wanted = self.stored.get((copy.group, ~copy.source))  # a slot read from a file has none
                    memory.settle()
                    assert found == bytes(memory.view(copy.group, ~copy.source))
                    assert wanted is None or found == wanted
                    self.num_loads += 1

        monkeypatch.setattr(HostMemory, "store", note)
        monkeypatch.setattr(HostMemory, "load", compare)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(save_tiny(tmp_path_factory.mktemp("model"), "llama"))


def open_llm(source, **options):
    return LLM(source, **(OPTIONS | {"tokenizer": tiny_tokenizer()} | options))


def rounds(llm, count=2, prompts=PROMPTS):
    """Tokens of the prompts, which evict one another, in groups and in turn."""
    found = []
    for number in range(count):
        for begin in range(0, len(prompts), 5 + number):
            outputs = llm.generate(prompts[begin : begin + 5 + number], GREEDY, use_tqdm=False)
            found += [output.outputs[0].token_ids for output in outputs]
    check_engine(llm)
    if llm._engine.tiers is not None:
        llm._engine.tiers.books.check()
    return found


@pytest.fixture(scope="module")
def expected(folder):
    with open_llm(folder, num_kv_blocks=400, enable_prefix_caching=False) as llm:
        return rounds(llm)


@pytest.mark.parametrize("graphs", [{"enforce_eager": False, "cuda_graphs": True}, {}], ids=["graphs", "eager"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_prefixes_from_pinned_memory_change_no_token(folder, expected, overlap, graphs):
    with open_llm(folder, overlap=overlap, **graphs, **HOST) as llm:
        assert rounds(llm) == expected
        stats = llm.stats()
        slab = llm._engine.tiers.memory.slot(0, 0)
    assert stats.tiers.num_loaded_blocks > 20 and stats.num_failed_steps == 0
    assert slab.is_pinned()


def test_every_loaded_block_has_the_bytes_that_were_stored(folder, expected, monkeypatch):
    checked = Checked(monkeypatch)
    with open_llm(folder, **HOST) as llm:
        assert rounds(llm, 2) == expected
    assert checked.num_loads > 20 and checked.num_stores > 20


@pytest.mark.parametrize("family", KINDS)
def test_windows_and_wide_keys_return_too(family, tmp_path, monkeypatch):
    model(family).save_pretrained(tmp_path)
    with open_llm(tmp_path, num_kv_blocks=400, enable_prefix_caching=False) as llm:
        expected = rounds(llm)
    checked = Checked(monkeypatch)
    with open_llm(tmp_path, **HOST) as llm:
        assert rounds(llm) == expected
        assert llm.stats().tiers.num_loaded_blocks > 0
    assert checked.num_loads > 0


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("class_name", ["Qwen3_5ForCausalLM", "Mamba2ForCausalLM", "Lfm2ForCausalLM"])
def test_recurrent_states_return_too(class_name, graphs, tmp_path, monkeypatch):
    tiny_class_model(class_name).save_pretrained(tmp_path / "model")
    options = {
        "block_size": 64, "num_kv_blocks": 6, "max_num_seqs": 2, "max_num_batched_tokens": 90,
        "enforce_eager": not graphs,
    }  # fmt: skip
    prompts = [[3 + token % 61 for token in prompt] for prompt in PROMPTS]
    with open_llm(tmp_path / "model", **options, enable_prefix_caching=False) as llm:
        expected = rounds(llm, 2, prompts)
    monkeypatch.setattr(PrefixTiers, "_compute_seconds", lambda *_: None)  # a tiny model computes as fast as it loads
    with monkeypatch.context() as patch, open_llm(tmp_path / "model", **options, **HOST) as llm:
        checked = Checked(patch)
        assert rounds(llm, 2, prompts) == expected
        assert llm.stats().tiers.num_loaded_blocks > 0
    assert checked.num_loads > 0
    for number in range(2):
        with open_llm(tmp_path / "model", **options, prefix_cache_dir=str(tmp_path / "kept")) as llm:
            assert rounds(llm, 1, prompts) == expected[: len(PROMPTS)]
            assert (llm.stats().tiers.num_read_blocks > 0) == bool(number)


def test_slots_that_are_overwritten_while_steps_run_never_mix(folder, expected, monkeypatch):
    """Few slots: each is stored to, loaded from and stored to again, with steps in flight."""
    checked = Checked(monkeypatch)
    with open_llm(folder, prefix_cache_host_bytes=2**20) as llm:
        tiers = llm._engine.tiers
        tiers.books.max_bytes = 36 * tiers.books.block_bytes[0]
        assert rounds(llm) == expected
        assert tiers.books.num_evictions > 0
    assert checked.num_loads > 0


def test_a_new_process_begins_with_the_prefixes_of_the_former(folder, expected, tmp_path):
    files = {"prefix_cache_dir": str(tmp_path)}
    with open_llm(folder, num_kv_blocks=400, **files) as llm:
        assert rounds(llm) == expected
    with open_llm(folder, **files) as llm:
        assert rounds(llm) == expected
        stats = llm.stats().tiers
    assert stats.num_read_blocks > 20 and stats.num_loaded_blocks > 20 and stats.num_failed_reads == 0


def test_blocks_are_stored_in_idle_time(folder, expected):
    with open_llm(folder, num_kv_blocks=400, **HOST) as llm:
        rounds(llm, 1)
        while llm._engine.tiers.save_idle():
            pass
        stats = llm.stats().tiers
        assert stats.num_stored_blocks >= 4 * len(PREFIXES)
        tiers = llm._engine.tiers
        for root in tiers.books.roots.values():
            for node in root.below():
                if node.entry is not None and 0 in node.slots:
                    block = next(iter(tiers.manager.holders[node.entry.prefix_id]))
                    tiers.memory.settle()
                    assert bytes(tiers.memory.view(0, node.slots[0])) == tiers.memory.read_block(0, block).tobytes()
