"""Quantised checkpoints on a GPU: float32 tokens are those of `transformers` on the weights that a CPU dequantises."""

import pytest

from nanovllm import LLM
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import loader
from tests.support.cpu_answers import OPTIONS, by_transformers, tokens
from tests.support.quantised_checkpoints import save_quantised, small_llama, small_moe


@pytest.mark.costly
@pytest.mark.parametrize("make", [small_llama, small_moe], ids=["dense", "experts"])
@pytest.mark.parametrize("form", ["fp8-block", "mxfp8"])
def test_answers_on_a_gpu_are_those_of_the_dequantised_weights(make, form, tmp_path):
    folder = save_quantised(tmp_path, form, make())
    wanted = by_transformers(loader.load_weights(str(folder), EngineConfig(device="cpu", dtype="float32")).model)
    options = OPTIONS | {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(folder, max_num_batched_tokens=48, **options) as llm:
        assert tokens(llm) == wanted
        assert tokens(llm) == wanted  # with prefixes cached
