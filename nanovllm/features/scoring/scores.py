"""Scores the relevance of documents to queries with a causal model; and reads embeddings from outputs.

yes_no: the model is asked whether the document is relevant to the query. With the logits z of the next token,
score = exp(z_yes) / (exp(z_yes) + exp(z_no)), the probability of "yes" among the two answers (Nogueira et al. 2020,
monoT5; Zhang et al. 2025, Qwen3-Reranker, trained for it). It works with any instructed model.

auto: yes_no where the model has a head and the tokenizer one token each for yes and no, else cosine.

cosine: score = e_query · e_document of normalised embeddings, each the last token's hidden state after the final norm
(Wang et al. 2024, E5-Mistral; Zhang et al. 2025, Qwen3-Embedding). It is meaningful for models trained to embed; hidden
states of other models point in much the same direction for all texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.config import text
from nanovllm.features.chat.chat import Message
from nanovllm.features.intake.headless import check_head
from nanovllm.features.sampling_params import EmbeddingParams, SamplingParams
from nanovllm.features.scoring.score_outputs import EmbeddingOutput, ScoreOutput
from nanovllm.outputs import RequestOutput
from nanovllm.requests import InputProcessor, Prompt

METHODS = ("yes_no", "cosine", "auto")
INSTRUCTION = "Decide whether the document is relevant to the query. Reply with one word only: yes or no."
ANSWERS = ("yes", "no")


def embedding_output(output: RequestOutput, *, normalize: bool) -> EmbeddingOutput:
    """The embedding of a finished request; `normalize` divides it by its L2 norm, unless that is zero."""
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
    """A logits processor that records the logits of two tokens, and changes nothing.

    logits: None before the step; set by the receiver of a message if the engine runs in another process.
    """

    def __init__(self, token_ids: tuple[int, int]) -> None:
        self.token_ids = token_ids
        self.logits: tuple[float, float] | None = None

    @classmethod
    def find_in(cls, params: SamplingParams) -> AnswerLogits | None:
        """The processor of a request of `ScoringPlan`; None for any other request."""
        processors = params.logits_processors
        return processors[0] if len(processors) == 1 and isinstance(processors[0], cls) else None

    def __call__(self, token_ids: list[int], logits: Any) -> Any:
        first, second = logits[list(self.token_ids)].tolist()
        self.logits = first, second
        return logits

    def score(self) -> float | None:
        """Probability of the first token among the two; None before the step."""
        if self.logits is None:
            return None
        difference = self.logits[0] - self.logits[1]
        if difference >= 0:  # the exponent is never positive: exp does not overflow
            return 1.0 / (1.0 + math.exp(-difference))
        return math.exp(difference) / (1.0 + math.exp(difference))


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """Requests that score pairs of query and document; run them, then call `scores`."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    pairs: list[tuple[int, int]]  # indices of the query's and the document's prompt; equal for yes_no

    def scores(self, outputs: SequenceABC[RequestOutput]) -> list[ScoreOutput]:
        """One score per pair, from the outputs of `prompts` in the same order."""
        return [self._score(outputs, *pair) for pair in self.pairs]

    def _score(self, outputs: SequenceABC[RequestOutput], query_index: int, document_index: int) -> ScoreOutput:
        query = outputs[query_index]
        document = outputs[document_index]
        score = None
        failed = next((o for o in (query, document) if o.outputs[0].finish_reason not in ("stop", "length")), None)
        if failed is None and not self.params[document_index].embeds:
            answer = AnswerLogits.find_in(self.params[document_index])
            score = None if answer is None else answer.score()
        elif failed is None:
            vectors = [embedding_output(output, normalize=True).embedding for output in (query, document)]
            score = float(np.dot(vectors[0], vectors[1])) if vectors[0] is not None and vectors[1] is not None else None
        source = failed or document  # the output with the error
        return ScoreOutput(
            request_id=document.request_id,
            score=score,
            prompt_token_ids=document.prompt_token_ids,
            finish_reason="stop" if failed is None else failed.outputs[0].finish_reason,
            num_cached_tokens=document.num_cached_tokens,
            metrics=document.metrics,
            error=source.error,
            error_kind=source.error_kind,
        )


def plan_scores(
    processor: InputProcessor,
    query: Any,
    documents: Any,
    *,
    method: str = "yes_no",
    instruction: str | None = None,
    template: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> ScoringPlan:
    """The requests of `LLM.score`, with its arguments; raises TypeError and ValueError for invalid arguments."""
    queries, texts = _pairs(query, documents)
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}.")
    asks = instruction is not None or template is not None
    raises = method == "yes_no" or asks
    if raises:
        check_head(processor.limits)
    asks_model = method != "cosine" and processor.limits.has_head
    answers = _answer_ids(processor.tokenizer, raises=raises) if asks_model else None
    if answers is None:
        if asks:
            raise ValueError(
                "instruction and template belong to method='yes_no'; for 'cosine' put them into the texts."
            )
        prompts = list(dict.fromkeys((*queries, *texts)))
        indices = {prompt: index for index, prompt in enumerate(prompts)}
        params: SamplingParams = EmbeddingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        pairs = [(indices[q], indices[t]) for q, t in zip(queries, texts, strict=True)]
        return ScoringPlan(list(prompts), [params] * len(prompts), pairs)
    options: dict[str, Any] = {} if template is None else {"chat_template": text("template", template)}
    prompts_of_pairs: list[Prompt] = [
        processor.parts.chat.apply_to(_question(*pair, instruction, is_own=template is None), **options)
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
        [(index, index) for index in range(len(prompts_of_pairs))],
    )


def _pairs(query: Any, documents: Any) -> tuple[list[str], list[str]]:
    """(queries, documents) of equal length; a single query is repeated."""
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


def _answer_ids(tokenizer: Any, *, raises: bool) -> tuple[int, int] | None:
    """Tokens of yes and no; where a word has several, ValueError if `raises`, else None."""
    if tokenizer is None:
        raise ValueError("score needs a tokenizer; pass tokenizer=... with the model.")
    yes, no = (tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS)
    for answer, token_ids in zip(ANSWERS, (yes, no), strict=True):
        if len(token_ids) != 1 and not raises:
            return None
        if len(token_ids) != 1:
            raise ValueError(
                f"the tokenizer spells {answer!r} in {len(token_ids)} tokens, and method='yes_no' compares the logits "
                "of one. Use method='cosine', or another model."
            )
    return yes[0], no[0]


def _question(query: str, document: str, instruction: str | None, *, is_own: bool) -> list[Message]:
    """The conversation of a pair; the query comes before the document, so that documents share a prefix."""
    instruction = INSTRUCTION if instruction is None else text("instruction", instruction)
    if is_own:
        content = f"{instruction}\n\nQuery: {query}\n\nDocument: {document}"
        return [{"role": "user", "content": content}]
    roles = {"system": instruction, "query": query, "document": document}
    return [{"role": role, "content": content} for role, content in roles.items()]
