"""Pictures over HTTP: one answer by every API, and addresses and damaged files refused before any work."""

import base64

import httpx
import pytest

from nanovllm.serving.server import media_hosts
from tests.support.picture_models import png, random_images, save_llava
from tests.support.serving import MODEL, serving

SIZES = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 24}
DATA = base64.b64encode(png(random_images()[0])).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = "what is it"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    _, processor = save_llava(folder)
    settings = {"allowed_media_hosts": ("127.0.0.1",)}
    with serving(settings, model=folder, tokenizer=processor.tokenizer, **SIZES) as running:
        yield httpx.Client(base_url=running.url, timeout=60)


def asked(client, path, content, **fields):
    """The answer to a message of the user."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    return client.post(path, json=body | fields)


def chat(client, url=URL):
    image = {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    return asked(client, "/v1/chat/completions", [image, {"type": "text", "text": TEXT}])


def test_every_api_gives_the_same_answer(client):
    first, again = chat(client).json(), chat(client).json()
    text = first["choices"][0]["message"]["content"]
    length = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    message = asked(client, "/v1/messages", blocks).json()
    assert message["content"][0]["text"] == text
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": TEXT}]
    items = [{"role": "user", "content": parts}]
    body = {"model": MODEL, "input": items, "max_output_tokens": 16, "temperature": 0}
    response = client.post("/v1/responses", json=body).json()
    assert response["output"][0]["content"][0]["text"].startswith(text) and response["usage"]["input_tokens"] == length
    options = {"stream": False, "options": {"num_predict": 6, "temperature": 0}}
    spoken = {"messages": [{"role": "user", "content": TEXT, "images": [DATA]}]}
    for path, given in (("chat", spoken), ("generate", {"prompt": TEXT, "images": [DATA]})):
        answer = client.post(f"/api/{path}", json={"model": MODEL} | given | options).json()
        assert (answer["message"]["content"] if path == "chat" else answer["response"]) == text
        assert answer["prompt_eval_count"] == length


def test_a_picture_of_an_allowed_host_is_the_same(client, monkeypatch):
    monkeypatch.setattr(media_hosts, "fetch", lambda url, *_: base64.b64decode(DATA))
    assert chat(client, "http://127.0.0.1/a.png").json()["choices"] == chat(client).json()["choices"]


@pytest.mark.parametrize(
    "url, error",
    [
        ("http://127.0.0.1/picture.png", "is an address of a private network"),
        ("http://elsewhere/picture.png", "is not fetched: its host is not one of --allowed-media-hosts"),
        ("file:///etc/passwd", "must be a data URL"),
        ("/etc/passwd", "must be a data URL"),
        ("data:image/png;base64,###", "is no base64"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "cannot be read"),
    ],
)
def test_what_is_no_picture_is_refused(url, error, client):
    refused = chat(client, url)
    assert refused.status_code == 400 and error in refused.json()["error"]["message"]


def test_a_raw_prompt_takes_no_picture(client):
    body = {"model": MODEL, "prompt": TEXT, "images": [DATA], "raw": True}
    refused = client.post("/api/generate", json=body)
    assert refused.status_code == 400 and "images is given with raw" in refused.json()["error"]


def test_a_text_model_says_so():
    with serving() as running, httpx.Client(base_url=running.url, timeout=60) as client:
        refused = chat(client)
        assert refused.status_code == 400 and "reads text alone" in refused.json()["error"]["message"]
