"""Quantised checkpoints whose weights stay quantised: the library's dequantised weights bit for bit, and its tokens."""

import json
from collections import Counter

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from nanovllm import LLM
from nanovllm.errors import ModelLoadError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import loader
from nanovllm.models.experts import KEPT_EXPERTS
from nanovllm.models.limits import check_stored_limits
from nanovllm.models.quantised.blocks import QuantisedLinear, SortedLinear
from nanovllm.models.quantised.kept_experts import KeptExperts
from tests.support import quantised_checkpoints
from tests.support.cpu_answers import ON_A_CPU, OPTIONS, by_transformers, tokens
from tests.support.packed_columns import FORMS, save_columns
from tests.support.quantised_checkpoints import (
    LLAMA_FORMS,
    as_modelopt,
    by_library,
    by_producer,
    decompressed,
    rewrite,
    save_mxfp4,
    save_quantised,
    small_llama,
    small_moe,
)

pytestmark = ON_A_CPU
CPU = torch.device("cpu")


def load(folder, **options):
    return loader.load_module(str(folder), EngineConfig(**({"dtype": "bfloat16"} | options)), CPU)


def open_llm(folder, **options):
    return LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **OPTIONS, **options)


def with_kept_weights(model, folder):
    """A model of `transformers` in float32 with the weights that are kept of a folder."""
    own = load(folder, dtype="float32")
    for name, weight in parts_of(own):
        model.get_submodule(name).weight.data = weight
    for name, module in experts_of(own).items():
        plain, kept = model.get_submodule(name), vars(module)[KEPT_EXPERTS]
        for projection, product in (("gate_up_proj", kept._up), ("down_proj", kept._down)):
            weight = torch.stack([linear.dequantise() for linear in product.linears])
            getattr(plain, projection).data = weight.transpose(1, 2).contiguous() if plain.is_transposed else weight
    return model


def parts_of(model):
    """Quantised layers by the path of the plain one, with their weights in the order of its inputs."""
    for name, module in model.named_modules():
        if isinstance(module, SortedLinear):
            weight = torch.empty(module.linear.out_features, module.linear.in_features)
            weight[:, module.order] = module.linear.dequantise()
            yield name, weight
        elif isinstance(module, QuantisedLinear) and not name.endswith(".linear"):
            yield name, module.dequantise()


def experts_of(model):
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module.__dict__.get(KEPT_EXPERTS), KeptExperts)
    }


def linears(model):
    found = (QuantisedLinear, nn.Linear)
    return {name: module for name, module in model.named_modules() if isinstance(module, found)}


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def with_scales_in(folder, dtype):
    """The scales' dtype in files is usually the model's."""

    def cast(name, value):
        is_scale = name.endswith(("weight_scale", "weight_scale_inv"))
        return {name: value.to(dtype) if is_scale and value.dtype in (torch.float32, torch.bfloat16) else value}

    rewrite(folder, cast, settings_of(folder))
    return folder


@pytest.mark.costly
@pytest.mark.parametrize("form", LLAMA_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_weight_is_bit_for_bit_what_the_library_dequantises(form, dtype, tmp_path):
    """compressed-tensors rounds to the dtype of the scales, of 4-bit floats to bfloat16; the library does not round."""
    folder = with_scales_in(save_quantised(tmp_path, form), dtype)
    expected = linears(by_library(folder))
    kept = linears(load(folder))
    rounded = torch.float32 if form.startswith("fp8") else torch.bfloat16 if "fp4" in form else dtype
    assert kept.keys() == expected.keys()
    assert [type(module) for module in kept.values()].count(QuantisedLinear) == 14
    for name, module in kept.items():
        own = module.dequantise().to(rounded) if isinstance(module, QuantisedLinear) else module.weight
        assert torch.equal(own.float(), expected[name].weight), name
    for name, module in linears(load(folder, quantization="int8")).items():  # dequantised first
        assert isinstance(module, QuantisedLinear) and module.kind == "int8", name


@pytest.mark.costly
@pytest.mark.parametrize("form", LLAMA_FORMS)
def test_float32_tokens_are_those_of_the_library_on_the_dequantised_weights(form, tmp_path):
    folder = save_quantised(tmp_path, form)
    with open_llm(folder) as llm:
        assert tokens(llm) == by_transformers(with_kept_weights(by_library(folder), folder))


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that was made, outside of the library's threads."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor and leaf.device.type == "cpu":
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("form", LLAMA_FORMS)
def test_kept_weights_take_the_bytes_of_the_file_at_load_and_after(form, tmp_path, monkeypatch):
    """No weight is ever there dequantised: no tensor is larger than one module's in the file, up to 4 % for scales of
    blocks, which each row has in memory.
    """
    model = small_llama(hidden_size=512, intermediate_size=1536, num_layers=1, num_attention_heads=8)
    folder = save_quantised(tmp_path, form, model)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    with LargestTensor() as peak:
        module = load(folder)
    stored = Counter()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name.rpartition(".")[0]] += tensor.nbytes * (2 if name.endswith("zero_point") else 1)  # bytes in memory
    resident = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rotary = sum(tensor.nbytes for name, tensor in resident.items() if "inv_freq" in name)
    assert sum(tensor.nbytes for tensor in resident.values()) - rotary <= 1.04 * sum(stored.values())
    assert peak.num_bytes <= 1.04 * max(stored.values())


def save_mixed(folder, form):
    """A checkpoint of this form, with attention in int8 but a plain v_proj."""
    save_quantised(folder, form, is_quantised=lambda name: "mlp" in name)
    mixed = settings_of(folder)
    save_quantised(other := folder / "other", "ct-int8-channel", is_quantised=lambda name: "v_proj" not in name)
    attention = {name: value for name, value in load_file(other / "model.safetensors").items() if "self_attn" in name}
    mixed["config_groups"]["group_1"] = settings_of(other)["config_groups"]["group_0"]
    rewrite(folder, lambda name, value: {} if "self_attn" in name else {name: value}, mixed)
    rewrite(folder, lambda name, value: {name: value} | (attention if name == "lm_head.weight" else {}), mixed)
    return folder


def test_a_mixed_checkpoint_is_kept_module_by_module(tmp_path):
    """Other bits for the attention than for the rest, and a plain layer: what a module's tensors are decides."""
    save_mixed(tmp_path, "ct-w4a16")
    kinds = {
        name.rpartition(".")[2]: getattr(module, "kind", "").split()[:1]
        for name, module in linears(load(tmp_path)).items()
    }
    assert kinds == {
        "q_proj": ["int8"], "k_proj": ["int8"], "v_proj": [], "o_proj": ["int8"], "lm_head": [],
        "gate_proj": ["uint4"], "up_proj": ["uint4"], "down_proj": ["uint4"],
    }  # fmt: skip


def test_biases_and_a_tied_head_stay(tmp_path):
    model = small_llama(family="qwen2", hidden_size=256, tie_word_embeddings=True, num_layers=1)
    folder = save_quantised(tmp_path, "ct-w4a16", model)
    own = load(folder)
    assert own.lm_head.weight is own.model.embed_tokens.weight
    assert isinstance(own.model.layers[0].self_attn.q_proj, QuantisedLinear)
    for name in ("q_proj", "v_proj"):
        bias = getattr(own.model.layers[0].self_attn, name).bias
        assert torch.equal(bias, getattr(model.model.layers[0].self_attn, name).bias)
    with open_llm(folder) as llm:
        assert tokens(llm) == by_transformers(by_library(folder))


def broken(folder, name, change):
    """Change one tensor of the file; None takes it out."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed.contiguous()}), file, metadata={"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj"


def test_widths_without_a_kernel_are_dequantised_one_by_one_and_one_line_says_so(tmp_path, info_log, monkeypatch):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    monkeypatch.setitem(quantised_checkpoints._COMPRESSED, "groups of 16", ({"weights": weights}, "pack-quantized"))
    folder = save_mixed(tmp_path, "groups of 16")
    expected = linears(by_library(save_quantised(tmp_path / "whole", "groups of 16"), torch.bfloat16))
    own = linears(load(folder))
    for name, module in own.items():
        assert isinstance(module, QuantisedLinear) == name.endswith(("q_proj", "k_proj", "o_proj")), name
        assert "mlp" not in name or torch.equal(module.weight, expected[name].weight), name
    lines = [record.message for record in info_log.records if "dequantised" in record.message]
    assert lines == ["6 quantised weights are held dequantised: no kernel multiplies uint4 in runs of 16"]


# ------------------------------------------------------------------------------------------------------ GPTQ and AWQ


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_gptq_and_awq_are_kept_in_float16_as_their_readers_compute_them(form, tmp_path):
    folder, expected = save_columns(tmp_path, form)
    kept = dict(parts_of(load(folder)))
    assert kept.keys() == expected.keys() and len(kept) == 14
    for name, weight in kept.items():
        assert torch.equal(weight.half(), expected[name]), name
    dequantised = load(folder, quantization="int8", dtype="float16")  # by way of plain weights
    assert all(module.kind == "int8" for module in linears(dequantised).values())


def test_the_converter_of_compressed_tensors_reads_the_same_awq_weights(tmp_path):
    folder, expected = save_columns(tmp_path, "awq")
    tensors = load_file(folder / "model.safetensors")
    for name, weight in expected.items():
        parts = (tensors[f"{name}.{suffix}"] for suffix in ("qweight", "scales", "qzeros"))
        codes, scale, zeros = AutoAWQConverter()._convert_gemm_module(*parts)
        spread = [each.repeat_interleave(128, dim=1) for each in (scale, zeros)]
        assert torch.equal((codes.half() - spread[1].half()) * spread[0], weight), name


@pytest.mark.costly
@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_gptq_and_awq_are_those_of_the_dequantised_weights(form, tmp_path):
    """With act-order the layers are not fused, but packed one by one."""
    folder, _ = save_columns(tmp_path / "packed", form)
    with open_llm(folder) as llm:
        model = llm._engine.model_runner.binding.model
        assert not any(module.blocks.numel() for module in model.modules() if isinstance(module, QuantisedLinear))
        found = tokens(llm)
    small_llama().save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    assert found == by_transformers(with_kept_weights(plain, folder))


BROKEN_COLUMNS = {
    "groups": ("gptq act-order", "g_idx", lambda groups: groups.clamp(max=1), "the inputs are not in 3 groups of 128"),
    "zeros": ("gptq", "qzeros", lambda zeros: zeros[:2], "qzeros (I32 [2, 32]) of model.safetensors does not fit"),
    "no zeros": ("awq", "qzeros", lambda zeros: None, "has no zeros, but "),
    "another": ("awq", "qweight", lambda weight: weight[:, :31], "its shape would be [384, 32]"),
    "symmetric": ("gptq 8 bits", "qzeros", lambda zeros: zeros + 1, "qzeros holds zero points other than 128"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_COLUMNS)
def test_files_of_gptq_and_awq_that_contradict_themselves_are_refused(case, tmp_path):
    form, suffix, change, message = BROKEN_COLUMNS[case]
    folder, _ = save_columns(tmp_path, form)
    broken(folder, f"{DOWN}.{suffix}", change)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert message in str(caught.value) and DOWN in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- experts

MOE_FORMS = ("ct-fp8-channel", "ct-int8-channel", "ct-w4a16", "ct-nvfp4", "fp8-block", "mxfp4")
# Experts that transformers 5.24 does not read (8-bit integers), or without their global scale (NVFP4).
BY_PRODUCER = ("ct-int8-channel", "ct-nvfp4")


def save_moe(folder, form):
    """Experts in files one by one, or of GPT-OSS all of a layer together, by inputs and with biases."""
    return save_mxfp4(folder) if form == "mxfp4" else save_quantised(folder, form, small_moe())


def by_reference(folder, form, dtype=torch.float32):
    """The model that `transformers` dequantises, or of the weights that compressed-tensors does."""
    if form in BY_PRODUCER:
        return by_producer(folder.parent / "plain", form, small_moe(), dtype)
    return by_library(folder, dtype)


@pytest.mark.costly
@pytest.mark.parametrize("form", MOE_FORMS)
def test_experts_stay_quantised_and_are_those_of_the_library(form, tmp_path):
    folder = save_moe(tmp_path / "quantised", form)
    own, library = load(folder), by_reference(folder, form, torch.bfloat16)
    assert len(experts_of(own)) == 2
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    resident = sum(tensor.nbytes for tensor in [*own.parameters(), *own.buffers()])
    assert resident <= 1.05 * stored
    exact = with_kept_weights(by_reference(folder, form), folder)
    for name, parameter in library.named_parameters():
        assert torch.equal(exact.get_parameter(name).to(parameter.dtype), parameter), name
    plain = load(folder, quantization="int8")  # dequantised first; experts are not quantised on load
    for name in experts_of(own):
        expected = library.get_submodule(name).down_proj.bfloat16()
        assert torch.equal(plain.get_submodule(name).down_proj, expected), name


@pytest.mark.costly
@pytest.mark.parametrize("form", MOE_FORMS)
@pytest.mark.parametrize("eager", [False, True])
def test_tokens_of_experts_are_those_of_the_dequantised_weights(form, eager, tmp_path, caplog):
    """Packed, and dequantised expert by expert where there are no kernels."""
    folder = save_moe(tmp_path / "quantised", form)
    with (
        open_llm(folder, enforce_eager=eager) as llm,
    ):
        assert ("each step dequantises them" in caplog.text) == eager
        assert loader.identity_of("a", llm.config, llm._engine.model_runner.binding.model) == "a:kept"
        found = experts_of(llm._engine.model_runner.binding.model)
        assert [module.down_proj.numel() == 0 for module in found.values()] == [not eager] * 2
        assert tokens(llm) == by_transformers(with_kept_weights(by_reference(folder, form), folder))


@pytest.mark.parametrize("name", ["up_proj", "experts.2.up"])
def test_experts_beside_plain_ones_are_held_dequantised(name, tmp_path, info_log):
    folder = save_quantised(tmp_path, "ct-fp8-channel", small_moe(), is_quantised=lambda module: name not in module)
    own = load(folder)
    reason = "they are no linear layers, or joined otherwise than by rows of one format"
    assert not experts_of(own) and reason in info_log.text
    scheme, _ = quantised_checkpoints.settings_of("ct-fp8-channel")
    stored = load_file(folder / "model.safetensors")
    for number in range(4):
        module = f"model.layers.0.mlp.experts.{number}.up_proj"
        parts = {key.rpartition(".")[2]: value for key, value in stored.items() if key.startswith(module)}
        wanted = decompressed(parts, scheme) if len(parts) > 1 else parts["weight"]
        found = own.model.layers[0].mlp.experts.gate_up_proj[number].chunk(2)[1]
        assert torch.equal(found, wanted.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_experts_of_a_layer_in_one_tensor_are_kept_or_dequantised(dtype, tmp_path):
    """No kernel multiplies e5m2."""
    model = small_moe()
    model.save_pretrained(tmp_path)
    stored, wanted = {}, {}
    for name, weight in model.state_dict().items():
        if "experts" in name:
            scale = 0.5 + torch.rand(len(weight), *(size // 128 for size in weight.shape[1:]))
            stored |= {name: weight.to(dtype), f"{name}_scale_inv": scale}
            spread = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            wanted[name] = weight.to(dtype).float() * spread
    settings = quantised_checkpoints.settings_of("fp8-block")[1]
    rewrite(tmp_path, lambda name, value: {} if "experts" in name else {name: value}, settings)
    rewrite(tmp_path, lambda name, value: {name: value} | (stored if name == "lm_head.weight" else {}), settings)
    own = load(tmp_path, dtype="float32")
    plain = load(tmp_path, dtype="float32", quantization="dequantize")
    assert len(experts_of(own)) == (2 if dtype == torch.float8_e4m3fn else 0) and len(wanted) == 4
    for name, module in experts_of(own).items():
        kept = vars(module)[KEPT_EXPERTS]
        found = torch.stack([linear.dequantise() for linear in kept._up.linears])
        assert torch.equal(found, wanted[f"{name}.gate_up_proj"]), name
    for name, weight in wanted.items():
        assert torch.equal(plain.get_parameter(name), weight), name


def test_nvfp4_whose_global_scale_is_no_reciprocal_is_read_so(tmp_path):
    """modelopt's convention: one that takes the two for each other would be wrong by the square of the scale."""
    folder = save_quantised(tmp_path, "ct-nvfp4", small_llama(num_layers=1))
    reciprocal = linears(load(folder))
    as_modelopt(folder)
    stored = load_file(folder / "model.safetensors")
    for name, module in linears(load(folder)).items():
        if isinstance(module, QuantisedLinear):
            codes, scale, whole = (stored[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
            numbers = unpack_fp4_from_uint8(codes, len(codes), 2 * codes.shape[1], dtype=torch.float32)
            expected = numbers.unflatten(1, (-1, 16)) * (scale.float() * whole)[..., None]
            assert torch.equal(module.dequantise(), expected.flatten(1)), name
            torch.testing.assert_close(module.dequantise(), reciprocal[name].dequantise(), rtol=1e-6, atol=0)
    broken(folder, f"{DOWN.replace('1', '0')}.weight_scale_2", lambda whole: whole * 0)
    with pytest.raises(
        ModelLoadError, match=r"down_proj\.weight_scale_2 .*: it is \[0\.0\], and must be one number other than 0"
    ):
        load(folder)


def test_fp8_checkpoints_hold_4_bit_floats_as_bytes(tmp_path):
    """Two in a byte of int8, beside layers of 8-bit floats, with exponents in place of the scales of blocks."""
    folder = save_quantised(tmp_path, "ct-mxfp4", small_llama(num_layers=1))
    reference = by_library(folder, torch.bfloat16)

    def renamed(name, value):
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            return {f"{module}.weight": value.view(torch.int8)}
        is_scale = suffix == "weight_scale"
        return {f"{module}.weight_scale_inv": value.view(torch.float8_e8m0fnu)} if is_scale else {name: value}

    rewrite(folder, renamed, quantised_checkpoints.settings_of("fp8-block")[1])
    for name, module in linears(load(folder)).items():
        if isinstance(module, QuantisedLinear):
            assert torch.equal(module.dequantise().bfloat16(), reference.get_submodule(name).weight), name
    assert "float4" in load(folder).model.layers[0].mlp.up_proj.kind


@pytest.mark.parametrize(
    "form, suffix, change, message",
    [
        ("ct-fp8-channel", "weight", lambda weight: weight.view(torch.uint8) | 127, "values that are no numbers"),
        ("ct-mxfp4", "weight_scale", lambda scale: scale | 255, "the exponent 255, which is no number"),
    ],
)
def test_values_that_are_no_numbers_are_refused_by_name(form, suffix, change, message, tmp_path):
    folder = save_quantised(tmp_path, form)
    broken(folder, f"{DOWN}.{suffix}", lambda values: change(values).view(values.dtype))
    with pytest.raises(ModelLoadError, match=f"{DOWN}.{suffix} holds {message}"):
        load(folder)


def test_exact_activations_are_for_weights_that_stay_quantised(tmp_path):
    folder = str(save_quantised(tmp_path, "ct-w4a16", small_llama(num_layers=1)))
    check_stored_limits(folder, EngineConfig(exact_activations=True))
    with pytest.raises(ValueError, match="are not quantised, so no weights are multiplied as bytes"):
        check_stored_limits(folder, EngineConfig(exact_activations=True, quantization="dequantize"))
