"""Layers of 8-bit floats on a GPU: products of any number of rows, and engines whose layers are such."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.models.quantised.on_load import quantise_model
from nanovllm.models.quantised.scaled import why_not
from tests.support.llms import check_engine
from tests.support.scaled_layers import Dense, replaced, scaled_linear
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or why_not(128, 128, torch.device("cuda")) is not None,
    reason="needs a GPU that multiplies 8-bit floats",
)
ROWS = (1, 2, 7, 8, 9, 16, 63, 64, 65, 300, 1000)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("sizes", [(128, 128), (384, 640), (4096, 2048)], ids=str)
def test_products_of_any_number_of_rows_are_those_of_float64(sizes):
    torch.manual_seed(0)
    layer = scaled_linear(torch.randn(sizes, device="cuda"))
    states = torch.randn(max(ROWS), sizes[1], device="cuda", dtype=torch.bfloat16)
    states *= torch.logspace(-4, 2, max(ROWS), device="cuda", dtype=torch.bfloat16)[torch.randperm(max(ROWS)), None]
    expected = Dense(layer)(states.double())
    for count in ROWS:
        output = layer(states[:count]).double()
        distances = (output - expected[:count]).norm(dim=1) / expected[:count].norm(dim=1)
        assert distances.max() < 3e-3, count


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3")


def answers(folder, prompts, **options):
    options = {
        "dtype": "float32",
        "block_size": 16,
        "num_kv_blocks": 200,
        "max_model_len": 256,
        "max_num_seqs": 8,
    } | options
    with LLM(folder, tokenizer=tiny_tokenizer(), quantization="fp8", **options) as llm:
        found = [output.outputs[0] for _ in range(2) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        check_engine(llm)
        assert llm.stats().prefix_cache_hits > 0
    return [one.token_ids for one in found], [one.logprobs for one in found]


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}, {"num_kv_blocks": 24}, {"speculation": "suffix"}],
    ids=["graphs", "eager", "chunks", "preemption", "drafts"],
)
def test_an_engine_answers_as_the_layers_in_float64(folder, options):
    prompts = random_prompts(6, low=40, high=70)
    found, logprobs = answers(folder, prompts, **options)
    assert found[:6] == found[6:], "a cached prefix changed a token"
    model = tiny_model("qwen3").cuda()
    quantise_model(model, "fp8", "cuda")
    replaced(model, Dense)
    for prompt, tokens, own in zip(prompts, found, logprobs, strict=False):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
        right = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].cpu()
        ours = torch.tensor([each[token].logprob for each, token in zip(own, tokens, strict=True)])
        # Tensor cores sum products of 8 bits to 1.3e-4 of a row, so that some inputs of the next layer become other
        # numbers of 8 bits, 6 % apart: 0.21 at most here.
        differences = (ours - right).abs()
        assert differences.max() < 0.5 and differences.mean() < 0.15
