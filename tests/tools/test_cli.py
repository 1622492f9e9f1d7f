"""The command line: prompts from anywhere, text or JSON out, every option a flag, and errors in one line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm
from nanovllm import LLM, EngineConfig, SamplingParams, TraceWriter
from nanovllm.cli.main import NOT_FOR_CHAT, main
from nanovllm.engine import Engine
from nanovllm.model.default_model import DEFAULT_MODEL
from tests.support import traces
from tests.support.tiny_models import save_tiny, tiny_model, tiny_tokenizer

ENGINE = ["--enforce-eager", "--block-size", "16", "--num-kv-blocks", "65", "--max-model-len", "256"]
SHORT = ["--max-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(folder, capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command on the tiny model; returns exit status, standard output and standard error."""

    def run(command: str, *arguments: str, stdin: str = "", model: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status = main([command, "--model", model or str(folder), *ENGINE, *arguments])
        except SystemExit as exit_:  # argparse's way to refuse
            status = exit_.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def generated(folder: Path, prompt: Any, **params: Any) -> list[int]:
    """What the Python front door says to the same."""
    options = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 256}
    with LLM(folder, **options) as llm:
        params = {"temperature": 0.0, "max_tokens": 6} | params
        return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids


def assert_refused(result: tuple[int, str, str], *named: str) -> None:
    status, out, err = result
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    assert "error:" in err
    for part in named:
        assert part in err


# ------------------------------------------------------------------------------------------------------------ generate


def test_a_prompt_as_an_argument_is_completed_on_standard_output(run, folder):
    status, out, _ = run("generate", "The capital", *SHORT)
    answer = tiny_tokenizer().decode(generated(folder, "The capital"), skip_special_tokens=True)
    assert (status, out) == (0, answer + "\n")


def test_several_prompts_are_answered_in_order_each_under_its_name(run):
    status, out, _ = run("generate", "first prompt", "second prompt", *SHORT)
    assert status == 0
    assert out.index("--- first prompt\n") < out.index("--- second prompt\n")


def test_json_output_is_one_object_a_line(run, folder):
    status, out, _ = run("generate", "one", "two", "--json", *SHORT)
    assert status == 0
    first, second = records(out)
    assert (first["prompt"], second["prompt"]) == ("one", "two")
    assert first["token_ids"] == generated(folder, "one")
    assert first["text"] == tiny_tokenizer().decode(first["token_ids"], skip_special_tokens=True)
    assert (first["finish_reason"], first["stop_reason"], first["error"]) == ("length", None, None)
    assert first["num_prompt_tokens"] == len(tiny_tokenizer()("one")["input_ids"])
    assert first["num_cached_tokens"] == 0
    assert 0 < first["seconds_to_first_token"] < first["seconds"]


def test_standard_input_is_one_prompt_a_line(run):
    _, out, _ = run("generate", "--json", *SHORT, stdin="one\n\ntwo\n")
    assert [record["prompt"] for record in records(out)] == ["one", "two"]


def test_a_dash_as_the_file_is_standard_input(run):
    _, out, _ = run("generate", "--file", "-", "--json", *SHORT, stdin="one\n")
    assert [record["prompt"] for record in records(out)] == ["one"]


def test_a_file_is_one_prompt_a_line(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("größe\nzwei\n", encoding="utf-8")
    _, out, _ = run("generate", "--file", str(tmp_path / "prompts.txt"), "--json", *SHORT)
    assert [record["prompt"] for record in records(out)] == ["größe", "zwei"]


def test_a_file_in_text_format_is_one_prompt(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("one\ntwo")
    _, out, _ = run("generate", "--file", str(tmp_path / "prompt.txt"), "--format", "text", "--json", *SHORT)
    assert [record["prompt"] for record in records(out)] == ["one\ntwo"]


def test_a_jsonl_file_holds_texts_token_ids_messages_and_overrides(run, folder, tmp_path):
    lines = [
        "one",
        [5, 6, 7],
        {"prompt": "two", "max_tokens": 3},
        {"prompt": [5, 6, 7], "temperature": 1.0, "seed": 3},
        {"messages": [{"role": "user", "content": "three"}], "max_tokens": 2},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    status, out, _ = run("generate", "--file", str(path), "--json", *SHORT)
    answers = [record["token_ids"] for record in records(out)]
    assert status == 0
    assert answers[:2] == [generated(folder, "one"), generated(folder, [5, 6, 7])]
    assert answers[2] == generated(folder, "two", max_tokens=3)
    assert answers[3] == generated(folder, [5, 6, 7], temperature=1.0, seed=3)
    assert len(answers[4]) == 2


def test_a_priority_for_all_and_one_of_its_own_in_jsonl_decide_who_runs_first(run):
    lines = '"one"\n{"prompt": "two", "priority": -1}\n"three"\n'
    _, out, _ = run(
        "generate", "--format", "jsonl", "--json", "--priority", "3", "--max-num-seqs", "1", *SHORT, stdin=lines
    )
    one, two, three = (record["seconds_in_queue"] for record in records(out))
    assert two < one < three


def test_a_timeout_ends_an_answer_with_what_there_is_of_it(run):
    lines = '"one"\n{"prompt": "two", "timeout": null}\n'
    status, out, _ = run("generate", "--format", "jsonl", "--json", "--timeout", "1e-9", *SHORT, stdin=lines)
    assert status == 0
    assert [(r["finish_reason"], len(r["token_ids"])) for r in records(out)] == [("timeout", 0), ("length", 6)]


def test_a_timeout_ends_an_answer_of_a_chat(run):
    status, out, _ = run("chat", "--timeout", "1e-9", *SHORT, stdin="hello\n")
    assert (status, out) == (0, "\n")


@pytest.mark.parametrize(
    "flag", [("--timeout", "0"), ("--timeout", "soon"), ("--priority", "1.5"), ("--priority", "9999999999")]
)
def test_a_bad_priority_or_timeout_is_refused(run, flag):
    assert_refused(run("generate", "hello", *flag), flag[0].strip("-"))


def test_jsonl_comes_from_standard_input_too(run):
    _, out, _ = run("generate", "--format", "jsonl", "--json", *SHORT, stdin='{"prompt": "one", "max_tokens": 2}\n')
    (record,) = records(out)
    assert len(record["token_ids"]) == 2


def test_chat_puts_the_prompt_into_the_chat_template(run):
    _, out, _ = run("generate", "What is it?", "--chat", "--json", *SHORT)
    text = "<|user|>What is it?<|end|><|assistant|>"
    assert records(out)[0]["num_prompt_tokens"] == len(tiny_tokenizer()(text)["input_ids"])


def test_without_options_it_is_greedy_and_repeats(run):
    first, second = (run("generate", "one", "--json")[1] for _ in range(2))
    assert records(first)[0]["token_ids"] == records(second)[0]["token_ids"]
    assert len(records(first)[0]["token_ids"]) == 256 - len(tiny_tokenizer()("one")["input_ids"])


def test_sampling_flags_reach_the_request(run, folder):
    flags = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--seed", "5"]
    _, out, _ = run("generate", "one", "--json", *flags, *SHORT)
    expected = generated(folder, "one", temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=5)
    assert records(out)[0]["token_ids"] == expected
    assert expected != generated(folder, "one")


def test_flags_that_may_be_repeated_are_collected(run, folder):
    answer = generated(folder, "one")
    _, out, _ = run("generate", "one", "--json", "--stop-token-ids", "511", "--stop-token-ids", str(answer[2]), *SHORT)
    assert records(out)[0]["stop_reason"] == answer[2]


def test_biases_and_penalties_reach_the_request(run, folder):
    answer = generated(folder, "one")
    flags = ["--logit-bias", f"{answer[0]}=-100", "--logit-bias", f"{answer[1]}=-100", "--presence-penalty", "1.5"]
    _, out, _ = run("generate", "one", "--json", *flags, *SHORT)
    biases = {answer[0]: -100, answer[1]: -100}
    assert records(out)[0]["token_ids"] == generated(folder, "one", logit_bias=biases, presence_penalty=1.5) != answer
    assert_refused(run("generate", "one", "--logit-bias", "5"), "TOKEN_ID=BIAS")


def test_each_sample_is_a_line_of_json_or_a_piece_of_text(run, folder):
    flags = ["--n", "3", "--temperature", "1", "--seed", "5", *SHORT]
    _, out, _ = run("generate", "one", "two", "--json", *flags)
    assert [(r["prompt"], r["index"]) for r in records(out)] == [(p, i) for p in ("one", "two") for i in range(3)]
    assert records(out)[3]["token_ids"] == generated(folder, "two", temperature=1.0, seed=5)
    _, text, _ = run("generate", "one", *flags)
    assert [line for line in text.splitlines() if line.startswith("--- ")] == [
        "--- one [0]",
        "--- one [1]",
        "--- one [2]",
    ]


def test_log_probabilities_are_shown_as_json(run):
    status, out, _ = run("generate", "one", "--json", "--logprobs", "2", "--prompt-logprobs", "0", *SHORT)
    (record,) = records(out)
    assert status == 0
    assert [reports[0]["token_id"] for reports in record["logprobs"]] == record["token_ids"]
    assert all([report["rank"] for report in reports] == [1, 2] for reports in record["logprobs"])  # greedy
    prompt = tiny_tokenizer()("one")["input_ids"]
    assert record["prompt_logprobs"][0] is None
    assert [reports[0]["token_id"] for reports in record["prompt_logprobs"][1:]] == prompt[1:]
    assert_refused(run("generate", "one", "--logprobs", "2"), "with --json only")


def test_flags_of_text_and_prompt_reach_the_request(run):
    word, always = tiny_tokenizer().decode([65]), ["--logit-bias", "65=100"]
    _, out, _ = run("generate", "one two three", "--json", "--truncate-prompt-tokens", "2", *SHORT)
    assert records(out)[0]["num_prompt_tokens"] == 2
    _, out, _ = run("generate", "one", "--stop", 2 * word, "--include-stop-str-in-output", *always, *SHORT)
    assert out == 2 * word + "\n"
    _, out, _ = run("generate", "one", "--bad-words", word, *always, *SHORT)
    assert word not in out
    flags = ["--no-skip-special-tokens", "--logit-bias", "3=100"]
    _, out, _ = run("generate", "one", *flags, *SHORT)
    assert out == 6 * tiny_tokenizer().decode([3]) + "\n"


def test_a_processor_is_named_by_its_module(run, tmp_path, monkeypatch):
    (tmp_path / "my_processors.py").write_text("def always_65(ids, row):\n    row[65] += 1000\n    return row\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    _, out, _ = run("generate", "one", "--json", "--logits-processors", "my_processors:always_65", *SHORT)
    assert records(out)[0]["token_ids"] == [65] * 6
    for name in ("my_processors:nothing", "no_such_module:f", "my_processors"):
        assert_refused(run("generate", "one", "--logits-processors", name), "MODULE:FUNCTION")
    lines = json.dumps({"prompt": "one", "logits_processors": ["my_processors:always_65"]})
    assert_refused(run("generate", "--format", "jsonl", stdin=lines), "logits_processors must hold functions")


def test_engine_flags_reach_the_engine(run, monkeypatch):
    seen: list[EngineConfig] = []
    generate = LLM.generate

    def note(self, *arguments, **options):
        seen.append(self.config)
        return generate(self, *arguments, **options)

    monkeypatch.setattr(LLM, "generate", note)
    run("generate", "one", "--max-num-seqs", "3", "--no-enable-prefix-caching", "--engine-seed", "9", *SHORT)
    (config,) = seen
    assert (config.max_num_seqs, config.enable_prefix_caching, config.seed) == (3, False, 9)
    assert (config.block_size, config.num_kv_blocks, config.max_model_len) == (16, 65, 256)


def test_a_tokenizer_may_be_named(run, folder, tmp_path):
    bare = save_tiny(tmp_path / "bare", with_tokenizer=False)
    status, out, _ = run("generate", "one", "--tokenizer", str(folder), "--json", *SHORT, model=str(bare))
    assert status == 0
    assert records(out)[0]["token_ids"] == generated(folder, "one")


def test_a_progress_bar_is_shown_when_asked_for_and_never_on_standard_output(run):
    _, out, err = run("generate", "one", "two", "--progress", "--json", *SHORT)
    assert "2/2" in err
    assert len(records(out)) == 2


def test_no_progress_bar_is_shown_where_nobody_watches(run):
    assert "2/2" not in run("generate", "one", "two", *SHORT)[2]


def test_a_request_that_ends_with_an_error_is_reported_and_exits_with_one(tmp_path, run):
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[tiny_tokenizer()("zq")["input_ids"][0]] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    tiny_tokenizer().save_pretrained(tmp_path / "broken")
    status, out, err = run("generate", "zq", "one", "--json", *SHORT, model=str(tmp_path / "broken"))
    bad, good = records(out)
    assert status == 1
    assert "finite" in bad["error"]
    assert "finite" in err
    assert len(good["token_ids"]) == 6


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["one", "--temperature", "-1"], ["temperature", "-1"]),
        (["one", "--temperature", "nan"], ["temperature", "nan"]),
        (["one", "--top-p", "0"], ["top_p", "(0, 1]"]),
        (["one", "--max-tokens", "0"], ["max_tokens", "at least 1"]),
        (["one", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["one", "--block-size", "17"], ["block_size", "17"]),
        (["one", "--max-model-len", "9999"], ["max_model_len", "9999", "2048"]),
        (["one", "--num-kv-blocks", "2"], ["num_kv_blocks", "16"]),
        (["one", "--attention-backend", "paged"], ["attention_backend", "paged"]),
        (["one", "--no-such-option"], ["--no-such-option"]),
        (["one", "--max-tok", "5"], ["--max-tok"]),
        (["one", "--file", "x"], ["--file", "not both"]),
        (["one", "--format", "jsonl"], ["--format", "Leave it out"]),
        (["--file", "/no/such/file"], ["/no/such/file"]),
        ([""], ["empty"]),
        (["one " * 500], ["max_model_len (256)"]),
        ([], ["no prompt"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else value,
)
def test_bad_arguments_are_refused_in_one_line_with_status_two(run, arguments, named):
    assert_refused(run("generate", *arguments), *named)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{not json", ["line 2", "not JSON"]),
        ('{"temperature": 0}', ["line 2", '"prompt" or "messages"']),
        ('{"prompt": "a", "messages": []}', ["line 2", "one of the two"]),
        ('{"prompt": "a", "temprature": 0}', ["line 2", "temprature", "temperature"]),
        ('{"prompt": "a", "top_p": 0}', ["2", "top_p"]),
        ('{"prompt": "a", "max_tokens": "many"}', ["2", "max_tokens", "many"]),
        ('{"messages": [{"role": "user"}]}', ["conversation"]),
        ("7", ["7"]),
        ('{"prompt": 7}', ["7"]),
        ("null", ["line 2", "null"]),
        ("[]", ["empty"]),
        ('""', ["empty"]),
    ],
)
def test_a_bad_line_of_jsonl_is_refused_and_named(run, line, named):
    result = run("generate", "--format", "jsonl", "--json", *SHORT, stdin='"good"\n' + line + "\n")
    assert_refused(result, *named)


def test_a_lone_number_as_jsonl_is_no_prompt(run):
    """Not the token of that id: a list of token ids is a prompt, a number is a mistake."""
    assert_refused(run("generate", "--format", "jsonl", "--json", *SHORT, stdin="7\n"), "7")


def test_two_numbers_as_jsonl_are_not_taken_for_one_prompt_of_two_tokens(run):
    assert_refused(run("generate", "--format", "jsonl", "--json", *SHORT, stdin="7\n8\n"), "prompt")


def test_a_model_that_is_not_there_is_refused_by_name(run):
    assert_refused(run("generate", "one", model="/no/such/folder"), "/no/such/folder")


def test_a_folder_without_weights_is_refused(run, tmp_path, folder):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_refused(run("generate", "one", model=str(tmp_path)), "weights")


def test_bad_options_are_refused_before_the_model_is_loaded(run, monkeypatch):
    monkeypatch.setattr("nanovllm.llm.LLM.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    assert_refused(run("generate", "one", "--top-p", "2"), "top_p")
    assert_refused(run("generate", "one", "--gpu-memory-utilization", "2"), "gpu_memory_utilization")


def test_verbose_raises_the_error_itself(run):
    with pytest.raises(ValueError, match="top_p"):
        run("generate", "one", "--top-p", "0", "--verbose")


def test_an_interrupt_ends_with_the_status_of_a_shell(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    status, _, err = run("generate", "one")
    assert status == 130
    assert "Traceback" not in err


def test_without_a_command_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "usage: nanovllm" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- trace


def test_trace_writes_what_the_run_did_and_the_answers_stay_the_same(run, tmp_path):
    plain = run("generate", "one", "two", *SHORT)
    assert run("generate", "one", "two", "--trace", str(tmp_path / "out.json"), *SHORT)[:2] == plain[:2]
    trace = traces.read(tmp_path / "out.json")
    assert list(trace.names.values()) == ["0", "1"]
    assert [trace.total(name, "decode", "tokens") for name in ("0", "1")] == [5, 5]


def test_an_interrupted_run_leaves_a_whole_trace(run, tmp_path, monkeypatch):
    steps = iter(range(3))

    def interrupted(self):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(self)

    step = Engine.step
    monkeypatch.setattr(Engine, "step", interrupted)
    assert run("generate", "one", "two", "--trace", str(tmp_path / "out.json"), *SHORT)[0] == 130
    trace = traces.read(tmp_path / "out.json")
    assert [trace.lane(name)[-1].arguments["reason"] for name in ("0", "1")] == ["abort", "abort"]
    assert len(trace.steps) == 3


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.llm.LLM.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    assert_refused(run("generate", "one", "--trace", str(tmp_path / "nowhere" / "out.json")), "nowhere")


def test_a_disk_that_fills_up_costs_the_trace_and_not_the_answers(run, tmp_path, monkeypatch):
    def fill_up(self, config):
        begin(self, config)
        self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    begin = TraceWriter.begin
    monkeypatch.setattr(TraceWriter, "begin", fill_up)
    plain = run("generate", "one", *SHORT)
    status, out, err = run("generate", "one", "--trace", str(tmp_path / "out.json"), *SHORT)
    assert (status, out) == (2, plain[1])
    assert "No space left" in err


# --------------------------------------------------------------------------------------------------------- every option


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("options", [SamplingParams, EngineConfig])
def test_every_option_has_a_flag(command, options, capsys):
    shown = help_of(command, capsys)
    for field in dataclasses.fields(options):
        if command == "chat" and field.name in NOT_FOR_CHAT:
            assert f"--{field.name.replace('_', '-')} " not in shown
            continue
        name = "engine-seed" if (options, field.name) == (EngineConfig, "seed") else field.name.replace("_", "-")
        assert f"--{name}" in shown


def test_the_help_names_the_defaults_that_differ_from_pythons(capsys):
    shown = " ".join(help_of("generate", capsys).split())
    assert "default here: 256" in shown
    assert "default here: 0.0" in shown
    assert DEFAULT_MODEL in shown


def test_no_model_named_means_the_embedded_default(monkeypatch, capsys):
    seen: list[Any] = []

    def note(self, model, **_):
        seen.append(model)
        raise ValueError("that is all")

    monkeypatch.setattr(LLM, "__init__", note)
    assert main(["generate", "one"]) == 2
    assert seen == [DEFAULT_MODEL]


def test_the_version_is_shown(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"nanovllm {nanovllm.__version__}\n"


# ---------------------------------------------------------------------------------------------------------------- chat


def conversations_of(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations that the command hands to the chat template."""
    seen: list[list[dict[str, str]]] = []
    apply = LLM.apply_chat_template

    def note(self, messages):
        seen.append([dict(message) for message in messages])
        return apply(self, messages)

    monkeypatch.setattr(LLM, "apply_chat_template", note)
    return seen


def roles(conversation: list[dict[str, str]]) -> list[str]:
    return [message["role"] for message in conversation]


def test_chat_answers_each_line_of_piped_input(run):
    status, out, _ = run("chat", *SHORT, stdin="hello\nand again\n")
    assert status == 0
    assert out.endswith("\n")
    assert len(out.strip()) > 0


def test_chat_keeps_the_conversation_and_its_own_answers(run, monkeypatch):
    seen = conversations_of(monkeypatch)
    run("chat", *SHORT, stdin="hello\nand again\n")
    assert [roles(c) for c in seen] == [["user"], ["user", "assistant", "user"]]
    assert [seen[1][0]["content"], seen[1][2]["content"]] == ["hello", "and again"]


def test_chat_begins_with_the_system_prompt(run, monkeypatch):
    seen = conversations_of(monkeypatch)
    run("chat", "--system", "be brief", *SHORT, stdin="hello\n")
    assert seen[0][0] == {"role": "system", "content": "be brief"}


def test_reset_forgets_the_conversation_but_not_the_system_prompt(run, monkeypatch):
    seen = conversations_of(monkeypatch)
    run("chat", "--system", "be brief", *SHORT, stdin="hello\n/reset\nagain\n")
    assert [roles(c) for c in seen] == [["system", "user"], ["system", "user"]]
    assert seen[1][1]["content"] == "again"


def test_exit_leaves_and_what_follows_is_not_answered(run, monkeypatch):
    seen = conversations_of(monkeypatch)
    status, _, _ = run("chat", *SHORT, stdin="hello\n/exit\nnever\n")
    assert status == 0
    assert len(seen) == 1


def test_empty_lines_are_not_asked(run, monkeypatch):
    seen = conversations_of(monkeypatch)
    run("chat", *SHORT, stdin="\n   \nhello\n\n")
    assert len(seen) == 1


def test_chat_prints_the_answer_that_python_gives(run, folder):
    _, out, _ = run("chat", *SHORT, stdin="hello\n")
    answer = generated(folder, tiny_tokenizer()("<|user|>hello<|end|><|assistant|>")["input_ids"])
    assert out == tiny_tokenizer().decode(answer, skip_special_tokens=True) + "\n"


def test_an_interrupt_ends_an_answer_and_keeps_the_conversation(run, monkeypatch):
    seen = conversations_of(monkeypatch)
    stream = LLM.stream
    interrupts = iter([True, False])

    def interrupted(self, *arguments, **options):
        whole = stream(self, *arguments, **options)
        interrupt = next(interrupts)
        for output in whole:
            yield output
            if interrupt:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    status, _, _ = run("chat", *SHORT, stdin="hello\nagain\n")
    assert status == 0
    assert [roles(c) for c in seen] == [["user"], ["user", "assistant", "user"]]


def test_chat_with_a_model_without_a_chat_template_is_refused(run, tmp_path):
    folder = save_tiny(tmp_path / "plain", with_tokenizer=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    assert_refused(run("chat", stdin="hello\n", model=str(folder)), "chat template")


def test_a_conversation_that_outgrows_the_model_is_refused_with_the_numbers(run):
    status, _, err = run("chat", *SHORT, stdin="hello " * 400 + "\n")
    assert status == 2
    assert "max_model_len (256)" in err
    assert "Traceback" not in err


class Terminal(io.StringIO):
    """Lines that a person types."""

    def isatty(self) -> bool:
        return True


def test_at_a_terminal_a_conversation_that_outgrows_the_model_goes_on_without_what_was_too_long(
    folder, monkeypatch, capsys
):
    lines = iter(["hello", "hello " * 400, "and now"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or throw(EOFError()))
    assert main(["chat", "--model", str(folder), *ENGINE, *SHORT]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("max_model_len (256)") == 1
    assert captured.out.count("\n") == 2  # the first question and the last were answered


def throw(error: BaseException) -> Any:
    raise error


def test_token_ids_do_not_go_into_a_chat_template(run):
    assert_refused(run("generate", "--chat", "--format", "jsonl", stdin="[5, 6, 7]\n"), "--chat", "[5, 6, 7]")


def test_what_the_chat_template_refuses_is_said_in_one_line(run, tmp_path):
    folder = save_tiny(tmp_path / "strict", with_tokenizer=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer.save_pretrained(folder)
    assert_refused(run("generate", "--chat", "hello", model=str(folder)), "chat template", "roles must alternate")


# --------------------------------------------------------------------------------------------- as a process of its own


def test_the_module_runs_as_a_program(folder):
    child = subprocess.run(
        [sys.executable, "-m", "nanovllm.cli", "generate", "--model", str(folder), *ENGINE, "--json", *SHORT],
        input="one\ntwo\n",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    assert [record["prompt"] for record in records(child.stdout)] == ["one", "two"]


def test_help_does_not_wait_for_torch():
    code = "import sys\nfrom nanovllm.cli import main\nmain._parser().format_help()\nassert 'torch' not in sys.modules"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
