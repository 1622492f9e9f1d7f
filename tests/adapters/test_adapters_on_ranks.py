"""Adapters of an engine of two ranks: each adds its part of low-rank products, and tokens are the merged model's."""

from dataclasses import replace

import pytest
import torch

from nanovllm import LLM
from tests.support.adapter_files import KINDS, merged, save_adapter, save_kinds, tensors_of
from tests.support.layer_kinds import own_answer
from tests.support.llms import assert_idle_and_whole, generate, greedy, submit, token_ids
from tests.support.other_models import small
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

pytestmark = pytest.mark.usefixtures("programs_are_forked")

NUM_TOKENS = 8
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
SIZES = {
    "dtype": "float32", "num_kv_blocks": 65, "max_num_seqs": 6, "max_model_len": 128, "max_num_batched_tokens": 64,
    "tensor_parallel_size": 2,
}  # fmt: skip
NAMES = [None, *KINDS]
PROMPTS = random_prompts(5, low=3, high=60, seed=8)


def phi3():
    torch.manual_seed(0)
    model = small("Phi3", vocab_size=512, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


FAMILIES = {
    "llama": tiny_model,
    "one KV head": lambda: tiny_model("mistral"),
    "biases of rows": lambda: tiny_model(attention_bias=True, mlp_bias=True),
}


def answers(models, prompts, names):
    return [own_answer(models[name], prompt, NUM_TOKENS) for prompt, name in zip(prompts, names, strict=True)]


def with_adapters(model, folder):
    folders = save_kinds(folder, model)
    return folders, {None: model} | {name: merged(model, path) for name, path in folders.items()}


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_four_adapters_and_none_in_one_batch_give_the_tokens_of_merged_models(family, tmp_path):
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "model")
    folders, models = with_adapters(model, tmp_path)
    right = answers(models, PROMPTS, NAMES)
    assert len({tuple(answers(models, PROMPTS[:1], [name])[0]) for name in NAMES}) == 5
    with LLM(tmp_path / "model", skip_tokenizer_init=True, **SIZES) as llm:
        plain = answers(models, PROMPTS, [None] * 5)
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == plain
        for name, path in folders.items():
            llm.load_adapter(name, path)
        for _ in range(2):  # with a cold and a warm cache
            assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=NAMES)) == right
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == plain
        assert_idle_and_whole(llm)


def test_factors_are_cut_where_one_product_computes_q_k_and_v(tmp_path):
    """Its layers gather their outputs, and take a part of their inputs."""
    model = phi3()
    model.save_pretrained(tmp_path / "model")
    path = save_adapter(
        tmp_path / "a", model, tensors=tensors_of(model, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), 8, 3)
    )
    right = own_answer(merged(model, path), PROMPTS[0], NUM_TOKENS)
    assert right != own_answer(model, PROMPTS[0], NUM_TOKENS)
    with LLM(tmp_path / "model", skip_tokenizer_init=True, **SIZES) as llm:
        llm.load_adapter("a", path)
        assert token_ids(generate(llm, PROMPTS[:1], GREEDY, adapter="a")) == [right]


def test_slots_are_given_to_others_while_requests_run(tmp_path):
    model = tiny_model()
    folder = save_tiny(tmp_path / "model")
    folders, models = with_adapters(model, tmp_path)
    with LLM(folder, overlap=True, max_loras=2, **SIZES) as llm:
        for name, path in folders.items():
            llm.load_adapter(name, path)
        names = NAMES * 3
        prompts = random_prompts(len(names), low=3, high=60, seed=2)
        assert token_ids(generate(llm, prompts, GREEDY, adapter=names)) == answers(models, prompts, names)
        assert_idle_and_whole(llm)


def test_an_adapter_of_another_model_is_refused_and_a_first_one_comes_while_requests_run(tmp_path, monkeypatch):
    model = tiny_model()
    folder = save_tiny(tmp_path / "model")
    folders, models = with_adapters(model, tmp_path)
    half = {name: part[..., :192].clone() for name, part in tensors_of(model, ("q_proj",), 4, 0).items()}
    with LLM(folder, overlap=True, **SIZES) as llm:
        engine = llm._engine
        with monkeypatch.context() as patch:
            patch.setattr(engine.model_runner, "device", torch.device("cuda"))
            with pytest.raises(ValueError, match=r"^load_adapter does not work with tensor_parallel_size: GPUs"):
                llm.load_adapter("b", folders["b"])
        for number, prompt in enumerate(PROMPTS):
            submit(engine, str(number), prompt, replace(GREEDY, seed=number))
        for _ in range(4):
            engine.step()
        with pytest.raises(ValueError, match=r"lora_A of shape \(4, 192\), and this model needs \(4, 384\)"):
            llm.load_adapter("x", save_adapter(tmp_path / "x", model, tensors=half))
        llm.load_adapter("b", folders["b"])
        while engine.has_unfinished:
            engine.step()
        found = {output.request_id: output.outputs[0].token_ids for output in engine.outputs}
        engine.outputs.clear()
        assert [found[str(number)] for number in range(5)] == answers(models, PROMPTS, [None] * 5)
        other = tiny_model(seed=1)
        llm.update_weights(other.state_dict())  # the adapter adds to the new weights
        llm.sleep()
        llm.wake()
        right = answers({"b": merged(other, folders["b"]), None: other}, PROMPTS[:2], ["b", None])
        assert token_ids(generate(llm, PROMPTS[:2], GREEDY, adapter=["b", None])) == right
