"""The kernels for each class of processors that this one belongs to; forms that are wrong are left out, in a line."""

import copy
import ctypes
import shutil

import pytest
import torch
from torch import nn

from nanovllm import LLM
from nanovllm.device import cpp_compiler
from nanovllm.errors import KernelBuildError
from nanovllm.fast import row_kernels
from nanovllm.fast.kernels import cpp as kernels
from nanovllm.fast.kernels import cpp_sampling, processor_classes, start_check
from nanovllm.fast.kernels.cpp import CompilerError
from nanovllm.fast.kernels.packed_product import PANEL
from nanovllm.fast.kernels.processor_classes import NON_X86, VARIABLE, X86, own_classes, rounding_class, targets
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.models.packed_linears import OneDnnLinear
from tests.support.cpu_answers import ON_A_CPU, OPTIONS, by_transformers, tokens
from tests.support.paged_cases import TRAITS, PagedCase, assert_dense, cpp
from tests.support.tiny_models import DTYPES, save_tiny, tiny_model

pytestmark = ON_A_CPU

CLASSES = [target.name for target in targets({})]
MIXED = [(33, 1), (0, 17), (48, 150), (7, 1), (16, 16), (0, 64), (5, 3)]
TILES = "_tile_dpbf16ps(1, 4, 7)"
PRODUCT = "low[i] += value * first"


def build_broken(monkeypatch, folder, file, right, wrong):
    """Let kernels be compiled from a copy of their sources in which `right` has become `wrong`."""
    shutil.copytree(kernels.SOURCES, folder / "csrc")
    path = folder / "csrc" / file
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    for module in (kernels, cpp_sampling):
        monkeypatch.setattr(module, "SOURCES", folder / "csrc")
    monkeypatch.setenv("NANOVLLM_CACHE", str(folder))
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-O0"))


# --------------------------------------------------------------------------------------------------- the right forms


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES)
def test_attention_and_products_are_right_in_every_class(monkeypatch, name):
    monkeypatch.setenv(VARIABLE, name)
    case = PagedCase(MIXED, dtype=torch.bfloat16)
    backend = cpp(case)
    case.check(case.run(backend))
    shared = PagedCase([(96, 1), (100, 1), (97, 1), (111, 1)], dtype=torch.bfloat16, shared=6)
    shared.check(shared.run(cpp(shared)))
    assert backend._kernels[0].kernels.target == name  # the comparison at start found nothing


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [48, *[pytest.param(size, marks=pytest.mark.slow) for size in (16, 80, 128)]])
@pytest.mark.parametrize("name", [CLASSES[0], pytest.param(CLASSES[-1], marks=pytest.mark.slow)])
def test_heads_that_do_not_fill_a_tiles_depth_are_right(monkeypatch, name, head_dim):
    monkeypatch.setenv(VARIABLE, name)
    assert_dense(cpp, MIXED, dtype=torch.bfloat16, head_dim=head_dim)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_trait_is_right_in_every_class(monkeypatch, name, traits, dtype):
    monkeypatch.setenv(VARIABLE, name)
    assert_dense(cpp, MIXED, dtype=dtype, **traits)


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES[1:])
def test_sampling_is_that_of_torch_to_the_bit_in_every_class(monkeypatch, name):
    """The kernels that `row_kernels.load_row_kernels` compares, which says no line."""
    monkeypatch.setenv(VARIABLE, name)
    assert row_kernels.first_wrong(cpp_sampling.load_row_kernels()) is None


@DTYPES
@pytest.mark.parametrize("factor", [1.0, 0.99, 1.01])
def test_the_comparison_at_start_finds_a_factor_of_one_percent(factor, dtype):
    plain = kernels.load_kernels(dtype, 64, 3)

    def scaled(product, rows, own, num_rows, threads):
        plain.linear(product, rows, own, num_rows, threads)
        size = num_rows * 2 * PANEL
        buffer = (ctypes.c_char * (size * dtype.itemsize)).from_address(own)
        torch.frombuffer(buffer, dtype=dtype).mul_(factor)

    changed = copy.copy(plain)
    changed.linear = scaled
    wrong = start_check.first_wrong(changed, 64, 64)
    assert wrong is None if factor == 1.0 else "products of 1 by 64 differ" in str(wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_programs_default_dtype_changes_nothing_of_the_comparison(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert row_kernels.load_row_kernels() is not None
    finally:
        torch.set_default_dtype(before)


@pytest.mark.full
def test_a_whole_model_answers_as_transformers_does_in_the_least_class(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, CLASSES[-1])
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-O1"))  # half of the time
    with LLM(save_tiny(tmp_path / "model", "qwen3"), **OPTIONS) as llm:
        runner = llm._engine.model_runner
        assert [own.target for own in runner.choice.kernels] == [CLASSES[-1]] and runner.binding.fused_layers
        assert tokens(llm) == by_transformers(tiny_model("qwen3"))


# ------------------------------------------------------------------------------------------------------ which class


def test_a_processors_flags_say_its_classes():
    zen_3 = frozenset({"avx2", "fma", "avx"})
    zen_4 = zen_3 | {"avx512f", "avx512bw", "avx512_bf16"}
    assert [each.name for each in own_classes(frozenset(), "x86_64")] == ["plain"]
    assert [each.name for each in own_classes(zen_3, "x86_64")] == ["avx2", "plain"]
    assert [each.name for each in own_classes(zen_4 - {"avx512_bf16"}, "x86_64")] == ["avx512", "avx2", "plain"]
    assert own_classes(zen_4, "x86_64") == list(X86[1:])
    assert own_classes(zen_4 | {"amx_bf16", "amx_tile"}, "x86_64") == list(X86)
    assert own_classes(frozenset({"asimd", "sve"}), "aarch64") == list(NON_X86)


def test_the_own_class_is_compiled_for_the_very_processor():
    assert targets({})[0].flags == ("-march=native",)
    assert all(target.flags != ("-march=native",) for target in targets({})[1:])


def test_an_unknown_class_is_refused_with_those_that_there_are(monkeypatch, tmp_path):
    folder = save_tiny(tmp_path / "model")
    for wrong in ("amx2", "AVX2", "neon"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{VARIABLE} is '{wrong}'.*{CLASSES[-1]}.*leave it out"):
            LLM(folder, **OPTIONS)
    monkeypatch.setattr(processor_classes, "processor_flags", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(processor_classes.platform, "machine", lambda: "x86_64")
    with pytest.raises(ValueError, match=r"'avx512'.*classes are avx2, plain"):  # a better one would crash
        targets({VARIABLE: "avx512"})


# -------------------------------------------------------------------------------------------------------- wrong forms


@pytest.mark.full
def test_wrong_matrix_tiles_are_left_out_for_the_next_class(monkeypatch, tmp_path, caplog):
    """On a processor without tiles nothing is wrong, and no line says so."""
    build_broken(monkeypatch, tmp_path, "tiles.h", TILES, "_tile_dpbf16ps(1, 4, 6)")
    own = kernels.load_kernels(torch.bfloat16, 64, 3)
    lines = [line for line in caplog.messages if "are not used" in line]
    has_tiles = CLASSES[0] == "amx"
    assert own.target == CLASSES[has_tiles]
    assert len(lines) == has_tiles
    assert all("for amx are not used" in line and "products of" in line for line in lines)


# Of matrix tiles, which the class of this processor may have.
WRONG_TILES = [
    ("tiles.h", "_tile_dpbssd(2, 5, 6)", "_tile_dpbssd(2, 4, 6)", "8 bits in runs of 192"),
    ("tiles.h", "_tile_loadd(5, rows + kTileRows * stride, stride)", "_tile_loadd(5, rows, stride)", "decodes"),
    ("decode_tiles.h", "_mm512_unpackhi_epi16(first, second)", "_mm512_unpackhi_epi16(first, first)", "decodes"),
]


@pytest.mark.parametrize("file, right, wrong, what", WRONG_TILES if CLASSES[0] == "amx" else [])
def test_the_comparison_at_start_names_the_tiles_that_are_wrong(monkeypatch, tmp_path, file, right, wrong, what):
    build_broken(monkeypatch, tmp_path, file, right, wrong)
    monkeypatch.setattr(kernels, "targets", lambda: targets({})[:1])  # one build
    with pytest.raises(KernelBuildError, match=f"wrong on this processor: .*{what}"):
        kernels.load_kernels(torch.bfloat16, 64, 3)


WRONG_FORMS = [
    (torch.float32, "row_products.h", PRODUCT, f"{PRODUCT} * 1.001f", "products of 1 by 64"),
    (torch.float32, "decode_vectors.h", "state.total * rescale", "state.total", "decodes"),
    (torch.float32, "query_lanes.h", "total += found", "total += found * 0.99f", "decodes with a common prefix"),
    (torch.float32, "query_lanes.h", "position < firsts", "position <= firsts", "chunks"),
    (torch.float32, "decoder_layer.cpp", "first, low, high)", "first, low, low)", "products of"),
    # Only where scores are far from the maximum, or from that of earlier tokens: all was right with scores below 10.
    (torch.float32, "lanes.h", "x < -87.0f", "x < -870.0f", "decodes"),
    (torch.bfloat16, "vectors.h", "x < -87.0f", "x < -870.0f", "decodes"),
    (torch.float32, "decode_vectors.h", "std::max(state.maximum, largest(maxima))",
     "std::isinf(state.maximum) ? largest(maxima) : state.maximum", "decodes"),
    (torch.float32, "query_lanes.h", "found > maximum ?", "(found > maximum) & (before == kLeast) ?", "chunks"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("dtype, file, right, wrong, what", WRONG_FORMS)
def test_the_comparison_at_start_names_the_form_that_is_wrong(monkeypatch, tmp_path, dtype, file, right, wrong, what):
    build_broken(monkeypatch, tmp_path, file, right, wrong)
    monkeypatch.setenv(VARIABLE, CLASSES[-1])  # one build
    with pytest.raises(KernelBuildError, match=f"wrong on this processor: {what}"):
        kernels.load_kernels(dtype, 64, 3)


def compile_with(monkeypatch, folder, refused):
    """Let a compiler be used that does not know these flags, as one that is older than the processor."""
    compiler = folder / "old-g++"
    flags = "|".join(f'*" {flag} "*' for flag in refused.split())
    lines = ["#!/bin/sh", f'case " $* " in {flags})', 'echo "error: unrecognized option" >&2; exit 1;;', "esac"]
    compiler.write_text("\n".join([*lines, f'exec {cpp_compiler()} "$@"', ""]))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("NANOVLLM_CACHE", str(folder))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-O0"))
    kernels._warn_of_lesser_class.cache_clear()


@pytest.mark.full
@pytest.mark.skipif(CLASSES[-1] != "plain", reason="the classes are those of x86")
@pytest.mark.parametrize("refused", ["-march=native", "-march=native -march=x86-64-v3"])
def test_a_compiler_too_old_for_the_best_class_compiles_for_the_next(monkeypatch, tmp_path, caplog, refused):
    known = [target.name for target in targets({}) if not set(target.flags) & set(refused.split())]
    compile_with(monkeypatch, tmp_path, refused)
    own = kernels.load_kernels(torch.bfloat16, 64, 3)
    assert row_kernels.load_row_kernels() is not None
    assert own.target == known[0]
    (line,) = [line for line in caplog.messages if "error: unrecognized option" in line]
    left_out = CLASSES[: CLASSES.index(known[0])]
    assert f"compiled for {known[0]}, not for {', '.join(left_out)}: {tmp_path / 'old-g++'} failed" in line


def test_a_compiler_that_fails_for_every_class_is_said_once_with_its_words(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(FastLayers, "compile_layers", lambda *_: None)  # ten seconds
    folder = save_tiny(tmp_path / "model")
    compile_with(monkeypatch, tmp_path, "-shared")
    with pytest.raises(CompilerError, match=r"old-g.. failed: error: unrecognized option"):
        kernels.load_kernels(torch.bfloat16, 64, 3)
    with LLM(folder, **OPTIONS) as llm:
        assert llm._engine.model_runner.config.attention_backend == "sdpa"
        assert tokens(llm) == by_transformers(tiny_model())
    lines = [line for line in caplog.messages if "unrecognized option" in line]
    assert [line for line in lines if "sampling takes" not in line] == [line for line in lines if "is 'sdpa'" in line]
    assert sum("attention_backend is 'sdpa'" in line for line in lines) == 1


@pytest.mark.full
def test_with_no_right_form_a_model_answers_by_torch_and_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(FastLayers, "compile_layers", lambda *_: None)  # ten seconds
    folder = save_tiny(tmp_path / "model")
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-O0"))  # nothing is computed
    monkeypatch.setattr(kernels, "first_wrong", lambda *_: "decodes differ by up to 1.0e+00 of their size")
    monkeypatch.setenv(VARIABLE, CLASSES[-1])
    with LLM(folder, **OPTIONS) as llm:
        assert llm._engine.model_runner.config.attention_backend == "sdpa"
        assert tokens(llm) == by_transformers(tiny_model())
    assert any("attention_backend is 'sdpa'" in line and "decodes" in line for line in caplog.messages)
    with pytest.raises(ValueError, match=r"attention_backend='cpp' is unavailable.*decodes"):
        LLM(folder, attention_backend="cpp", **OPTIONS)


@pytest.mark.full
@pytest.mark.parametrize(
    "file, right, wrong, what",
    [
        ("draw.cpp", "score = level + noise", "score = level + 2 * noise", "draw other tokens"),
        ("rows.h", "0.693359375f", "0.6935f", "measure other log-probabilities"),
        ("logprobs.cpp", "values > own", "values >= own", "measure other log-probabilities"),
        ("penalties.cpp", "value / repetition", "value * repetition", "penalise or mask otherwise"),
    ],
)
def test_sampling_that_is_wrong_is_left_to_torch_and_said(monkeypatch, tmp_path, caplog, file, right, wrong, what):
    build_broken(monkeypatch, tmp_path, f"sampling/{file}", right, wrong)
    assert row_kernels.load_row_kernels() is None
    (line,) = [line for line in caplog.messages if "sampling takes torch's operations" in line]
    assert what in line


def test_a_product_of_one_dnn_that_is_wrong_is_left_to_the_module(monkeypatch, tmp_path, caplog):
    model = save_tiny(tmp_path)
    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, states: nn.functional.relu(states) @ self.wrong.T)
    monkeypatch.setattr(
        OneDnnLinear, "__init__", lambda self, linear: setattr(self, "wrong", linear.weight.data * 1.01)
    )
    with LLM(model, enforce_eager=True, **OPTIONS) as llm:
        assert tokens(llm) == by_transformers(tiny_model())
    lines = [line for line in caplog.messages if "oneDNN's product is wrong" in line]
    assert lines and len(lines) == len(set(lines))  # one a shape


def test_where_one_dnn_has_no_products_of_bfloat16_layers_stay_plain(monkeypatch, tmp_path):
    def refuse(weight):
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    with LLM(save_tiny(tmp_path / "model", dtype=torch.bfloat16), enforce_eager=True, **OPTIONS) as llm:
        assert len(tokens(llm)) > 0


@DTYPES
@pytest.mark.parametrize("wrong_from", [None, 0, 2040])
def test_a_product_of_one_dnn_is_not_compared_with_itself(monkeypatch, dtype, wrong_from):
    """The layer's own forward is as wrong, from some output on, or not: in bfloat16 it is oneDNN's."""
    right = nn.functional.linear

    def wrong(states, weight, bias=None):
        output = right(states, weight, bias)
        if wrong_from is not None:
            output[..., wrong_from:] *= 1.5
        return output

    if not OneDnnLinear.can_pack(dtype):
        pytest.skip(f"oneDNN has no products of {dtype} on this processor")
    torch.manual_seed(0)
    linear = nn.Linear(640, 2049, dtype=dtype)  # more than is compared at once
    by_one_dnn = OneDnnLinear(linear)
    monkeypatch.setattr(nn.functional, "linear", wrong)
    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, states: wrong(states, linear.weight, linear.bias))
    assert by_one_dnn.is_right(linear) == (wrong_from is None)


def test_the_rounding_class_names_byte_products_of_the_processors_own_instructions(monkeypatch):
    flags = frozenset({"avx512f", "avx512bw", "avx512_vnni", "avx2", "fma"})
    monkeypatch.setattr(processor_classes, "processor_flags", lambda: flags)
    monkeypatch.setattr(processor_classes.platform, "machine", lambda: "x86_64")
    assert rounding_class({}) == "avx512 avx512_vnni"
    assert rounding_class({VARIABLE: "avx2"}) == "avx2"
