"""`nanovllm generate`: where prompts come from, when answers are written, and what an interrupt leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.cli import prompt_files
from nanovllm.cli.main import main
from nanovllm.cli.prompt_files import read_requests
from nanovllm.outputs import RequestOutput
from tests.support.command_line import ENGINE, SHORT, assert_refused, generated, records
from tests.support.tiny_models import save_tiny, tiny_tokenizer

JSON = ["--raw", "--json", *SHORT]


def prompts_of(result: tuple[int, str, str]) -> list[Any]:
    assert result[0] == 0, result[2]
    return [record["prompt"] for record in records(result[1])]


# -------------------------------------------------------------------------------------------------------------- prompts


def test_standard_input_is_one_prompt(run):
    assert prompts_of(run("generate", *JSON, stdin="one\n\ntwo\n")) == ["one\n\ntwo"]
    assert prompts_of(run("generate", "--file", "-", *JSON, stdin="one\ntwo\n")) == ["one\ntwo"]


def test_with_lines_each_line_is_a_prompt(run):
    assert prompts_of(run("generate", "--lines", *JSON, stdin="one\n\ntwo\r\n")) == ["one", "two"]


def test_standard_input_is_appended_to_the_arguments(run):
    assert prompts_of(run("generate", "Summarise:", *JSON, stdin="an article\n")) == ["Summarise:\n\nan article"]
    both = run("generate", "--lines", "Say:", "Ask:", *JSON, stdin="a\nb\n")
    assert prompts_of(both) == ["Say:\n\na", "Say:\n\nb", "Ask:\n\na", "Ask:\n\nb"]


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_standard_input_adds_nothing(run, text):
    assert prompts_of(run("generate", "one", *JSON, stdin=text)) == ["one"]


def test_a_closed_standard_input_adds_nothing(run, monkeypatch, folder, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--model", str(folder), *ENGINE, "one", *JSON]) == 0
    assert prompts_of((0, capsys.readouterr().out, "")) == ["one"]


def test_a_standard_input_that_nobody_closes_is_told_of(monkeypatch, capsys):
    reader, writer = os.pipe()
    select = prompt_files.select.select

    def closed_later(*arguments: Any) -> Any:
        found = select(*arguments)
        os.close(writer)
        return found

    monkeypatch.setattr(prompt_files, "PATIENCE_S", 0.0)
    monkeypatch.setattr(prompt_files.select, "select", closed_later)
    with os.fdopen(reader) as silent:
        monkeypatch.setattr(sys, "stdin", silent)
        assert [request.prompt for request in read_requests(["one"], None, None)] == ["one"]
    assert "waiting for standard input" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_named(run, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"one\n\xff\n")
    assert_refused(run("generate", "--file", str(tmp_path / "prompts.txt")), "prompts.txt is not UTF-8", "position 4")


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "Summarise:"], ["generate", "--file", "-"]])
def test_standard_input_that_is_not_utf8_is_refused_with_byte_position_and_remedy(run, arguments):
    result = run(*arguments, stdin=b"one\r\ncaf\xe9 au lait\n")
    assert_refused(result, "standard input is not UTF-8 text", "byte 0xe9 at position 8, in line 2", "iconv")


def test_a_line_of_a_chat_that_is_not_utf8_is_refused_by_its_number(run):
    status, _, err = run("chat", *SHORT, stdin=b"hello\ncaf\xe9\n")
    assert status == 2
    assert "line 2 of standard input is not UTF-8 text: byte 0xe9 at position 3. Convert it" in err


def test_an_argument_that_is_not_utf8_is_refused_with_its_byte(run):
    assert_refused(run("generate", "caf\udce9"), "as character 3", "the byte 0xe9 of a text that is not UTF-8", "iconv")


def test_lines_of_standard_input_may_end_as_on_windows(run):
    status, out, _ = run("generate", "--lines", "--json", *SHORT, stdin=b"one\r\ntwo\r\n")
    assert (status, [record["prompt"] for record in records(out)]) == (0, ["one", "two"])


def test_the_template_frames_texts_of_any_source_and_no_token_ids(run, folder):
    lines = '"hello"\n{"prompt": "hello"}\n[5, 6, 7]\n{"messages": [{"role": "user", "content": "hello"}]}\n'
    found = records(run("generate", "--format", "jsonl", "--json", *SHORT, stdin=lines)[1])
    framed = tiny_tokenizer()("<|user|>hello<|end|><|assistant|>")["input_ids"]
    assert [record["num_prompt_tokens"] for record in found] == [len(framed), len(framed), 3, len(framed)]
    assert found[0]["token_ids"] == generated(folder, framed)


def test_a_system_prompt_is_a_message_before_the_text(run):
    (found,) = records(run("generate", "hello", "--system", "be brief", "--json", *SHORT)[1])
    text = "<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"
    assert found["num_prompt_tokens"] == len(tiny_tokenizer()(text)["input_ids"])


def test_without_a_chat_template_a_text_is_completed(run, tmp_path):
    folder = save_tiny(tmp_path / "plain", with_tokenizer=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (found,) = records(run("generate", "hello", "--json", *SHORT, model=str(folder))[1])
    assert found["token_ids"] == generated(folder, "hello")
    for flag in (["--chat"], ["--system", "be brief"]):
        assert_refused(run("generate", "hello", *flag, model=str(folder)), "chat template")


def test_ids_are_carried_through(run):
    lines = '{"prompt": "one", "custom_id": "a"}\n{"prompt": "two", "id": 7}\n{"prompt": "three"}\n'
    found = records(run("generate", "--format", "jsonl", *JSON, stdin=lines)[1])
    assert [(r.get("custom_id"), r.get("id"), r["request_id"]) for r in found] == [
        ("a", None, "0"), (None, 7, "1"), (None, None, "2"),
    ]  # fmt: skip
    lines += json.dumps("a prompt\n\nof lines " + 40 * "and words ") + "\n"
    _, out, _ = run("generate", "--format", "jsonl", "--raw", *SHORT, stdin=lines)
    *headings, long = [line for line in out.splitlines() if line.startswith("---")]
    assert headings == ["--- a", "--- 7", "--- three"]
    assert long.startswith("--- a prompt of lines and words") and len(long) <= 104


def test_options_of_the_model_are_the_defaults_and_flags_come_first(run, folder, tmp_path):
    own = save_tiny(tmp_path / "own")
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 5}))
    found = [
        records(run("generate", "hello", "--seed", "3", *flags, *JSON, model=str(own))[1])[0]["token_ids"]
        for flags in (
            [],
            ["--temperature", "0"],
            ["--generation-config", "none"],
            ["--generation-config", "none", "--n", "1"],
            ["--generation-config", "none", "--top-k", "5"],
        )
    ]
    assert found[0] == generated(folder, "hello", temperature=0.7, top_k=5, seed=3) != found[1]
    assert found[1] == found[2] == found[3] == generated(folder, "hello")
    assert found[4] == generated(folder, "hello", temperature=1.0, top_k=5, seed=3) != found[3]


@pytest.mark.parametrize("config", [{"temperature": 1.0}, {"do_sample": True}])
def test_a_model_that_asks_for_a_temperature_of_one_is_sampled(run, folder, tmp_path, config):
    own = save_tiny(tmp_path / "own")
    (own / "generation_config.json").write_text(json.dumps(config))
    (found,) = records(run("generate", "hello", "--seed", "3", *JSON, model=str(own))[1])
    assert found["token_ids"] == generated(folder, "hello", temperature=1.0, seed=3) != generated(folder, "hello")


@pytest.mark.parametrize("line", ["[5, 6, 7]", '{"messages": [{"role": "user", "content": "hello"}]}'])
def test_a_system_prompt_for_what_takes_none_is_refused(run, line):
    assert_refused(run("generate", "--system", "be brief", "--format", "jsonl", stdin=line), "--system", "request 1")


# -------------------------------------------------------------------------------------------------------------- answers


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_ended: int) -> None:
    """Raise what Ctrl-C raises once so many prompts have ended."""
    as_completed = LLM.as_completed

    def interrupted(llm: LLM, *arguments: Any, **options: Any) -> Iterator[tuple[int, RequestOutput]]:
        for number, found in enumerate(as_completed(llm, *arguments, **options), 1):
            yield found
            if number == num_ended:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "as_completed", interrupted)


LINES = "\n".join(json.dumps({"prompt": "one", "max_tokens": count}) for count in (9, 2, 5, 1))


def lengths(out: str) -> list[int]:
    return [len(record["token_ids"]) for record in records(out)]


def test_answers_come_in_the_order_of_the_prompts(run):
    status, out, _ = run("generate", "--format", "jsonl", "--raw", "--json", stdin=LINES)
    assert (status, lengths(out)) == (0, [9, 2, 5, 1])


def test_or_as_they_end(run):
    status, out, _ = run("generate", "--format", "jsonl", "--raw", "--json", "--as-completed", stdin=LINES)
    assert (status, lengths(out)) == (0, [1, 2, 5, 9])
    assert [record["request_id"] for record in records(out)] == ["3", "1", "2", "0"]


@pytest.mark.parametrize("flag", [[], ["--as-completed"]])
def test_an_interrupt_keeps_what_had_ended(run, monkeypatch, flag):
    interrupt_after(monkeypatch, 3)
    status, out, err = run("generate", "--format", "jsonl", "--raw", "--json", *flag, stdin=LINES)
    assert (status, sorted(lengths(out))) == (130, [1, 2, 5])
    assert "3 of 4 prompts were answered" in err


def test_one_prompt_is_streamed(run, monkeypatch):
    printed: list[tuple[int, str]] = []
    stream = LLM.stream

    def noted(llm: LLM, *arguments: Any, **options: Any):
        for output in stream(llm, *arguments, **options):
            yield output
            printed.append((len(output.outputs[0].token_ids), sys.stdout.getvalue()))  # type: ignore[attr-defined]

    def no_batch(*_: Any, **__: Any) -> list[RequestOutput]:
        pytest.fail("it was not streamed")

    monkeypatch.setattr(LLM, "stream", noted)
    monkeypatch.setattr(LLM, "as_completed", no_batch)
    with redirect_stdout(StringIO()) as out:
        assert run("generate", "hello", "--raw", *SHORT)[0] == 0
    texts = [text for _, text in printed]
    assert len(texts) == 6
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(set(texts)) >= 4
    assert out.getvalue() == texts[-1] + "\n"


@pytest.mark.full
@pytest.mark.usefixtures("sigint_is_heeded")
def test_ctrl_c_leaves_the_answers_that_were_written(folder):
    """In a process of its own, whose second prompt would take 200 tokens of a huge batch of them."""
    short, long = {"prompt": [5, 6], "max_tokens": 1}, {"prompt": [5, 6], "max_tokens": 250, "ignore_eos": True}
    lines = "\n".join(map(json.dumps, [short, short, *[long] * 400]))
    command = [sys.executable, "-m", "nanovllm.cli", "generate", "--model", str(folder), *ENGINE, "--json"]
    child = subprocess.Popen(
        [*command, "--format", "jsonl", "--max-num-seqs", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(lines)
    child.stdin.close()
    child.stdin = None
    first = [child.stdout.readline(), child.stdout.readline()]  # while 400 others wait
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    found = [json.loads(line) for line in [*first, *out.splitlines()]]
    assert child.returncode == 130
    assert [record["request_id"] for record in found[:2]] == ["0", "1"]
    assert len(found) < 402
    assert f"{len(found)} of 402 prompts were answered" in err
    assert "Traceback" not in err
