"""Updates of weights on a GPU: tokens of the new weights with every form of a step, graphs kept, no stale KV."""

import pytest
import torch

from nanovllm import LLM
from tests.support.adapter_files import merged, save_adapter
from tests.support.layer_kinds import own_answer
from tests.support.llms import generate, greedy, token_ids
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

NUM_TOKENS = 12
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
OPTIONS = {"num_kv_blocks": 200, "max_model_len": 300, "max_num_seqs": 16, "block_size": 16}
PROMPTS = random_prompts(10, low=1, high=100, seed=3)
STACKED = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "num_layers": 3,
}  # fmt: skip
WAYS = {
    "graphs": {},
    "one by one": {"overlap": False},
    "no graphs": {"cuda_graphs": False},
    "eager": {"enforce_eager": True},
    "drafts": {"speculation": "suffix"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("way", WAYS)
def test_float32_tokens_are_those_of_the_new_weights(way, folder):
    with LLM(folder, dtype="float32", **OPTIONS | WAYS[way]) as llm:
        for seed in (0, 1, 2, 0):
            model = tiny_model(seed=seed).cuda()
            llm.update_weights(model.state_dict())
            right = [own_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
            for is_warm in (False, True):
                outputs = generate(llm, PROMPTS, GREEDY)
                assert token_ids(outputs) == right
                assert any(output.num_cached_tokens for output in outputs) == is_warm


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("count", [1, 4, 10])
def test_bfloat16_launches_have_the_bits_of_a_new_engine(count, tied, tmp_path):
    """Steps of few decodes in one launch, layers by kernels, merged products: a copy of old weights would show."""
    shape = STACKED | {"tie_word_embeddings": tied}
    folders = [save_tiny(tmp_path / str(seed), seed=seed, **shape) for seed in (0, 1)]
    with LLM(folders[1], dtype="bfloat16", **OPTIONS) as llm:
        right = token_ids(generate(llm, PROMPTS[:count], GREEDY))
    with LLM(folders[0], dtype="bfloat16", **OPTIONS) as llm:
        executor = llm._engine.model_runner.executor
        assert token_ids(generate(llm, PROMPTS[:count], GREEDY)) != right
        graphs = dict(executor._forwards.graphs)
        stack = executor.stacked
        llm.update_weights(tiny_model(seed=1, dtype=torch.bfloat16, **shape).state_dict())
        assert token_ids(generate(llm, PROMPTS[:count], GREEDY)) == right
        assert executor.stacked is stack and graphs.items() <= executor._forwards.graphs.items()


def test_adapters_add_to_the_new_weights(folder, tmp_path):
    models = [tiny_model(seed=seed).cuda() for seed in (0, 1)]
    path = save_adapter(tmp_path / "a", tiny_model(), seed=9)
    with LLM(folder, dtype="float32", **OPTIONS) as llm:
        llm.load_adapter("a", path)
        for model in models:
            llm.update_weights(model.state_dict())
            both = generate(llm, PROMPTS[:1] * 2, GREEDY, adapter=[None, "a"])
            references = model, merged(model.cpu(), path).cuda()
            assert token_ids(both) == [own_answer(each.cuda(), PROMPTS[0], NUM_TOKENS) for each in references]


def test_running_requests_go_on_with_the_new_weights(folder):
    models = [tiny_model(seed=seed).cuda() for seed in (0, 1)]
    with LLM(folder, dtype="float32", **OPTIONS) as llm:
        for keep_kv in (False, True):
            llm.update_weights(models[0].state_dict())
            stream = llm.stream(PROMPTS[1], greedy(40, ignore_eos=True))
            for _ in range(5):
                next(stream)
            known = len(next(iter(llm._engine.requests.values())).sequences[0].output_token_ids)
            llm.update_weights(models[1].state_dict(), keep_kv=keep_kv)
            *_, last = stream
            tokens = last.outputs[0].token_ids
            rest = own_answer(models[1], PROMPTS[1] + tokens[:known], 40 - known)
            assert (tokens[known:] == rest) or keep_kv
            assert generate(llm, [PROMPTS[1] + tokens], GREEDY)[0].outputs[0].token_ids == own_answer(
                models[1], PROMPTS[1] + tokens, NUM_TOKENS
            )
