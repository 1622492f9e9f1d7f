"""Tiny random models of every family, greedy in float32: token for token what `transformers` generates.

The same file runs on a GPU machine, where the engine takes the GPU by default.
"""

import functools
import random

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from nanovllm import LLM
from nanovllm.attention import ATTENTION_NAME
from tests.support.equality import DEVICE, NUM_NEW_TOKENS, model, prompts, reference
from tests.support.llms import check_engine, greedy, submit
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

GREEDY = greedy(NUM_NEW_TOKENS)


@functools.cache
def expected(family):
    return [reference(model(family), prompt) for prompt in prompts()]


def generate(llm, batch):
    outputs = llm.generate(batch, GREEDY, use_tqdm=False)
    check_engine(llm)
    return [output.outputs[0].token_ids for output in outputs]


EAGER = {"attention_backend": "sdpa", "enforce_eager": True}
TIGHT = {"num_kv_blocks": 16, "block_size": 16, "max_model_len": 230, "max_num_batched_tokens": 48, "max_num_seqs": 8}
SETTINGS = {
    "defaults, eager": {},
    "smallest budget": {"max_num_batched_tokens": 20, "max_num_seqs": 4, "block_size": 16},
    "budget of 4096": {"max_num_batched_tokens": 4096},
    "blocks of 16": {"block_size": 16},
    "blocks of 32": {"block_size": 32},
    "no prefix cache": {"enable_prefix_caching": False},
    "forced preemption": {"num_kv_blocks": 17, "block_size": 16, "max_model_len": 230, "max_num_batched_tokens": 80},
}


# What a setting changes is the same for every family: the others run with those that cut prompts most. Their prompts
# of one call, uncut, are those of the next test.
ALWAYS = ("smallest budget", "forced preemption")
CELLS = [
    pytest.param(family, name, marks=[] if family == "llama" or name in ALWAYS else pytest.mark.slow)
    for family in FAMILIES
    for name in SETTINGS
]


@pytest.mark.costly
@pytest.mark.parametrize("family, name", CELLS)
def test_greedy_tokens_equal_those_of_transformers(family, name):
    setting = SETTINGS[name]
    with LLM(model=model(family), **(EAGER | setting)) as llm:
        assert generate(llm, prompts()) == expected(family)
        if "num_kv_blocks" in setting:
            assert llm.stats().num_preemptions > 0
        assert generate(llm, prompts()) == expected(family), "with a warm cache"
        assert (llm.stats().prefix_cache_hits > 0) == setting.get("enable_prefix_caching", True)


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_neither_order_nor_neighbours_change_a_token(family):
    with LLM(model=model(family), **EAGER) as llm:
        order = list(range(len(prompts())))
        random.Random(1).shuffle(order)
        shuffled = generate(llm, [prompts()[number] for number in order])
        assert shuffled == [expected(family)[number] for number in order]
    with LLM(model=model(family), **EAGER) as llm:
        assert [generate(llm, [prompt])[0] for prompt in prompts()] == expected(family)


# FlexAttention takes 15 s of a compiler for each geometry and size of the cache: two families, the smallest and the
# largest group, are part of every run, and what else computes with it here has the sizes of the first.
FLEX_FAMILIES = [
    family if family in ("llama", "mistral") else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES
]


@pytest.mark.full
@pytest.mark.parametrize("family", FLEX_FAMILIES)
def test_compiled_layers_with_flex_attention_compute_the_same(family):
    with LLM(model=model(family), attention_backend="flex", **TIGHT) as llm:
        assert generate(llm, prompts()) == expected(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_outputs_prove_something(family):
    """They vary, and an early prompt token decides what comes out at the end."""
    assert all(len(set(tokens)) >= NUM_NEW_TOKENS // 3 for tokens in expected(family)[1:])  # not for a lone token
    assert len({token for tokens in expected(family) for token in tokens}) > VOCAB_SIZE // 5
    for number in (5, 9, 13):
        changed = list(prompts()[number])
        changed[1] = (changed[1] + 1) % VOCAB_SIZE
        assert reference(model(family), changed) != expected(family)[number]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_bfloat16_follows_transformers_bfloat16_closely(backend):
    """Logits within bfloat16's rounding (8 bits, a few layers deep); tokens may part where two are nearly equal."""
    module = tiny_model("qwen3", dtype=torch.bfloat16).to(DEVICE)
    with LLM(model=module, attention_backend=backend, num_kv_blocks=60, max_model_len=300) as llm:
        runner = llm._engine.model_runner
        captured = []
        sample = runner.sampler.sample
        runner.sampler.sample = lambda logits, *rest: captured.append(logits.float()) or sample(logits, *rest)
        for prompt in prompts():
            llm.generate([prompt], greedy(1), use_tqdm=False)
            with torch.no_grad():
                theirs = module(torch.tensor([prompt], device=DEVICE)).logits[0, -1].float()
            scale = theirs.abs().max()
            assert (captured[-1][0] - theirs).abs().max() < 0.05 * scale


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_the_number_of_compiled_graphs_is_bounded_over_a_varied_run(backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    choice = random.Random(2)
    with LLM(model=model("llama"), attention_backend=backend, **TIGHT) as llm:
        for count in (1, 2, 3, 7, 16, 25):
            batch = [[choice.randrange(VOCAB_SIZE) for _ in range(choice.randint(1, 150))] for _ in range(count)]
            generate(llm, batch)
    counters = torch._dynamo.utils.counters
    # One graph for all layers at any token count; flex adds one for decodes and one for chunks.
    assert counters["stats"]["unique_graphs"] == (1 if backend == "sdpa" else 3)
    assert not counters["graph_break"]


def test_no_mask_is_built_and_no_position_is_read_on_the_host():
    """`transformers` inspects positions on the host each step for any attention that has a mask function."""
    assert ATTENTION_NAME not in AttentionMaskInterface._global_mapping
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
    masks = []
    with LLM(model=model("llama"), **EAGER) as llm:
        layer = llm._engine.model_runner.binding.layers[0].module
        hook = layer.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        generate(llm, prompts()[:3])
        hook.remove()
    assert masks and all(mask is None for mask in masks)


# ------------------------------------------------------------------------------------------------------------------ NaN


BAD = 7  # the token whose embedding is NaN
CLEAN = list(range(20, 20 + 90))


def poisoned_model():
    module = tiny_model("llama").to(DEVICE)
    with torch.no_grad():
        module.get_input_embeddings().weight[BAD] = torch.nan
    return module


def poisoned_prompt(length=90):
    return [BAD if position == length // 2 else 300 + position for position in range(length)]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sdpa", "flex"] if torch.cuda.is_available() else ["sdpa", "flex", "cpp"])
def test_a_request_driven_to_nan_ends_with_an_error_and_harms_nobody(backend):
    module = poisoned_model()
    wanted = reference(module, CLEAN)
    with LLM(model=module, attention_backend=backend, **TIGHT) as llm:
        batch = [CLEAN, poisoned_prompt(), CLEAN[:40], poisoned_prompt(33)]
        outputs = llm.generate(batch, GREEDY, use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length", "error"]
        assert "not finite" in outputs[1].error
        assert outputs[1].outputs[0].token_ids == []
        assert outputs[0].outputs[0].token_ids == wanted
        assert outputs[2].outputs[0].token_ids == reference(module, CLEAN[:40])
        for _ in range(4):  # successors get the very blocks that held NaN
            llm.reset_prefix_cache()
            assert generate(llm, [CLEAN]) == [wanted]
        again = llm.generate([poisoned_prompt()], GREEDY, use_tqdm=False)[0]
        assert again.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_a_poisoned_request_stopped_half_way_through_its_prompt_harms_no_successor(how):
    module = poisoned_model()
    wanted = reference(module, CLEAN)
    with LLM(model=module, **EAGER, **TIGHT) as llm:
        engine = llm._engine
        submit(engine, "poisoned", poisoned_prompt(150), GREEDY)
        while engine.scheduler.in_flight or engine.stats().num_scheduled_tokens < 96:
            engine.step()  # two chunks of 48: past the poisoned token at 75, before the end
        if how == "preempted":
            engine.drop_computed()
        assert engine.abort("poisoned").outputs[0].finish_reason == "abort"
        for _ in range(4):
            llm.reset_prefix_cache()
            assert generate(llm, [CLEAN]) == [wanted]


def test_the_next_request_with_a_poisoned_prefix_fails_as_well_instead_of_answering_wrongly():
    module = poisoned_model()
    with LLM(model=module, **EAGER, **TIGHT) as llm:
        engine = llm._engine
        submit(engine, "poisoned", poisoned_prompt(150), GREEDY)
        while engine.stats().num_scheduled_tokens < 96:
            engine.step()
        engine.abort("poisoned")
        output = llm.generate([poisoned_prompt(150)], GREEDY, use_tqdm=False)[0]
        assert output.num_cached_tokens > 0
        assert output.outputs[0].finish_reason == "error"
