"""A tiny Llama with random weights, a tokenizer of bytes, an engine over both, and the model's own answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from tests.engine.blocks import check_blocks

VOCAB_SIZE = 258
END = 256  # the id of "<end>", a special token; the ids before it are bytes
OPTIONS: dict[str, Any] = {
    "attention_backend": "sdpa",
    "enforce_eager": True,
    "block_size": 16,
    "num_kv_blocks": 33,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def tiny_model(*, seed: int = 0, **options: Any) -> Any:
    """Weights are drawn wide, so that a token depends on its whole prompt and answers vary."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
    torch.manual_seed(seed)
    config = LlamaConfig(**(sizes | heads | ends | {"initializer_range": 0.3} | options))
    return LlamaForCausalLM(config).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, in no order of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)


def open_llm(model: Any = None, tokenizer: Any = None, **options: Any) -> LLM:
    return LLM(tiny_model() if model is None else model, tokenizer=tokenizer, **(OPTIONS | options))


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[Any]:
    """Outputs of a call, after which no block is in use."""
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    check_idle(llm._engine)
    return outputs


def check_idle(engine: Any) -> None:
    """Check that no request is left, and that every block is free."""
    assert not engine.scheduler.running and not engine.scheduler.waiting and not engine.requests
    check_blocks(engine.block_manager, [])


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def own_answer(model: Any, prompt: list[int], num_tokens: int = 12) -> list[int]:
    """The greedy answer of `transformers` to one prompt, alone."""
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    return found[0, len(prompt) :].tolist()


def make_it_say(monkeypatch: pytest.MonkeyPatch, llm: LLM, token_ids: list[int]) -> None:
    """Every request draws these tokens, one after another and then from the first one on."""

    def sample(logits: Any, sequences: Any, positions: Any, *_: Any) -> torch.Tensor:
        places = [position - s.num_prompt_tokens for s, position in zip(sequences, positions, strict=True)]
        return torch.tensor([token_ids[place % len(token_ids)] for place in places])

    monkeypatch.setattr(llm._engine.model_runner.sampler, "sample", sample)
