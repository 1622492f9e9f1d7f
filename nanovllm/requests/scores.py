"""Relevance of documents to queries by a causal model: prompts in, scores out; and embeddings of their outputs.

yes_no: the model reads query and document and is asked whether they belong together. With the logits z of the token
that follows, score = exp(z_yes) / (exp(z_yes) + exp(z_no)), the probability of "yes" among the two answers (Nogueira et
al. 2020, monoT5; Zhang et al. 2025, Qwen3-Reranker, whose checkpoints are trained for it). Any instructed model has it.

cosine: score = e_query · e_document of normalised embeddings, each the last token's hidden state behind the final norm
(Wang et al. 2024, E5-Mistral; Zhang et al. 2025, Qwen3-Embedding). It means something for models trained to embed; of
others, hidden states point in much the same direction whatever the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.core.outputs import EmbeddingOutput, RequestOutput, ScoreOutput
from nanovllm.core.sampling_params import EmbeddingParams, SamplingParams
from nanovllm.core.validation import text
from nanovllm.requests.chat import ChatTemplate, Message
from nanovllm.requests.input_processor import Prompt

METHODS = ("yes_no", "cosine")
INSTRUCTION = "Decide whether the document is relevant to the query. Reply with one word only: yes or no."
ANSWERS = ("yes", "no")


def embedding_output(output: RequestOutput, *, normalize: bool) -> EmbeddingOutput:
    """The embedding of a finished request, of length 1 if asked for; a vector of zeros stays one."""
    embedding = output.embedding
    if embedding is not None and normalize:
        length = float(np.linalg.norm(embedding))
        embedding = embedding / np.float32(length) if length else embedding
    return EmbeddingOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        embedding=embedding,
        finish_reason=output.outputs[0].finish_reason,
        num_cached_tokens=output.num_cached_tokens,
        metrics=output.metrics,
        error=output.error,
        error_kind=output.error_kind,
    )


class AnswerLogits:
    """A logits processor that keeps the logits of two tokens, and changes nothing.

    logits: None before the step; those of an engine of another process are put here by whom they are sent to.
    """

    def __init__(self, token_ids: tuple[int, int]) -> None:
        self.token_ids = token_ids
        self.logits: tuple[float, float] | None = None

    @classmethod
    def of(cls, params: SamplingParams) -> AnswerLogits | None:
        """That of a request of `ScoringPlan`; None for any other."""
        processors = params.logits_processors
        return processors[0] if len(processors) == 1 and isinstance(processors[0], cls) else None

    def __call__(self, token_ids: list[int], logits: Any) -> Any:
        first, second = logits[list(self.token_ids)].tolist()
        self.logits = first, second
        return logits

    def score(self) -> float | None:
        """The share of the first token; None before the step."""
        if self.logits is None:
            return None
        difference = self.logits[0] - self.logits[1]
        if difference >= 0:  # so that exp does not overflow
            return 1.0 / (1.0 + math.exp(-difference))
        return math.exp(difference) / (1.0 + math.exp(difference))


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """The requests that score pairs of query and document: make them, then read `scores`."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    pairs: list[tuple[int, int]]  # which prompts are of the query and the document; one of both for yes_no

    def scores(self, outputs: SequenceABC[RequestOutput]) -> list[ScoreOutput]:
        """One for each pair, of the outputs of `prompts` in their order."""
        return [self._score(outputs, *pair) for pair in self.pairs]

    def _score(self, outputs: SequenceABC[RequestOutput], of_query: int, of_document: int) -> ScoreOutput:
        query, document, score = outputs[of_query], outputs[of_document], None
        failed = next((o for o in (query, document) if o.outputs[0].finish_reason not in ("stop", "length")), None)
        if failed is None and not self.params[of_document].embeds:
            answer = AnswerLogits.of(self.params[of_document])
            score = None if answer is None else answer.score()
        elif failed is None:
            vectors = [embedding_output(output, normalize=True).embedding for output in (query, document)]
            score = float(np.dot(vectors[0], vectors[1])) if vectors[0] is not None and vectors[1] is not None else None
        told = failed or document
        return ScoreOutput(
            request_id=document.request_id,
            score=score,
            prompt_token_ids=document.prompt_token_ids,
            finish_reason="stop" if failed is None else failed.outputs[0].finish_reason,
            num_cached_tokens=document.num_cached_tokens,
            metrics=document.metrics,
            error=told.error,
            error_kind=told.error_kind,
        )


def plan_scores(
    chat: ChatTemplate,
    tokenizer: Any,
    query: Any,
    documents: Any,
    *,
    method: str = "yes_no",
    instruction: str | None = None,
    template: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> ScoringPlan:
    """The requests of `LLM.score`, whose arguments these are; raises TypeError and ValueError for bad ones."""
    queries, texts = _pairs(query, documents)
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}.")
    if method == "cosine":
        if instruction is not None or template is not None:
            raise ValueError(
                "instruction and template belong to method='yes_no'; for 'cosine' put them into the texts."
            )
        prompts = list(dict.fromkeys((*queries, *texts)))
        places = {prompt: place for place, prompt in enumerate(prompts)}
        params: SamplingParams = EmbeddingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        pairs = [(places[q], places[t]) for q, t in zip(queries, texts, strict=True)]
        return ScoringPlan(list(prompts), [params] * len(prompts), pairs)
    answers = _answer_ids(tokenizer)
    options: dict[str, Any] = {} if template is None else {"chat_template": text("template", template)}
    prompts_of_pairs: list[Prompt] = [
        chat.apply_to(_question(*pair, instruction, is_own=template is None), **options)
        for pair in zip(queries, texts, strict=True)
    ]
    return ScoringPlan(
        prompts_of_pairs,
        [
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                truncate_prompt_tokens=truncate_prompt_tokens,
                logits_processors=(AnswerLogits(answers),),
            )
            for _ in prompts_of_pairs
        ],
        [(place, place) for place in range(len(prompts_of_pairs))],
    )


def _pairs(query: Any, documents: Any) -> tuple[list[str], list[str]]:
    """Each document with its query: one query for all, or one for each."""
    for name, given in (("query", query), ("documents", documents)):
        if not isinstance(given, SequenceABC) or isinstance(given, bytes):
            raise TypeError(f"{name} must be a string or a list of strings, not {given!r}.")
    queries, texts = ([given] if isinstance(given, str) else list(given) for given in (query, documents))
    if not texts:
        raise ValueError("the list of documents is empty; give at least one document.")
    if isinstance(query, str):
        queries = queries * len(texts)
    if len(queries) != len(texts):
        raise ValueError(
            f"there are {len(queries)} queries and {len(texts)} documents; give one query, or one for each."
        )
    for name, given in (("query", queries), ("document", texts)):
        for item in given:
            if not isinstance(item, str) or not item:
                raise TypeError(f"a {name} must be a string that is not empty, not {item!r}.")
            text(f"a {name}", item)
    return queries, texts


def _answer_ids(tokenizer: Any) -> tuple[int, int]:
    if tokenizer is None:
        raise ValueError("score needs a tokenizer; pass tokenizer=... with the model.")
    yes, no = (tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS)
    for answer, token_ids in zip(ANSWERS, (yes, no), strict=True):
        if len(token_ids) != 1:
            raise ValueError(
                f"the tokenizer spells {answer!r} in {len(token_ids)} tokens, and method='yes_no' compares the logits "
                "of one. Use method='cosine', or another model."
            )
    return yes[0], no[0]


def _question(query: str, document: str, instruction: str | None, *, is_own: bool) -> list[Message]:
    """The conversation that asks; the query comes first, so that documents share what is before them."""
    instruction = INSTRUCTION if instruction is None else text("instruction", instruction)
    if is_own:
        content = f"{instruction}\n\nQuery: {query}\n\nDocument: {document}"
        return [{"role": "user", "content": content}]
    roles = {"system": instruction, "query": query, "document": document}
    return [{"role": role, "content": content} for role, content in roles.items()]
