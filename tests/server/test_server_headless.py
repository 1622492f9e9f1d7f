"""A served model without a head: endpoints that embed answer, those that generate are refused by name."""

import numpy as np
import pytest
import torch

from tests.support.serving import MODEL, served, serving, user
from tests.support.tiny_models import tiny_model, tiny_tokenizer

TEXTS = ["The capital of France is Paris.", "Two and two are four."]
USER = [user("hello")]
REFUSAL = "LlamaModel has no language model head, so it generates nothing: it embeds"


running = served(lambda: serving(model=tiny_model(num_layers=1).base_model))


def states():
    """Normalised last hidden states of `transformers`, [hidden_size] each."""
    model, tokenizer = tiny_model(num_layers=1).base_model, tiny_tokenizer()
    with torch.no_grad():
        rows = [model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1].numpy() for text in TEXTS]
    return [row / np.linalg.norm(row) for row in rows]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 4}),
        ("/api/chat", {"messages": USER}),
        ("/api/generate", {"prompt": "hello"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_endpoints_that_generate_are_refused_by_name(running, path, body, is_streamed):
    answer = running.post(path, {"model": MODEL, "stream": is_streamed} | body)
    assert answer.status_code == 400
    assert REFUSAL in answer.text
    assert running.is_idle()


def test_scores_by_the_head_are_refused_and_others_are_cosines(running):
    body = {"query": TEXTS[0], "documents": [TEXTS[1]]}
    refused = running.post("/v1/rerank", body | {"method": "yes_no"})
    ranked = running.post("/v1/rerank", body).json()["results"]
    (scored,) = running.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]}).json()["data"]
    assert refused.status_code == 400 and REFUSAL in refused.text
    expected = float(np.dot(*states()))
    assert [ranked[0]["relevance_score"], scored["score"]] == pytest.approx([expected] * 2, abs=1e-4)


def test_embeddings_of_both_apis_are_those_of_transformers(running):
    data = running.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
    of_ollama = running.post("/api/embed", {"model": MODEL, "input": TEXTS}).json()["embeddings"]
    for given in ([item["embedding"] for item in data], of_ollama):
        np.testing.assert_allclose(given, states(), atol=1e-5)


def test_the_models_card_lists_embedding_alone(running):
    assert running.get("/v1/models").json()["data"][0]["capabilities"] == ["embedding"]
    assert running.get(f"/v1/models/{MODEL}").json()["capabilities"] == ["embedding"]
    assert running.post("/api/show", {"model": MODEL}).json()["capabilities"] == ["embedding"]
    assert running.post("/api/generate", {"model": MODEL}).json()["done_reason"] == "load"
    assert running.post("/tokenize", {"messages": USER}).json()["count"] > 0
    with serving() as generating:
        assert generating.get("/v1/models").json()["data"][0]["capabilities"] == ["completion", "embedding"]
