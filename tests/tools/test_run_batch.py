"""`nanovllm run-batch`: OpenAI's batch file in, its output file out; errors per line; going on after an end."""

import json
import os
import signal

import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from nanovllm import AsyncLLM
from nanovllm.engine import Engine
from nanovllm.serving.server.openai.completions import CompletionJob
from tests.support.command_answers import decoded, encoded, generated
from tests.support.command_line import assert_refused
from tests.support.tiny_models import tiny_model

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def line(custom_id, url=COMPLETIONS, method="POST", **body):
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "tiny"} | body}


GOOD = [
    line("chat", CHAT, messages=[{"role": "user", "content": "hello"}], max_tokens=6, temperature=0),
    line("text", prompt="hello", max_tokens=6, temperature=0),
    line("embedding", EMBEDDINGS, input="hello"),
]
BAD = [
    line("field", prompt="hello", max_tokenz=6),
    line("model", prompt="hello") | {"body": {"model": "gpt-4o-mini", "prompt": "hello"}},
    line("long", prompt="hello " * 400),
    line("stream", prompt="hello", stream=True),
]


@pytest.fixture
def batch(tmp_path, run):
    """Run the command on these lines; returns its result, and the lines of the output by custom_id."""

    def batch(lines, *flags, name="out.jsonl"):
        source, target = tmp_path / "in.jsonl", tmp_path / name
        source.write_text("\n".join(given if isinstance(given, str) else json.dumps(given) for given in lines))
        result = run(f"run-batch -i {source} -o {target}", *flags)
        return result, read(target)

    return batch


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(AsyncLLM, "__init__", lambda *_, **__: pytest.fail("the model was loaded"))


def read(path):
    if not path.exists():
        return {}
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({given["custom_id"] for given in found}) == len(found)
    return {given["custom_id"]: given for given in found}


def test_each_line_is_answered_as_its_endpoint_answers(batch, folder):
    (status, out, err), found = batch(GOOD)
    assert (status, out, set(found)) == (0, "", {"chat", "text", "embedding"})
    assert "3 lines answered, 0 failed, 0 left" in err
    for answer in found.values():
        assert answer["id"].startswith("batch_req_") and answer["error"] is None
        assert answer["response"]["status_code"] == 200 and answer["response"]["request_id"]
    bodies = {name: answer["response"]["body"] for name, answer in found.items()}
    text = decoded(generated(folder, encoded("<|user|>hello<|end|><|assistant|>")))
    assert ChatCompletion.model_validate(bodies["chat"]).choices[0].message.content == text
    assert bodies["text"]["choices"][0]["text"] == decoded(generated(folder, "hello"))
    (embedded,) = CreateEmbeddingResponse.model_validate(bodies["embedding"]).data
    assert len(embedded.embedding) == tiny_model().config.hidden_size


def test_a_line_that_fails_has_its_error_and_the_others_their_answers(batch):
    (status, _, err), found = batch(GOOD[1:2] + BAD)
    assert status == 1
    assert "1 lines answered, 4 failed, 0 left" in err
    failed = {name: answer["response"] for name, answer in found.items() if name != "text"}
    assert {name: response["status_code"] for name, response in failed.items()} == {
        "field": 400, "model": 404, "long": 400, "stream": 400,
    }  # fmt: skip
    assert failed["field"]["body"]["error"]["param"] == "max_tokenz"
    assert failed["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert "stream" in failed["stream"]["body"]["error"]["message"]


def test_a_defect_costs_one_line(batch, monkeypatch):
    begin = CompletionJob.__init__

    def failing(self, state, request, body, *rest):
        if body.prompt == "boom":
            raise ZeroDivisionError
        begin(self, state, request, body, *rest)

    monkeypatch.setattr(CompletionJob, "__init__", failing)
    (status, _, err), found = batch([line("boom", prompt="boom"), *GOOD])
    assert status == 1 and "3 lines answered, 1 failed, 0 left" in err
    assert {name: answer["response"]["status_code"] for name, answer in found.items()} == {
        "boom": 500, "chat": 200, "text": 200, "embedding": 200,
    }  # fmt: skip


def test_lines_that_fail_go_to_a_file_of_their_own(batch, tmp_path):
    errors = tmp_path / "errors.jsonl"
    (status, _, _), found = batch([*GOOD, BAD[0]], "--error-file", str(errors))
    assert (status, set(found), set(read(errors))) == (1, {"chat", "text", "embedding"}, {"field"})
    again = [*GOOD, BAD[0], line("new", prompt="hello", max_tokens=2)]
    (status, _, err), found = batch(again, "--error-file", str(errors), "--resume")
    assert (status, set(found), set(read(errors))) == (0, {"chat", "text", "embedding", "new"}, {"field"})
    assert "1 lines answered" in err


@pytest.mark.costly
@pytest.mark.usefixtures("sigint_is_heeded")
@pytest.mark.parametrize("how", ["Ctrl-C", "dead engine"])
def test_after_an_interruption_resume_answers_what_is_left(batch, tmp_path, monkeypatch, how):
    lines = [line(str(number), prompt="hello", max_tokens=4 if number < 4 else 100) for number in range(1, 9)]
    target = tmp_path / "out.jsonl"
    step = Engine.step

    def interrupted(self):
        if target.exists() and target.read_bytes().count(b"\n") >= 3:
            if how == "dead engine":
                raise KeyboardInterrupt  # in its own thread, where none comes
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        (status, _, err), found = batch(lines)
    assert status == (2 if how == "dead engine" else 130)
    assert set(found) == {"1", "2", "3"}
    assert "3 lines answered, 0 failed, 5 left" in err
    with target.open("a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "4", "resp')  # written in part
    (status, _, err), found = batch(lines, "--resume")
    assert (status, set(found)) == (0, {str(number) for number in range(1, 9)})
    assert "5 lines answered" in err
    monkeypatch.setattr(AsyncLLM, "__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    (status, _, err), _ = batch(lines, "--resume")
    assert status == 0 and "all 8 lines have a response" in err


NO_BATCHES = {
    "line 2 & not JSON": [GOOD[0], "{not json"],
    "line 2 & nested deeper than": [GOOD[0], "[" * 100_000],
    "line 2 & custom_id, method, url, body": [GOOD[0], "[]"],
    "line 2 & 'chat' as in line 1": [GOOD[0], GOOD[0]],
    "line 1 & 'body' is missing": ['{"custom_id": "a", "method": "POST", "url": "/v1/completions"}'],
    "custom_id": [line("", prompt="a")],
    "'GET' & 'POST'": [line("a", method="GET")],
    f"/v1/images & {CHAT}": [line("a", url="/v1/images")],
    "body must be an object": [line("a") | {"body": []}],
    "no request": [],
}


@pytest.mark.parametrize("named, lines", NO_BATCHES.items(), ids=NO_BATCHES)
def test_a_file_that_is_no_batch_is_refused_before_the_model_is_loaded(batch, nothing_is_loaded, lines, named):
    assert_refused(batch(lines)[0], named)


def test_files_are_checked_before_the_model_is_loaded(batch, run, nothing_is_loaded, tmp_path):
    assert_refused(run(f"run-batch -i /no/such/file -o {tmp_path}/out.jsonl"), "no folder for the file & /no/such")
    assert_refused(batch(GOOD, name="nowhere/out.jsonl")[0], "--output-file & does not exist")
    notes = tmp_path / "notes.txt"
    notes.write_text("notes\n")
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(GOOD[0]))
    line = f"run-batch -i {source} -o {notes}"
    assert_refused(run(line), "notes.txt exists & --resume")
    assert_refused(run(f"{line} --resume"), "not the output of a batch")
    assert notes.read_text() == "notes\n"
    before = source.read_text()  # whose last line has no end
    assert_refused(run(f"run-batch -i {source} -o {source} --resume"), "not the output of a batch")
    two = tmp_path / "two.jsonl"
    two.write_text(f"{before}\n{before}\n")
    assert_refused(run(f"run-batch -i {source} -o {two} --resume"), "not the output of a batch")
    assert source.read_text() == before
