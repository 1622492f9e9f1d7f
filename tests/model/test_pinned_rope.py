"""Rotary embeddings that follow the batch in `transformers` are pinned: a request's tokens depend on it alone."""

import copy
import functools
import threading

import pytest
import torch

from nanovllm import LLM, UnsupportedModelError
from tests.support import class_cases
from tests.support.llms import generate, greedy, token_ids
from tests.support.other_models import small
from tests.support.refusals import assert_names
from tests.support.snapshots import Snapshot, assert_untouched
from tests.support.tiny_models import random_prompts, widen

ORIGINAL = 64
OPTIONS = {
    "enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_num_batched_tokens": 48, "max_num_seqs": 4,
}  # fmt: skip
GREEDY = greedy(8)
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [4.0 - 0.2 * i for i in range(16)],
    "original_max_position_embeddings": ORIGINAL,
}
SHORT, LONG = (random_prompts(4, low=low, high=high, seed=3) for low, high in ((10, 50), (80, 120)))


def model_with(rope, family="Phi3", **fields):
    if family == "Phi3":
        fields["original_max_position_embeddings"] = ORIGINAL
    model = small(family, rope_parameters=dict(rope), **fields)
    widen(model)
    return model


@pytest.fixture
def model():
    return model_with(LONG_ROPE)


def answers(model, prompts, max_model_len):
    with LLM(model, **OPTIONS, max_model_len=max_model_len) as llm:
        return token_ids(generate(llm, prompts, GREEDY))


def own_answers(model, prompts):
    """Each by a module that computed nothing before."""
    return [class_cases.own_answers(copy.deepcopy(model), [prompt], 8)[0] for prompt in prompts]


def always_long(model):
    """A copy whose frequencies are those of its long factors at every length."""
    model = copy.deepcopy(model)
    model.model.rotary_emb(torch.zeros(1), torch.tensor([[2 * ORIGINAL]]))  # the library's own choice for a long one
    model.model.rotary_emb.rope_type = "default"
    return model


@pytest.mark.parametrize("prompts, max_model_len", [(SHORT, ORIGINAL), (LONG, 128)], ids=["short", "long"])
def test_sequences_get_the_factors_of_their_length_as_in_transformers(prompts, max_model_len, model):
    assert answers(model, prompts, max_model_len) == own_answers(model, prompts)


def test_short_and_long_sequences_of_one_engine_share_the_factors_and_do_not_depend_on_each_other(model):
    expected = own_answers(always_long(model), SHORT + LONG)
    assert expected[:4] != own_answers(model, SHORT), "the factors make no difference"
    assert answers(model, SHORT + LONG, 128) == expected
    assert [answers(model, [prompt], 128)[0] for prompt in SHORT] == expected[:4]


def test_the_choice_is_logged_with_the_limit_that_made_it(info_log):
    for max_model_len, factors in ((ORIGINAL, "short"), (ORIGINAL + 1, "long")):
        info_log.clear()
        LLM(model_with(LONG_ROPE), **OPTIONS, max_model_len=max_model_len).close()
        (message,) = [text for text in info_log.messages if "rotary" in text]
        assert_names(
            message, "Phi3ForCausalLM", f"the {factors} factors", f"original length {ORIGINAL}", str(max_model_len)
        )


def test_a_live_module_has_its_own_frequencies_back_between_steps_and_after_close(model):
    before, frequencies = Snapshot(model), model.model.rotary_emb.inv_freq.clone()
    with LLM(model, **OPTIONS, max_model_len=128) as llm:
        generate(llm, LONG, GREEDY)
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
        assert_untouched(model, before)
    assert_untouched(model, before)


def test_engines_of_one_module_with_different_limits_keep_their_own_factors(model):
    expected = [own_answers(model, SHORT), own_answers(always_long(model), SHORT)]
    with LLM(model, **OPTIONS, max_model_len=ORIGINAL) as short, LLM(model, **OPTIONS, max_model_len=128) as long:
        for _ in range(2):
            for llm, tokens in zip((short, long), expected, strict=True):
                assert token_ids(generate(llm, SHORT, GREEDY)) == tokens


def test_scales_that_follow_the_longest_sequence_are_pinned_too():
    rope = LONG_ROPE | {"short_mscale": 0.8, "long_mscale": 1.6}
    model = model_with(rope, "Phimoe", num_local_experts=4, sliding_window=None)
    assert answers(model, SHORT, ORIGINAL) == own_answers(model, SHORT)
    assert answers(model, LONG, 128) == own_answers(model, LONG)
    assert answers(model, SHORT + LONG, 128)[4:] == own_answers(model, LONG)


def test_dynamic_frequencies_are_served_up_to_the_length_from_which_they_depend_on_the_batch():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = model_with(rope, "Llama", max_position_embeddings=128)
    assert answers(model, SHORT + LONG, 128) == own_answers(model, SHORT + LONG)


def test_dynamic_frequencies_beyond_that_length_are_refused_with_both_numbers():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = model_with(rope, "Llama", max_position_embeddings=256)
    model.model.rotary_emb.original_max_seq_len = 100
    before = Snapshot(model)
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(model, **OPTIONS, max_model_len=128)
    assert_names(
        str(caught.value), "LlamaForCausalLM", "'dynamic'", "neighbours", "beyond 100 tokens", "max_model_len (128)"
    )
    assert_untouched(model, before)


def test_an_engine_that_opens_during_another_ones_step_pins_the_same(model):
    expected = answers(model, LONG, 4 * ORIGINAL)
    found = []
    with LLM(model, **OPTIONS, max_model_len=4 * ORIGINAL) as first:
        second = threading.Thread(target=lambda: found.append(answers(model, LONG, 4 * ORIGINAL)))
        with first._engine.model_runner.binding.installed():  # as in a step: the library's own choice is hidden
            second.start()
            second.join(0.3)
        second.join(60)
    assert found == [expected]


def test_a_step_of_another_engine_is_no_change_by_the_owner(model):
    with LLM(model, **OPTIONS, max_model_len=4 * ORIGINAL) as first, LLM(model, **OPTIONS, max_model_len=256) as second:
        generate(first, SHORT, GREEDY)
        found = []
        look = functools.partial(first._engine.model_runner.model_changed, was_idle=True)
        looking = threading.Thread(target=lambda: found.append(look()))
        with second._engine.model_runner.binding.installed():
            looking.start()
            looking.join(0.3)
        looking.join(60)
    assert found == [False]
