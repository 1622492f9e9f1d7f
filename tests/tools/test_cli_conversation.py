"""Commands within a conversation, and the prompt of `nanovllm chat` at a terminal."""

import io
import json
import os
import re
import sys
import termios
from contextlib import contextmanager

import pexpect
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from nanovllm import SamplingParams
from nanovllm.cli.conversation import ChatEnded, Conversation
from nanovllm.cli.terminal import Terminal, echo
from tests.support.command_line import ENGINE, assert_refused, words
from tests.support.refusals import invalid

DOWN, UP, ALT_ENTER, CTRL_C, CTRL_D = "\x1b[B", "\x1b[A", "\x1b\r", "\x03", "\x04"


@pytest.fixture
def shown():
    return []


@pytest.fixture
def talk(shown):
    return Conversation("be brief", {"max_tokens": 256, "temperature": 0.5}, show=shown.append)


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    "line, question",
    {
        "hello": "hello",
        "": None,
        "   ": None,
        " /help is a word": "/help is a word",
        "/usr/bin/env is a path": "/usr/bin/env is a path",
        '"""one\ntwo"""': "one\ntwo",
        '"""\none\n"""': "one",
        '""""""': None,
    }.items(),
)
def test_what_is_no_command_is_a_message(talk, line, question):
    assert talk.read(line) == question


def test_help_lists_every_command(talk, shown):
    assert talk.read("/help") is None
    for name in words("continue retry system set show model copy save load reset clear exit"):
        assert f"/{name}" in shown[0]


def test_system_shows_changes_and_removes_the_system_prompt(talk, shown):
    talk.read("/system")
    talk.read("/system answer in rhymes")
    assert talk.with_question("hi")[0] == {"role": "system", "content": "answer in rhymes"}
    talk.read("/system -")
    assert talk.with_question("hi") == [{"role": "user", "content": "hi"}]
    talk.read("/system")
    assert shown == ["be brief", "there is no system prompt"]


def test_set_changes_shows_and_restores_options(talk, shown):
    for line in ("/set top-k 4", "/set temperature 0.9", "/set max_tokens 1k", "/set stop END", "/set ignore_eos on"):
        talk.read(line)
    assert SamplingParams(**talk.sampling) == SamplingParams(
        top_k=4, temperature=0.9, max_tokens=1000, stop=("END",), ignore_eos=True
    )
    for name in ("top_k", "temperature", "stop", "ignore_eos"):
        talk.read(f"/set {name} -")
    talk.read("/set")
    assert sorted(shown[-1].splitlines()) == ["max_tokens 1000", "temperature 0.5"]


@pytest.mark.parametrize(
    "line, named",
    {
        "/set temprature 1": "did you mean temperature?",
        "/set temperature": "needs a value",
        "/set temperature hot": "it must be a number",
        "/set temperature -1": "temperature is -1.0",
        "/set max_tokens 1.5": "not a whole number",
        "/set ignore_eos maybe": "it must be one of",
        "/set n 3": "not an option of a conversation",
        "/sytem be brief": "there is no command /sytem; did you mean /system? /help lists them",
        "/lead talk.json": "there is no command /lead; did you mean /load? /help lists them",
        "/zzz": "there is no command /zzz. /help lists them",
        "/load": "needs a file",
        "/retry": "no message",
        "/save": "needs a file",
    }.items(),
)
def test_a_command_that_cannot_be_done_changes_nothing(talk, line, named):
    before = dict(talk.sampling)
    with invalid(re.escape(named)):
        talk.read(line)
    assert talk.sampling == before


def test_retry_takes_the_last_answer_back(talk):
    talk.record("one", "first")
    talk.record("two", "second")
    assert talk.read("/retry") == "two"
    talk.restore()  # there was no answer
    assert talk.messages[-1]["content"] == "second"
    assert talk.read("/retry") == "two"
    assert [message["content"] for message in talk.with_question("two")] == ["be brief", "one", "first", "two"]


def test_save_writes_the_conversation_and_load_goes_on_with_it(talk, shown, tmp_path):
    path = tmp_path / "talk.json"
    talk.record("größe", "answer")
    talk.read(f"/save {path}")
    assert json.loads(path.read_text()) == {"messages": talk.with_question("")[:-1]}
    assert "3 messages" in shown[0]
    other = Conversation(None, {}, show=shown.append)
    other.record("forgotten", "too")
    other.read(f"/load {path}")
    assert other.with_question("next") == talk.with_question("next")
    assert "2 messages are loaded" in shown[-1]
    for command in ("/save", "/load"):
        with pytest.raises(OSError, match="nowhere"):
            talk.read(f"{command} {tmp_path}/nowhere/talk.json")


def test_retry_asks_a_message_again_that_has_no_answer(talk):
    talk.record("one", "first")
    assert talk.read("two") == "two"
    talk.restore("two")  # its request failed
    assert talk.read("/retry") == "two" and len(talk.messages) == 2
    talk.record("two", "second")
    assert talk.read("/retry") == "two"
    assert talk.record("two", "second") and not talk.record("three", "second")


@pytest.mark.parametrize(
    "text, named",
    {
        "not JSON": "holds no conversation",
        "[]": "holds no conversation",
        '{"messages": [{"role": "user"}]}': "holds no conversation",
        '{"messages": [{"role": "user", "content": "a"}]}': "messages of user; a conversation is texts",
        '{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}': "of user, tool; a",
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": 3}]}': "is texts of user",
    }.items(),
)
def test_a_file_of_another_form_is_refused_and_nothing_is_lost(talk, tmp_path, text, named):
    talk.record("one", "first")
    before = talk.with_question("")
    path = tmp_path / "talk.json"
    path.write_text(text)
    with invalid(re.escape(named)):
        talk.read(f"/load {path}")
    assert talk.with_question("") == before


def test_save_asks_before_it_overwrites(talk, shown, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text("mine")
    with invalid(r"talk.json exists, and /save overwrites no file from a pipe"):
        talk.read(f"/save {path}")
    asked = []
    for answer in (False, True):
        talk.confirm = lambda question, answer=answer: asked.append(question) or answer
        talk.read(f"/save {path}")
        assert (path.read_text() != "mine") == answer
    assert asked == [f"{path} exists. Overwrite it?"] * 2 and shown[0] == "nothing is written"


@pytest.mark.parametrize("line", ["/exit", "/quit", "/bye "])
def test_exit_leaves(talk, line):
    with pytest.raises(ChatEnded):
        talk.read(line)


def test_commands_work_from_a_pipe_too(run, tmp_path):
    path = tmp_path / "talk.json"
    lines = f'/set max_tokens 2\n"""hello\nand again"""\n/retry\n/save {path}\n'
    status, out, _ = run("chat", stdin=lines)
    question, answer = json.loads(path.read_text())["messages"]
    assert status == 0
    assert question == {"role": "user", "content": "hello\nand again"}
    assert answer["role"] == "assistant" and out.splitlines()[:2] == [answer["content"]] * 2
    assert run("chat", stdin="/nonsense\n")[0] == 2
    assert_refused(run("chat", stdin='"""never closed\n'), "ends within")


# ------------------------------------------------------------------------------------------------------------- terminal


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """A terminal at which keys were pressed, and its keyboard."""
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))

    @contextmanager
    def typed(keys):
        with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
            keyboard.send_text(keys)
            yield Terminal(lambda: None, keeps_history=True), keyboard

    return typed


KEYS = {
    "alt and enter": (f"hello{ALT_ENTER}world\r", "hello\nworld"),
    "quotes": ('"""one\rtwo"""\r', '"""one\ntwo"""'),
    "pasted": ("\x1b[200~one\ntwo\n\x1b[201~three\r", "one\ntwo\nthree"),
}


@pytest.mark.parametrize("keys, message", KEYS.values(), ids=KEYS)
def test_enter_sends_unless_with_alt_within_quotes_or_pasted(typed, keys, message):
    with typed(keys) as (terminal, _):
        assert terminal.read() == message


def test_history_outlives_the_conversation_and_is_private(typed, tmp_path):
    with typed("first\r") as (terminal, _):
        assert terminal.read() == "first"
    assert (tmp_path / "chat_history").stat().st_mode & 0o777 == 0o600
    with typed(f"{UP}!\r") as (terminal, _):
        assert terminal.read() == "first!"


def test_control_c_clears_the_line_and_control_d_leaves(typed):
    with typed(f"hello{CTRL_C}world\r{CTRL_C}") as (terminal, keyboard):
        assert terminal.read() == "world"
        with pytest.raises(KeyboardInterrupt):
            terminal.read()
        keyboard.send_text(CTRL_D)
        with pytest.raises(EOFError):
            terminal.read()


def test_a_model_that_cannot_be_loaded_ends_the_prompt(typed):
    with typed("") as (terminal, _):
        terminal.leave(OSError("no such model"))
        with pytest.raises(OSError, match="no such model"):
            terminal.read()


@pytest.fixture(scope="module")
def chats():
    chats = []
    yield chats
    for child in chats:
        child.close(force=True)


@pytest.fixture
def chat(chats, folder, tmp_path_factory):
    """The command at a terminal: a new one if a test has ended the last."""
    if chats and chats[-1].isalive():
        return chats[-1]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "NANOVLLM_CACHE": str(tmp_path_factory.mktemp("cache"))}
    environ |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}  # it would wait for the terminal's answer
    arguments = words(f"-m nanovllm.cli chat {folder} --max-tokens 200 --ignore-eos")
    child = pexpect.spawn(sys.executable, [*arguments, *ENGINE], env=environ, encoding="utf-8", timeout=120)
    child.logfile_read = io.StringIO()
    chats.append(child)
    return child


def type_in(chat, *lines):
    for line in lines:
        chat.send(f"{line}\r")


@pytest.mark.full
def test_at_a_terminal_the_prompt_is_there_before_the_model(chat):
    chat.expect(">")
    chat.expect("loading ")  # beside it
    type_in(chat, "/set max_tokens 3", "/set")
    chat.expect("max_tokens 3\r?\n")
    type_in(chat, "hello")
    chat.expect("cut at 3 tokens")
    type_in(chat, "/set max_tokens 200", "/retry")
    chat.expect("cut at 200 tokens: /continue goes on")
    type_in(chat, "/set max_tokens 4", "/continue")
    chat.expect(r"tiny · [\d.]+ tokens/s · 2\d\d of 256 tokens")
    chat.expect("cut at 4 tokens")
    type_in(chat, "/set max_tokens -", "/continue")
    chat.expect("the context of 256 tokens is full: /reset")
    seen = chat.logfile_read.getvalue()
    assert "Loading" not in seen and "KV cache" not in seen  # bars of other libraries, other lines about the load


@pytest.mark.full
def test_keys_are_not_shown_while_an_answer_is_drawn(monkeypatch):
    """An echoed ^C at the end of a full line moves the cursor down: the line would stay above its last drawing."""
    primary, secondary = os.openpty()

    def echoes():
        return bool(termios.tcgetattr(secondary)[3] & termios.ECHO)

    with open(secondary, encoding="utf-8") as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        with echo(is_on=False):
            assert not echoes()
            with echo(is_on=True):  # a question, as of /save
                assert echoes()
            assert not echoes()
        assert echoes()
    os.close(primary)
    with open(os.devnull, encoding="utf-8") as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        with echo(is_on=False):  # no terminal
            pass


@pytest.mark.full
def test_at_a_terminal_errors_do_not_end_the_conversation(chat):
    for line, shown in {
        "/sytem": "did you mean /system",
        "hello " * 300: "max_model_len",
        "/set max_tokens 2\r/reset\rand now": "cut at 2 tokens",
        "/copy": r"\x1b\]52;c;[\w+/=]+\x07",
        "/show": "context +[0-9]+ of 256 tokens",
        "/exit": pexpect.EOF,
    }.items():
        type_in(chat, *line.split("\r"))
        chat.expect(shown)
    chat.close()
    assert chat.exitstatus == 0
