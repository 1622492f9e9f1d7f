"""What an engine refuses before a request is queued; each refusal names value, limit and remedy."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.errors import PromptTooLongError
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a model and its engine can serve.

    vocab_size: a prompt's token ids lie below it: the rows of the embedding.
    num_logits: the tokens that can be sampled, those of both embedding and head.
    max_model_len: tokens of prompt and answer together.
    model_name: in errors.
    has_base_model: whether the head is a module apart, which prompt_logprobs needs.
    allow_control_tokens: see `EngineConfig.allow_control_tokens_in_messages`.
    """

    vocab_size: int
    num_logits: int
    max_model_len: int
    model_name: str
    has_base_model: bool = True
    allow_control_tokens: bool = False


def truncated(prompt_token_ids: list[int], params: SamplingParams) -> list[int]:
    """The last `truncate_prompt_tokens` of a prompt, or all of it."""
    limit = params.truncate_prompt_tokens
    return prompt_token_ids if limit is None else prompt_token_ids[-limit:]


def check_prompt(prompt_token_ids: list[int], params: SamplingParams, limits: RequestLimits) -> None:
    """Raise ValueError or TypeError for a prompt, truncated already, that cannot be served with these parameters."""
    vocab_size, max_model_len = limits.vocab_size, limits.max_model_len
    if not prompt_token_ids:
        raise ValueError("the prompt is empty; it needs at least one token.")
    if set(map(type, prompt_token_ids)) != {int}:  # a prompt may be long, and this is fast
        for token_id in prompt_token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"a prompt's token ids must be whole numbers, not {token_id!r}.")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"the prompt holds token id {low if low < 0 else high}, outside the vocabulary of {vocab_size} "
            "tokens (0 to vocabulary - 1)."
        )
    length = len(prompt_token_ids)
    if length >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {length} tokens, which leaves no room for a new one within max_model_len "
            f"({max_model_len}). Shorten it to at most {max_model_len - 1} tokens (truncate_prompt_tokens does), or "
            "raise max_model_len if the model and the KV cache allow."
        )
    if params.min_tokens > max_model_len - length:
        raise ValueError(
            f"min_tokens is {params.min_tokens}, but behind a prompt of {length} tokens max_model_len "
            f"({max_model_len}) leaves room for {max_model_len - length}."
        )


def check_params(params: SamplingParams, limits: RequestLimits, *, has_tokenizer: bool) -> None:
    """Raise ValueError for parameters that this model or tokenizer cannot serve."""
    vocab_size = limits.num_logits
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name):
            if token_id >= vocab_size:
                raise ValueError(f"{name} holds {token_id}, outside the vocabulary of {vocab_size} tokens.")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise ValueError(f"{name} is {count}, more tokens than the vocabulary has; at most {vocab_size}.")
    if params.prompt_logprobs is not None and not limits.has_base_model:
        raise ValueError(
            f"prompt_logprobs is {params.prompt_logprobs}, and {limits.model_name} has no base model apart "
            "from its head, whose logits could be made in pieces. Leave it out."
        )
    if has_tokenizer:
        return
    for name, is_used in (
        ("stop strings", bool(params.stop)),
        ("bad_words", bool(params.bad_words)),
        ("skip_special_tokens=False", not params.skip_special_tokens),
    ):
        if is_used:
            raise ValueError(
                f"{name} need a tokenizer, and the engine was built without one; pass tokenizer=... to LLM."
            )
