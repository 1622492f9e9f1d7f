"""Adapters that PEFT itself has made and saved: its own modules generate the same tokens."""

import importlib.util

import pytest
import torch

from nanovllm import LLM
from tests.support.layer_kinds import own_answer
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
LIVE = {
    "lora": lambda peft: [peft.LoraConfig(r=4 + 4 * seed, target_modules="all-linear") for seed in range(2)],
    "variants": lambda peft: [
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True),
        peft.LoraConfig(r=8, target_modules=["v_proj"], use_rslora=True),
    ],
    "loha": lambda peft: [peft.LoHaConfig(r=4, target_modules=["v_proj", "up_proj"]) for _ in range(2)],
    "saved modules": lambda peft: [
        peft.LoraConfig(r=4, target_modules=["o_proj"], modules_to_save=["lm_head"]) for _ in range(2)
    ],
}
ADAPTERS = ["first", "second"]
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
        answers[name] = [own_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
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


def live_module(kind, *, is_base):
    """(PEFT's module with adapters a and b of random weights; itself, or the base model with layers of adapters)"""
    import peft

    configs = LIVE[kind](peft)
    for config in configs:
        config.task_type = "CAUSAL_LM"
    owner = peft.get_peft_model(tiny_model(), configs[0], adapter_name="first")
    owner.add_adapter("second", configs[1])
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in owner.named_parameters():
            if ".first" in name or ".second" in name:
                parameter += 0.1 * torch.randn(parameter.shape)
    own_answer(owner.eval(), PROMPTS[0], 1)  # the first one leaves an attribute, which drops all prefixes once
    return owner, owner.get_base_model() if is_base else owner


@pytest.mark.parametrize("kind", LIVE)
@pytest.mark.parametrize("is_base", [False, True], ids=["PeftModel", "base"])
def test_a_live_module_keeps_the_prefixes_of_each_adapter_over_switches(kind, is_base):
    owner, model = live_module(kind, is_base=is_base)
    with LLM(model, block_size=16, num_kv_blocks=257, max_num_seqs=8, max_model_len=128) as llm:
        params = greedy(NUM_TOKENS, ignore_eos=True)

        def check(is_first):
            outputs = generate(llm, PROMPTS, params)
            assert token_ids(outputs) == [own_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
            found = sum(output.num_cached_tokens for output in outputs)
            rate = found / sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)
            assert rate == 0.0 if is_first else rate > 0.9
            return token_ids(outputs)

        seen = set()
        answers = set()
        for name in [*ADAPTERS, *ADAPTERS[::-1], *ADAPTERS]:
            owner.set_adapter(name)
            answers.add(repr(check(name not in seen)))
            with owner.disable_adapter():
                answers.add(repr(check(name not in seen)))
            check(is_first=False)
            seen.add(name)
        assert len(answers) == 3
        if kind == "lora":
            owner.merge_adapter()
            check(is_first=True)
            owner.unmerge_adapter()
            check(is_first=True)
            owner.set_adapter("first")
            check(is_first=True)


@pytest.mark.parametrize("is_base", [False, True], ids=["PeftModel", "base"])
def test_a_stream_goes_on_by_the_adapter_that_its_owner_switches_to(is_base):
    owner, model = live_module("lora", is_base=is_base)
    with LLM(model, block_size=16, num_kv_blocks=65, max_model_len=128) as llm:
        tokens = []
        stream = llm.stream(PROMPTS[0], greedy(20, ignore_eos=True))
        for name in ADAPTERS * 2:
            owner.set_adapter(name)
            for _ in range(3):
                tokens.append(next(stream).outputs[0].token_ids[-1])
                assert tokens[-1:] == own_answer(model, PROMPTS[0] + tokens[:-1], 1)
