"""Routed experts of packed 4- and 8-bit weights on a GPU: products of any number of rows, and engines with them."""

import math

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.fast.kernels import packed_experts
from nanovllm.fast.kernels.packed_experts import Experts, apply_gate, expert_products
from nanovllm.fast.kernels.packed_rows import why_not
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import loader
from nanovllm.models.quantised.tiled import tiled_linear
from nanovllm.models.quantised.tiled_experts import TiledExperts
from tests.support.llms import check_engine
from tests.support.quantised import random_layer
from tests.support.quantised_checkpoints import save_mxfp4, save_quantised, small_moe
from tests.support.tiny_models import random_prompts

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or why_not(torch.device("cuda")) is not None, reason="needs a Hopper GPU"
)
DTYPES = (torch.bfloat16, torch.float16)
KINDS = ("MXFP4", "NVFP4", "W4 groups", "W4 zeros", "Q4_1", "Q6_K", "int8", "FP8 blocks", "FP8 rows")
WHOLE = {"Q6_K": 256, "W4 zeros": 128, "FP8 blocks": 128}  # weights that a row's length is a multiple of
ROWS = (1, 2, 3, 8, 9, 16, 33, 64, 128, 300)
GATES = {"none": (), "clamped": (1.702, 7.0, 1.0), "silu": (1.0, math.inf, 0.0)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


def random_experts(kind, num_experts, outputs, width, dtype, gate):
    """Packed experts, and their weights in float64."""
    layers = [random_layer(kind, outputs, width, seed=number) for number in range(num_experts)]
    parts = [tiled_linear(layer.quantised_parts(), None, dtype) for layer in layers]
    assert len({part.form for part in parts}) == 1

    def stacked(name):
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.stack(found).cuda()

    bias = torch.randn(num_experts, outputs).to(dtype).cuda()
    packed = Experts(*map(stacked, ("codes", "scales", "shifts", "units")), bias, width, parts[0].form.text, gate)
    return packed, torch.stack([layer.dequantise() for layer in layers]).double().cuda()


def random_ids(num_rows, num_experts, top_k):
    """Experts of rows, the last of them without any, another with half of the rows."""
    weights = torch.ones(num_rows, num_experts)
    weights[:, 1] = 4
    weights[:, -1] = 0
    return torch.multinomial(weights, top_k).cuda()


def expected_of(rows, ids, experts, weights, *, gathers):
    top_k = ids.shape[1]
    pairs = rows.repeat_interleave(top_k, dim=0) if gathers else rows
    chosen = ids.flatten()
    found = torch.empty(len(pairs), weights.shape[1], device="cuda", dtype=torch.float64)
    for expert, weight in enumerate(weights):
        mine = chosen == expert
        found[mine] = pairs[mine].double() @ weight.T + experts.bias[expert].double()
    return apply_gate(found, experts.gate) if experts.gate else found


def distance(output, expected):
    return ((output.double() - expected).norm(dim=1) / expected.norm(dim=1)).max()


@pytest.mark.parametrize("sizes", [(48, 192), (160, 2880), (512, 4096)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_any_number_of_rows_are_those_of_float64(kind, sizes, dtype):
    torch.manual_seed(0)
    outputs, width = sizes
    multiple = WHOLE.get(kind, 1)
    width = max(multiple, width // multiple * multiple)
    num_experts, top_k = 9, 3
    for name, gate in GATES.items():
        experts, weights = random_experts(kind, num_experts, outputs, width, dtype, gate)
        for gathers in (True, False):
            rows = 0.25 * torch.randn(max(ROWS) * (1 if gathers else top_k), width, device="cuda", dtype=dtype)
            for count in ROWS:
                own = rows[: count if gathers else count * top_k]
                ids = random_ids(count, num_experts, top_k)
                output = expert_products(own, ids.flatten(), top_k, experts, None, gathers=gathers)
                expected = expected_of(own, ids, experts, weights, gathers=gathers)
                assert distance(output, expected) < 6e-3, (name, gathers, count)
                again = expert_products(own, ids.flatten(), top_k, experts, None, gathers=gathers)
                assert torch.equal(output, again), (name, gathers, count)


@pytest.mark.parametrize("num_rows", [5, 40])
def test_a_row_does_not_depend_on_its_place(num_rows):
    experts, _ = random_experts("MXFP4", 6, 64, 448, torch.bfloat16, GATES["clamped"])
    rows = torch.randn(num_rows, 448, device="cuda", dtype=torch.bfloat16)
    ids = random_ids(num_rows, 6, 2)
    output = expert_products(rows, ids.flatten(), 2, experts, None, gathers=True)
    turned = expert_products(rows.roll(1, 0), ids.roll(1, 0).flatten(), 2, experts, None, gathers=True)
    assert torch.equal(turned.roll(-2, 0), output)


@pytest.mark.parametrize("num_rows", [3, 40])
def test_padding_gets_zeros_and_reads_nothing(num_rows):
    experts, weights = random_experts("MXFP4", 6, 64, 448, torch.bfloat16, ())
    rows = torch.randn(num_rows, 448, device="cuda", dtype=torch.bfloat16)
    rows[0] = math.nan
    ids = random_ids(num_rows, 6, 2)
    slots = torch.arange(num_rows - 1, device="cuda")  # the first row is padding, and the last has no slot
    torch.full((4096, 64), math.nan, device="cuda", dtype=torch.bfloat16)  # memory that the output may take
    output = expert_products(rows, ids.flatten(), 2, experts, slots, gathers=True)
    expected = expected_of(rows, ids, experts, weights, gathers=True)
    assert (output[:2] == 0).all() and (output[-2:] == 0).all()
    assert distance(output[2:-2], expected[2:-2]) < 6e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scratch", [1 << 30, 2 * 3 * 96 * 320])
def test_more_pairs_than_the_kernel_takes(dtype, scratch, monkeypatch):
    """By widened experts, three at a time or all at once; in float16 rows are taken in parts."""
    monkeypatch.setattr(packed_experts, "MAX_PAIRS", 64)
    monkeypatch.setattr(packed_experts, "_SCRATCH_BYTES", scratch)
    packed_experts._kernel.cache_clear()
    for gate in GATES.values():
        experts, weights = random_experts("MXFP4", 8, 96, 320, dtype, gate)
        for gathers in (True, False):
            rows = torch.randn(200 if gathers else 400, 320, device="cuda", dtype=dtype)
            ids = random_ids(200, 8, 2)
            output = expert_products(rows, ids.flatten(), 2, experts, None, gathers=gathers)
            assert distance(output, expected_of(rows, ids, experts, weights, gathers=gathers)) < 1.2e-2
    packed_experts._kernel.cache_clear()


def test_a_graph_follows_its_routes():
    experts, weights = random_experts("MXFP4", 6, 64, 448, torch.bfloat16, GATES["silu"])
    packed_experts.compile_kernels(experts, torch.device("cuda", 0))
    rows = torch.randn(20, 448, device="cuda", dtype=torch.bfloat16)
    ids = random_ids(20, 6, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = expert_products(rows, ids.flatten(), 2, experts, None, gathers=True)
    for _ in range(3):
        ids.copy_(random_ids(20, 6, 2))
        rows.normal_()
        graph.replay()
        assert distance(output, expected_of(rows, ids, experts, weights, gathers=True)) < 6e-3


@pytest.mark.parametrize(
    "options",
    [
        {}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}, {"num_kv_blocks": 24}, {"dtype": "float16"},
        {"speculation": "suffix"},
    ],
    ids=["graphs", "eager", "chunks", "preemption", "float16", "drafts"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["mxfp4", "ct-nvfp4", "ct-w4a16", "fp8-block"])
def test_an_engine_answers_as_the_dequantised_model(form, options, tmp_path, placed):
    folder = save_mxfp4(tmp_path) if form == "mxfp4" else save_quantised(tmp_path, form, small_moe())
    prompts = random_prompts(6, low=40, high=70)
    plain = loader.load_weights(
        str(folder), EngineConfig(device="cpu", dtype="float32", quantization="dequantize")
    ).model
    sizes = {"block_size": 16, "num_kv_blocks": 200, "max_model_len": 256, "max_num_seqs": 8}
    options = (
        sizes | {"dtype": "bfloat16", "skip_tokenizer_init": True, "device": "cuda", "quantization": "keep"} | options
    )
    with LLM(folder, **options) as llm:
        found = [output.outputs[0] for _ in range(2) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        check_engine(llm)
    assert placed.count(TiledExperts) == 2
    for prompt, output in zip(prompts * 2, found, strict=True):
        tokens = output.token_ids
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        right = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        ours = torch.tensor([each[token].logprob for each, token in zip(output.logprobs, tokens, strict=True)])
        differences = (ours - right).abs()
        # A row near a tie of its router may have another expert.
        assert differences.topk(2).values[1] < 0.5 and differences.mean() < 0.1
