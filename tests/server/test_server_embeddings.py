"""/v1/embeddings, /v1/rerank and /v1/score: the offline engine's numbers in the forms of the clients."""

import base64
import threading

import numpy as np
import openai
import pytest

from nanovllm.features.scoring import scores
from nanovllm.serving.server.ollama import catalogue
from nanovllm.serving.server.openai import embeddings as embedding_endpoints
from tests.support.async_llms import offline
from tests.support.llms import comes_true
from tests.support.serving import serving
from tests.support.tiny_models import random_prompts

QUERY, DOCUMENTS = "the capital", ["The capital of France is Paris.", "Two and two are four.", "A block of tokens."]


@pytest.fixture(scope="module")
def running():
    with pytest.MonkeyPatch.context() as patch, serving({"max_prompts": 8, "api_key": ["secret"]}) as running:
        patch.setattr(scores, "ANSWERS", ("y", "n"))  # which the tiny tokenizer has tokens for
        yield running


KEY = {"Authorization": "Bearer secret"}


def answer(running, path, **body):
    return running.answer(path, body, headers=KEY)


def embeddings(prompts, **options):
    return [output.embedding for output in offline().embed(prompts, use_tqdm=False, **options)]


@pytest.mark.parametrize("encoding_format", [openai.NOT_GIVEN, "float", "base64"], ids=str)
def test_the_clients_embeddings_are_those_of_the_engine(running, encoding_format):
    made = running.client("secret").embeddings.create(model="tiny", input=DOCUMENTS, encoding_format=encoding_format)
    given = [item.embedding for item in made.data]
    if encoding_format == "base64":
        given = [np.frombuffer(base64.b64decode(text), "<f4") for text in given]
    for own, expected in zip(given, embeddings(DOCUMENTS), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)
    assert ([item.index for item in made.data], made.object) == ([0, 1, 2], "list")
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_numbers_are_encoded_outside_of_the_event_loop(running, monkeypatch, path):
    threads = []

    def encode(vector):
        threads.append(threading.current_thread())
        return "[]"

    for module in (embedding_endpoints, catalogue):
        monkeypatch.setattr(module, "encode_numbers", encode)
    assert answer(running, path, model="tiny", input=DOCUMENTS)
    assert len(threads) == 3 and running.thread not in threads


@pytest.mark.parametrize("given", ["one text", [1, 2, 3], [[1, 2, 3], [4, 5]], ["a", "b"]], ids=str)
def test_an_input_is_a_text_token_ids_or_a_list_of_either(running, given):
    data = answer(running, "/v1/embeddings", input=given)["data"]
    np.testing.assert_allclose([item["embedding"] for item in data], embeddings(given), atol=1e-5)


def test_dimensions_cut_and_normalise(running):
    (cut,) = running.client("secret").embeddings.create(model="tiny", input="one text", dimensions=8).data
    (whole,) = embeddings("one text")
    np.testing.assert_allclose(cut.embedding, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-5)


def test_what_is_not_normalised_and_truncated(running):
    prompt = random_prompts(1, low=60, high=60)[0]
    options = {"normalize": False, "truncate_prompt_tokens": 20}
    (item,) = answer(running, "/v1/embeddings", input=prompt, **options)["data"]
    np.testing.assert_allclose(item["embedding"], embeddings(prompt[-20:], normalize=False)[0], atol=1e-3)


def test_reranked_documents_come_best_first(running):
    expected = [output.score for output in offline().score(QUERY, DOCUMENTS, use_tqdm=False)]
    found = answer(running, "/v1/rerank", query=QUERY, documents=[DOCUMENTS[0], *map(_object, DOCUMENTS[1:])])
    results = found["results"]
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [result["index"] for result in results] == order
    assert [result["relevance_score"] for result in results] == pytest.approx([expected[i] for i in order], abs=1e-4)
    assert [result["document"] for result in results] == [_object(DOCUMENTS[index]) for index in order]
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] > 0
    options = {"top_n": 1, "return_documents": False}
    (best,) = answer(running, "/v1/rerank", query=QUERY, documents=DOCUMENTS, **options)["results"]
    assert (best["index"], "document" in best) == (order[0], False)


def _object(text):
    return {"text": text}


@pytest.mark.parametrize("method", ["yes_no", "cosine"])
@pytest.mark.parametrize("queries", [QUERY, [QUERY, "Paris", "tokens"]], ids=["one query", "one each"])
def test_scores_are_those_of_the_engine(running, method, queries):
    data = answer(running, "/v1/score", text_1=queries, text_2=DOCUMENTS, method=method)["data"]
    expected = offline().score(queries, DOCUMENTS, method=method, use_tqdm=False)
    assert [item["index"] for item in data] == [0, 1, 2]
    assert [item["score"] for item in data] == pytest.approx([own.score for own in expected], abs=1e-4)


@pytest.mark.parametrize(
    "path, body, message",
    [
        ("embeddings", "{}", "input: Field required"),
        ("embeddings", '{"input": ""}', "input: it is empty"),
        ("embeddings", '{"input": ["a", 1]}', "input: it must be a string"),
        ("embeddings", {"input": ["a"] * 9}, "input: 9 are too many for one request; at most 8"),
        ("embeddings", {"input": [1] * 600}, "the prompt has 600 tokens"),
        ("embeddings", '{"input": [99999]}', "the prompt holds token id 99999"),
        ("embeddings", '{"input": "a", "encoding_format": "int8"}', "encoding_format: "),
        ("embeddings", '{"inputs": "a", "input": "a"}', "inputs: unknown field; did you mean input"),
        ("embeddings", '{"input": "a", "model": "gpt"}', "the model 'gpt' does not exist"),
        ("embeddings", '{"input": "one text", "dimensions": 9999}', "the model's embeddings have 384"),
        ("rerank", '{"query": "a", "documents": []}', "documents: "),
        ("rerank", '{"query": "a", "documents": [1]}', "documents[0]"),
        ("rerank", '{"query": "a", "documents": ["b"], "top_n": 0}', "top_n: "),
        ("score", '{"text_1": ["a", "b"], "text_2": ["c"]}', "there are 2 queries and 1 documents"),
        ("score", '{"text_1": "a", "text_2": "b", "method": "cosine", "instruction": "c"}',
         "instruction and template belong to method='yes_no'"),
        ("score", '{"text_1": "a", "text_2": "b", "priority": -5}', "priority is -5"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_by_name(running, path, body, message):
    status = 404 if "does not exist" in message else 400
    assert message in running.error(f"/v1/{path}", body, status=status, headers=KEY)["message"]


def test_one_that_times_out_is_a_408(running):
    body = {"input": [5] * 400, "timeout": 1e-6}
    assert running.error("/v1/embeddings", body, status=408, headers=KEY)["code"] == "timeout"
    assert running.is_idle()


def test_they_are_counted_as_other_requests_are(running):
    def count():
        lines = running.get("/metrics", headers=KEY).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("nanovllm:request_success_total"))

    before = count()
    answer(running, "/v1/embeddings", input=random_prompts(6))
    comes_true(running.is_idle)
    assert count() - before == 6


def test_a_full_queue_is_a_429_and_nothing_is_left():
    with serving(max_num_seqs=2, max_queue=1) as running:
        assert running.error("/v1/embeddings", '{"input": [[1], [2], [3], [4]]}', status=429)["code"] == "queue_full"
        assert running.is_idle()
