"""Quantised checkpoints with plain weights: those of the formats' own libraries, bit for bit, or refused by name."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Llama4ForCausalLM

from nanovllm import LLM
from nanovllm.cli.fit import _about
from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import loader
from nanovllm.models.default_model import ensure_default_model
from nanovllm.models.quantised import stored, stored_config
from nanovllm.models.quantised.blocks import QuantisedLinear
from nanovllm.models.quantised.rows import RowFormat
from nanovllm.models.sizes import read_sizes
from tests.support import quantised_checkpoints as made
from tests.support.class_cases import own_answers
from tests.support.cpu_answers import GREEDY, OPTIONS, PROMPTS, by_transformers, tokens
from tests.support.hubs import generate_once, serving
from tests.support.llms import generate, greedy, token_ids
from tests.support.quantised_checkpoints import (
    LLAMA_FORMS,
    as_modelopt,
    by_library,
    by_producer,
    compressed,
    configure,
    rewrite,
    save_mxfp4,
    save_quantised,
)
from tests.support.real_texts import prompts as real_prompts
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import tiny_tokenizer

CHUNKED = OPTIONS | {
    "device": "cpu",
    "quantization": "dequantize",
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
}
# Of experts `transformers` reads these wrong, or not at all.
UNREAD_EXPERTS = tuple(
    f"ct-{form}" for form in ("fp8-block", "int8-channel", "w4a16-asym", "nvfp4", "nvfp4-a4", "mxfp8")
)


def loaded(folder, **options):
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "quantization": "dequantize"} | options)
    return loader.load_weights(str(folder), config).model


def assert_same_weights(found, wanted):
    names = dict(wanted.named_parameters())
    assert names.keys() >= dict(found.named_parameters()).keys()  # older releases leave scales in the modules
    for name, weight in found.named_parameters():
        assert torch.equal(weight, names[name].to(weight.dtype)), name


def edit(folder, **changes):
    """Replace tensors of a folder by name; None takes one out."""
    file = folder / "model.safetensors"
    held = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file, metadata={"format": "pt"})


# -------------------------------------------------------------------------------------------------- weights and answers


@pytest.mark.costly
@pytest.mark.parametrize("form", ["ct-nvfp4", *(form for form in LLAMA_FORMS if form != "ct-nvfp4"), "mxfp4"])
def test_weights_and_answers_are_those_of_transformers(form, tmp_path):
    """Float32 tokens with prompts in chunks, and again with their prefixes cached; weights near those before."""
    folder = save_mxfp4(tmp_path) if form == "mxfp4" else save_quantised(tmp_path, form)
    model = loaded(folder)
    assert_same_weights(model, by_library(folder))
    plain = made.small_gpt_oss() if form == "mxfp4" else made.small_llama()
    for name, weight in plain.named_parameters():
        assert (model.get_parameter(name) - weight).norm() <= 0.16 * weight.float().norm(), name
    wanted = by_transformers(model)
    with LLM(folder, dtype="float32", **CHUNKED) as llm:
        assert tokens(llm) == wanted
        again = generate(llm, PROMPTS, GREEDY)
        assert token_ids(again) == wanted
        assert sum(output.num_cached_tokens for output in again) > 0


@pytest.mark.costly
@pytest.mark.parametrize("form", [*UNREAD_EXPERTS, *(form for form in LLAMA_FORMS if form not in UNREAD_EXPERTS)])
def test_experts_are_widened_each_by_its_own_tensors(form, tmp_path):
    folder = save_quantised(tmp_path / "quantised", form, made.small_moe())
    is_compressed = form.startswith("ct-")
    wanted = by_producer(tmp_path / "plain", form, made.small_moe()) if is_compressed else by_library(folder)
    assert_same_weights(loaded(folder), wanted)


def test_each_weight_of_a_mixed_checkpoint_is_read_in_its_own_format(tmp_path):
    """FP8 attention by pattern, other layers by class; `transformers` takes the first group for all."""
    folder = save_quantised(tmp_path / "mixed", "ct-w4a16", is_quantised=lambda name: "mlp" in name)
    scheme, settings = made.settings_of("ct-fp8-channel")
    rewrite(
        folder,
        lambda name, tensor: {
            name.replace("weight", part): value for part, value in compressed(tensor, scheme).items()
        } if "self_attn" in name else {name: tensor},
        {},
    )  # fmt: skip
    groups = settings["config_groups"]
    groups["group_0"]["targets"] = ["re:.*self_attn.*"]
    groups["group_1"] = made.settings_of("ct-w4a16")[1]["config_groups"]["group_0"]
    configure(folder, settings | {"format": "mixed-precision"})
    model = loaded(folder)
    for form, part in (("ct-fp8-channel", "self_attn"), ("ct-w4a16", "mlp")):
        wanted = by_producer(tmp_path / form, form, made.small_llama())
        for name, weight in model.named_parameters():
            assert part not in name or torch.equal(weight, wanted.get_parameter(name)), name


@pytest.mark.parametrize("form", ["ct-fp8-block", "fp8-block"])
def test_blocks_that_the_weight_ends_within_keep_their_size(form, tmp_path):
    """192 rows in blocks of 128: `transformers` takes two blocks of 96."""
    rows = {"num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 384, "intermediate_size": 200}
    model = made.small_llama(**rows)
    folder = tmp_path / "ragged"
    model.save_pretrained(folder)
    wanted = {}

    def quantised(name, tensor):
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        grid = [math.ceil(size / 128) for size in tensor.shape]
        scales = 0.5 + torch.rand(grid)
        values = tensor.float().clamp(-400, 400).to(torch.float8_e4m3fn)
        each = scales.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        wanted[name] = values.float() * each
        return {name: values, name + ("_scale_inv" if form == "fp8-block" else "_scale"): scales}

    rewrite(folder, quantised, made.settings_of(form)[1])
    found = loaded(folder)
    assert len({tuple(weight.shape) for weight in wanted.values()}) > 2
    for name, weight in wanted.items():
        assert torch.equal(found.get_parameter(name), weight), name


def test_the_text_part_of_a_model_of_several_modalities_is_read_alone(tmp_path):
    model = tiny_class_model("Llama4ForCausalLM").to(torch.bfloat16)
    folder = save_quantised(tmp_path, "fp8-tensor", model)
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    whole = {"model_type": "llama4", "architectures": ["Llama4ForCausalLM"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": settings}))
    found = loaded(folder)
    assert type(found) is Llama4ForCausalLM
    assert_same_weights(found, by_library(folder))


def test_a_base_without_a_head_embeds_by_its_dequantised_weights(tmp_path):
    folder = save_quantised(tmp_path, "fp8-block", made.small_llama().model)
    with LLM(folder, dtype="float32", **CHUNKED) as llm:
        (output,) = llm.embed([PROMPTS[1]], use_tqdm=False)
    base = by_library(folder, auto_class=AutoModel)
    wanted = base(torch.tensor([PROMPTS[1]])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(output.embedding), wanted / wanted.norm(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["fbgemm_fp8", "modelopt"])
def test_formats_that_no_producer_writes_here_are_read_by_their_description(method, tmp_path):
    """The same bytes as in a format of compressed-tensors, by the names of another producer."""
    form = "ct-fp8-channel" if method == "fbgemm_fp8" else "ct-nvfp4"
    folder = save_quantised(tmp_path, form)
    wanted = loaded(folder)
    if method == "modelopt":
        as_modelopt(folder)
    else:
        settings = {"quant_method": method, "activation_scale_ub": 1200.0}
        rewrite(folder, lambda name, tensor: {name: tensor.float() if "scale" in name else tensor}, settings)
    found = loaded(folder)
    for name, weight in found.named_parameters():  # compressed-tensors rounds NVFP4 to bfloat16
        tolerance = {"rtol": 2**-7, "atol": 1e-4} if method == "modelopt" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(weight, wanted.get_parameter(name), **tolerance)


# -------------------------------------------------------------------------------------------------------------- options


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    return save_quantised(tmp_path_factory.mktemp("fp8"), "fp8-block")


def test_what_is_dequantised_is_said_once_with_its_bytes(fp8, info_log, monkeypatch):
    monkeypatch.setattr(RowFormat, "has_kernel", False)
    for option, level in ((None, "WARNING"), ("dequantize", "INFO"), ("int8", "INFO")):
        info_log.clear()
        model = loaded(fp8, quantization=option)
        (said,) = [record for record in info_log.records if "are dequantised" in record.message]
        assert said.levelname == level and "(fp8, 8 bits" in said.message and "GB" in said.message
        assert any(isinstance(module, QuantisedLinear) for module in model.modules()) == (option == "int8")


def test_weights_in_another_form_are_of_another_prefix(fp8, monkeypatch):
    def identity(option):
        return loader.load_weights(str(fp8), EngineConfig(device="cpu", quantization=option)).identity

    assert identity("dequantize") == str(fp8)
    assert identity("int8") == f"{fp8}:int8"
    assert identity(None) == identity("auto") == identity("keep") == f"{fp8}:kept"


@pytest.mark.parametrize("option", ["keep", "dequantize"])
def test_an_option_that_contradicts_the_checkpoint_is_refused_with_both(option, tmp_path, monkeypatch):
    made.small_llama().save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=f"quantization is '{option}', but the weights of .* are not quantised"):
        LLM(tmp_path, **CHUNKED | {"quantization": option})


def test_weights_without_a_quantised_form_cannot_be_kept(fp8):
    config = AutoConfig.from_pretrained(fp8)
    with pytest.raises(
        UnsupportedModelError, match=r"is 'keep', .*\(fp8, 8 bits\) have no quantised form here on this GPU"
    ):
        stored_config.keeps(str(fp8), config, "keep", "this GPU")
    with pytest.raises(ValueError, match=r"quantization does not work with tensor_parallel_size: .* 'int8'"):
        EngineConfig(quantization="int8", tensor_parallel_size=2)


def test_weights_that_are_pickled_are_refused_with_the_remedy(tmp_path):
    folder = save_quantised(tmp_path, "fp8-block")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelLoadError, match=r"\(fp8, 8 bits\) has no \*\.safetensors, .* not from pickled files .*safetensors\.torch"
    ):
        loaded(folder)


# ------------------------------------------------------------------------------------------------------------ bad input

LAYER = "model.layers.1.mlp.down_proj."
ZEROS = {
    "a scale of a row too few": ("fp8-block", "weight_scale_inv", torch.zeros(1, 3), r"\[1, 3\].* would be \[2, 3\]"),
    "no scale": ("fp8-block", "weight_scale_inv", None, "has no scales"),
    "values of another dtype": ("fp8-block", "weight", torch.zeros(256, 384, dtype=torch.int32), "stored in I32"),
    "a scale of another dtype": ("fp8-block", "weight_scale_inv", torch.zeros(2, 3).long(), "stored in I64"),
    "no scales of channels": ("ct-int8-channel", "weight_scale", None, "has no scales"),
    "scales of tensors": ("ct-int8-channel", "weight_scale", torch.zeros(1), r"\[1\].* would be \[256, 1\]"),
    "groups too few": ("ct-w4a16", "weight_scale", torch.zeros(256, 2), r"\[256, 2\].* would be \[256, 3\]"),
    "a lying shape": ("ct-w4a16", "weight_shape", torch.tensor([256, 4096]), r"\[256, 4096\] integers of 4 bits"),
    "no zero points": ("ct-w4a16-asym", "weight_zero_point", None, "has no zeros"),
    "inputs in another order": ("ct-w4a16", "weight_g_idx", torch.zeros(384).int(), "weight_g_idx.* not in 3 groups"),
    "rows cut off": ("ct-w4a16", "weight_packed", torch.zeros(248, 48).int(), r"\[256, 384\] integers of 4 bits"),
    "words cut off": ("ct-w4a16", "weight_packed", torch.zeros(256, 47).int(), r"\[256, 384\] integers of 4 bits"),
    "bits of no group": ("ct-w4a16", "weight_packed", torch.zeros(256, 36).int(), r"\[256, 384\] integers of 4 bits"),
    "groups that do not divide": ("ct-w4a16", "weight_scale", torch.zeros(256, 5), r"\[256, 5\].* would be \[256, 3\]"),
    "zero points too few": ("ct-w4a16-asym", "weight_zero_point", torch.zeros(4, 3).int(), r"would be \[32, 3\]"),
    "channels too few": ("ct-int8-channel", "weight_scale", torch.zeros(255, 1), r"would be \[256, 1\]"),
    "no global scale": ("ct-nvfp4", "weight_global_scale", None, "has no unit"),
    "a global scale a row": ("ct-nvfp4", "weight_global_scale", torch.zeros(256), r"would be \[1\] or \[\]"),
    "plain values": ("ct-fp8-channel", "weight", torch.zeros(256, 384), "stored in F32"),
}  # fmt: skip


@pytest.mark.parametrize("form, part, value, said", ZEROS.values(), ids=ZEROS)
def test_tensors_that_do_not_fit_are_refused_by_name_before_weights_are_read(
    form, part, value, said, tmp_path, monkeypatch
):
    folder = save_quantised(tmp_path, form)
    edit(folder, **{f"{LAYER}{part}": value})
    monkeypatch.setattr("nanovllm.models.quantised.reader.load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelLoadError, match=f"{LAYER}.*{said}"):
        loaded(folder)


SETTINGS = {
    "unknown format": ({"format": "marlin-24"}, "marlin-24"),
    "rotated inputs": ({"transform_config": {"config_groups": {"u": 1}}}, "transform_config"),
    "groups of no scheme": ({"config_groups": {"group_0": {"weights": 4}}}, "is not understood: AttributeError"),
    "no group for a layer": ({"config_groups": {"group_0": {"targets": ["re:.*lm_head"], "weights": {"num_bits": 8}}}},
                             r"would be \[1, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("changes, said", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_contradict_the_files_are_refused(changes, said, tmp_path):
    folder = save_quantised(tmp_path, "ct-fp8-channel")
    settings = made.settings_of("ct-fp8-channel")[1]
    if "format" in changes:
        settings["config_groups"]["group_0"]["format"] = None
    configure(folder, settings | changes)
    with pytest.raises(ModelLoadError, match=said):
        loaded(folder)


def test_files_that_are_damaged_are_refused_before_weights_are_read(fp8, tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.models.quantised.reader.load", lambda *_, **__: pytest.fail("weights were read"))

    def damaged(name, change):
        folder = tmp_path / name
        shutil.copytree(fp8, folder)
        change(folder / "model.safetensors")
        return folder

    def cut(file):
        file.write_bytes(file.read_bytes()[:-100])

    def lengthen(file):
        file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])

    with pytest.raises(ModelLoadError, match=r"is truncated: 100 bytes"):
        loaded(damaged("cut", cut))
    with pytest.raises(ModelLoadError, match=r"its header alone would have 1,099,511,627,776"):
        loaded(damaged("long", lengthen))
    plain = damaged("plain", lambda file: None)
    made.small_llama().save_pretrained(plain)
    configure(plain, made.settings_of("fp8-block")[1])
    with pytest.raises(ModelLoadError, match=r"weights are quantised .* none of them is"):
        loaded(plain)
    index = json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
    missing = damaged("missing", lambda file: file.with_name("model.safetensors.index.json").write_text(index))
    with pytest.raises(ModelLoadError, match=r"names model-00001-of-00002\.safetensors, which is not in its folder"):
        loaded(missing)


def test_methods_are_those_that_are_read():
    assert set(stored.NAMES) == set(stored_config.METHODS)


def test_what_has_no_layout_is_dequantised_unless_it_is_to_be_kept(tmp_path):
    folder = save_quantised(tmp_path, "ct-w3a16", made.small_llama())
    assert_same_weights(loaded(folder, quantization=None), by_library(folder))
    with pytest.raises(
        UnsupportedModelError,
        match=r"no weight of .* has a quantised form here; .*: no kernel multiplies uint8 in runs of 128",
    ):
        loaded(folder, quantization="keep")


# ------------------------------------------------------------------------------------------------------ other crossings


def test_fit_tells_the_format_and_both_sizes(fp8):
    sizes = read_sizes(str(fp8), quantization="dequantize")
    model = made.small_llama()
    assert sizes.num_weights == model.num_parameters() and sizes.dtype == "bfloat16"
    assert sizes.weight_bytes == 2 * sizes.num_weights
    assert sizes.stored == "fp8, 8 bits"
    assert sizes.stored_bytes < (fp8 / "model.safetensors").stat().st_size < sizes.stored_bytes + 4096
    assert read_sizes(str(fp8), quantization="int8").weight_bytes == sizes.num_weights
    assert read_sizes(str(fp8)).weight_bytes == sizes.stored_bytes < sizes.weight_bytes
    assert read_sizes(str(fp8), device="cuda").weight_bytes == sizes.stored_bytes
    about = _about("fp8", sizes, "cpu", 2**30, 2**28)
    assert "weights       0.00 GB in memory, 0.00 GB in files (fp8, 8 bits)" in about
    with pytest.raises(ValueError, match="are not quantised"):
        model.save_pretrained(fp8.with_name("plain"))
        read_sizes(str(fp8.with_name("plain")), quantization="keep")


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"draft_model": True},
        {"quantization": "int8", "data_parallel_size": 2},
    ],
    ids=str,
)
def test_answers_of_other_engines_are_those_of_one(options, fp8):
    options = options | ({"speculation": "draft", "draft_model": str(fp8)} if "draft_model" in options else {})
    common = CHUNKED | {"dtype": "float32", "quantization": options.pop("quantization", "dequantize")}
    with LLM(fp8, **common) as llm:
        wanted = tokens(llm)
    with LLM(str(fp8), **common, **options) as llm:
        assert tokens(llm) == wanted


@pytest.mark.full
@pytest.mark.parametrize("form", ["ct-nvfp4", "ct-int8-channel", "mxfp8"])
def test_the_default_model_answers_real_text_as_transformers_does(form, tmp_path):
    """576 inputs are no multiple of 128, as in many small models."""
    source = AutoModelForCausalLM.from_pretrained(ensure_default_model(), dtype=torch.bfloat16)
    folder = save_quantised(tmp_path, form, source)
    model = by_library(folder)
    prompts = [prompt[:300] for prompt in real_prompts()[:6]]
    wanted = own_answers(model, prompts, 8)
    with LLM(folder, dtype="float32", **CHUNKED) as llm:
        for _ in range(2):
            assert token_ids(generate(llm, prompts, greedy(8))) == wanted


@pytest.mark.full
def test_a_quantised_model_of_a_hub_is_fetched_without_its_other_files(tmp_path):
    folder = tmp_path / "model"
    save_quantised(folder, "fp8-block")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    held = [dict(sorted(tensors.items())[part::2]) for part in range(2)]  # a weight's scale is in the other file
    for name, part in zip(names, held, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {name: names[part] for part in range(2) for name in held[part]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    tiny_tokenizer().save_pretrained(folder)
    (folder / "consolidated.safetensors").write_bytes(b"of another format")
    with serving({"own/tiny": folder}) as hub:
        done = generate_once("own/tiny", tmp_path / "cache", hub.endpoint, "--quantization", "dequantize")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "cache").rglob("*.safetensors")} == set(names)
