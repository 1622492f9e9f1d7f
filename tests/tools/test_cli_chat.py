"""`nanovllm chat`: conversations from a pipe and at a terminal."""

from __future__ import annotations

import pytest

from nanovllm import LLM
from tests.support.command_line import SHORT, assert_refused, generated
from tests.support.tiny_models import save_tiny, tiny_tokenizer


def recorded_conversations(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """Record the conversations passed to the chat template."""
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
    seen = recorded_conversations(monkeypatch)
    run("chat", *SHORT, stdin="hello\nand again\n")
    assert [roles(c) for c in seen] == [["user"], ["user", "assistant", "user"]]
    assert [seen[1][0]["content"], seen[1][2]["content"]] == ["hello", "and again"]


def test_chat_begins_with_the_system_prompt(run, monkeypatch):
    seen = recorded_conversations(monkeypatch)
    run("chat", "--system", "be brief", *SHORT, stdin="hello\n")
    assert seen[0][0] == {"role": "system", "content": "be brief"}


def test_reset_forgets_the_conversation_but_not_the_system_prompt(run, monkeypatch):
    seen = recorded_conversations(monkeypatch)
    run("chat", "--system", "be brief", *SHORT, stdin="hello\n/reset\nagain\n")
    assert [roles(c) for c in seen] == [["system", "user"], ["system", "user"]]
    assert seen[1][1]["content"] == "again"


def test_exit_leaves_and_what_follows_is_not_answered(run, monkeypatch):
    seen = recorded_conversations(monkeypatch)
    status, _, _ = run("chat", *SHORT, stdin="hello\n/exit\nnever\n")
    assert status == 0
    assert len(seen) == 1


def test_empty_lines_are_not_asked(run, monkeypatch):
    seen = recorded_conversations(monkeypatch)
    run("chat", *SHORT, stdin="\n   \nhello\n\n")
    assert len(seen) == 1


def test_chat_prints_the_answer_that_python_gives(run, folder):
    _, out, _ = run("chat", *SHORT, stdin="hello\n")
    answer = generated(folder, tiny_tokenizer()("<|user|>hello<|end|><|assistant|>")["input_ids"])
    assert out == tiny_tokenizer().decode(answer, skip_special_tokens=True) + "\n"


def test_an_interrupt_ends_an_answer_and_keeps_the_conversation(run, monkeypatch):
    seen = recorded_conversations(monkeypatch)
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


def test_token_ids_do_not_go_into_a_chat_template(run):
    assert_refused(run("generate", "--chat", "--format", "jsonl", stdin="[5, 6, 7]\n"), "--chat", "[5, 6, 7]")


def test_what_the_chat_template_refuses_is_said_in_one_line(run, tmp_path):
    folder = save_tiny(tmp_path / "strict", with_tokenizer=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer.save_pretrained(folder)
    assert_refused(run("generate", "--chat", "hello", model=str(folder)), "chat template", "roles must alternate")
