"""The fingerprint of a model, which files of prefixes name: every byte of its weights, its form and its code."""

import os
import sys
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import fingerprint
from nanovllm.models.fingerprint import model_digest
from nanovllm.models.loader import load_weights
from nanovllm.models.quantised.blocks import QuantisedLinear
from tests.support.quantised import random_blocks
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import DTYPES, save_tiny, tiny_model

ROWS = 5_000  # of a linear layer, many more than any sample


def digest_of(source, **options):
    """The digest of a model as an engine loads it."""
    return model_digest(load_weights(str(source), EngineConfig(device="cpu", **options)).model)


@DTYPES
@pytest.mark.parametrize("row", [0, 7, ROWS - 1])
def test_one_element_of_a_large_tensor_makes_another_model(dtype, row):
    layer = nn.Linear(64, ROWS, dtype=dtype)
    before = model_digest(layer)
    assert model_digest(layer) == before
    with torch.no_grad():
        layer.weight[row, 31] += 0.5
    assert model_digest(layer) != before


def test_chunks_of_any_size_have_every_byte(monkeypatch):
    layer = nn.Linear(64, 100)
    whole = model_digest(layer)
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", 1000)
    assert model_digest(layer) == whole
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(weight.t().contiguous().t())  # the same values, in another order in memory
    assert model_digest(layer) == whole


def test_weights_rewritten_with_their_old_size_and_time_are_another_model(tmp_path):
    folder = save_tiny(tmp_path / "model", "llama")
    file = folder / "model.safetensors"
    before, stat = digest_of(folder), file.stat()
    weights = load_file(file)
    name = next(name for name in weights if "embed_tokens" in name)
    weights[name][7:13] += 0.25  # control tokens trained anew
    content = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(content, file, metadata={"format": "pt"})
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert digest_of(folder) != before


def test_a_copy_of_a_folder_is_the_same_model_and_another_form_of_its_weights_is_not(tmp_path):
    folder, copy = (save_tiny(tmp_path / name, "llama") for name in ("model", "copy"))
    found = [digest_of(folder, dtype=dtype) for dtype in ("float32", "bfloat16")]
    found += [digest_of(folder, dtype="float32", quantization=kind) for kind in ("int8", "int4")]
    assert digest_of(copy, dtype="float32") == found[0]
    assert len(set(found)) == len(found)


def test_a_gguf_file_with_one_other_element_is_another_model(tmp_path):
    model = tiny_model("llama")
    digests = []
    for number in range(2):
        path = tmp_path / f"{number}.gguf"
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[3, 5] += 0.5 * number
        write_gguf(path, model)
        digests.append(digest_of(path))
        assert digest_of(path) == digests[-1]
    assert digests[0] != digests[1]


def test_equal_bytes_of_blocks_in_another_format_are_another_model():
    blocks = random_blocks("Q4_K", 4, 256)
    as_others = QuantisedLinear("Q4_0", blocks)  # as many bytes a row
    assert model_digest(QuantisedLinear("Q4_K", blocks)) != model_digest(as_others)


def test_the_code_that_came_with_a_model_counts(tmp_path, monkeypatch):
    """With `trust_remote_code` the weights and the names of classes say nothing of it."""
    package = tmp_path / fingerprint.REMOTE_CODE / "model"
    package.mkdir(parents=True)
    (package / "modeling.py").write_text("from torch import nn\n\n\nclass Model(nn.ReLU): ...\n")
    (package / "rope.py").write_text("THETA = 10_000\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = import_module(f"{fingerprint.REMOTE_CODE}.model.modeling")
    try:
        digests = {model_digest(module.Model())}
        (package / "rope.py").write_text("THETA = 20_000\n")
        digests.add(model_digest(module.Model()))
    finally:
        for name in [name for name in sys.modules if name.startswith(fingerprint.REMOTE_CODE)]:
            del sys.modules[name]
    assert len(digests) == 2


def test_equal_bytes_of_another_shape_or_dtype_are_other_weights():
    digests = set()
    for shape, dtype in (((2, 3), torch.float16), ((3, 2), torch.float16), ((2, 3), torch.bfloat16)):
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        digests.add(model_digest(module))
    assert len(digests) == 3
