"""`nanovllm generate --image`: pictures before a text, with and without a chat template."""

import base64
import io
import json
import sys

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.cli.conversation import Conversation
from nanovllm.cli.main import main
from tests.support.picture_models import png, random_images, save_llava

SIZES = ["--num-kv-blocks", "64", "--max-model-len", "256", "--max-num-seqs", "2", "--dtype", "float32"]
ASKED = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    for number, image in enumerate(random_images()):
        (folder / f"{number}.png").write_bytes(png(image))
    return folder


@pytest.fixture(autouse=True)
def no_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.mark.parametrize("is_raw", [False, True])
def test_an_answer_is_that_of_the_library(is_raw, folder, capfd):
    images = [str(folder / name) for name in ("0.png", "2.png")]
    text = "<image> <image> what is it" if is_raw else "what is it"
    flags = [flag for path in images for flag in ("--image", path)] + ["--raw"] * is_raw
    assert main(["generate", text, "--model", str(folder), *flags, *SIZES, *ASKED]) == 0
    with LLM(folder, dtype="float32", num_kv_blocks=64, max_model_len=256, max_num_seqs=2) as llm:
        parts = [*({"type": "image", "image": path} for path in images), {"type": "text", "text": text}]
        raw = {"prompt": text, "multi_modal_data": {"image": images}}
        prompt = raw if is_raw else llm.apply_chat_template([{"role": "user", "content": parts}])[0]
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert capfd.readouterr().out.strip() == output.outputs[0].text.strip()


def test_a_line_of_a_batch_has_a_picture(folder, tmp_path):
    url = f"data:image/png;base64,{base64.b64encode((folder / '0.png').read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
    path = "/v1/chat/completions"
    bodies = {"a": body, "b": json.loads(json.dumps(body).replace("iVBOR", "AAAAA"))}
    lines = [{"custom_id": name, "method": "POST", "url": path, "body": body} for name, body in bodies.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    names = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--served-model-name", "tiny"]
    assert main(["run-batch", *names, "--model", str(folder), *SIZES]) != 0
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    good, bad = sorted(answers, key=lambda answer: answer["custom_id"])
    assert good["response"]["status_code"] == 200 and good["response"]["body"]["usage"]["prompt_tokens"] > 16
    assert "cannot be read" in json.dumps(bad)


def test_a_missing_file_is_named_before_a_model_is_loaded(folder, capfd):
    assert main(["generate", "hello", "--model", str(folder), "--image", "missing.png"]) != 0
    assert "--image missing.png: there is no such file" in capfd.readouterr().err


def test_a_message_of_a_chat_has_its_pictures_and_keeps_them(folder, monkeypatch, capfd, tmp_path):
    lines = (
        f"/image {folder}/0.png\nwhat is it\nwhy\n/retry\n/save {tmp_path}/talk.json\n/load {tmp_path}/talk.json\nand\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", "--model", str(folder), *SIZES, *ASKED]) == 0
    shown = [line for line in capfd.readouterr().out.splitlines() if line.strip()]
    parts = [{"type": "image", "image": f"{folder}/0.png"}, {"type": "text", "text": "what is it"}]
    messages = [{"role": "user", "content": parts}]
    with LLM(folder, dtype="float32", num_kv_blocks=64, max_model_len=256, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        for question in ("why", "and", None):
            (output,) = llm.chat(messages, params, use_tqdm=False)
            assert output.outputs[0].text.strip() in " ".join(shown)
            messages += [
                {"role": "assistant", "content": output.outputs[0].text},
                {"role": "user", "content": question},
            ]


def test_a_chat_names_a_picture_that_is_not_there():
    talk = Conversation(None, {}, show=print)
    with pytest.raises(ValueError, match=r"not 'missing\.png'"):
        talk.read("/image missing.png")
