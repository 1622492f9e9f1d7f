"""`embed` and `score` of `LLM` and `AsyncLLM`: ordinary requests that return the last row's hidden state or logits."""

from __future__ import annotations

import numbers
import uuid
from collections.abc import Sequence as SequenceABC
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from nanovllm.features.sampling_params import EmbeddingParams
from nanovllm.features.scoring.score_outputs import EmbeddingOutput, ScoreOutput
from nanovllm.features.scoring.scores import ScoringPlan, embedding_output, plan_scores
from nanovllm.outputs import OutputKind, RequestOutput
from nanovllm.requests import Prompt


class Scoring:
    """Mixin of `LLM`."""

    def embed(
        self: Any,
        prompts: Prompt | SequenceABC[Prompt],
        *,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[EmbeddingOutput]:
        """Embed prompts by the hidden state of their last token, after the model's final norm.

        Args:
            prompts: prompts in the forms that `generate` takes. Text gets the tokenizer's special tokens, such as the
                end token that embedding models are trained with; at most max_model_len - 1 tokens.
            normalize: True divides each embedding by its L2 norm.
            truncate_prompt_tokens: most tokens of a prompt; only its last ones are kept.
            use_tqdm, **options: arguments of `generate`.

        Returns one `EmbeddingOutput` per prompt, in order. Raises as `generate`, and ValueError for a model without a
        separate head.
        """
        params = EmbeddingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, **options)
        return [embedding_output(output, normalize=normalize) for output in outputs]

    def score(
        self: Any,
        query: str | SequenceABC[str],
        documents: str | SequenceABC[str],
        *,
        method: str = "yes_no",
        instruction: str | None = None,
        template: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[ScoreOutput]:
        """Score the relevance of documents to queries; docs/guide/embeddings.md has the formulas.

        Args:
            query: one for all documents, or a list with one per document.
            documents: one or several.
            method: "yes_no", the probability of yes against no (0 to 1), for instructed models and rerankers; "cosine"
                of embeddings (-1 to 1), for models trained to embed; "auto", yes_no where the tokenizer has one token
                each for yes and no, else cosine.
            instruction: the question to the model; None asks for relevance in general.
            template: a Jinja chat template with the roles system (the instruction), query and document, for rerankers
                trained on another format; None uses the tokenizer's chat template.
            truncate_prompt_tokens: most tokens of a prompt, as in `embed`.
            use_tqdm, **options: arguments of `generate`; one value for all.

        Returns one `ScoreOutput` per document, in order.
        """
        engine = self._open_engine()
        plan = plan_scores(
            engine.input_processor,
            query,
            documents,
            method=method,
            instruction=instruction,
            template=template,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return plan.scores(self.generate(plan.prompts, plan.params, use_tqdm=use_tqdm, **options))


class AsyncScoring:
    """Mixin of `AsyncLLM`; its coroutines return all results at once, and cancelling them aborts the requests."""

    async def embed(
        self: Any,
        prompts: Prompt | SequenceABC[Prompt],
        *,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> list[EmbeddingOutput]:
        """As `LLM.embed`; **options are those of `generate`."""
        is_one = isinstance(prompts, str) or all(isinstance(item, numbers.Integral) for item in prompts)
        each = cast(list[Prompt], [prompts] if is_one else prompts)
        params = EmbeddingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        outputs = await _final_outputs(self, each, params, options)
        return [embedding_output(output, normalize=normalize) for output in outputs]

    async def score(
        self: Any,
        query: str | SequenceABC[str],
        documents: str | SequenceABC[str],
        *,
        method: str = "yes_no",
        instruction: str | None = None,
        template: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> list[ScoreOutput]:
        """As `LLM.score`; **options are those of `generate`."""
        plan: ScoringPlan = await self.plan_scores(
            query,
            documents,
            method=method,
            instruction=instruction,
            template=template,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return plan.scores(await _final_outputs(self, plan.prompts, plan.params, options))

    async def plan_scores(
        self: Any, query: str | SequenceABC[str], documents: str | SequenceABC[str], **options: Any
    ) -> ScoringPlan:
        """The requests of `score`, for the caller to submit; **options: those of `score`, without `generate`'s."""
        work = partial(plan_scores, self._input_processor, query, documents, **options)
        plan: ScoringPlan = await self.prepare(work, (query, documents))
        return plan


async def _final_outputs(llm: Any, prompts: list[Prompt], params: Any, options: dict[str, Any]) -> list[RequestOutput]:
    """The final outputs of all prompts, in order."""
    request_ids = [uuid.uuid4().hex for _ in prompts]
    stream = await llm.submit(prompts, params, request_ids=request_ids, output_kind=OutputKind.FINAL, **options)
    outputs: dict[str, RequestOutput] = {}
    async with aclosing(stream):
        async for output in stream:
            outputs[output.request_id] = output
    return [outputs[request_id] for request_id in request_ids]
