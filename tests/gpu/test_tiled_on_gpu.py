"""Layers of packed 4- and 8-bit weights on a GPU: products of any number of rows, and engines whose layers are such."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from nanovllm import LLM, SamplingParams
from nanovllm.fast.kernels.packed_rows import Rest, fits, fused_product, why_not
from nanovllm.fast.layers.packed_layers import PackedLayer
from nanovllm.models.quantised import tiled
from nanovllm.models.quantised.on_load import quantise_model
from nanovllm.models.quantised.scaled import ScaledLinear
from tests.support.llms import check_engine
from tests.support.packed_columns import FORMS, save_columns
from tests.support.quantised import KINDS, random_layer
from tests.support.quantised_checkpoints import save_quantised, small_llama
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or why_not(torch.device("cuda")) is not None, reason="needs a Hopper GPU"
)
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 63, 64, 65, 128, 129, 300)
PACKED = (
    "ct-w4a16", "ct-w4a16-asym", "ct-mxfp4", "ct-nvfp4", "ct-int8-channel", "ct-fp8-block", "fp8-block-ue8m0", "mxfp8"
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("sizes", [(48, 256), (1000, 1920), (4096, 4096)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_any_number_of_rows_are_those_of_float64(kind, sizes, dtype):
    torch.manual_seed(0)
    width = sizes[1] if kind not in ("Q4_K", "Q5_K", "Q6_K") else sizes[1] // 256 * 256
    layer = random_layer(kind, sizes[0], width, torch.randn(sizes[0])).cuda()
    layer_of_gpu = tiled.tiled_linear(layer.quantised_parts(), layer.bias.to(dtype), dtype).cuda()
    states = torch.randn(max(ROWS), width, device="cuda", dtype=dtype)
    expected = states.double() @ layer.dequantise().double().T + layer.bias.to(dtype).double()
    for count in ROWS:
        output = layer_of_gpu(states[:count])
        distances = (output.double() - expected[:count]).norm(dim=1) / expected[:count].norm(dim=1)
        assert distances.max() < (4e-3 if count <= 8 else 8e-3), count  # of more rows the weight is rounded too
        assert torch.equal(output, layer_of_gpu(states[:count])), count
        apart = layer_of_gpu(torch.cat((states[1:count], states[:1]))) if count > 1 else output
        assert torch.equal(apart[-1], output[0]), f"a row among {count} others depends on its place"


@pytest.mark.parametrize("sizes", [(96, 128), (1024, 2944), (4096, 12288)], ids=str)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "W4 zeros", "MXFP4", "int8", "FP8 blocks"])
def test_norms_gates_and_sums_in_a_products_launch_are_those_of_float64(kind, sizes):
    torch.manual_seed(0)
    outputs, width = sizes
    layer = tiled.tiled_linear(random_layer(kind, outputs, width, None).quantised_parts()).cuda()
    weight = layer.dequantise().double()
    norm = torch.rand(width, device="cuda", dtype=torch.bfloat16) + 0.5
    parts = layer.codes, layer.scales, layer.shifts, layer.units
    for count, real in ((1, 1), (4, 1), (5, 5), (8, 6)):
        states = torch.randn(count, width, device="cuda", dtype=torch.bfloat16)
        residual = torch.randn(count, outputs, device="cuda", dtype=torch.bfloat16)
        slots = torch.tensor([7] * real + [0] * (count - real), device="cuda")
        run = partial(fused_product, states, parts, None, outputs, layer.form.text)
        summed = run(Rest(residual=residual, slots=slots))
        assert_near(summed, states.double() @ weight.T + residual.double(), real)
        if fits(count, width, layer.form.text):
            products = F.rms_norm(states.double(), (width,), norm.double(), 1e-5).bfloat16().double() @ weight.T
            assert_near(run(Rest(norm=norm, epsilon=1e-5, slots=slots)), products, real)
            gate, up = products.chunk(2, dim=-1)
            assert_near(run(Rest(norm=norm, epsilon=1e-5, slots=slots, gated=True)), F.silu(gate) * up, real)


def assert_near(output, expected, num_real):
    distances = (output.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert distances[:num_real].max() < 8e-3
    assert not output[num_real:].any(), "rows of padding are no zeros"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def fused(monkeypatch):
    """Numbers of rows of layers that ran in the launches of their products."""
    found = []

    def recorded(self, states, *args):
        found.append(states.shape[1])
        return run(self, states, *args)

    run = PackedLayer.fused
    monkeypatch.setattr(PackedLayer, "fused", recorded)
    return found


def answers(folder, prompts, quantization, **options):
    options = {"block_size": 16, "num_kv_blocks": 200, "max_model_len": 256, "max_num_seqs": 8} | options
    with LLM(folder, tokenizer=tiny_tokenizer(), quantization=quantization, device="cuda", **options) as llm:
        found = [output.outputs[0] for _ in range(2) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        check_engine(llm)
        assert llm.stats().prefix_cache_hits > 0
    return [one.token_ids for one in found], [one.logprobs for one in found]


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}, {"num_kv_blocks": 24}, {"speculation": "suffix"}],
    ids=["graphs", "eager", "chunks", "preemption", "drafts"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_answers_as_the_dequantised_model(folder, options, quantization, dtype, placed, fused):
    prompts = random_prompts(6, low=40, high=70)
    found, logprobs = answers(folder, prompts, quantization, dtype=dtype, **options)
    assert placed.count(tiled.TiledLinear) == 15
    assert bool(fused) == (dtype == "bfloat16" and "enforce_eager" not in options)
    model = tiny_model("qwen3").to(getattr(torch, dtype)).cuda()
    quantise_model(model, quantization, "cuda")  # of the weights as the engine has them
    model = model.float()  # dequantises them in each pass
    for prompt, tokens, own in zip(prompts * 2, found, logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
        right = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].cpu()
        ours = torch.tensor([each[token].logprob for each, token in zip(own, tokens, strict=True)])
        differences = (ours - right).abs()
        assert differences.max() < (1e-4 if dtype == "float32" else 0.5)
        assert differences.mean() < (1e-4 if dtype == "float32" else 0.1)  # in bfloat16 a wrong product shows in each
        if dtype == "float32":
            assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("form", [*PACKED, *FORMS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kept_checkpoint_answers_as_the_dequantised_one(form, dtype, tmp_path, placed):
    folder = save_columns(tmp_path, form)[0] if form in FORMS else save_quantised(tmp_path, form)
    prompts = random_prompts(4, low=40, high=70)
    found, logprobs = answers(folder, prompts, "keep", dtype=dtype)
    assert placed.count(tiled.TiledLinear) == 14
    expected, plain = answers(folder, prompts, "dequantize", dtype=dtype)
    if dtype == "float32" and form != "ct-nvfp4":  # the library rounds its dequantised weights to bfloat16
        assert found == expected
    for own, other in zip(logprobs, plain, strict=True):
        (ours,), (theirs,) = own[0].values(), other[0].values()
        assert abs(ours.logprob - theirs.logprob) < (2e-3 if dtype == "float32" and form != "ct-nvfp4" else 0.3)


def test_fp8_checkpoints_stay_so(tmp_path, placed):
    folder = save_quantised(tmp_path, "ct-fp8-channel")
    prompts = random_prompts(4, low=40, high=70)
    found, logprobs = answers(folder, prompts, "keep", dtype="bfloat16")
    assert placed.count(ScaledLinear) == 14 and found[:4] == found[4:]
    _, plain = answers(folder, prompts, "dequantize", dtype="bfloat16")
    for own, other in zip(logprobs, plain, strict=True):
        (ours,), (theirs,) = own[0].values(), other[0].values()
        assert abs(ours.logprob - theirs.logprob) < 0.3  # inputs are rounded to 8 bits


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_a_gguf_file_stays_so(kind, tmp_path, placed):
    path = tmp_path / "model.gguf"
    write_gguf(path, small_llama(intermediate_size=512).float(), kind)
    prompts = random_prompts(4, low=40, high=70)
    found, _ = answers(path, prompts, None, dtype="float32")
    assert placed.count(tiled.TiledLinear) >= 14
    assert found == answers(path, prompts, "dequantize", dtype="float32")[0]
