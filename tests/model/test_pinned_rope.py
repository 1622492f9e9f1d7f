"""Rotary embeddings that follow the batch in `transformers` are pinned: a request's tokens depend on it alone."""

import copy
import functools
import logging
import threading

import pytest
import torch

from nanovllm import LLM, SamplingParams, UnsupportedModelError
from tests.support.other_models import small
from tests.support.snapshots import Snapshot, assert_untouched
from tests.support.tiny_models import random_prompts, widen

ORIGINAL = 64
OPTIONS = {
    "enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_num_batched_tokens": 48, "max_num_seqs": 4,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
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


def answers(model, prompts, max_model_len):
    with LLM(model, **OPTIONS, max_model_len=max_model_len) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def own_answers(model, prompts):
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        full = copy.deepcopy(model).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
        )
        found.append(full[0, len(prompt) :].tolist())
    return found


def always_long(model):
    """A copy whose frequencies are those of its long factors at every length."""
    model = copy.deepcopy(model)
    model.model.rotary_emb(torch.zeros(1), torch.tensor([[2 * ORIGINAL]]))  # the library's own choice for a long one
    model.model.rotary_emb.rope_type = "default"
    return model


def test_sequences_within_the_original_length_get_the_short_factors_as_in_transformers():
    model = model_with(LONG_ROPE)
    assert answers(model, SHORT, ORIGINAL) == own_answers(model, SHORT)


def test_sequences_beyond_the_original_length_get_the_long_factors_as_in_transformers():
    model = model_with(LONG_ROPE)
    assert answers(model, LONG, 128) == own_answers(model, LONG)


def test_short_and_long_sequences_of_one_engine_share_the_factors_and_do_not_depend_on_each_other():
    model = model_with(LONG_ROPE)
    expected = own_answers(always_long(model), SHORT + LONG)
    assert expected[:4] != own_answers(model, SHORT), "the factors make no difference"
    assert answers(model, SHORT + LONG, 128) == expected
    assert [answers(model, [prompt], 128)[0] for prompt in SHORT] == expected[:4]


def test_the_choice_is_logged_with_the_limit_that_made_it(caplog):
    caplog.set_level(logging.INFO, logger="nanovllm")
    for max_model_len, factors in ((ORIGINAL, "short"), (ORIGINAL + 1, "long")):
        caplog.clear()
        LLM(model_with(LONG_ROPE), **OPTIONS, max_model_len=max_model_len).close()
        (message,) = [text for text in caplog.messages if "rotary" in text]
        for part in ("Phi3ForCausalLM", f"the {factors} factors", f"original length {ORIGINAL}", str(max_model_len)):
            assert part in message


def test_a_live_module_has_its_own_frequencies_back_between_steps_and_after_close():
    model = model_with(LONG_ROPE)
    before, frequencies = Snapshot(model), model.model.rotary_emb.inv_freq.clone()
    with LLM(model, **OPTIONS, max_model_len=128) as llm:
        llm.generate(LONG, GREEDY, use_tqdm=False)
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
        assert_untouched(model, before)
    assert_untouched(model, before)


def test_engines_of_one_module_with_different_limits_keep_their_own_factors():
    model = model_with(LONG_ROPE)
    expected = [own_answers(model, SHORT), own_answers(always_long(model), SHORT)]
    with LLM(model, **OPTIONS, max_model_len=ORIGINAL) as short, LLM(model, **OPTIONS, max_model_len=128) as long:
        for _ in range(2):
            for llm, tokens in zip((short, long), expected, strict=True):
                outputs = llm.generate(SHORT, GREEDY, use_tqdm=False)
                assert [output.outputs[0].token_ids for output in outputs] == tokens


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
    for part in ("LlamaForCausalLM", "'dynamic'", "neighbours", "beyond 100 tokens", "max_model_len (128)"):
        assert part in str(caught.value)
    assert_untouched(model, before)


def test_an_engine_that_opens_during_another_ones_step_pins_the_same():
    model = model_with(LONG_ROPE)
    expected = answers(model, LONG, 4 * ORIGINAL)
    found = []
    with LLM(model, **OPTIONS, max_model_len=4 * ORIGINAL) as first:
        second = threading.Thread(target=lambda: found.append(answers(model, LONG, 4 * ORIGINAL)))
        with first._engine.model_runner.binding.installed():  # as in a step: the library's own choice is hidden
            second.start()
            second.join(0.3)
        second.join(60)
    assert found == [expected]


def test_a_step_of_another_engine_is_no_change_by_the_owner():
    model = model_with(LONG_ROPE)
    with LLM(model, **OPTIONS, max_model_len=4 * ORIGINAL) as first, LLM(model, **OPTIONS, max_model_len=256) as second:
        first.generate(SHORT, GREEDY, use_tqdm=False)
        found = []
        look = functools.partial(first._engine.model_runner.model_changed, was_idle=True)
        looking = threading.Thread(target=lambda: found.append(look()))
        with second._engine.model_runner.binding.installed():
            looking.start()
            looking.join(0.3)
        looking.join(60)
    assert found == [False]
