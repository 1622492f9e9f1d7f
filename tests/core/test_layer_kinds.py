"""Windows, chunks, soft-caps, sinks, keys wider than values: greedy tokens are those of `transformers`."""

import copy

import pytest
import torch

from nanovllm import LLM
from nanovllm.fast.attention.layer_traits import first_beyond
from tests.support.layer_kinds import MODELS, WINDOW, expected, model, own_answer, prompts
from tests.support.llms import generate, greedy

NUM_NEW_TOKENS = 18  # the shortest prompt moves beyond its window within them
GREEDY = greedy(NUM_NEW_TOKENS)
OPTIONS = {"block_size": 16, "num_kv_blocks": 80, "max_model_len": 160, "max_num_seqs": 6}
BACKENDS = {"sdpa": {"enforce_eager": True}, "cpp": {"attention_backend": "cpp"}, "flex": {"attention_backend": "flex"}}
# With each shape the C++ kernels are compiled, and with each kind FlexAttention.
QUICK = {("cpp", family) for family in ("Gemma2", "GptOss", "Gemma4Text", "DeepseekV2")}


def answers(family, *, rounds=1, **options):
    found = []
    with LLM(model(family), **(OPTIONS | options)) as llm:
        for _ in range(rounds):
            found.append([o.outputs[0].token_ids for o in generate(llm, prompts(), GREEDY)])
        return found, llm.stats()


@pytest.mark.costly
@pytest.mark.parametrize(
    "backend, family",
    [pytest.param(backend, family, marks=[] if backend == "sdpa" or (backend, family) in QUICK else [pytest.mark.slow])
     for backend in BACKENDS for family in MODELS],
)  # fmt: skip
def test_greedy_tokens_are_those_of_transformers_with_the_cache_cold_and_warm(backend, family):
    found, _ = answers(family, rounds=2, max_num_batched_tokens=50, **BACKENDS[backend])
    assert found == 2 * [expected(family, NUM_NEW_TOKENS)]


@pytest.mark.costly
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if ("cpp", family) in QUICK else [pytest.mark.slow]) for family in MODELS]
)
def test_small_budgets_and_preemption_change_no_token(family):
    num_blocks = 6 if family == "Mistral" else 14  # of windows alone, no sequence holds more than three
    found, stats = answers(family, max_num_batched_tokens=22, num_kv_blocks=num_blocks, **BACKENDS["sdpa"])
    assert found == [expected(family, NUM_NEW_TOKENS)]
    assert stats.num_preemptions > 0


def test_the_layers_are_what_their_models_say():
    def traits(family):
        with LLM(model(family), **OPTIONS, **BACKENDS["sdpa"]) as llm:
            binding = llm._engine.model_runner.binding
            assert binding.caches.num_bytes(1) == sum(cache[0][0].nbytes + cache[1][0].nbytes for cache in {
                id(cache): cache for cache in binding.caches.of_layers
            }.values())  # fmt: skip
            return [layer.traits for layer in binding.layers]

    assert [(t.sight.window, t.softcap) for t in traits("Gemma2")] == [(WINDOW, 2.0), (None, 2.0)]
    assert [(t.sight.window, t.has_sinks) for t in traits("GptOss")] == [(WINDOW, True), (None, True)]
    assert [t.sight.chunk for t in traits("Llama4Text")] == [WINDOW, None]
    assert [(t.head_dim, t.value_dim) for t in traits("DeepseekV2")] == [(48, 32)] * 2
    assert [t.shares for t in traits("Gemma3nText")] == [None, None, None, 1, 2, 1]
    assert [(t.head_dim, t.shares) for t in traits("Gemma4Text")] == [(32, None), (64, None), (32, 0), (64, 1)]


def test_max_model_len_is_the_models_and_not_the_windows():
    with LLM(model("Mistral"), block_size=16, num_kv_blocks=80, **BACKENDS["sdpa"]) as llm:
        assert llm.config.max_model_len == model("Mistral").config.max_position_embeddings > WINDOW


def test_sinks_of_a_live_module_are_those_that_its_owner_has_set():
    module = copy.deepcopy(model("GptOss"))
    with LLM(module, **OPTIONS, **BACKENDS["sdpa"]) as llm:

        def answer():
            return [o.outputs[0].token_ids for o in generate(llm, prompts(), GREEDY)]

        assert answer() == expected("GptOss", NUM_NEW_TOKENS)
        with torch.no_grad():
            for layer in module.model.layers:
                layer.self_attn.sinks.fill_(6.0)
        changed = answer()
    assert changed == [own_answer(module, prompt, NUM_NEW_TOKENS) for prompt in prompts()]
    assert changed != expected("GptOss", NUM_NEW_TOKENS)


@pytest.mark.parametrize("family", ["Mistral", "Llama4Text"])
def test_a_window_that_holds_the_longest_sequence_is_plain_attention(family):
    with LLM(model(family), **(OPTIONS | {"max_model_len": WINDOW}), **BACKENDS["sdpa"]) as llm:
        assert all(first_beyond(layer.traits) is None for layer in llm._engine.model_runner.binding.layers)
        short = greedy(WINDOW // 2)
        (answer,) = generate(llm, prompts()[:1], short)
    assert answer.outputs[0].token_ids == own_answer(model(family), prompts()[0], WINDOW // 2)
    with LLM(model(family), **(OPTIONS | {"max_model_len": WINDOW + 1}), **BACKENDS["sdpa"]) as llm:
        assert first_beyond(llm._engine.model_runner.binding.layers[0].traits) is not None
