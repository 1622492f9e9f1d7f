"""Beam search: the beams of `transformers` in float32, on every layout of the cache, beside other requests."""

from dataclasses import replace

import pytest
import torch

from nanovllm import BeamSearchParams
from nanovllm.block_manager import digest, root_hash
from nanovllm.features.beams.books import BeamBooks
from nanovllm.outputs import Logprob
from tests.support.layer_kinds import model
from tests.support.llms import GREEDY, assert_idle_and_whole, fail_in_step, generate, greedy, open_llm, token_ids
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import tiny_model

PROMPTS = [list(range(40, 75)), list(range(100, 120)), [3, 4, 5]]


def of_transformers(module, prompt, params, eos):
    with torch.no_grad():
        return module.generate(
            torch.tensor([prompt]), num_beams=params.beam_width, num_return_sequences=params.beam_width,
            do_sample=False, max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
            eos_token_id=eos or None, pad_token_id=1, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip


def assert_equal(module, params, eos=(), **options):
    with open_llm(module, **options) as llm:
        processor = llm._engine.input_processor
        processor.limits = replace(processor.limits, eos_token_ids=eos)
        before = llm._engine.config, llm._engine.scheduler.proposer
        outputs = llm.beam_search(PROMPTS, params)
        assert (llm._engine.config, llm._engine.scheduler.proposer) == before
        assert_idle_and_whole(llm)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = of_transformers(module, prompt, params, [*eos])
        for number, result in enumerate(output.sequences):
            tokens = expected.sequences[number].tolist()
            assert result.tokens == tokens[: len(result.tokens)] and {*tokens[len(result.tokens) :]} <= {1}
            assert result.score == pytest.approx(float(expected.sequences_scores[number]), rel=1e-4)
            assert (result.finish_reason == "stop") == (result.tokens[-1] in eos)


@pytest.fixture
def llm():
    with open_llm() as llm:
        yield llm


@pytest.mark.costly
@pytest.mark.parametrize("width, length, penalty", [(2, 9, 1.0), (4, 24, 1.0), (3, 20, 0.5), (5, 30, 2.0)])
def test_beams_are_those_of_transformers(width, length, penalty):
    assert_equal(tiny_model(), BeamSearchParams(beam_width=width, max_tokens=length, length_penalty=penalty))


@pytest.mark.costly
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("eos", [(7,), (5, 9, 200), tuple(range(0, 512, 9))[:12]], ids=["one", "three", "twelve"])
def test_ends_of_sequences_are_those_of_transformers(eos, penalty):
    params = BeamSearchParams(beam_width=3, max_tokens=40, length_penalty=penalty, include_stop_str_in_output=True)
    assert_equal(tiny_model(), params, eos)


@pytest.mark.costly
@pytest.mark.parametrize("family", ["Gemma3Text", "Gemma4Text", "DeepseekV2"])
def test_beams_are_those_of_transformers_in_cache_groups(family):
    assert_equal(model(family), BeamSearchParams(beam_width=4, max_tokens=24), max_model_len=160)


@pytest.mark.costly
@pytest.mark.parametrize("options", [
    {"attention_backend": "cpp", "enforce_eager": False}, {"overlap": True}, {"num_kv_blocks": 17, "max_model_len": 64},
    {"max_num_seqs": 4}, {"prefix_cache_host_bytes": 2**22},
], ids=["cpp", "overlap", "few blocks", "few slots", "tiers"])  # fmt: skip
def test_beams_are_the_same_with_every_option(options):
    assert_equal(tiny_model(), BeamSearchParams(beam_width=4, max_tokens=12), **options)


def test_a_beam_of_one_is_greedy():
    with open_llm() as llm:
        outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=12))
        expected = token_ids(generate(llm, PROMPTS))
    assert [o.sequences[0].tokens[len(p) :] for o, p in zip(outputs, PROMPTS, strict=True)] == expected


def test_other_requests_go_on_with_their_tokens():
    with open_llm(max_num_seqs=5) as llm:
        expected = token_ids(generate(llm, PROMPTS, greedy(40)))
        streams = [llm.stream(prompt, greedy(40)) for prompt in PROMPTS]
        for stream in streams:
            next(stream)
        params = BeamSearchParams(beam_width=4, max_tokens=16)
        beside = llm.beam_search(PROMPTS, params)
        assert [[*stream][-1].outputs[0].token_ids for stream in streams] == expected
        alone = llm.beam_search(PROMPTS, params)
        assert [[s.tokens for s in o.sequences] for o in beside] == [[s.tokens for s in o.sequences] for o in alone]
        assert_idle_and_whole(llm)


def test_each_step_computes_one_token_a_beam():
    records = []
    with open_llm(on_step=records.append, overlap=True) as llm:
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=4, max_tokens=24))
        assert llm._engine.config.overlap  # again, for other requests
    first, *rest = records
    assert first.num_prefill_tokens == len(PROMPTS[0])
    assert [(record.num_decode_tokens, record.num_prefill_tokens) for record in rest] == [(4, 0)] * 23


def test_blocks_of_beams_are_found_by_the_hashes_of_their_tokens(llm):
    llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=40))
    manager = llm._engine.block_manager
    hashes = {entry.prefix_id: entry.block_hash for entry in manager.entries.values()}
    for entry in manager.entries.values():
        before = hashes.get(entry.parent) or root_hash(manager.hash_seed, entry.parent)
        assert entry.block_hash == digest(before + entry.tokens)


def test_text_and_logprobs_are_of_the_tokens(llm):
    (output,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=6))
    for result in output.sequences:
        new = result.tokens[len(PROMPTS[0]) :]
        assert result.text == llm.tokenizer.decode(result.tokens, skip_special_tokens=True)
        chosen = [of_token[token].logprob for of_token, token in zip(result.logprobs, new, strict=True)]
        assert result.cum_logprob == pytest.approx(sum(chosen), abs=1e-4)


def test_a_failed_step_ends_the_search_and_nothing_else(monkeypatch, llm):
    fail_in_step(monkeypatch, llm, 6, ValueError("this step fails"))
    with pytest.raises(Exception, match="this step fails"):
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=12))
    assert_idle_and_whole(llm)
    assert token_ids(generate(llm, PROMPTS[:1], GREEDY))


@pytest.mark.parametrize("options, message", [
    ({"beam_width": 0, "max_tokens": 4}, "beam_width is 0; it must be between 1 and 64"),
    ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    ({"beam_width": 2, "max_tokens": 4, "temperature": 1.0}, "temperature is 1.0; it must be between 0 and 0"),
    ({"beam_width": 8, "max_tokens": 400}, "8 beams of 435 tokens take 224 blocks and 8 slots, but there are 128"),
    ({"beam_width": 2, "max_tokens": 500}, "max_tokens=500 has 535 tokens, but max_model_len is 512"),
], ids=["no beam", "no token", "noise", "too many blocks", "too long"])  # fmt: skip
def test_bad_options_are_refused_with_the_numbers(options, message, llm):
    with pytest.raises(ValueError, match=message):
        llm.beam_search(PROMPTS, BeamSearchParams(**options))
    assert_idle_and_whole(llm)


def test_models_with_recurrent_states_are_refused():
    with open_llm(tiny_class_model("Mamba2ForCausalLM")) as llm, pytest.raises(ValueError, match="recurrent states"):
        llm.beam_search([[3, 4, 5]], BeamSearchParams(beam_width=2, max_tokens=4))


def test_the_books_stop_where_no_beam_can_win():
    books = BeamBooks(BeamSearchParams(beam_width=1, max_tokens=9), [1], (7,))
    assert not books.is_done
    assert books.advance([{7: Logprob(-0.1, 1), 5: Logprob(-3.0, 2)}])[0].token_id == 5
    assert books.is_done and books.results[0].finish_reason == "stop" and books.results[0].tokens == [1]


def test_an_end_is_a_result_only_among_the_most_probable_continuations():
    books = BeamBooks(BeamSearchParams(beam_width=1, max_tokens=9), [1], (7,))
    assert [each.token_id for each in books.advance([{5: Logprob(-0.1, 1), 7: Logprob(-0.2, 2)}])] == [5]
    assert books.results == [] and not books.is_done
