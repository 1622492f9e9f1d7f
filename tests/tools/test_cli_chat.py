"""`nanovllm chat`: conversations from a pipe and at a terminal."""

import json
import re
from functools import partial

import pytest

from nanovllm import LLM
from nanovllm.cli.conversation import TURNS
from tests.support.command_answers import decoded, encoded, generated, save_with_template
from tests.support.command_line import assert_refused
from tests.support.tiny_models import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def chat(run):
    """The command with short answers; takes more flags and standard input."""
    return partial(run, "chat --max-tokens 6")


@pytest.fixture
def seen(monkeypatch):
    """The conversations that are passed to the chat template."""
    conversations = []
    apply = LLM.apply_chat_template

    def note(self, messages):
        conversations.append([dict(message) for message in messages])
        return apply(self, messages)

    monkeypatch.setattr(LLM, "apply_chat_template", note)
    return conversations


def answer_to(folder, prompt="<|user|>hello<|end|><|assistant|>", **params):
    """The line that is printed for the answer that Python gives."""
    return decoded(generated(folder, encoded(prompt), **params)) + "\n"


def roles(conversation):
    return [message["role"] for message in conversation]


def test_chat_keeps_the_conversation_and_its_own_answers(chat, seen):
    chat(stdin="hello\nand again\n")
    assert [roles(c) for c in seen] == [["user"], ["user", "assistant", "user"]]
    assert [seen[1][0]["content"], seen[1][2]["content"]] == ["hello", "and again"]


def test_reset_forgets_the_conversation_but_not_the_system_prompt(chat, seen):
    chat("--system", "be brief", stdin="hello\n/reset\nagain\n")
    assert [roles(c) for c in seen] == [["system", "user"], ["system", "user"]]
    assert seen[1][1]["content"] == "again"


def test_empty_lines_and_what_follows_exit_are_not_asked(chat, seen):
    status, _, _ = chat(stdin="\n   \nhello\n\n/exit\nnever\n")
    assert status == 0 and len(seen) == 1


def test_an_interrupt_ends_an_answer_and_keeps_the_conversation(chat, monkeypatch, seen):
    stream = LLM.stream

    def interrupted(self, *arguments, **options):
        for output in stream(self, *arguments, **options):
            yield output
            if len(seen) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    status, _, _ = chat(stdin="hello\nagain\n")
    assert status == 0
    assert [roles(c) for c in seen] == [["user"], ["user", "assistant", "user"]]


def test_chat_with_a_model_without_a_chat_template_is_refused(run, tmp_path):
    plain = save_with_template(tmp_path, None)
    assert_refused(run("chat", stdin="hello\n", model=plain), "chat template")


def test_a_conversation_that_outgrows_the_model_is_refused_with_the_numbers(run):
    assert_refused(run("chat", stdin="hello " * 400 + "\n"), "max_model_len (256)")


def test_token_ids_do_not_go_into_a_chat_template(run):
    assert_refused(run("generate --chat --format jsonl", stdin="[5, 6, 7]\n"), "--chat & [5, 6, 7]")


def test_what_the_chat_template_refuses_is_said_in_one_line(run, tmp_path):
    strict = save_with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    assert_refused(run("generate --chat hello", model=strict), "chat template & roles must alternate")


def test_continue_goes_on_as_if_the_answer_had_not_been_cut(run, tmp_path):
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    _, expected, _ = run("chat --max-tokens 40", stdin=f"hello\n/save {whole}\n")
    lines = f"/set max_tokens 7\nhello\n/set max_tokens 33\n/continue\n/save {cut}\n"
    status, out, _ = run("chat", stdin=lines)
    assert status == 0 and cut.read_text() == whole.read_text()
    assert "".join(out.splitlines()[:2]) == expected.splitlines()[0]


@pytest.mark.full
def test_an_answer_goes_on_to_the_end_of_the_context_without_a_limit(run, folder):
    answer = answer_to(folder, max_tokens=None)
    assert len(answer) > len(answer_to(folder, max_tokens=16))
    assert run("chat", stdin="hello\n")[1] == answer


@pytest.mark.parametrize(
    "lines, named",
    {
        "/continue\n": "no answer to go on with",
        "hello\n/reset\n/continue\n": "no answer to go on with",
        "/copy\n": "no answer to copy",
        "hello\n/copy\n": "/copy sets the clipboard of a terminal",
        "/model /nowhere/model\n": "there is no folder /nowhere/model",
        "/set stop e\n/set max_tokens -\nhello\n/continue\n": "ended by itself",
    }.items(),
)
def test_a_command_of_a_chat_that_cannot_be_done_says_why(chat, lines, named):
    status, _, err = chat(stdin=lines)
    assert status == 2 and named in err


def test_a_conversation_goes_on_with_another_model(chat, tmp_path, seen):
    other = save_tiny(tmp_path / "other", seed=5)
    status, out, _ = chat(stdin=f"/model\nhello\n/model {other}\nagain\n/model\n/show\n")
    assert status == 0 and len(seen[1]) == 3
    lines = out.splitlines()
    assert lines[0].endswith("tiny") and str(other) in lines
    shown = dict(line.split(maxsplit=1) for line in lines[-6:])
    assert shown["model"] == str(other) and shown["sampling"] == "greedy" and shown["messages"] == "4"
    assert shown["options"] == "max_tokens 6" and shown["context"].endswith("of 256 tokens")


def test_the_context_that_is_shown_is_that_of_the_conversation(chat):
    out = chat(stdin="hello\n/show\n/reset\n/show\n")[1]
    first, second = (line.removeprefix("context").strip() for line in out.splitlines() if line.startswith("context"))
    assert re.fullmatch(r"\d+ of 256 tokens", first) and second == "256 tokens"


def test_a_chat_goes_on_with_the_last_conversation(chat, monkeypatch, tmp_path, seen):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    assert_refused(chat("--resume"), "no conversation to resume & last_conversation.json")
    messages = [{"role": "system", "content": "be brief"}, *({"role": role, "content": "one"} for role in TURNS)]
    (tmp_path / "last_conversation.json").write_text(json.dumps({"messages": messages}))
    chat("--resume", stdin="two\n")
    chat("--resume", "--system", "be long", stdin="two\n")
    assert [roles(conversation) for conversation in seen] == [["system", "user", "assistant", "user"]] * 2
    assert [conversation[0]["content"] for conversation in seen] == ["be brief", "be long"]


def test_a_template_of_a_file_takes_the_place_of_the_tokenizers(chat, folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}say {{ message['content'] }}{% endfor %}")
    from_file = f"--chat-template={template}"
    assert chat(from_file, stdin="hello\n")[:2] == (0, answer_to(folder, "say hello"))
    template.write_bytes(b"\xff")
    assert_refused(chat(from_file), "chat_template & is not UTF-8 text")
    assert_refused(chat("--chat-template=/nowhere"), "chat_template is '/nowhere', which cannot be read")


@pytest.mark.parametrize("line", ["chat", "generate hello"])
def test_a_model_without_a_head_is_refused_before_the_first_question(run, tmp_path, line):
    tiny_model(num_layers=1).base_model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    result = run(line, stdin="hello\n", model=str(tmp_path))
    said = f"{tmp_path} has no language model head, so it generates nothing. It embeds: nanovllm serve."
    assert_refused(result, said)
