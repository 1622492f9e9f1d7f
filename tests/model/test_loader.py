"""Loading by name: required files, errors that name what is missing, options that are honoured."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from nanovllm import LLM, EngineConfig, ModelLoadError, UnsupportedModelError
from nanovllm.models.loader import identity_of, load_tokenizer
from tests.support.llms import generate, greedy, token_ids
from tests.support.quantised_checkpoints import configure
from tests.support.tiny_models import edit_json, random_prompts, save_tiny, tiny_model, tiny_tokenizer

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 33, "max_model_len": 256}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole folder; tests that spoil one take a copy."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", eos_token_ids=[7, 9])


@pytest.fixture
def spoil(saved, tmp_path):
    """A copy of the folder without some of its files."""

    def copy_without(*patterns):
        return Path(shutil.copytree(saved, tmp_path / "spoilt", ignore=shutil.ignore_patterns(*patterns)))

    return copy_without


@pytest.fixture
def shards(tmp_path):
    """A folder whose weights are in several files."""
    tiny_model().save_pretrained(tmp_path / "shards", max_shard_size="1MB")
    tiny_tokenizer().save_pretrained(tmp_path / "shards")
    return tmp_path / "shards"


def dtypes(llm):
    binding = llm._engine.model_runner.binding
    return {parameter.dtype for parameter in binding.model.parameters()}, binding.caches.of_layers[0][0].dtype


def answers(llm):
    return token_ids(generate(llm, random_prompts(3), greedy(8)))


# ------------------------------------------------------------------------------------------------------- local folders


def test_a_local_folder_gives_the_saved_weights_and_tokenizer(saved):
    with LLM(saved, **OPTIONS) as llm, LLM(tiny_model(), **OPTIONS) as original:
        assert answers(llm) == answers(original)
        (output,) = generate(llm, "The capital")
        assert output.prompt_token_ids == tiny_tokenizer()("The capital")["input_ids"]


@pytest.mark.parametrize("name", ["./tiny", "tiny"])
def test_a_string_names_a_folder_before_any_hub_id(name, saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    with LLM(name, **OPTIONS) as llm:
        assert len(answers(llm)) == 3


@pytest.mark.parametrize("method", ["aqlm", "one of a later release"])
def test_a_quantised_checkpoint_is_refused_before_its_weights_are_read(spoil, monkeypatch, method):
    folder = spoil()
    configure(folder, {"quant_method": method, "bits": 4})
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(
        UnsupportedModelError, match=f"LlamaForCausalLM has quantised weights.*{method}.*compressed-tensors"
    ):
        LLM(folder)


def test_weights_in_shards_load(shards):
    assert len(list(shards.glob("*.safetensors"))) > 1
    with LLM(shards, **OPTIONS) as llm, LLM(tiny_model(), **OPTIONS) as original:
        assert answers(llm) == answers(original)


def test_every_end_of_sequence_token_of_the_generation_config_is_honoured(saved):
    assert GenerationConfig.from_pretrained(saved).eos_token_id == [7, 9]
    with LLM(saved, **OPTIONS) as llm:
        assert set(llm._engine.input_processor.limits.eos_token_ids) == {7, 9}


def test_the_end_of_sequence_token_of_the_tokenizer_serves_when_the_configs_name_none():
    with LLM(tiny_model(), tokenizer=tiny_tokenizer(eos_token="<|end|>"), **OPTIONS) as llm:
        assert llm._engine.input_processor.limits.eos_token_ids == (tiny_tokenizer().convert_tokens_to_ids("<|end|>"),)


def test_another_tokenizer_may_be_given_as_an_object_or_a_folder(spoil, saved):
    folder = spoil("tokenizer*")
    for tokenizer in (tiny_tokenizer(), saved, str(saved)):
        with LLM(folder, tokenizer=tokenizer, **OPTIONS) as llm:
            assert generate(llm, "The capital")[0].prompt == "The capital"


def test_loading_prints_nothing(saved, capfd):
    LLM(saved, **OPTIONS).close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "%" not in err, "a progress bar"


# --------------------------------------------------------------------------------------------------- dtype and device


def test_dtype_auto_takes_the_checkpoints_own(tmp_path):
    with LLM(save_tiny(tmp_path / "half", dtype=torch.bfloat16), **OPTIONS) as llm:
        assert dtypes(llm) == ({torch.bfloat16}, torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_chosen_dtype_holds_for_weights_and_cache(saved, dtype):
    with LLM(saved, dtype=dtype, **OPTIONS) as llm:
        assert dtypes(llm) == ({getattr(torch, dtype)}, getattr(torch, dtype))
        assert len(answers(llm)) == 3


# ------------------------------------------------------------------------------------------------------ what is missing


def refusal(model, **options):
    with pytest.raises(ModelLoadError) as caught:
        LLM(model, **(OPTIONS | options))
    return str(caught.value)


@pytest.mark.parametrize(
    "left_out, words",
    [
        ("config.json", ["config.json"]),
        ("*.safetensors", ["weights", "*.safetensors"]),
        ("tokenizer*", ["tokenizer.json", "tokenizer=..."]),
        ("*", ["config.json"]),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused_by_name(spoil, left_out, words):
    folder = spoil(left_out)
    assert all(part in refusal(folder) for part in (str(folder), *words))


def test_a_file_in_place_of_a_folder_is_refused(saved):
    message = refusal(saved / "config.json")
    assert "is a file" in message
    assert str(saved / "config.json") in message


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "~/no-such-folder", "no/such/folder"])
def test_a_path_to_nothing_is_refused_at_once_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("asked the hub"))
    message = refusal(name)
    assert "there is no folder" in message
    assert "no" in message


@pytest.mark.parametrize("name, words", [("config.json", "config.json"), ("tokenizer.json", "")])
def test_a_file_that_is_not_json_is_refused(spoil, name, words):
    folder = spoil()
    (folder / name).write_text("{ not json")
    message = refusal(folder)
    assert str(folder) in message and words in message


def test_a_model_that_is_no_causal_language_model_is_refused(spoil):
    folder = spoil()
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    assert str(folder) in refusal(folder)


def test_weights_that_were_cut_short_are_refused(spoil):
    folder = spoil()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert str(folder) in refusal(folder)


def test_a_missing_shard_is_refused_by_name(shards):
    missing = sorted(shards.glob("*.safetensors"))[1]
    missing.unlink()
    assert missing.name in refusal(shards)


@pytest.mark.parametrize(
    "field, value, words",
    [("model_type", "perceptron-1957", "perceptron-1957"), ("num_hidden_layers", 3, "layers.2")],
    ids=["an unknown architecture", "a layer that the weights lack"],
)
def test_a_config_that_does_not_fit_is_refused_and_nothing_filled_with_random_numbers(spoil, field, value, words):
    folder = spoil()
    edit_json(folder / "config.json", **{field: value})
    assert words in refusal(folder)


def test_weights_of_another_shape_are_refused(spoil):
    folder = spoil()
    edit_json(folder / "config.json", intermediate_size=96)
    assert str(folder) in refusal(folder)


def test_a_tokenizer_folder_that_is_not_there_is_refused(saved):
    assert "/no/such/tokenizer" in refusal(saved, tokenizer="/no/such/tokenizer")


# ---------------------------------------------------------------------------------------------------------------- hub


def test_commit_and_quantisation_are_part_of_a_models_identity(monkeypatch):
    monkeypatch.setattr(
        "nanovllm.models.loader.try_to_load_from_cache", lambda *_, **__: "/cache/snapshots/abc/config.json"
    )
    assert identity_of("org/model", EngineConfig()) == "org/model:abc"
    assert identity_of("org/model", EngineConfig(quantization="int8")) == "org/model:abc:int8"


def test_a_load_leaves_the_librarys_progress_bars_as_they_were(saved):
    enable_progress_bar()
    load_tokenizer(str(saved), None, EngineConfig())
    assert is_progress_bar_enabled()


def test_a_hub_id_that_cannot_be_reached_is_a_model_load_error_that_names_it(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
    message = refusal("somebody/some-model")
    assert "somebody/some-model" in message
    assert "cannot be reached" in message


@pytest.mark.full
def test_a_hub_id_offline_fails_within_seconds_and_without_a_traceback_of_the_library():
    """In a process of its own, since the library reads the setting when it is imported."""
    code = (
        "import time\nfrom nanovllm import LLM, ModelLoadError\nfrom transformers import AutoModelForCausalLM\n"
        "start = time.monotonic()\ntry:\n    LLM('somebody/some-model')\nexcept ModelLoadError as error:\n"
        "    print(f'{time.monotonic() - start:.1f}', error)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    seconds, _, message = child.stdout.partition(" ")
    assert float(seconds) < 10
    assert "somebody/some-model" in message


def test_revision_and_trust_remote_code_reach_the_hub(monkeypatch):
    seen = []

    def note(_source, **options):
        seen.append(options)
        raise OSError("that is all")

    def note_config(_source, **options):
        seen.append(options)
        return PreTrainedConfig()

    monkeypatch.setattr("nanovllm.models.hub.is_reachable", lambda *_, **__: True)
    monkeypatch.setattr(AutoConfig, "from_pretrained", note_config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", note)
    refusal("somebody/some-model", revision="v2", trust_remote_code=True)
    assert [options["revision"] for options in seen] == ["v2", "v2"]
    assert all(options["trust_remote_code"] is True for options in seen)


def test_a_tokenizer_of_its_own_is_not_looked_up_at_the_models_revision(saved, monkeypatch):
    seen = []

    def note(_source, **options):
        seen.append(options)
        raise OSError("that is all")

    monkeypatch.setattr("nanovllm.models.hub.is_reachable", lambda *_, **__: True)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", note)
    assert "that is all" in refusal(saved, tokenizer="somebody/some-tokenizer")
    assert seen[0] == {"trust_remote_code": False, "local_files_only": False}


def test_a_loaded_tokenizer_does_not_warn_of_indexing_errors_in_a_text_that_is_refused_anyway(tmp_path, monkeypatch):
    save_tiny(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path, model_max_length=8).save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", pytest.fail)
    tokenizer = load_tokenizer(tmp_path, None, EngineConfig())
    assert tokenizer.model_max_length == 8
    assert len(tokenizer("one two " * 20)["input_ids"]) > 8


def test_a_revision_of_a_local_folder_is_refused(saved):
    with pytest.raises(ValueError, match=r"revision is 'v2'.*no hub model"):
        LLM(saved, revision="v2")


def test_a_local_folder_is_never_looked_up_on_the_hub(saved, monkeypatch):
    seen = []
    for loader in (AutoModelForCausalLM, AutoTokenizer):
        load = loader.from_pretrained

        def note(*arguments, load=load, **options):
            seen.append(options["local_files_only"])
            return load(*arguments, **options)

        monkeypatch.setattr(loader, "from_pretrained", note)
    LLM(saved, **OPTIONS).close()
    assert seen == [True, True]
