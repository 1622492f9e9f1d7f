"""Quantised checkpoints as their producers write them, read by `transformers` alone."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.quantised_checkpoints import LLAMA_FORMS, save_mxfp4, save_quantised, small_gpt_oss, small_llama


@pytest.mark.costly
@pytest.mark.parametrize("form", [*LLAMA_FORMS, "mxfp4"])
def test_producers_write_weights_near_those_of_the_model_in_fewer_bytes(form, tmp_path):
    plain = small_gpt_oss() if form == "mxfp4" else small_llama()
    folder = save_mxfp4(tmp_path) if form == "mxfp4" else save_quantised(tmp_path, form)
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["dequantize"] = True
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    for name, weight in plain.named_parameters():
        wanted = weight.float()
        assert torch.linalg.vector_norm(model.get_parameter(name) - wanted) <= 0.16 * torch.linalg.vector_norm(
            wanted
        ), name
    num_bytes = 2 * sum(parameter.numel() for parameter in plain.parameters())
    assert (folder / "model.safetensors").stat().st_size < 0.8 * num_bytes
