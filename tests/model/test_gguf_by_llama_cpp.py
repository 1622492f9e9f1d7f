"""Files of llama.cpp's own quantiser: the greedy tokens of `transformers` with the weights that `gguf` dequantises."""

import gguf
import pytest
import torch
from gguf.quants import dequantize

from nanovllm import LLM
from nanovllm.errors import UnsupportedModelError
from nanovllm.models.gguf.file import GGUFFile
from tests.support.cpu_answers import OPTIONS, by_transformers, tokens
from tests.support.tiny_gguf import row_order, write_gguf
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.slow
REASON = "llama-cpp-python is not installed"
# Types of the matrices in a file of each kind; K blocks of 256 do not fit rows of 320.
KINDS = {
    **{kind: {kind[:4], "Q6_K"} for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K")},
    "Q8_0": {"Q8_0"},
    "Q4_K_S": {"Q4_K", "Q5_K", "Q6_K"},
}
KINDS_OF_NARROW = {"Q4_K_S": {"Q5_0", "Q5_1", "Q8_0"}, "Q4_K_M": {"Q5_0", "Q8_0"}, "Q5_K_M": {"Q5_1", "Q8_0"}}


def model_of(width):
    heads = width // 64
    return tiny_model(
        num_layers=4,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=heads,
        num_key_value_heads=heads if heads % 2 else heads // 2,
        head_dim=64,
    )


def quantised(path, model, kind):
    """A file by llama.cpp's quantiser."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=REASON)
    whole = write_gguf(path / "whole.gguf", model, "F32", metadata={"rope.dimension_count": 64})
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    to = path / f"{kind}.gguf"
    assert llama_cpp.llama_model_quantize(str(whole).encode(), str(to).encode(), params) == 0
    return to


def take_weights(model, path):
    """Give a module those of a file, dequantised by `gguf`."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        tensor = stored[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(parameter.shape)
        order = row_order("llama", tensor.name, model.config)
        parameter.data = values if order is None else values[torch.from_numpy(order).argsort()]


@pytest.mark.parametrize(
    "width, kind, types",
    [*((256, *case) for case in KINDS.items()), *((320, *case) for case in KINDS_OF_NARROW.items())],
)
def test_a_file_of_each_kind_has_the_tokens_of_transformers(tmp_path, width, kind, types):
    model = model_of(width)
    path = quantised(tmp_path, model, kind)
    assert {tensor.kind for tensor in GGUFFile(path).tensors.values() if len(tensor.shape) > 1} == types
    take_weights(model, path)
    with LLM(path, dtype="float32", **OPTIONS) as llm:
        assert llm._engine.model_runner.binding.fused_layers
        assert tokens(llm) == by_transformers(model)


def test_a_kind_without_a_kernel_is_refused_by_its_types(tmp_path):
    path = quantised(tmp_path, model_of(256), "Q3_K_M")
    with pytest.raises(UnsupportedModelError, match=r"without a kernel \(Q3_K: "):
        LLM(path, dtype="float32", **OPTIONS)
