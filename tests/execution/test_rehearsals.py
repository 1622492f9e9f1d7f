"""Rehearsals: every option is used once while idle, and nothing of it is left behind. They run on a CPU here."""

import math
from functools import partial

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.errors import DeviceError
from nanovllm.fast.gpu import rehearsal
from nanovllm.fast.gpu.rehearsal import rehearsal_batch, rehearse_at_start
from nanovllm.features.sampling_params import _STAGES
from tests.support.layer_kinds import model
from tests.support.llms import check_engine, generate, token_ids
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import tiny_model, tiny_tokenizer

OPTIONS = {"block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
PROMPTS = [list(range(5, 45)), list(range(5, 30)), [7, 8, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def rehearsing_on_a_cpu(monkeypatch):
    monkeypatch.setattr(rehearsal, "DEVICES", {"cpu"})


def open_llm(model, **options):
    return LLM(model, tokenizer=tiny_tokenizer(), **(OPTIONS | options))


def rehearse(llm):
    """Use idle time until nothing is left to do; returns the number of rehearsals so far."""
    engine = llm._engine
    while engine.use_idle_time(captures=True):
        pass
    count = engine.model_runner.paths.num_rehearsed
    return count


def tokens(llm, **options):
    params = SamplingParams(max_tokens=8, ignore_eos=True, **options)
    return token_ids(generate(llm, PROMPTS, params))


def test_at_start_options_of_the_draw_are_rehearsed_and_their_heads_captured(folder, monkeypatch, info_log):
    with open_llm(folder) as llm:
        runner = llm._engine.model_runner  # type: ignore[union-attr]
        before = tokens(llm, temperature=0.0)
        given, execute, heads = [], runner.execute, [1, 2]

        def noting(batch):
            given.append(batch)
            return execute(batch)

        monkeypatch.setattr(runner, "execute", noting)
        rehearse_at_start(runner, lambda: bool(heads) and bool(heads.pop()))
        params = [batch.sampling[0].params for batch in given]
        assert "rehearsal" not in info_log.text and not heads
        assert [[entry.num_new_tokens for entry in batch.entries] for batch in given] == [[3], [1]] * (len(given) // 2)
        assert {each.logprobs for each in params if not each.penalises} >= {0, 5, 20}
        assert any(each.penalises and each.logprobs is None for each in params)
        assert all(each.penalises or each.logprobs is not None for each in params)
        monkeypatch.undo()
        assert tokens(llm, temperature=0.0) == before


WAYS = {
    "default": {},
    "sdpa": {"attention_backend": "sdpa", "enforce_eager": True},
    "one step at a time": {"overlap": False},
    "speculation": {"speculation": "suffix"},
    "one sequence": {"max_num_seqs": 1},
    "small steps": {"max_num_batched_tokens": 20, "max_num_seqs": 4},
}


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_after_every_rehearsal(folder, way, info_log):
    with open_llm(folder, **WAYS[way]) as llm:
        before = tokens(llm, temperature=0.0), tokens(llm, seed=5, top_p=0.9, repetition_penalty=1.1)
        stats = llm.stats()
        count = rehearse(llm)
        assert "rehearsal" not in info_log.text
        assert count >= 3 * len(rehearsal._OPTIONS) and rehearse(llm) == count
        after = llm.stats()
        assert (after.num_used_blocks, after.kv_findable_bytes) == (0, stats.kv_findable_bytes)
        assert (after.num_output_tokens, after.num_steps) == (stats.num_output_tokens, stats.num_steps)
        # With the blocks of before, and computed anew.
        assert (tokens(llm, temperature=0.0), tokens(llm, seed=5, top_p=0.9, repetition_penalty=1.1)) == before
        llm.reset_prefix_cache()
        assert (tokens(llm, temperature=0.0), tokens(llm, seed=5, top_p=0.9, repetition_penalty=1.1)) == before
        check_engine(llm)


@pytest.mark.costly
@pytest.mark.parametrize("build", [partial(model, "Gemma3Text"), partial(tiny_class_model, "Qwen3NextForCausalLM")],
                         ids=["windows", "recurrent states"])  # fmt: skip
def test_models_with_other_layers_rehearse_too(build, tmp_path):
    build().save_pretrained(tmp_path)
    with open_llm(tmp_path, max_model_len=128, block_size=64) as llm:
        before = tokens(llm, temperature=0.0)
        assert rehearse(llm) > 0
        assert tokens(llm, temperature=0.0) == before


def test_every_option_with_a_stage_of_sampling_is_rehearsed():
    """But structured output: its grammar belongs to a request."""
    stages = _STAGES.__reduce__()[1]
    used = {name for options in rehearsal._OPTIONS for name in options}
    assert set(stages) - used == {"structured_output"}
    assert {"top_k", "top_p", "min_p", "temperature"} <= used


def test_an_error_of_a_rehearsal_leaves_the_others_and_captures(folder, monkeypatch, info_log):
    with open_llm(folder) as llm:
        runner, execute = llm._engine.model_runner, llm._engine.model_runner.execute

        def fail_for_penalties(batch):
            if batch.sampling[0].params.penalises:
                raise RuntimeError("no such kernel")
            return execute(batch)

        monkeypatch.setattr(runner, "execute", fail_for_penalties)
        assert rehearse(llm) >= 3 * len(rehearsal._OPTIONS)
        assert info_log.text.count("a rehearsal failed") == 3 * sum("penalty" in str(o) for o in rehearsal._OPTIONS)
        monkeypatch.setattr(runner, "execute", lambda _: (_ for _ in ()).throw(DeviceError("gone")))
        runner.paths.num_rehearsed = 0
        with pytest.raises(DeviceError):
            runner.capture_ahead()


def test_rehearsed_rows_are_in_the_null_block_alone(folder):
    with open_llm(folder) as llm:
        caches = [part for cache in llm._engine.model_runner.binding.caches.of_layers for part in cache]
        for part in caches:
            part[16:].fill_(math.nan)
        rehearse(llm)
        assert all(bool(torch.isnan(part[16:]).all()) and bool(part[:16].isfinite().all()) for part in caches)


def test_a_live_module_a_cpu_and_ranks_rehearse_nothing(folder, monkeypatch):
    with LLM(tiny_model(), tokenizer=tiny_tokenizer(), **OPTIONS) as llm:
        assert not llm._engine.model_runner.capture_ahead()
    with open_llm(folder) as llm:
        runner = llm._engine.model_runner
        assert rehearsal_batch(runner.binding, runner.config, 0) is not None
        runner.binding.ranks = object()  # type: ignore[assignment]
        assert rehearsal_batch(runner.binding, runner.config, 0) is None
        runner.binding.ranks = None
        monkeypatch.undo()
        assert rehearsal_batch(runner.binding, runner.config, 0) is None
