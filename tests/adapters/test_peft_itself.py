"""Adapters that PEFT itself has made and saved: its own modules generate the same tokens."""

import importlib.util

import pytest
import torch

from nanovllm import LLM
from tests.support.llms import generate, greedy, token_ids
from tests.support.tiny_models import random_prompts, tiny_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft, see .ci/peft")

CONFIGS = {
    "plain": {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "all linear": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["o_proj", "gate_proj"]},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "up_proj"], "rank_pattern": {"k_proj": 12},
        "alpha_pattern": {"layers.1.mlp.up_proj": 64},
    },
    "some layers": {"r": 8, "lora_alpha": 64, "target_modules": ["q_proj"], "layers_to_transform": [1]},
}  # fmt: skip
PROMPTS = random_prompts(4, low=5, high=60, seed=2)
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(the base model, a folder of adapters, the tokens of each prompt by PEFT's module with each of them)"""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("peft")
    base = tiny_model()
    model = None
    for seed, (name, options) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        if model is None:
            model = get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    model.save_pretrained(folder)
    model.eval()
    answers = {}
    for name in CONFIGS:
        model.set_adapter(name)
        answers[name] = [
            model.generate(
                input_ids=torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]  # fmt: skip
    return tiny_model(), folder, answers


def test_tokens_are_those_of_its_own_module_in_one_batch(tuned):
    model, folder, answers = tuned
    with LLM(model, num_kv_blocks=129, max_num_seqs=8, max_model_len=128) as llm:
        for name in CONFIGS:
            llm.load_adapter(name, folder / name)
        each = [(number, name) for number in range(len(PROMPTS)) for name in CONFIGS]
        prompts, names = [PROMPTS[number] for number, _ in each], [name for _, name in each]
        outputs = generate(llm, prompts, greedy(NUM_TOKENS, ignore_eos=True), adapter=names)
        assert token_ids(outputs) == [answers[name][number] for number, name in each]
        assert len({tuple(answers[name][0]) for name in CONFIGS}) == len(CONFIGS)
