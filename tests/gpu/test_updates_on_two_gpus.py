"""Updates and sleep of a model on two GPUs: the tokens of `transformers`, with CUDA graphs and without.

Where there is one GPU, both ranks are on it.
"""

import pytest
import torch

from nanovllm import LLM
from tests.support.layer_kinds import own_answer
from tests.support.llms import generate, greedy, token_ids
from tests.support.shared_gpu import share_one_gpu
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

SIZES = {
    "tensor_parallel_size": 2, "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256,
    "max_model_len": 512, "num_kv_blocks": 80, "block_size": 64,
}  # fmt: skip
FORMS = {"eager": {"enforce_eager": True}, "graphs": {}}
NUM_TOKENS = 12
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
PROMPTS = random_prompts(5, low=3, high=90, seed=4)


@pytest.fixture(scope="module", autouse=True)
def gpus():
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() == 1:
            share_one_gpu(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("form", FORMS)
def test_updates_and_both_levels_of_sleep(form, folder):
    models = [tiny_model(seed=seed) for seed in range(2)]
    answers = [[own_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS] for model in models]
    with LLM(folder, **SIZES | FORMS[form]) as llm:
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers[0]
        llm.update_weights({name: part.cuda() for name, part in models[1].state_dict().items()})
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers[1]
        for level in (1, 2):
            before = torch.cuda.memory_allocated()
            llm.sleep(level)
            assert torch.cuda.memory_allocated() < before
            llm.wake()
            assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers[1]
        llm.sleep(2)
        llm.update_weights(models[0].state_dict())
        llm.wake()
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers[0]
