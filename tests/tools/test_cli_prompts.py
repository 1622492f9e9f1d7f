"""`nanovllm generate`: where prompts come from, when answers are written, and what an interrupt leaves."""

import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise

import pytest

from nanovllm import LLM
from nanovllm.cli import prompt_files
from nanovllm.cli.prompt_files import read_requests
from tests.support.command_answers import encoded, generated, save_with_template
from tests.support.command_line import ENGINE, SHORT, assert_refused, records, words
from tests.support.tiny_models import save_tiny

FRAMED = "<|user|>hello<|end|><|assistant|>"


# -------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    "arguments, stdin, prompts",
    [
        ("", "one\n\ntwo\n", ["one\n\ntwo"]),
        ("--file -", "one\ntwo\n", ["one\ntwo"]),
        ("--lines", "one\n\ntwo\r\n", ["one", "two"]),
        ("--lines", b"one\r\ntwo\r\n", ["one", "two"]),
        ("Summarise:", "an article\n", ["Summarise:\n\nan article"]),
        ("--lines Say: Ask:", "a\nb\n", ["Say:\n\na", "Say:\n\nb", "Ask:\n\na", "Ask:\n\nb"]),
        ("one", "", ["one"]),
        ("one", "\n", ["one"]),
    ],
)
def test_standard_input_is_a_prompt_or_its_lines_are_or_goes_behind_the_arguments(answers, arguments, stdin, prompts):
    assert [record["prompt"] for record in answers(f"--raw {arguments}", stdin=stdin)] == prompts


def test_a_closed_standard_input_adds_nothing(monkeypatch, folder, command):
    monkeypatch.setattr(sys, "stdin", None)
    status, out, _ = command(f"generate one --raw --json --model {folder}", *ENGINE, *SHORT)
    assert status == 0 and [record["prompt"] for record in records(out)] == ["one"]


def test_a_standard_input_that_nobody_closes_is_told_of(monkeypatch, capsys):
    reader, writer = os.pipe()
    select = prompt_files.select.select

    def closed_later(*arguments):
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
    assert_refused(run(f"generate --file {tmp_path / 'prompts.txt'}"), "prompts.txt is not UTF-8 & position 4")


@pytest.mark.parametrize("arguments", ["generate", "generate Summarise:", "generate --file -"])
def test_standard_input_that_is_not_utf8_is_refused_with_byte_position_and_remedy(run, arguments):
    result = run(arguments, stdin=b"one\r\ncaf\xe9 au lait\n")
    assert_refused(result, "standard input is not UTF-8 text & byte 0xe9 at position 8, in line 2 & iconv")


def test_a_line_of_a_chat_that_is_not_utf8_is_refused_by_its_number(run):
    status, _, err = run("chat", *SHORT, stdin=b"hello\ncaf\xe9\n")
    assert status == 2
    assert "line 2 of standard input is not UTF-8 text: byte 0xe9 at position 3. Convert it" in err


def test_an_argument_that_is_not_utf8_is_refused_with_its_byte(run):
    assert_refused(run("generate", "caf\udce9"), "as character 3 & the byte 0xe9 of a text that is not UTF-8 & iconv")


def test_the_template_frames_texts_of_any_source_and_no_token_ids(answers, folder):
    lines = '"hello"\n{"prompt": "hello"}\n[5, 6, 7]\n{"messages": [{"role": "user", "content": "hello"}]}\n'
    found = answers("--format jsonl", stdin=lines)
    framed = encoded(FRAMED)
    assert [record["num_prompt_tokens"] for record in found] == [len(framed), len(framed), 3, len(framed)]
    assert found[0]["token_ids"] == generated(folder, framed)


def test_a_system_prompt_is_a_message_before_the_text(answers):
    (found,) = answers("hello --system 'be brief'")
    assert found["num_prompt_tokens"] == len(encoded(f"<|system|>be brief<|end|>{FRAMED}"))


def test_without_a_chat_template_a_text_is_completed(run, answers, tmp_path):
    plain = save_with_template(tmp_path, None)
    (found,) = answers("hello", model=plain)
    assert found["token_ids"] == generated(plain, "hello")
    for flag in ("--chat", "--system 'be brief'"):
        assert_refused(run(f"generate hello {flag}", model=plain), "chat template")


def test_ids_are_carried_through(run, answers):
    lines = '{"prompt": "one", "custom_id": "a"}\n{"prompt": "two", "id": 7}\n{"prompt": "three"}\n'
    found = answers("--raw --format jsonl", stdin=lines)
    assert [f"{r.get('custom_id')} {r.get('id')} {r['request_id']}" for r in found] == [
        "a None 0",
        "None 7 1",
        "None None 2",
    ]
    lines += json.dumps("a prompt\n\nof lines " + 40 * "and words ") + "\n"
    _, out, _ = run("generate --format jsonl --raw", *SHORT, stdin=lines)
    *headings, long = [line for line in out.splitlines() if line.startswith("---")]
    assert headings == ["--- a", "--- 7", "--- three"]
    assert long.startswith("--- a prompt of lines and words") and len(long) <= 104


def test_options_of_the_model_are_the_defaults_and_flags_come_first(answers, folder, tmp_path):
    own = save_tiny(tmp_path / "own")
    (own / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 5}')
    none = "--generation-config none"
    found = [
        answers(f"--raw hello --seed 3 {flags}", model=str(own))[0]["token_ids"]
        for flags in ("", "--temperature 0", none, f"{none} --n 1", f"{none} --top-k 5")
    ]
    assert found[0] == generated(folder, "hello", temperature=0.7, top_k=5, seed=3) != found[1]
    assert found[1] == found[2] == found[3] == generated(folder, "hello")
    assert found[4] == generated(folder, "hello", temperature=1.0, top_k=5, seed=3) != found[3]


@pytest.mark.parametrize("config", ['{"temperature": 1.0}', '{"do_sample": true}'])
def test_a_model_that_asks_for_a_temperature_of_one_is_sampled(answers, folder, tmp_path, config):
    own = save_tiny(tmp_path / "own")
    (own / "generation_config.json").write_text(config)
    (found,) = answers("--raw hello --seed 3", model=str(own))
    assert found["token_ids"] == generated(folder, "hello", temperature=1.0, seed=3) != generated(folder, "hello")


@pytest.mark.parametrize("line", ["[5, 6, 7]", '{"messages": [{"role": "user", "content": "hello"}]}'])
def test_a_system_prompt_for_what_takes_none_is_refused(run, line):
    assert_refused(run("generate --system a --format jsonl", stdin=line), "--system & request 1")


# -------------------------------------------------------------------------------------------------------------- answers


def interrupt_after(monkeypatch, num_ended):
    """Raise what Ctrl-C raises once so many prompts have ended."""
    as_completed = LLM.as_completed

    def interrupted(llm, *arguments, **options):
        for number, found in enumerate(as_completed(llm, *arguments, **options), 1):
            yield found
            if number == num_ended:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "as_completed", interrupted)


LINES = "\n".join(json.dumps({"prompt": "one", "max_tokens": count}) for count in (9, 2, 5, 1))


def lengths(out):
    return [len(record["token_ids"]) for record in records(out)]


COMMAND = "generate --format jsonl --raw --json"


@pytest.mark.parametrize("flag, order", [("", "0123"), ("--as-completed", "3120")])
def test_answers_come_in_the_order_of_the_prompts_or_as_they_end(run, flag, order):
    status, out, _ = run(f"{COMMAND} {flag}", stdin=LINES)
    assert (status, lengths(out)) == (0, [(9, 2, 5, 1)[int(number)] for number in order])
    assert "".join(record["request_id"] for record in records(out)) == order


@pytest.mark.parametrize("flag", ["", "--as-completed"])
def test_an_interrupt_keeps_what_had_ended(run, monkeypatch, flag):
    interrupt_after(monkeypatch, 3)
    status, out, err = run(f"{COMMAND} {flag}", stdin=LINES)
    assert (status, sorted(lengths(out))) == (130, [1, 2, 5])
    assert "3 of 4 prompts were answered" in err


def test_one_prompt_is_streamed(run, monkeypatch):
    printed = []
    stream = LLM.stream

    def noted(llm, *arguments, **options):
        for output in stream(llm, *arguments, **options):
            yield output
            printed.append(sys.stdout.getvalue())

    monkeypatch.setattr(LLM, "stream", noted)
    monkeypatch.setattr(LLM, "as_completed", lambda *_, **__: pytest.fail("it was not streamed"))
    with redirect_stdout(StringIO()) as out:
        assert run("generate hello --raw", *SHORT)[0] == 0
    assert len(printed) == 6 and len(set(printed)) >= 4
    assert all(later.startswith(earlier) for earlier, later in pairwise(printed))
    assert out.getvalue() == printed[-1] + "\n"


@pytest.mark.full
@pytest.mark.usefixtures("sigint_is_heeded")
def test_ctrl_c_leaves_the_answers_that_were_written(folder):
    """In a process of its own, whose second prompt would take 200 tokens of a huge batch of them."""
    lines = 2 * '{"prompt": [5, 6], "max_tokens": 1}\n'
    lines += 400 * '{"prompt": [5, 6], "max_tokens": 250, "ignore_eos": true}\n'
    command = [sys.executable, *words(f"-m nanovllm.cli generate --model {folder} --json --format jsonl"), *ENGINE]
    child = subprocess.Popen(
        [*command, "--max-num-seqs", "2"], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    child.stdin.write(lines)
    child.stdin.close()
    child.stdin = None
    first = [child.stdout.readline(), child.stdout.readline()]  # while 400 others wait
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    found = [json.loads(line) for line in [*first, *out.splitlines()]]
    assert child.returncode == 130 and len(found) < 402
    assert [record["request_id"] for record in found[:2]] == ["0", "1"]
    assert f"{len(found)} of 402 prompts were answered" in err and "Traceback" not in err
