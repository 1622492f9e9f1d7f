"""Weights that stay quantised on two ranks: each rank's part bit for bit, tokens of one rank, refusals with numbers."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.errors import UnsupportedModelError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import loader
from nanovllm.models.quantised.block_tensor import BlockTensor
from nanovllm.models.quantised.blocks import QuantisedLinear
from nanovllm.models.sharded_loading import check_shards
from tests.support import quantised_checkpoints as made
from tests.support.cpu_answers import ON_A_CPU, OPTIONS, tokens
from tests.support.packed_columns import FORMS, save_columns
from tests.support.quantised_checkpoints import LLAMA_FORMS, save_quantised, small_llama, small_moe

pytestmark = [
    pytest.mark.usefixtures("programs_are_forked"),
    ON_A_CPU,
]
WHOLE_RUNS = {"intermediate_size": 512}  # of 128 in each half
FLOAT32 = OPTIONS | {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu"}
ASYMMETRIC = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}


@pytest.fixture(autouse=True)
def groups_of_32(monkeypatch):
    monkeypatch.setitem(made._COMPRESSED, "ct-w4a16-asym-32", ({"weights": ASYMMETRIC}, "pack-quantized"))


def in_blocks(folder):
    """Parameters of a model that are read to be cut among ranks."""
    config = EngineConfig(dtype="float32")
    model = loader.load_module(str(folder), config, torch.device("cpu"), is_sharded=True)
    return {name: each for name, each in model.named_parameters() if isinstance(each, BlockTensor)}


@pytest.mark.parametrize("form", [*LLAMA_FORMS, *FORMS])
def test_a_part_of_the_blocks_is_that_part_of_the_weight(form, tmp_path):
    model = small_llama(**WHOLE_RUNS, num_layers=1)
    folder = save_columns(tmp_path, form, model)[0] if form in FORMS else save_quantised(tmp_path, form, model)
    found = in_blocks(folder)
    assert len(found) == 7
    for name, weight in found.items():
        rows, width = (size // 2 for size in weight.shape)
        plain = weight.plain()
        assert torch.equal(weight[rows:].plain(), plain[rows:]), name
        assert torch.equal(torch.cat([weight[rows:], weight.new_zeros(0, 2 * width)]).plain(), plain[rows:]), name
        for part in (slice(0, width), slice(width, 2 * width)):
            own = weight[:, part] if form.startswith("gptq") else weight[:, part].plain()
            assert torch.equal(own, plain[:, part]), name


def test_other_operations_compute_with_the_plain_weight(tmp_path):
    found = in_blocks(save_quantised(tmp_path, "ct-w4a16", small_llama(num_layers=1)))
    weight = found["model.layers.0.mlp.down_proj.weight"]
    plain = weight.plain()
    assert torch.equal(weight[:, 64:192], plain[:, 64:192]), "halves of two runs"
    assert torch.equal(weight[::2], plain[::2])
    assert torch.equal(weight.T @ weight, plain.T @ plain)
    assert torch.equal(torch.cat([weight, plain]), torch.cat([plain, plain]))


@pytest.mark.costly
@pytest.mark.parametrize("form", ["ct-w4a16-asym-32", "ct-int8-channel", "fp8-block", "ct-mxfp4", "experts"])
def test_tokens_of_two_ranks_are_those_of_one_and_of_the_dequantised_weights(form, tmp_path):
    model = small_moe() if form == "experts" else small_llama(**WHOLE_RUNS)
    folder = str(save_quantised(tmp_path, "ct-int8-channel" if form == "experts" else form, model))
    with LLM(folder, **FLOAT32, quantization="dequantize") as llm:
        wanted = tokens(llm)
    with LLM(folder, **FLOAT32, quantization="keep") as llm:
        assert tokens(llm) == wanted
    with LLM(folder, **FLOAT32, quantization="keep", tensor_parallel_size=2) as llm:
        model = llm._engine.model_runner.binding.model
        layer = model.model.layers[0]
        sizes = [(each.in_features, each.out_features) for each in layer.modules() if isinstance(each, QuantisedLinear)]
        assert sizes[:4] == [(256, 128), (256, 64), (256, 64), (128, 256)]
        assert len(sizes) == 7 or layer.mlp.experts.down_proj.dtype == torch.uint8
        assert tokens(llm) == wanted
        assert loader.identity_of("a", llm.config, model) == "a:kept"


REFUSED = {
    "blocks": ("fp8-block", r"layers\.0\.mlp\.down_proj .*: weights 192 to 384 of 384 are no whole runs of 128"),
    "order": ("gptq act-order", r"layers\.0\.self_attn\.o_proj .*: its inputs are sorted \(act-order\)"),
    "experts": ("moe", r"mlp\.experts\.down_proj .*: weights 192 to 384 of 384 are no whole runs of 128"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_with_its_numbers_or_dequantised(case, tmp_path, caplog):
    form, reason = REFUSED[case]
    if form in FORMS:
        folder, _ = save_columns(tmp_path, form)
    else:
        folder = save_quantised(tmp_path, *(("ct-w4a16", small_moe(384)) if form == "moe" else (form,)))
    options = {"device": "cpu", "tensor_parallel_size": 2}
    with pytest.raises(UnsupportedModelError, match=f"'keep', but tensor_parallel_size is 2, and .*{reason}"):
        check_shards(str(folder), EngineConfig(quantization="keep", **options))
    check_shards(str(folder), EngineConfig(**options))
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    caplog.clear()
    check_shards(str(folder), EngineConfig(quantization="dequantize", **options))
    assert not caplog.records
