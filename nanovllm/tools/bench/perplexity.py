"""Perplexity of a text by the engine itself: the log-probabilities of its tokens, in chunks that are read alone."""

from __future__ import annotations

import math
import statistics
from typing import Any

from nanovllm.features.sampling_params import SamplingParams

CHUNK = 512  # tokens of a chunk, unless another number is given


def chunks_of(name: str, text: str, tokenizer: Any, length: int) -> list[list[int]]:
    """Token ids of a text, without special tokens, in chunks of so many.

    Args:
        name: the text's, for messages.

    Raises ValueError for a text without two tokens in a chunk, and for chunks of one.
    """
    if length < 2:
        raise ValueError(
            f"--perplexity-tokens is {length}, but a chunk's first token is not scored: it must be at least 2."
        )
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = [token_ids[at : at + length] for at in range(0, len(token_ids), length)]
    found = [chunk for chunk in found if len(chunk) > 1]
    if not found:
        raise ValueError(f"--perplexity is {name!r}, which has {len(token_ids)} tokens. Name a text of 2 at least.")
    return found


def measure(llm: Any, name: str, chunks: list[list[int]]) -> dict[str, Any]:
    """Figures of a text's chunks. The standard error takes each chunk for a sample."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": chunk} for chunk in chunks], params, use_tqdm=False)
    losses = [
        -sum(found[token].logprob for token, found in zip(chunk[1:], output.prompt_logprobs[1:], strict=True))
        for chunk, output in zip(chunks, outputs, strict=True)
    ]
    counts = [len(chunk) - 1 for chunk in chunks]
    perplexity = math.exp(sum(losses) / sum(counts))
    means = [loss / count for loss, count in zip(losses, counts, strict=True)]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return {
        "file": name,
        "perplexity": perplexity,
        "standard_error": None if error is None else perplexity * error,
        "scored_tokens": sum(counts),
        "chunks": len(chunks),
        "chunk_tokens": max(map(len, chunks)),
        "dtype": llm.config.dtype,
        "quantization": llm.config.quantization or "auto",
    }


def table(figures: dict[str, Any]) -> str:
    """The figures in two lines of text."""
    error = figures["standard_error"]
    spread = "" if error is None else f", standard error {error:.3f}"
    of_text = f"{figures['scored_tokens']:,} tokens of {figures['file']}"
    return (
        f"perplexity  {figures['perplexity']:.4f} over {of_text}{spread}\n"
        f"chunks      {figures['chunks']} of {figures['chunk_tokens']} tokens; the first of each is not scored"
    )
