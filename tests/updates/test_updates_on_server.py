"""Updates and pauses of a server: vLLM's names, the flag and the key that they need, and files of one folder."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from nanovllm.cli.main import main
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server import updates
from nanovllm.serving.server.engine_process import front_door
from nanovllm.serving.server.settings import ServerSettings
from tests.support.async_llms import slow_steps
from tests.support.command_line import ENGINE, assert_refused
from tests.support.layer_kinds import own_answer
from tests.support.llms import comes_true
from tests.support.serving import run_in_subprocess, serving
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

KEY = {"authorization": "Bearer secret"}
(PROMPT,) = random_prompts(1, low=30, high=30, seed=5)
PLAIN = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "prompt": PROMPT}
CALLS = {
    "/pause": "POST", "/resume": "POST", "/is_paused": "GET", "/update_weights": "POST",
    "/sleep": "POST", "/wake_up": "POST", "/is_sleeping": "GET",
}  # fmt: skip
BODY = {"update_info": {"backend": "safetensors", "path": "new"}}


@pytest.fixture(scope="module")
def models():
    return [tiny_model(num_layers=1, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("old", "new")):
        save_tiny(folder / name, num_layers=1, seed=seed)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with serving({"allow_weight_updates": True, "weights_folder": str(folder), "api_key": ("secret",)}) as running:
        yield running


@pytest.fixture
def running(server):
    """The server with its first weights, which no test leaves paused or asleep."""
    assert update(server, "old").status_code == 200
    yield server
    assert server.post("/wake_up", headers=KEY).json() == {"status": "awake"}
    assert server.post("/resume", headers=KEY).json() == {"status": "resumed"}


def update(running, path, **fields):
    body = {"update_info": {"backend": "safetensors", "path": path}} | fields
    return running.post("/update_weights", body, headers=KEY)


def refused(running, body, param, said, status=400):
    error = running.error("/update_weights", body, status=status, headers=KEY)
    assert error["param"] == param and said in error["message"], error


def completed(running, count=10):
    answer = running.answer("/v1/completions", PLAIN, {"max_tokens": count}, headers=KEY)
    return answer["choices"][0]["token_ids"]


def num_tokens(running):
    """The number of tokens so far, once no step is in flight."""

    def look():
        return run_in_subprocess(running.engine.inspect(lambda engine: (not engine._in_flight, engine.stats())))

    comes_true(lambda: look()[0])
    return look()[1].num_output_tokens


def streamed(chunks):
    return [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids]


def begun(running, count):
    """A stream with its first token, which a pause has interrupted."""
    fields = {name: PLAIN[name] for name in ("ignore_eos", "return_token_ids")}
    with slow_steps(running.engine):
        stream = running.client("secret").completions.create(
            model="tiny", prompt=PROMPT, temperature=0, max_tokens=count, stream=True, extra_body=fields
        )
        first = streamed([next(stream)])
        assert running.post("/pause?mode=keep", headers=KEY).json() == {"status": "paused"}
    return stream, first


# ------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_stream_goes_on_with_the_weights_that_it_is_updated_to(running, models, keep_kv):
    stream, first = begun(running, 80)
    assert update(running, "new", keep_kv=keep_kv).status_code == 200
    assert running.post("/resume", headers=KEY).status_code == 200
    tokens = first + streamed(stream)
    old = own_answer(models[0], PROMPT, 80)
    ends = [end for end in range(1, 80) if tokens[:end] == old[:end]]
    assert len(tokens) == 80 and ends and tokens != old
    if not keep_kv:
        assert any(tokens[end:] == own_answer(models[1], PROMPT + tokens[:end], 80 - end) for end in ends)
    assert completed(running) == own_answer(models[1], PROMPT, 10)  # no prefix of the old weights is found


def test_a_pause_holds_tokens_back_and_new_requests_wait(running, models):
    stream, first = begun(running, 60)
    before = num_tokens(running)
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(completed, running)
        comes_true(lambda: running.stats().num_waiting == 1)
        for _ in range(5):
            assert running.get("/is_paused", headers=KEY).json()["is_paused"] is True
        assert running.get("/health").status_code == 200
        assert num_tokens(running) == before and not later.done()
        running.post("/resume", headers=KEY)
        assert later.result() == own_answer(models[0], PROMPT, 10)
    assert running.get("/is_paused", headers=KEY).json()["is_paused"] is False
    assert first + streamed(stream) == own_answer(models[0], PROMPT, 60)


def test_asleep_streams_wait_and_new_requests_name_the_remedy(running, models):
    stream, first = begun(running, 60)
    running.post("/resume", headers=KEY)
    assert is_sleeping(running) is False
    for level in ("?level=1", "?level=2&mode=keep", ""):
        assert running.post(f"/sleep{level}", headers=KEY).json() == {"status": "asleep"}
    assert is_sleeping(running) is True
    before = num_tokens(running)
    for path in ("/v1/completions", "/v1/embeddings"):
        body = {"prompt": PROMPT} if path == "/v1/completions" else {"input": PROMPT}
        error = running.error(path, body, status=503, headers=KEY)
        assert error["code"] == "engine_asleep" and "POST /wake_up" in error["message"]
    assert running.get("/health").status_code == 200
    assert re.search(r"engine_stalled\S* 0", running.get("/metrics", headers=KEY).text)
    assert num_tokens(running) == before
    assert running.post("/wake_up?tags=weights&tags=kv_cache", headers=KEY).json() == {"status": "awake"}
    assert is_sleeping(running) is False
    assert first + streamed(stream) == own_answer(models[0], PROMPT, 60)
    assert completed(running) == own_answer(models[0], PROMPT, 10)


def is_sleeping(running):
    return running.get("/is_sleeping", headers=KEY).json()["is_sleeping"]


def test_parts_of_a_sleep_are_refused_by_name(running):
    queries = {
        "/sleep?level=3": "'1' or '2'", "/sleep?mode=abort": "'keep'", "/sleep?tags=weights": "unknown field",
        "/wake_up?tags=weights": "wake together", "/wake_up?tags=weights&tags=kv_cache&tags=x": "wake together",
    }  # fmt: skip
    for path, said in queries.items():
        error = running.error(path, headers=KEY)
        assert said in error["message"] and error["param"] in path
    assert is_sleeping(running) is False


def test_a_version_is_told_once_its_weights_answer(running, models):
    answer = update(running, "new", version="step-7")
    assert answer.json() == {"message": "Weights updated", "version": "step-7"}
    assert running.get("/is_paused", headers=KEY).json() == {"is_paused": False, "weights_version": "step-7"}
    assert completed(running) == own_answer(models[1], PROMPT, 10)
    assert update(running, "none", version="step-8").status_code == 400
    assert running.get("/is_paused", headers=KEY).json()["weights_version"] == "step-7"
    assert update(running, "old").json()["version"] is None


def test_some_weights_in_several_files_leave_the_others(running, models, folder, tmp_path):
    changed = tiny_model(num_layers=1)
    new = {name: tensor for name, tensor in models[1].state_dict().items() if "mlp" in name}
    (folder / "some").mkdir()
    for number, (name, tensor) in enumerate(new.items()):
        save_file({name: tensor}, folder / "some" / f"part-{number}.safetensors")
    assert update(running, str(folder / "some")).status_code == 200  # the whole path names it too
    changed.load_state_dict(new, strict=False)
    assert completed(running) == own_answer(changed, PROMPT, 10)


def test_updates_at_once_take_turns(running, models):
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: update(running, name, version=name), ["new", "old"] * 4))
    assert {answer.status_code for answer in found} == {200}
    last = running.get("/is_paused", headers=KEY).json()["weights_version"]
    assert completed(running) == own_answer(models[last == "new"], PROMPT, 10)


# ------------------------------------------------------------------------------------------------------ refusals


def test_bad_files_are_refused_and_change_nothing(running, models, folder):
    saved = (folder / "new" / "model.safetensors").read_bytes()
    bad = {
        "torn": (saved[:-7], "cannot be read"),
        "no_tensors": (b"\x80\x04 a pickle", "cannot be read"),
        "empty": (None, "holds no weights"),
    }
    for name, (content, said) in bad.items():
        (folder / name).mkdir()
        if content is not None:
            (folder / name / "model.safetensors").write_bytes(content)
        refused(running, {"update_info": {"backend": "safetensors", "path": name}}, "update_info.path", said)
    save_tiny(folder / "wide", num_layers=1, intermediate_size=64)
    save_tiny(folder / "deep", num_layers=2)
    (folder / "index").mkdir()
    (folder / "index" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    for name, said in (("wide", "shape"), ("deep", "no weight"), ("index", "part.safetensors"), ("gone", "no weights")):
        assert said in update(running, name).json()["error"]["message"]
        assert update(running, name).status_code == 400
    assert completed(running) == own_answer(models[0], PROMPT, 10)


def test_files_are_read_once_and_may_change_afterwards(running, models, folder, monkeypatch):
    """A mapping of a trainer's file would end the server, or mix two versions, when the trainer writes the next one."""
    copyfile = shutil.copyfile
    copies = []

    def copy(file, to, change=None):
        copies.append(copyfile(file, to))
        if change is not None:
            change(file)
        return to

    save_tiny(folder / "next", num_layers=1, seed=1)
    monkeypatch.setattr(updates.shutil, "copyfile", partial(copy, change=lambda file: os.truncate(file, 100)))
    body = {"update_info": {"backend": "safetensors", "path": "next"}}
    refused(running, body, "update_info.path", "has changed meanwhile")
    assert completed(running) == own_answer(models[0], PROMPT, 10)
    save_tiny(folder / "next", num_layers=1, seed=1)
    monkeypatch.setattr(updates.shutil, "copyfile", copy)
    found = updates._read(str(folder), "next")
    os.truncate(folder / "next" / "model.safetensors", 0)
    assert len(copies) == 2 and all(torch.equal(found[name], own) for name, own in models[1].state_dict().items())


@pytest.mark.parametrize("path", ["../new", "new/", "./new", ".", "..", "/etc", "\0", "ROOT", "ROOT/../new", "PARENT"])
def test_paths_outside_the_folder_are_refused_by_its_name(running, folder, path):
    given = path.replace("ROOT", str(folder)).replace("PARENT", str(folder.parent))
    body = {"update_info": {"backend": "safetensors", "path": given}}
    refused(running, body, "update_info.path", f"directly in {folder} (--weights-folder)", status=403)


def test_no_link_or_index_leads_out_of_the_folder(running, models, folder, tmp_path):
    save_tiny(tmp_path / "outside", num_layers=1, seed=1)
    file = tmp_path / "outside" / "model.safetensors"
    (folder / "link").symlink_to(tmp_path / "outside")
    for name in ("file", "named", "away"):
        (folder / name).mkdir()
    (folder / "file" / "model.safetensors").symlink_to(file)
    for name, target in (("named", str(file)), ("away", os.path.relpath(file, folder / "away"))):
        (folder / name / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{target}"}}}}')
    for name in ("link", "file", "named", "away"):
        body = {"update_info": {"backend": "safetensors", "path": name}}
        refused(running, body, "update_info.path", "which no link leaves", status=403)
    assert completed(running) == own_answer(models[0], PROMPT, 10)


def test_transfers_and_fields_that_are_not_built_are_refused_by_name(running):
    info = BODY["update_info"]
    refused(running, {"update_info": info | {"backend": "nccl"}}, "update_info.backend", "'safetensors'")
    for name in ("names", "packed", "ipc_handles"):
        refused(running, {"update_info": {name: ["a"]}}, f"update_info.{name}", "neither NCCL nor IPC handles")
    refused(running, BODY | {"flush": True}, "flush", "unknown field")
    refused(running, {"update_info": info | {"device": "x"}}, "update_info.device", "unknown field")
    refused(running, {}, "update_info", "Field required")
    refused(running, BODY | {"keep_kv": 1}, "keep_kv", "boolean")
    for query, param in (("mode=abort", "mode"), ("clear_cache=true", "clear_cache")):
        assert running.error(f"/pause?{query}", headers=KEY)["param"] == param


def test_the_calls_need_the_key_and_are_described(running):
    for path, method in CALLS.items():
        assert running.request(method, path).status_code == 401
        assert path in running.get("/openapi.json").json()["paths"]


def test_without_the_flag_the_calls_name_it_and_are_not_described():
    with serving() as running:
        for path, method in CALLS.items():
            answer = running.request(method, path, json=BODY if path == "/update_weights" else None)
            assert answer.status_code == 403 and "--allow-weight-updates" in answer.json()["error"]["message"]
            assert path not in running.get("/openapi.json").json()["paths"]


def test_without_a_folder_the_update_names_its_flag():
    with serving({"allow_weight_updates": True, "api_key": ("secret",)}) as running:
        refused(running, BODY, "update_info.path", "--weights-folder", status=403)
        assert running.post("/pause", headers=KEY).status_code == 200
        assert running.stop() == 0  # a paused server ends


def test_a_server_without_a_key_is_refused_at_its_start(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("NANOVLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"allow_weight_updates is set, but no API key"):
        ServerSettings(allow_weight_updates=True)
    with pytest.raises(ValueError, match=r"weights_folder is set, but allow_weight_updates"):
        ServerSettings(weights_folder="x", api_key=("secret",))
    model = str(save_tiny(tmp_path, num_layers=1))
    flags = ["--allow-weight-updates", "--api-key", "x", "--port", "0", "--weights-folder", "/no/such"]
    for given, said in ((flags[:1], "api_key"), (flags, "--weights-folder is '/no/such'")):
        try:
            status = main(["serve", model, *ENGINE, *given])
        except SystemExit as exit_:
            status = exit_.code
        assert_refused((status, *capsys.readouterr()), said)


def test_an_engine_in_a_process_takes_the_calls_and_several_ranks_are_refused(folder, models):
    settings = {"allow_weight_updates": True, "weights_folder": str(folder), "api_key": ("secret",)}
    front = front_door({"device": "cpu"}, engine_process=True, updates_weights=True)
    with serving(settings, model=str(folder / "old"), front_door=front) as running:
        assert completed(running) == own_answer(models[0], PROMPT, 10)
        assert running.post("/sleep", headers=KEY).status_code == 200 and is_sleeping(running) is True
        assert running.error("/v1/completions", PLAIN, status=503, headers=KEY)["code"] == "engine_asleep"
        assert running.get("/health").status_code == 200
        assert update(running, "new").status_code == 200
        assert "no weight" in update(running, "old-and-other").json()["error"]["message"]
        assert running.post("/wake_up", headers=KEY).status_code == 200
        assert completed(running) == own_answer(models[1], PROMPT, 10)
    with pytest.raises(ValueError, match="update_weights does not work with tensor_parallel_size"):
        front_door({"tensor_parallel_size": 2}, engine_process=True, updates_weights=True)


def test_an_engine_that_cannot_pause_says_so(running, monkeypatch):
    async def refused_pause(self):
        raise ValueError("pause_generation does not work here")

    monkeypatch.setattr(AsyncLLM, "pause_generation", refused_pause)
    assert "does not work here" in running.error("/pause", headers=KEY)["message"]
