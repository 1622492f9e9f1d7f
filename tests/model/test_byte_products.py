"""Products of quantised weights with rows as bytes, on processors that multiply bytes (VNNI) without matrix tiles."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.fast.kernels import cpp
from nanovllm.fast.kernels.cpp import load_kernels
from nanovllm.fast.kernels.processor_classes import VARIABLE, processor_flags, targets
from nanovllm.models.packed_linears import PackedHead
from nanovllm.models.quantised.blocks import FORMATS
from tests.support.quantised import exact_product, random_layer
from tests.support.sanitizer import check_sanitized
from tests.support.tiny_models import save_tiny

# Compiler flags that leave this processor without tiles, and without AVX-512 as well, by the instructions needed.
VARIANTS = {
    "avx512_vnni": "-mno-amx-bf16 -mno-amx-int8 -mno-amx-tile",
    "avx_vnni": "-mno-amx-bf16 -mno-amx-int8 -mno-amx-tile -mno-avx512f",
}
OWN = [flag for flag in VARIANTS if flag in processor_flags()]
RUN, DEPTH = 32, 512
KINDS = (*FORMATS, "NVFP4")
pytestmark = pytest.mark.skipif(torch.cuda.is_available() or not OWN, reason="a CPU's own, with VNNI")


@pytest.fixture(scope="module", params=[(name, exact) for name in OWN for exact in (False, True)], ids=str)
def kernels(request):
    name, exact = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        patch.setattr(cpp, "FLAGS", (*cpp.FLAGS, *VARIANTS[name].split()))
        own = load_kernels(torch.bfloat16, 64, 3, exact_rows=exact)
    first = 5 if name == "avx512_vnni" else 1
    assert own.least_byte_rows == (0 if exact else first) and own.target == targets({})[0].name
    return own


def layer(kind, num_outputs=96, depth=DEPTH):
    bias = torch.randn(num_outputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    return random_layer(kind, num_outputs, depth, bias, dtype=torch.bfloat16)


def rows_of(num_rows, depth=DEPTH):
    """Runs of very different sizes."""
    generator = torch.Generator().manual_seed(num_rows)
    sizes = 10 ** (4 * torch.rand(num_rows, depth // RUN, 1, generator=generator) - 2)
    return (torch.randn(num_rows, depth // RUN, RUN, generator=generator) * sizes).flatten(1).bfloat16()


def rounded(rows, largest, run=RUN):
    """Each run as whole numbers up to `largest` times a scale."""
    runs = rows.float().unflatten(1, (-1, run))
    most = runs.abs().amax(dim=2, keepdim=True)
    inverse = torch.full_like(most, largest) / most  # `largest / most` rounds twice
    whole = (runs.double() * inverse.double()).round()  # as a fused multiplication and addition rounds
    return (whole * (most / largest).double()).flatten(1)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_product_is_that_of_rows_rounded_run_by_run(kind, num_threads, kernels):
    """To 8 bits, or 15 in two planes, in runs of the weights; among any number of rows a row has the same bits."""
    quantised, before = layer(kind), torch.get_num_threads()
    head, rows, weight = PackedHead(quantised, kernels), rows_of(43), quantised.dequantise().double()
    first = max(kernels.least_byte_rows, 5)
    largest = 127 if kernels.least_byte_rows else 127 * 128
    run = 16 if kind in ("Q6_K", "NVFP4") else RUN
    expected = rounded(rows, largest, run) @ weight.T + quantised.bias.double()
    sizes = rows.double().norm(dim=1, keepdim=True) * weight.norm(dim=1)
    try:
        torch.set_num_threads(num_threads)
        whole = head(rows).clone()
        assert ((whole.double() - expected).abs() <= (3e-6 if kernels.least_byte_rows else 2e-5) * sizes + 1e-6).all()
        for size in (first, 6, 7, 8, 13, 24):
            assert torch.equal(torch.cat([head(part).clone() for part in rows.split(size) if len(part) >= first]),
                               torch.cat([part for part in whole.split(size) if len(part) >= first]))  # fmt: skip
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_nothing_tiny_or_no_number_stay_so(kind, kernels):
    quantised, rows = layer(kind), rows_of(9)
    rows[0], rows[1, 7], rows[2, 70], rows[3, 511] = 0, torch.inf, -torch.inf, torch.nan
    rows[4], rows[5], rows[6] = 1e-39, 1e-36, 1e33
    output = PackedHead(quantised, kernels)(rows)
    assert torch.equal(output[0], quantised.bias.float())
    assert not output[1:4].isfinite().any() and output[4:].isfinite().all()
    expected = exact_product(quantised, rows[6:])
    assert ((output[6:].double() - expected).norm(dim=1) <= 0.02 * expected.norm(dim=1)).all()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="the sanitizer's library is found through g++")
def test_products_of_bytes_keep_within_their_memory(tmp_path):
    """Builds with AddressSanitizer for each set of instructions, in one process of their own."""
    script = f"""
        import torch
        from nanovllm.fast.kernels import cpp
        from nanovllm.models.packed_linears import PackedLinear
        from tests.support.quantised import KINDS, random_layer

        flags = (*cpp.FLAGS, "-fsanitize=address", "-O0")
        layers = [random_layer(kind, 64, 256, dtype=torch.bfloat16) for kind in KINDS]
        for variant in {[VARIANTS[name].split() for name in OWN]}:
            cpp.FLAGS = (*flags, *variant)
            for exact in (False, True):
                kernels = cpp.load_kernels(torch.bfloat16, 64, 3, exact_rows=exact)
                for layer in layers:
                    packed, rows = PackedLinear(layer, kernels), torch.ones(33, 256).bfloat16()
                    assert all(packed(rows[:n]).isfinite().all() for n in (1, 4, 5, 6, 7, 13, 33))
        print("no complaints")
    """
    check_sanitized(script, tmp_path)


@pytest.mark.costly
@pytest.mark.parametrize("exact", [False, True])
def test_an_engine_multiplies_as_its_option_says(exact, tmp_path, monkeypatch):
    """Also with outliers in its activations, after which 8 bits leave little of their neighbours: layers stay fused."""
    lesser = [target.name for target in targets({}) if target.name in ("avx512_bf16", "avx512")]
    monkeypatch.setenv(VARIABLE, lesser[0] if lesser else targets({})[0].name)
    folder = save_tiny(tmp_path, "llama", dtype=torch.bfloat16, hidden_size=192)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("layernorm.weight"):
            weight[::RUN] *= 12
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"num_kv_blocks": 40, "block_size": 16, "quantization": "int8"}
    with LLM(folder, exact_activations=exact, **sizes) as llm:
        runner = llm._engine.model_runner
        (own,) = runner.choice.kernels
        assert (own.least_byte_rows == 0) == exact
        assert runner.binding.fused_layers
