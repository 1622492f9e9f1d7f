"""`previous_response_id`: conversations go on, bounded in number and bytes, each for its key."""

import re

import pytest

from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.openai.response_store import ResponseStore, StoredConversation, size_of
from tests.support.serving import serving, user

ASK = {"temperature": 0, "max_output_tokens": 6}


def conversation(num_bytes=10, owner=""):
    return StoredConversation(owner, (user("x"),), num_bytes)


def post(running, *, key=None, **body):
    return running.answer("/v1/responses", ASK, body, headers=key and {"Authorization": f"Bearer {key}"})


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_a_conversation_goes_on_as_if_it_were_sent_whole():
    with serving({"store_responses": 4}) as running:
        first = post(running, input="Hello", instructions="Be brief.")
        assert first["store"] is True
        second = post(running, input="And then?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        said = [user("Hello"), {"role": "assistant", "content": text_of(first)}]
        whole = post(running, input=[*said, user("And then?")])
        assert text_of(second) == text_of(whole) and second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        body = ASK | {"input": "x", "previous_response_id": second["id"], "stream": True}
        assert re.search("response.(incomplete|completed)", running.post("/v1/responses", body).text)
        said += [user("And then?"), {"role": "assistant", "content": text_of(second)}]
        third = post(running, input="x", previous_response_id=second["id"])
        assert text_of(third) == text_of(post(running, input=[*said, user("x")]))


def test_what_is_not_kept_is_named():
    with serving({"store_responses": 1}) as running:
        first, _ = post(running, input="x"), post(running, input="y")
        left_out = post(running, input="x", store=False)
        for response_id in (left_out["id"], first["id"], "resp_unknown"):
            body = {"input": "z", "previous_response_id": response_id}
            error = running.error("/v1/responses", ASK, body, status=404)
            assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
            assert "--store-responses" in error["message"]


def test_a_conversation_belongs_to_its_key():
    with serving({"store_responses": 4, "api_key": ("one", "two")}) as running:
        body = ASK | {"input": "y", "previous_response_id": post(running, key="one", input="x")["id"]}
        assert running.error("/v1/responses", body, status=404, headers={"Authorization": "Bearer two"})


def test_the_oldest_are_dropped_beyond_a_number_or_bytes():
    store = ResponseStore(3, 100)
    for name in "abcd":
        store.keep(name, conversation())
    assert len(store) == 3 and store.num_bytes == 30
    store.find("b", "")  # used last
    store.keep("e", conversation(85))
    assert len(store) == 2 and store.num_bytes == 95
    assert store.find("b", "") and store.find("e", "")
    store.keep("f", conversation(101))
    assert len(store) == 2
    for name in "acdf":
        with pytest.raises(ApiError, match="not kept"):
            store.find(name, "")


def test_sizes_count_texts_and_messages():
    assert size_of([user("x" * 1000)]) > 1500
