"""`score`: the formulas of both methods against plain forward passes of `transformers`, and what is refused."""

import math

import numpy as np
import pytest
import torch

from nanovllm import ErrorKind
from nanovllm.features.scoring.scores import INSTRUCTION, AnswerLogits, embedding_output
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.support import async_llms
from tests.support.llms import assert_idle_and_whole, open_llm
from tests.support.tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of France is Paris.", "Two and two are four.", "The dog was lazy. " * 12]
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|end|>{% endfor %}<|assistant|>"
)


@pytest.fixture
def tokenizer(monkeypatch):
    """The tiny one, with a token each for yes and no."""
    tokenizer = tiny_tokenizer()
    encode = type(tokenizer).encode

    def encoded(self, text, **options):
        return {"yes": [300], "no": [301]}.get(text) or encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", encoded)
    return tokenizer


def share_of_yes(model, prompt):
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    return torch.softmax(logits[[300, 301]], dim=0)[0].item()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 40, "max_num_seqs": 8}, {"overlap": True}], ids=str)
def test_yes_no_is_the_share_of_yes_among_the_two_answers(tokenizer, options):
    model = tiny_model()
    with open_llm(model, **options) as llm:
        cold = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        warm = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert_idle_and_whole(llm)
    for document, one, other in zip(DOCUMENTS, cold, warm, strict=True):
        text = f"{INSTRUCTION}\n\nQuery: {QUERY}\n\nDocument: {document}"
        conversation = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert one.prompt_token_ids == prompt
        assert one.score == pytest.approx(share_of_yes(model, prompt), abs=1e-4)
        assert other.score == pytest.approx(one.score, abs=1e-4)
        assert other.num_cached_tokens > 0
    assert len({round(one.score, 3) for one in cold}) == 3


def test_documents_share_what_comes_before_them(tokenizer):
    with open_llm() as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    assert outputs[0].num_cached_tokens == 0
    assert min(output.num_cached_tokens for output in outputs[1:]) >= 48


def test_a_template_of_its_own_renders_system_query_and_document(tokenizer):
    with open_llm() as llm:
        (output,) = llm.score("a", ["b"], instruction="c", template=TEMPLATE, use_tqdm=False)
    assert tokenizer.decode(output.prompt_token_ids) == (
        "[system]c<|end|>[query]a<|end|>[document]b<|end|><|assistant|>"
    )


def test_control_tokens_in_texts_are_plain_text(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    with open_llm() as llm:
        (own,) = llm.score("a", ["b"], use_tqdm=False)
        (output,) = llm.score("a<|end|>", ["b<|end|>"], use_tqdm=False)
        (templated,) = llm.score("a<|end|>", ["b"], template=TEMPLATE, use_tqdm=False)
    assert output.prompt_token_ids.count(end) == own.prompt_token_ids.count(end) == 1
    assert templated.prompt_token_ids.count(end) == 3


def test_cosine_is_that_of_the_last_hidden_states():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    with open_llm(model) as llm:
        outputs = llm.score([QUERY, DOCUMENTS[0], QUERY], DOCUMENTS, method="cosine", use_tqdm=False)
        assert llm.score(QUERY, QUERY, method="cosine", use_tqdm=False)[0].score == pytest.approx(1.0)
    states = {}
    for text in (QUERY, *DOCUMENTS):
        with torch.no_grad():
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            states[text] = model.model(ids).last_hidden_state[0, -1].numpy()
    for query, document, output in zip([QUERY, DOCUMENTS[0], QUERY], DOCUMENTS, outputs, strict=True):
        one, other = states[query], states[document]
        cosine = float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other))
        assert output.score == pytest.approx(cosine, abs=1e-5)


async def test_asynchronous_scores_are_the_same(tokenizer):
    with open_llm() as llm:
        expected = {
            method: llm.score(QUERY, DOCUMENTS, method=method, use_tqdm=False) for method in ("yes_no", "cosine")
        }
    async with async_llms.open_llm() as llm:
        for method, own in expected.items():
            outputs = await llm.score(QUERY, DOCUMENTS, method=method)
            assert [o.score for o in outputs] == pytest.approx([o.score for o in own], abs=1e-4)


def test_a_document_that_fails_says_so_and_the_others_are_scored(tokenizer):
    model = tiny_model()
    bad = tokenizer("Z", add_special_tokens=False)["input_ids"]
    assert len(bad) == 1
    with torch.no_grad():
        model.model.embed_tokens.weight[bad[0]] = torch.nan
    with open_llm(model) as llm:
        for method in ("yes_no", "cosine"):
            good, failed = llm.score("a", ["b", "Z"], method=method, use_tqdm=False)
            assert (good.finish_reason, good.error) == ("stop", None)
            assert (failed.finish_reason, failed.score, failed.error_kind) == ("error", None, ErrorKind.INTERNAL)
            assert "not finite" in failed.error
            (failed,) = llm.score("Z", ["b"], method=method, use_tqdm=False)
            assert failed.finish_reason == "error" and "not finite" in failed.error
        (late,) = llm.score("a", ["b"], timeout=1e-9, use_tqdm=False)
        assert (late.finish_reason, late.score) == ("timeout", None)


def test_an_embedding_of_zeros_stays_what_it_is():
    zeros = np.zeros(4, np.float32)
    completion = CompletionOutput(0, "", [], "stop", None)
    output = RequestOutput("a", None, [1], [completion], True, 0, RequestMetrics(0.0), embedding=zeros)
    assert not embedding_output(output, normalize=True).embedding.any()


def test_far_apart_logits_do_not_overflow():
    for values, expected in (([800.0, -800.0], 1.0), ([-800.0, 800.0], 0.0), ([1.0, 1.0], 0.5)):
        processor = AnswerLogits((0, 1))
        processor([], torch.tensor(values))
        assert processor.score() == pytest.approx(expected)
    processor = AnswerLogits((0, 1))
    processor([], torch.tensor([1.0, 3.0]))
    assert processor.score() == pytest.approx(1 / (1 + math.exp(2.0)))


def test_what_cannot_be_scored_is_refused_by_name(tokenizer):
    with open_llm() as llm:
        for error, message, arguments, options in (
            (ValueError, "method is 'max'; it must be one of yes_no, cosine, auto", ("q", ["d"]), {"method": "max"}),
            (ValueError, "the list of documents is empty", ("q", []), {}),
            (ValueError, "there are 2 queries and 1 documents", (["q", "r"], ["d"]), {}),
            (TypeError, "a document must be a string that is not empty, not 3", ("q", [3]), {}),
            (TypeError, "a query must be a string that is not empty, not ''", ("", ["d"]), {}),
            (TypeError, "documents must be a string or a list of strings, not None", ("q", None), {}),
            (ValueError, "for 'cosine' put them", ("q", ["d"]), {"method": "cosine", "instruction": "i"}),
            (ValueError, "chat template refuses", ("q", ["d"]), {"template": "{{ raise_exception('no') }}"}),
        ):
            with pytest.raises(error, match=message):
                llm.score(*arguments, use_tqdm=False, **options)


def test_a_tokenizer_that_spells_an_answer_in_several_tokens_is_refused():
    assert len(tiny_tokenizer().encode("yes", add_special_tokens=False)) > 1
    with open_llm() as llm, pytest.raises(ValueError, match="the tokenizer spells 'yes' in"):
        llm.score("q", ["d"], use_tqdm=False)


def test_a_tokenizer_without_a_chat_template_needs_one_given(tokenizer, monkeypatch):
    with open_llm() as llm:
        llm.tokenizer.chat_template = None
        with pytest.raises(ValueError, match="chat needs a tokenizer with a chat template"):
            llm.score("q", ["d"], use_tqdm=False)
        (output,) = llm.score("q", ["d"], template=CHAT_TEMPLATE, use_tqdm=False)
        assert 0.0 < output.score < 1.0
