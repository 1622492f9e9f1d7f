"""The command line: errors in one line, every option a flag, and the module as a program."""

import dataclasses
import sys

import pytest

import nanovllm
from nanovllm import LLM, EngineConfig, SamplingParams
from nanovllm.cli.chat import NOT_FOR_CHAT
from nanovllm.features.structured_output import KINDS
from nanovllm.models.default_model import DEFAULT_MODEL
from tests.support.command_line import assert_refused, python

# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "arguments, named",
    {
        "one --temperature -1": "temperature & -1",
        "one --temperature nan": "temperature & nan",
        "one --top-p 0": "top_p & (0, 1]",
        "one --max-tokens 0": "max_tokens & at least 1",
        "one --max-tokens many": "--max-tokens & many",
        "one --block-size 17": "block_size & 17",
        "one --max-model-len 9999": "max_model_len & 9999 & 2048",
        "one --num-kv-blocks 2": "num_kv_blocks & 16",
        "one --num-kv-blocks 1000000000000": "not as much memory as was asked for & --num-kv-blocks",
        "one --attention-backend paged": "attention_backend & paged",
        "one --client-weights batch": "--client-weights & 'batch' & CLIENT=WEIGHT",
        "one --client-weights batch=0": "client_weights & 'batch' & between 0.001 and 1000",
        "one --no-such-option": "--no-such-option",
        "one --max-tok 5": "--max-tok",
        "one --file x": "--file & one of the two",
        "one --lines": "--format lines & standard input & Leave it out",
        "one --raw --system 'be brief'": "--system & --raw",
        "one --regex '(a'": "regex & unclosed group",
        "one --grammar /no/such/grammar": "--grammar & /no/such/grammar & there is no",
        "one --max-model-len 4x": "4x & 512MiB",
        "one --format jsonl": "--format & Leave one out",
        "--file /no/such/file": "/no/such/file",
        "''": "empty",
        f"'{500 * 'one '}'": "max_model_len (256)",
        "": "no prompt",
    }.items(),
)
def test_bad_arguments_are_refused_in_one_line_with_status_two(run, arguments, named):
    assert_refused(run(f"generate {arguments}"), named)


@pytest.mark.parametrize(
    "line, named",
    {
        "{not json": "line 2 & not JSON",
        '{"temperature": 0}': 'line 2 & "prompt" or "messages"',
        '{"prompt": "a", "messages": []}': "line 2 & one of the two",
        '{"prompt": "a", "temprature": 0}': "line 2 & temprature & temperature",
        '{"prompt": "a", "top_p": 0}': "2 & top_p",
        '{"prompt": "a", "structured_output": {"regex": "(b"}}': "request 2 & regex",
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}': "line 2 & run-batch",
        '{"prompt": "a", "max_tokens": "many"}': "2 & max_tokens & many",
        '{"messages": [{"role": "user"}]}': "conversation",
        "7": "7",
        '{"prompt": 7}': "7",
        "null": "line 2 & null",
        "[]": "empty",
        '""': "empty",
    }.items(),
)
def test_a_bad_line_of_jsonl_is_refused_and_named(run, line, named):
    assert_refused(run("generate --format jsonl", stdin=f'"good"\n{line}\n'), named)


def test_numbers_as_jsonl_are_not_one_prompt_of_several_tokens(run):
    assert_refused(run("generate --format jsonl", stdin="7\n8"), "prompt")


def test_a_folder_without_weights_is_refused(run, tmp_path, folder):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_refused(run("generate one", model=str(tmp_path)), "weights")


def test_bad_options_are_refused_before_the_model_is_loaded(run, monkeypatch):
    monkeypatch.setattr("nanovllm.llm.LLM.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    assert_refused(run("generate one --top-p 2"), "top_p")
    assert_refused(run("generate one --gpu-memory-utilization 2"), "gpu_memory_utilization")
    assert_refused(run("generate one --choice a --ignore-eos"), "ignore_eos")
    assert_refused(run("generate --format jsonl", stdin='"good"\n[1, "a"]\n'), "line 2 & whole numbers")
    assert_refused(run("generate --format jsonl", stdin='{"prompt": "a", "timeout": -1}'), "request 1 & timeout")
    assert_refused(run("generate one", model="/no/such/folder"), "/no/such/folder")
    assert_refused(run("generate one", model="smollm2"), "Did you mean smollm2-135m-instruct?")


def test_verbose_raises_the_error_itself(run):
    with pytest.raises(ValueError, match="top_p"):
        run("generate one --top-p 0 --verbose")


def test_an_interrupt_ends_with_the_status_of_a_shell(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    status, _, err = run("generate one")
    assert status == 130 and "Traceback" not in err


# --------------------------------------------------------------------------------------------------------- every option


OWN_FLAGS = {
    (EngineConfig, "seed"): ("engine_seed",),
    (EngineConfig, "policies"): ("policy",),
    (SamplingParams, "structured_output"): KINDS,
}


@pytest.mark.parametrize("name", ["generate", "chat"])
@pytest.mark.parametrize("options", [SamplingParams, EngineConfig])
def test_every_option_has_a_flag(command, name, options):
    status, shown, _ = command(f"{name} --help")
    assert status == 0
    for field in dataclasses.fields(options):
        if name == "chat" and options is SamplingParams and field.name in NOT_FOR_CHAT:
            assert f"--{field.name.replace('_', '-')} " not in shown
            continue
        for flag in OWN_FLAGS.get((options, field.name), (field.name,)):
            assert f"--{flag.replace('_', '-')}" in shown


def test_the_help_names_the_defaults_that_differ_from_pythons(command):
    shown = " ".join(command("generate --help")[1].split())
    assert "default here: 256" not in shown
    assert "generation_config.json" in shown
    assert "--raw completes it as it stands" in shown
    assert DEFAULT_MODEL in shown


def test_no_model_named_means_the_embedded_default(monkeypatch, command):
    def refuse(self, model, **_):
        raise ValueError(f"it is {model}")

    monkeypatch.setattr(LLM, "__init__", refuse)
    monkeypatch.setattr(sys, "stdin", None)
    assert_refused(command("generate one"), f"it is {DEFAULT_MODEL}")


def test_the_version_is_shown(command):
    assert command("--version")[:2] == (0, f"nanovllm {nanovllm.__version__}\n")


# ---------------------------------------------------------------------------------------------- as a process of its own


def test_help_does_not_wait_for_torch():
    code = "import sys\nfrom nanovllm.cli import main\nmain._parser().format_help()\nassert 'torch' not in sys.modules"
    child = python("-c", code)
    assert child.returncode == 0, child.stderr
