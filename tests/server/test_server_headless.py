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
    assert REFUSAL in str(running.error(path, {"model": MODEL, "stream": is_streamed}, body))
    assert running.is_idle()


def test_scores_by_the_head_are_refused_and_others_are_cosines(running):
    query, document = TEXTS
    body = {"query": query, "documents": [document]}
    assert REFUSAL in running.error("/v1/rerank", body, '{"method": "yes_no"}')["message"]
    (ranked,) = running.answer("/v1/rerank", body)["results"]
    (scored,) = running.answer("/v1/score", {"text_1": query, "text_2": document})["data"]
    assert [ranked["relevance_score"], scored["score"]] == pytest.approx([float(np.dot(*states()))] * 2, abs=1e-4)


def test_embeddings_of_both_apis_are_those_of_transformers(running):
    data = running.answer("/v1/embeddings", {"input": TEXTS})["data"]
    of_ollama = running.answer("/api/embed", {"model": MODEL, "input": TEXTS})["embeddings"]
    for given in ([item["embedding"] for item in data], of_ollama):
        np.testing.assert_allclose(given, states(), atol=1e-5)


def test_the_models_card_lists_embedding_alone(running):
    named = {"model": MODEL}
    (listed,) = running.get("/v1/models").json()["data"]
    cards = (listed, running.get(f"/v1/models/{MODEL}").json(), running.answer("/api/show", named))
    assert [card["capabilities"] for card in cards] == [["embedding"]] * 3
    assert running.answer("/api/generate", named)["done_reason"] == "load"
    assert running.answer("/tokenize", {"messages": USER})["count"] > 0
    with serving() as generating:
        assert generating.get("/v1/models").json()["data"][0]["capabilities"] == ["completion", "embedding"]
