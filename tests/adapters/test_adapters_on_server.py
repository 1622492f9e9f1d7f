"""Adapters of a server: names of models on every API, vLLM's calls that load and unload them, and flags."""

import asyncio
import io
import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main
from nanovllm.serving.server import app as server_app
from nanovllm.serving.server import preparing
from nanovllm.serving.server.adapters import path_in
from nanovllm.serving.server.batch import batch_settings
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.settings import ServerSettings
from tests.support.adapter_files import save_adapter
from tests.support.command_line import ENGINE, assert_refused, records, words
from tests.support.llms import OPTIONS, generate
from tests.support.serving import MODEL, run_in_subprocess, serving, user
from tests.support.tiny_models import edit_json, save_tiny, tiny_model, tiny_tokenizer

PROMPT = "The capital"
TALK = [user("Where is the sea?")]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
PLAIN = {"temperature": 0, "max_tokens": NUM_TOKENS}
OLLAMA = {"stream": False, "options": {"temperature": 0, "num_predict": NUM_TOKENS}}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NAMES = ("red", "blue")


def save(folder, seed, **fields):
    """A random adapter of the tiny model, in a folder."""
    return Path(save_adapter(folder, tiny_model(num_layers=1), seed=seed, **fields))


def open_llm(folder):
    llm = LLM(tiny_model(num_layers=1), tokenizer=tiny_tokenizer(), **OPTIONS)
    for name in NAMES:
        llm.load_adapter(name, folder / name)
    return llm


def load(running, name, path=None, **fields):
    """The status of a request to load an adapter, and its text."""
    answer = running.post(LOAD, {"lora_name": name, "lora_path": str(path or name)} | fields)
    return answer.status_code, answer.text


def unload(running, name, **fields):
    return running.post(UNLOAD, {"lora_name": name} | fields).status_code


def completed(running, name, **fields):
    return running.answer("/v1/completions", PLAIN, {"prompt": PROMPT, "model": name}, fields)["choices"][0]["text"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        save(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """Texts that a completion and an answer of each adapter have, and of the model alone."""
    with open_llm(folder) as llm:
        found = {}
        for name in (None, *NAMES):
            (text,) = generate(llm, [PROMPT], GREEDY, adapter=name)
            (answer,) = llm.chat(TALK, GREEDY, adapter=name, use_tqdm=False)
            found[name] = text.outputs[0].text, answer.outputs[0].text
    assert len(set(found.values())) == 3
    return found


@pytest.fixture(scope="module")
def running(folder):
    with serving({"adapter_folder": str(folder)}) as running:
        assert [load(running, name)[0] for name in NAMES] == [200, 200]
        yield running


@pytest.fixture
def loaded(running):
    """A server in which a test loads other adapters, which are unloaded at its end."""
    yield running
    for name in set(running.engine.adapters) - set(NAMES):
        assert unload(running, name) == 200
    assert sorted(running.engine.adapters) == sorted(NAMES)


# ------------------------------------------------------------------------------------------------- names of models


@pytest.mark.parametrize("name", NAMES)
def test_every_api_answers_by_the_adapter_that_a_request_names(running, expected, name):
    text, answer = expected[name]
    ask = partial(running.answer, status=200)
    assert completed(running, name) == text
    assert (
        ask("/v1/chat/completions", PLAIN, {"model": name, "messages": TALK})["choices"][0]["message"]["content"]
        == answer
    )
    response = ask("/v1/responses", {"model": name, "input": TALK, "temperature": 0, "max_output_tokens": NUM_TOKENS})
    assert response["output"][0]["content"][0]["text"] == answer
    message = ask("/v1/messages", PLAIN, {"model": name, "messages": TALK})
    assert message["content"][0]["text"] == answer
    chat = ask("/api/chat", OLLAMA, {"model": f"{name}:latest", "messages": TALK})
    assert chat["message"]["content"] == answer
    whole = ask("/api/generate", OLLAMA, {"model": name, "prompt": PROMPT, "raw": True})
    assert whole["response"] == text
    assert ask("/api/generate", OLLAMA, {"model": name, "prompt": TALK[0]["content"]})["response"] == answer
    assert {given["model"] for given in (response, message, chat, whole)} == {name}


def test_prompts_of_one_request_and_its_samples_share_the_adapter(running, expected):
    choices = running.answer("/v1/completions", PLAIN, {"prompt": [PROMPT] * 3, "model": "red"})["choices"]
    assert [choice["text"] for choice in choices] == [expected["red"][0]] * 3


def test_streams_answer_by_the_adapter_and_name_it(running, expected):
    stream = running.client().chat.completions.create(model="blue", messages=TALK, stream=True, **PLAIN)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected["blue"][1]
    assert {chunk.model for chunk in chunks} == {"blue"}
    with running.anthropic().messages.stream(
        model="red", messages=TALK, max_tokens=NUM_TOKENS, extra_body={"temperature": 0}
    ) as events:
        final = events.get_final_message()
    assert (final.content[0].text, final.model) == (expected["red"][1], "red")


def test_the_model_alone_answers_by_its_name_and_without_one(running, expected):
    assert completed(running, MODEL) == completed(running, None) == expected[None][0]
    with serving({"any_model_name": True}) as other:
        assert completed(other, "red") == expected[None][0]


def test_an_embedding_is_that_of_the_adapter(running, folder):
    def embedded(name):
        return running.answer("/v1/embeddings", {"input": PROMPT, "model": name})

    with open_llm(folder) as llm:
        params = {name: llm.embed(PROMPT, adapter=name, use_tqdm=False)[0].embedding for name in (None, *NAMES)}
    for name in NAMES:
        found = embedded(name)
        vector = torch.tensor(found["data"][0]["embedding"])
        assert found["model"] == name
        assert torch.allclose(vector, torch.as_tensor(params[name]), atol=1e-4)
        assert not torch.allclose(vector, torch.as_tensor(params[None]), atol=1e-2)
    assert running.answer("/api/embed", {"input": PROMPT, "model": "red"})["model"] == "red"
    assert (
        running.answer("/v1/score", {"text_1": "a", "text_2": "b", "method": "cosine", "model": "red"})["model"]
        == "red"
    )


def test_lists_of_models_have_the_adapters_below_the_model(running):
    cards = {card["id"]: card["parent"] for card in running.get("/v1/models").json()["data"]}
    assert cards == {MODEL: None, "red": MODEL, "blue": MODEL}
    assert running.get("/v1/models/red").json()["parent"] == MODEL
    for path in ("/api/tags", "/api/ps"):
        entries = {each["name"]: each["details"]["parent_model"] for each in running.get(path).json()["models"]}
        assert entries == {MODEL: "", "red": MODEL, "blue": MODEL}
    assert running.answer("/api/show", {"model": "red"})["details"]["parent_model"] == MODEL


def test_an_unknown_model_is_refused_with_the_names_of_adapters(running):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": TALK})):
        error = running.error(path, body, {"model": "green"}, status=404)
        assert error["code"] == "model_not_found" and "'tiny' or 'red' or 'blue' is served" in error["message"]


def test_a_line_of_a_batch_file_names_an_adapter(folder, expected, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = {name: PLAIN | {"model": name, "prompt": PROMPT} for name in (*NAMES, "green")}
    lines = [{"custom_id": n, "method": "POST", "url": "/v1/completions", "body": body} for n, body in bodies.items()]
    source.write_text("\n".join(map(json.dumps, lines)))
    model = save_tiny(tmp_path / "model", num_layers=1)
    given = [f"--adapter={name}={folder / name}" for name in NAMES]
    assert main(["run-batch", "-i", str(source), "-o", str(target), *ENGINE, *given, str(model)]) == 1
    found = {line["custom_id"]: line["response"] for line in records(target.read_text())}
    assert found["green"]["status_code"] == 404
    for name in NAMES:
        assert found[name]["body"]["choices"][0]["text"] == expected[name][0]


# ------------------------------------------------------------------------------------------- loading and unloading


def test_an_adapter_is_loaded_by_its_name_or_its_whole_path_and_unloaded(loaded, folder, expected):
    for path in ("red", folder / "red"):
        assert load(loaded, "other", path) == (200, "Success: the adapter 'other' is loaded.")
        assert completed(loaded, "other") == expected["red"][0]
        assert unload(loaded, "other", lora_int_id=7) == 200
        assert loaded.post("/v1/completions", {"prompt": "x", "model": "other"}).status_code == 404


def test_the_description_lists_the_adapters_and_the_calls(loaded):
    def described():
        return loaded.get("/openapi.json").json()

    def named():
        return described()["components"]["schemas"]["CompletionRequest"]["properties"]["model"]["enum"]

    assert {LOAD, UNLOAD} <= described()["paths"].keys()
    assert named() == [MODEL, *NAMES, None]
    load(loaded, "other", "red")
    assert named() == [MODEL, *NAMES, "other", None]
    assert unload(loaded, "other") == 200
    assert named() == [MODEL, *NAMES, None]


def test_a_name_is_taken_for_other_contents_unless_in_place(loaded, expected):
    assert load(loaded, "other", "red")[0] == load(loaded, "other", "red")[0] == 200
    loaded.refuses(LOAD, "lora_name", "set load_inplace", {"lora_name": "other", "lora_path": "blue"})
    assert completed(loaded, "other") == expected["red"][0]
    assert load(loaded, "other", "blue", load_inplace=True)[0] == 200
    assert completed(loaded, "other") == expected["blue"][0]


def test_of_two_loads_of_one_name_at_once_one_is_refused(loaded):
    async def both():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.to_thread(load, loaded, "other", path)) for path in ("red", "blue")]
        return sorted(task.result()[0] for task in tasks)

    assert run_in_subprocess(both()) == [200, 400]


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_the_models_own_name_is_refused(running, name):
    assert "as the served model is" in running.error(LOAD, {"lora_name": name, "lora_path": "red"})["message"]


@pytest.mark.parametrize("path", [
    "../red", "red/", "./red", "red/../blue", ".", "..", "/etc", "/", "sub\\red", "\x00", "ROOT/../red", "ROOT/red/x",
    "ROOT", "ROOT/", "ROOT/..", "PARENT",
])  # fmt: skip
def test_paths_outside_the_folder_are_refused_by_its_name(running, folder, path):
    given = path.replace("ROOT", str(folder)).replace("PARENT", str(folder.parent))
    running.refuses(
        LOAD,
        "lora_path",
        f"directly in {folder} (--adapter-folder)",
        {"lora_name": "x", "lora_path": given},
        status=403,
    )


def test_no_link_leads_out_of_the_folder(tmp_path):
    root, outside = tmp_path / "root", save(tmp_path / "outside", 0)
    inner = save(root / "inner", 0)
    (root / "link").symlink_to(outside)
    (root / "alias").symlink_to(inner)
    (root / "files").mkdir()
    (root / "files" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (tmp_path / "way").symlink_to(root)
    for name in ("link", "files"):
        with pytest.raises(ApiError, match="which no link leaves") as refused:
            path_in(str(root), name)
        assert refused.value.status_code == 403
    assert path_in(str(root), "alias") == str(root / "alias")
    assert path_in(str(tmp_path / "way"), "inner") == str(tmp_path / "way" / "inner")
    with pytest.raises(ApiError):  # another spelling of the folder
        path_in(str(tmp_path / "way"), str(root / "inner"))


def test_without_a_folder_the_calls_name_the_flag_and_are_not_described():
    with serving() as running:
        for path, body in ((LOAD, {"lora_name": "x", "lora_path": "x"}), (UNLOAD, {"lora_name": "x"})):
            assert "--adapter-folder" in running.error(path, body, status=403)["message"]
            assert path not in running.get("/openapi.json").json()["paths"]


def test_fields_and_names_that_are_not_known_are_refused(running):
    running.refuses(LOAD, "base", "unknown field", {"lora_name": "x", "lora_path": "red", "base": 1})
    running.refuses(LOAD, "lora_path", "Field required", {"lora_name": "x"})
    running.refuses(LOAD, "lora_name", "at least 1 character", {"lora_name": "", "lora_path": "red"})
    running.refuses(UNLOAD, "force", "unknown field", {"lora_name": "red", "force": True})
    running.refuses(UNLOAD, "lora_name", "loaded are: 'red', 'blue'", {"lora_name": "green"}, status=404)


@pytest.mark.parametrize("name", ["a\nb", "\ud800", "x" * 300], ids=ascii)
def test_a_name_that_no_list_can_show_is_refused(running, name):
    answer = running.http().post(
        LOAD, content=json.dumps({"lora_name": name, "lora_path": "red"}), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert running.get("/v1/models").status_code == 200


def test_a_bad_adapter_is_refused_with_the_reason_and_changes_nothing(running, folder):
    torn = save(folder / "torn", 3)
    os.truncate(torn / "adapter_model.safetensors", 100)
    other = save(folder / "other_kind", 3)
    edit_json(other / "adapter_config.json", peft_type="IA3")
    save(folder / "wide", 3, rank=65)
    for path, said in (
        ("torn", "truncated"),
        ("other_kind", "IA3"),
        ("wide", "max_lora_rank"),
        ("none", "cannot be read"),
    ):
        assert said in running.error(LOAD, {"lora_name": "x", "lora_path": path})["message"]
        assert said in running.error(LOAD, {"lora_name": "red", "lora_path": path, "load_inplace": True})["message"]
    assert [card["id"] for card in running.get("/v1/models").json()["data"]] == [MODEL, *NAMES]


def test_the_calls_need_the_servers_key(folder):
    with serving({"adapter_folder": str(folder), "api_key": ("secret",)}) as running:
        body = {"lora_name": "red", "lora_path": "red"}
        assert [running.post(path, body).status_code for path in (LOAD, UNLOAD)] == [401, 401]
        key = {"authorization": "Bearer secret"}
        assert running.post(LOAD, body, headers=key).status_code == 200
        assert running.post(UNLOAD, {"lora_name": "red"}, headers=key).status_code == 200


def test_a_stream_keeps_the_adapter_that_is_unloaded_meanwhile(loaded, folder):
    long = {"max_tokens": 300, "temperature": 0, "prompt": PROMPT}
    with open_llm(folder) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=300)
        (whole,) = generate(llm, [PROMPT], params, adapter="red")
    load(loaded, "other", "red")
    stream = loaded.client().completions.create(model="other", stream=True, **long)
    text = next(stream).choices[0].text
    assert unload(loaded, "other") == 200
    assert load(loaded, "other", "blue")[0] == 200  # another one under its name
    chunks = list(stream)
    assert text + "".join(chunk.choices[0].text for chunk in chunks) == whole.outputs[0].text
    assert {chunk.model for chunk in chunks} == {"other"}


# ------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "model", num_layers=1)


@pytest.fixture
def run(tiny, capsys, monkeypatch):
    """Run a command on the tiny model; returns exit status, standard output and standard error."""

    def run(line, *arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        name, *flags = words(line)
        try:
            status = main([name, "--model", str(tiny), *ENGINE, *flags, *arguments])
        except SystemExit as exit_:  # raised by argparse
            status = exit_.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("form", ["", "--json"])
def test_generate_answers_by_its_adapter(run, folder, expected, form):
    flags = f"--raw --max-tokens {NUM_TOKENS} --adapter red={folder / 'red'} {form}"
    status, out, err = run(f"generate {flags}", PROMPT)
    assert status == 0, err
    assert (records(out)[0]["text"] if form else out.removesuffix("\n")) == expected["red"][0]


def test_a_conversation_is_answered_by_its_adapter_until_the_model_changes(run, folder, expected, tiny):
    question = TALK[0]["content"]
    stdin = f"{question}\n/reset\n/model {tiny}\n{question}\n"
    status, out, err = run(f"chat --max-tokens {NUM_TOKENS} --adapter red={folder / 'red'}", stdin=stdin)
    assert status == 0, err
    assert out.startswith(expected["red"][1]) and out.endswith(f"{expected[None][1]}\n")


@pytest.mark.parametrize("line, named", [
    ("generate x --adapter red", "'red' is not of the form NAME=PATH"),
    ("generate x --adapter red=", "'red=' is not of the form NAME=PATH"),
    ("generate x --adapter red=/no/such", "red=/no/such: there is no such folder"),
    ("generate x --adapter red=FOLDER/red --adapter blue=FOLDER/blue", "red, blue; one adapter answers all prompts"),
    ("chat --adapter red=FOLDER/red --adapter blue=FOLDER/blue", "one adapter answers all prompts"),
    ("generate x --adapter red=FOLDER", "adapter_config.json"),
    ("serve --adapter red=FOLDER/red --adapter red=FOLDER/blue", "--adapter names one adapter twice: red, red"),
    ("serve --port 0 --adapter-folder /no/such", "--adapter-folder is '/no/such'"),
])  # fmt: skip
def test_flags_that_name_no_adapter_are_refused(run, folder, line, named):
    assert_refused(run(line.replace("FOLDER", str(folder))), named)


def test_a_server_loads_the_adapters_of_its_flags_before_it_listens(tiny, folder, monkeypatch):
    found = []

    class Recording:
        exit_code = 0

        def __init__(self, app, engine, settings):
            self.engine = engine

        def run(self, listeners):
            found.append((list(self.engine.adapters), self.engine.config.max_loras))
            asyncio.run(self.engine.close())

    monkeypatch.setattr(server_app, "build_server", Recording)
    monkeypatch.setattr(preparing, "bind", lambda host, port: [])
    given = [f"--adapter={name}={folder / name}" for name in NAMES]
    assert main(["serve", str(tiny), *ENGINE, "--max-loras", "2", *given]) == 0
    assert found == [(["red", "blue"], 2)]


def test_settings_map_names_of_adapters_to_folders():
    assert ServerSettings(adapter={"red": "r"}).adapter == batch_settings(None, {"red": "r"}).adapter == {"red": "r"}
    for given in ("red", {"red": 5}, {"red": ""}, {5: "r"}, ["red"]):
        with pytest.raises(TypeError, match="adapter"):
            ServerSettings(adapter=given)
