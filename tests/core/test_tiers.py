"""Prefixes in host memory and in files: the tokens stay the same, with any damage to the files, in any process."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from array import array
from dataclasses import replace

import pytest

from nanovllm import LLM, SamplingParams, TraceWriter
from nanovllm.cli.main import main
from nanovllm.fast.kernels import processor_classes
from nanovllm.features.costs.learned_costs import LearnedCosts
from nanovllm.features.tiers import books, prefix_tiers, reading, segments, tiered_blocks
from nanovllm.features.tiers.books import TierBooks
from nanovllm.features.tiers.directory import CacheDirectory
from nanovllm.features.tiers.reading import FileReads
from tests.support.forked_processes import programs_are_forked
from tests.support.layer_kinds import model
from tests.support.llms import OPTIONS, check_engine, generate, open_llm, submit, token_ids
from tests.support.prefixes import OTHERS, PROMPTS, SHARED, cached

HOST = {"prefix_cache_host_bytes": 2**26}


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **OPTIONS) as llm:
        return token_ids(generate(llm, PROMPTS))


@pytest.fixture
def kept(folder, tmp_path):
    """A directory with the prefixes of an engine that has ended."""
    run_in(folder, tmp_path / "kept")
    return tmp_path / "kept"


def open_in(folder, directory, **options):
    return LLM(folder, **(OPTIONS | {"prefix_cache_dir": str(directory)} | options))


@contextlib.contextmanager
def evicted(**options):
    """An engine whose prompts are in host memory alone."""
    with open_llm(num_kv_blocks=40, **HOST, **options) as llm:
        generate(llm, PROMPTS)
        generate(llm, OTHERS)
        yield llm


def run_in(folder, directory, prompts=PROMPTS, **options):
    """Tokens and numbers of cached tokens of a new engine, and its statistics of tiers."""
    with open_in(folder, directory, **options) as llm:
        outputs = generate(llm, prompts, priority=[*range(len(prompts))])
        check_engine(llm)
        llm._engine.tiers.books.check()
        return token_ids(outputs), cached(outputs), llm.stats().tiers


# -------------------------------------------------------------------------------------------------------- host memory


@pytest.mark.costly
@pytest.mark.parametrize("family", [None, "Gemma3Text", "Gemma4Text", "DeepseekV2", "Llama4Text"])
def test_evicted_prefixes_come_back_from_host_memory_with_the_same_tokens(family):
    of_family = None if family is None else model(family)
    options = {"max_model_len": 160, "num_kv_blocks": 25}
    with open_llm(of_family, **options) as llm:
        expected = token_ids(generate(llm, PROMPTS))
    with open_llm(of_family, **options, **HOST) as llm:
        assert token_ids(generate(llm, PROMPTS)) == expected
        generate(llm, OTHERS)
        again = generate(llm, PROMPTS)
        stats = llm.stats().tiers
        check_engine(llm)
        llm._engine.tiers.books.check()
    assert token_ids(again) == expected
    assert min(cached(again)) >= 64 and stats.num_loaded_blocks > 0 and stats.host_bytes > 0


@pytest.mark.full
def test_a_tier_in_which_nothing_is_found_stores_little_until_something_is(monkeypatch):
    monkeypatch.setattr(books, "MIN_MEMORY", 1)

    def stored(llm, prompts):
        before = llm.stats().tiers.num_stored_blocks
        for prompt in prompts:  # one at a time, so that each has steps of its own
            generate(llm, [prompt])
        return llm.stats().tiers.num_stored_blocks - before

    with open_llm(num_kv_blocks=12, max_model_len=160, **HOST) as llm:
        block_bytes = llm._engine.tiers.books.block_bytes[0]
    with open_llm(num_kv_blocks=12, max_model_len=160, prefix_cache_host_bytes=24 * block_bytes) as llm:
        monkeypatch.setattr(llm._engine.tiers, "save_idle", lambda: False)  # idle time costs nothing
        tier = llm._engine.tiers.books
        first = stored(llm, OTHERS[:6])
        stored(llm, [[number, *OTHERS[0]] for number in range(3, 43)])
        share = tier.found_share
        assert share < 0.02, "all of it left without a hit"
        assert stored(llm, [[number, *OTHERS[1]] for number in range(3, 9)]) < first / 3
        assert llm.stats().tiers.num_loaded_blocks == 0
        for number in range(3, 63):  # the same prompt again, with others between: stored by and by, then always
            stored(llm, [[number, *OTHERS[3]], [number, *OTHERS[4]]])
            generate(llm, [OTHERS[2]])
        assert llm.stats().tiers.num_loaded_blocks > 0


def test_a_step_that_stores_new_content_goes_on_until_the_prefix_is_whole(monkeypatch):
    """Its tail is queued first, and without its head no hit."""
    with open_llm(num_kv_blocks=12, max_model_len=160, **HOST) as llm:
        tiers = llm._engine.tiers
        manager, block_bytes = tiers.manager, tiers.books.block_bytes[0]
        monkeypatch.setattr(tiers, "save_idle", lambda: False)
        monkeypatch.setattr(tiered_blocks, "STEP_BYTES", 2 * block_bytes)
        tiers.books.found_share = 0.0
        for number in range(3, 43):
            generate(llm, [[number, *OTHERS[0]]])
        chains = [
            [bool(node.slots) for node in first.below()] for root in tiers.books.roots.values()
            for first in root.children.values()
        ]  # fmt: skip
        whole = [chain for chain in chains if sum(chain) > 2]
        assert whole and manager.num_stored_blocks < 40
        assert any(all(chain[:4]) for chain in whole), "from the head on"
        before = manager.num_stored_blocks
        assert manager.stores_now(), "idle time has what steps left"
        assert manager.num_stored_blocks > before


def test_every_loaded_block_has_the_bytes_that_were_stored():
    with open_llm(num_kv_blocks=40, **HOST) as llm:
        tiers = llm._engine.tiers
        generate(llm, PROMPTS)
        manager, memory = tiers.manager, tiers.memory

        def contents():
            entries = manager.entries.values()
            return {
                e.block_hash: memory.read_block(0, next(iter(manager.holders[e.prefix_id]))).tobytes() for e in entries
            }

        before = contents()
        generate(llm, OTHERS)
        generate(llm, PROMPTS)
        after = contents()
        common = before.keys() & after.keys()
        assert len(common) >= 4 and all(before[name] == after[name] for name in common)
        for root in tiers.books.roots.values():
            for node in root.below():
                if node.slots and node.hash in after:
                    assert bytes(memory.view(0, node.slots[0])) == after[node.hash]


def test_loads_that_are_slower_than_computing_do_not_happen():
    with evicted() as llm:
        costs = llm._engine.tiers.costs
        costs.rates["host"], costs.compute = 1e3, lambda start, count: 1e-3
        assert cached(generate(llm, PROMPTS[0])) == [0]
        assert costs.num_loads == 0 and costs.num_recomputes > 0
        stats = llm.stats().tiers
        assert stats.load_seconds > stats.compute_seconds == 1e-3
        costs.compute = lambda start, count: 1e6
        assert cached(generate(llm, PROMPTS[1])) == [64]


def test_the_time_to_compute_a_prefix_is_that_of_its_steps(monkeypatch):
    """A GPU pads rows up to those of the largest step, and knows none beyond."""
    with open_llm(max_num_batched_tokens=64, **HOST) as llm:
        tiers = llm._engine.tiers
        fit = LearnedCosts(replace(llm.config, device="cuda"))
        tiers._fit, tiers._num_chunk_steps = fit, prefix_tiers.MIN_CHUNK_STEPS
        assert tiers.costs.compute(32, 4096) is None  # nothing is learned yet, and nothing fails
        asked = []
        monkeypatch.setattr(fit, "forecast", lambda _, start: lambda count: asked.append((start, count)) or count)
        assert tiers.costs.compute(32, 150) == 150
        assert asked == [(32, 64), (96, 64), (160, 22)]


def test_the_trace_has_each_decision_with_both_estimates(tmp_path):
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace, evicted(trace=trace) as llm:
        llm._engine.tiers.costs.rates["host"] = 1e9
        generate(llm, PROMPTS[0])
    (event,) = [event for event in json.loads(path.read_text()) if event.get("name") == "prefix"]
    assert event["args"]["medium"] == "host" and event["args"]["num_tokens"] == 64 and event["args"]["loads"]
    assert event["args"]["load_seconds"] > 0.0 and "compute_seconds" in event["args"]


# -------------------------------------------------------------------------------------------------------------- files


@pytest.mark.full
def test_a_new_process_begins_with_the_prefixes_of_a_former_one(folder, expected, tmp_path):
    program = (
        "import sys\nfrom nanovllm import LLM, SamplingParams\n"
        f"llm = LLM({folder!r}, prefix_cache_dir=sys.argv[1], **{OPTIONS!r})\n"
        f"outputs = llm.generate({PROMPTS!r}, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)\n"
        "print([o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs])\n"
    )  # nobody closes it: the prefixes are saved as the process ends

    def run():
        command = [sys.executable, "-c", program, str(tmp_path / "kept")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert run() == f"{expected} [0, 64]"
    assert run() == f"{expected} [64, 64]"


def test_steps_wait_for_files_in_turns_between_which_a_request_can_be_aborted(folder, kept, monkeypatch):
    waits = []

    class NeverSet(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return False

    begin = FileReads.start

    def start(reads, items):
        job = begin(reads, items)
        job.is_done = NeverSet()
        return job

    monkeypatch.setattr(FileReads, "start", start)
    monkeypatch.setattr(FileReads, "_run", lambda self: None)
    monkeypatch.setattr(reading, "MAX_WAIT_SECONDS", 1e6)
    with open_in(folder, kept) as llm:
        engine = llm._engine
        for name, prompt in zip("ab", PROMPTS, strict=True):
            submit(engine, name, prompt, SamplingParams(max_tokens=2))
        for _ in range(3):
            engine.step()
        assert len(waits) == 3 and all(0 < wait <= reading.TURN_SECONDS for wait in waits)
        assert llm.stats().num_waiting == 2
        assert engine.abort("a").finished and engine.abort("b").finished
        assert token_ids(generate(llm, [[5, 6, 7]]))


def test_a_forked_child_writes_nothing(folder, tmp_path):
    with open_in(folder, tmp_path) as llm:
        generate(llm, PROMPTS)
        child = os.fork()
        if child == 0:
            try:
                prefix_tiers._close_all()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert run_in(folder, tmp_path)[1] == [64, 64]


def test_files_are_their_owners_alone(kept):
    assert oct(kept.stat().st_mode)[-3:] == "700"
    assert {oct(path.stat().st_mode)[-3:] for path in kept.iterdir()} == {"600"}


def test_a_salted_prefix_is_found_with_its_salt_alone(folder, tmp_path):
    for salt in ("a", "b", "a", ""):
        with open_in(folder, tmp_path) as llm:
            found = cached(generate(llm, PROMPTS[0], cache_salt=salt))
            assert found == [64 if salt == "a" and llm.stats().tiers.num_read_blocks else 0]
            if salt == "":
                assert found == [0]
    assert b"salt" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def flipped_bits(data):
    """Bits of a file, each of the first bytes and some of all others: K and V take most of it."""
    num_bits = 8 * len(data)
    return [*range(min(num_bits, 4096)), *range(4096, num_bits, 7919)]


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["kv", "index"])
def test_a_flipped_bit_is_a_miss_and_never_wrong(suffix, folder, kept):
    """Read as an engine reads: header, records and blocks."""
    path = next(kept.glob(f"*.{suffix}"))
    right, segment = path.read_bytes(), next(kept.glob("*.kv"))
    header, begin = segments.read_header(segment.read_bytes())
    index = next(kept.glob("*.index")).read_bytes()
    records = [record for record, _ in segments.read_records(index, begin, 1)]
    sizes = [records[0].place.length]
    content = {record.block_hash: right_content(segment, record.place) for record in records}
    tokens = {record.block_hash: record.tokens for record in records}

    def found():
        books = TierBooks(sizes, 2**26)
        directory = CacheDirectory(kept, header, 2**30, books)
        directory.close()
        nodes = [node for root in books.roots.values() for node in root.below() if node.places]
        assert all(tokens[node.hash] == node.key for node in nodes)
        read = {node.hash: (right_content(segment, node.places[0]), node.places[0].checksum) for node in nodes}
        return {name: data for name, (data, expected) in read.items() if segments.checksum(data) == expected}

    assert found() == content
    num_misses = 0
    for bit in flipped_bits(right):
        damaged = bytearray(right)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        after = found()
        assert all(content[name] == data for name, data in after.items())
        num_misses += len(after) < len(content)
    path.write_bytes(right)
    assert num_misses == len(flipped_bits(right))


def right_content(segment, place):
    with segment.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


def test_engines_answer_the_same_from_files_with_damaged_blocks(folder, expected, kept):
    segment, index = next(kept.glob("*.kv")), next(kept.glob("*.index")).read_bytes()
    right = segment.read_bytes()
    _, begin = segments.read_header(index)
    shared = array("i", SHARED)
    places = {r.tokens: r.place for r, _ in segments.read_records(index, begin, 1)}
    for number in range(4):
        damaged = bytearray(right)
        damaged[places[shared[16 * number :][:16].tobytes()].offset + 99] ^= 4
        segment.write_bytes(damaged)
        tokens, _, stats = run_in(folder, kept)
        assert tokens == expected and stats.num_failed_reads == 1
        segment.write_bytes(right)


@pytest.mark.costly
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("suffix", ["kv", "index"])
def test_a_kill_at_any_byte_loses_the_rest_of_the_segment_at_most(suffix, share, folder, expected, kept):
    for path in kept.glob(f"*.{suffix}"):
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])
    tokens, found, _ = run_in(folder, kept)
    assert tokens == expected and found[0] <= 64
    assert run_in(folder, kept)[:2] == (expected, [64, 64])  # a new segment has what was lost


def test_a_directory_of_a_processor_that_rounds_differently_is_a_miss(folder, kept, monkeypatch):
    monkeypatch.setattr(processor_classes, "rounding_class", lambda: "another")
    assert run_in(folder, kept)[1][0] == 0
    monkeypatch.undo()
    assert run_in(folder, kept)[1][0] > 0


def test_other_weights_of_the_same_config_are_another_model(folder, kept, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert run_in(str(copy), kept)[1] == [64, 64]
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in sorted(weights) if "k_proj" in name)
    weights[name] *= 1.01
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert [run_in(str(copy), kept)[1] for _ in range(2)] == [[0, 64], [64, 64]]  # then it finds its own there
    assert run_in(folder, kept)[1] == [64, 64]


def test_a_read_only_directory_is_read_with_a_warning(folder, expected, kept, monkeypatch, caplog):
    open_file, before = os.open, sorted(path.name for path in kept.iterdir())

    def read_only(path, flags, *mode):
        if flags & (os.O_RDWR | os.O_WRONLY) and str(path).startswith(str(kept)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return open_file(path, flags, *mode)

    monkeypatch.setattr("nanovllm.features.tiers.directory.os.open", read_only)
    assert run_in(folder, kept)[:2] == (expected, [64, 64])
    assert "Read-only file system" in caplog.text
    assert sorted(path.name for path in kept.iterdir()) == before


@programs_are_forked()
def test_replicas_share_a_directory(folder, expected, kept):
    with open_in(folder, kept, data_parallel_size=2, routing="round-robin") as llm:
        outputs = generate(llm, PROMPTS)
        assert token_ids(outputs) == expected and cached(outputs) == [64, 64]
        assert llm.stats().tiers.num_read_blocks == 8  # four by each


def test_the_command_lists_verifies_and_clears(kept, capsys):
    assert main(["cache", "list", str(kept)]) == 0
    out = capsys.readouterr().out
    assert "SEGMENT" in out and len(out.splitlines()) == 2
    assert main(["cache", "verify", str(kept)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "0"
    segment = next(kept.glob("*.kv"))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    assert main(["cache", "verify", str(kept)]) == 1
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "1"
    assert main(["cache", "clear", str(kept)]) == 0
    assert [path.name for path in kept.iterdir()] == ["lock"]
    assert main(["cache", "list", str(kept / "nowhere")]) == 2


def test_a_folder_is_not_cleared_under_an_engine_that_writes(folder, tmp_path, capsys):
    with open_in(folder, tmp_path):
        assert main(["cache", "clear", str(tmp_path)]) == 2
    assert "End it first" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("options, message", [
    ({"prefix_cache_host_bytes": 2**60}, r"_bytes is 1,152,921,504,606,846,976 bytes, but the machine"),
    ({"prefix_cache_dir": __file__ + "/in"}, r"test_tiers.py/in', which cannot be made: '.*test_tiers.py' is not"),
    ({"prefix_cache_dir": __file__}, r"which is a file"),
    ({"prefix_cache_host_bytes": 2**20, "enable_prefix_caching": False}, r"enable_prefix_caching=False caches no"),
], ids=["more than memory", "not to be made", "a file", "no cache"])  # fmt: skip
def test_bad_input_is_refused_before_the_model_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("/no/such/model", **options)


def test_a_module_of_another_owner_has_no_files(tmp_path):
    with pytest.raises(ValueError, match="a module, whose weights its owner may change"):
        open_llm(prefix_cache_dir=str(tmp_path))


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_folder_that_others_may_enter_is_named(tmp_path, caplog, mode):
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(mode)
    CacheDirectory(folder, {}, 2**30, TierBooks([16], 2**20)).close()
    assert (f"prefix_cache_dir {folder} has mode 0755," in caplog.text) == (mode == 0o755)
    assert folder.stat().st_mode & 0o777 == mode
