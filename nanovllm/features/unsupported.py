"""Reasons why models are unsupported, with remedies: the table for error messages and the docs page of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanovllm.errors import UnsupportedModelError
from nanovllm.probe import ATTENTION_TYPES

OWN_GENERATE = "Use the model's own generate()."
ONE_RANK = "Set tensor_parallel_size to 1."


class Reason(NamedTuple):
    """An unsupported trait, as the predicate of a sentence about a layer or model, and its remedy, as sentences."""

    trait: str
    remedy: str


REASONS = {
    "both directions": Reason(
        "attends in both directions; only causal decoders are supported",
        f"An engine for encoders serves it. {OWN_GENERATE}",
    ),
    "recurrent state": Reason(
        "keeps a recurrent state (linear attention, a state space, a convolution) outside of a cache of `transformers`",
        "A class that reads and writes its state by update_recurrent_state and update_conv_state of the cache would be "
        f"served. {OWN_GENERATE}",
    ),
    "states on ranks": Reason(
        "keeps recurrent states, which ranks do not share yet",
        ONE_RANK,
    ),
    "sparse attention": Reason(
        "chooses by an index which keys a row sees, which no attention backend computes",
        f"A cache of index keys and a backend that takes chosen blocks would serve it. {OWN_GENERATE}",
    ),
    "layer type": Reason(
        "is of a type that this engine does not know",
        f"A later version may serve it. {OWN_GENERATE}",
    ),
    "own attention": Reason(
        "computes attention in code of its own or keeps another state, which paged attention cannot replace",
        "A class that calls the attention interface of `transformers`, or keeps its state in a cache of it, would be "
        f"served. {OWN_GENERATE}",
    ),
    "own mask": Reason(
        "computes an attention mask of its own, which paged attention would ignore",
        f"A mask by the library's own functions would be read. {OWN_GENERATE}",
    ),
    "other mask": Reason(
        "has an attention mask that is neither causal nor a sliding window nor in chunks",
        f"No attention backend computes another. {OWN_GENERATE}",
    ),
    "window of the mask": Reason(
        "names a sliding window that its attention mask does not have, so that its result depends on the attention "
        "implementation",
        OWN_GENERATE,
    ),
    "window of the cache": Reason(
        "sees all earlier tokens without a cache, but loses those behind a window with the cache that `transformers` "
        "makes from its config",
        "Set the config's sliding_window to None to have all of them seen, or use the model's own generate().",
    ),
    "repeated layers": Reason(
        "attends more than once per forward pass; its layers share modules",
        f"A cache for each pass through a module would serve it. {OWN_GENERATE}",
    ),
    "uneven keys": Reason(
        "has keys and values of different numbers of heads or tokens",
        OWN_GENERATE,
    ),
    "other keys": Reason(
        "attends to other keys than its own tokens' (cross-attention)",
        f"A cache of what is attended to would serve it. {OWN_GENERATE}",
    ),
    "unknown argument": Reason(
        "passes something to attention that no attention backend computes, and it is refused rather than ignored",
        OWN_GENERATE,
    ),
    "positions by row": Reason(
        "ignores position_ids and counts positions along the row",
        "Compute them from position_ids, or use the model's own generate().",
    ),
    "positions from padding": Reason(
        "counts positions in a way of its own (such as from its padding token's id + 1)",
        OWN_GENERATE,
    ),
    "mixed rows": Reason(
        "counts positions along the row, or mixes rows outside of attention (a convolution, a token shift), where "
        "paged attention keeps no state",
        OWN_GENERATE,
    ),
    "logits of other rows": Reason(
        "does not compute the logits of the rows in logits_to_keep, in their order",
        "Let its forward select the hidden states of these rows before the head.",
    ),
    "more inputs than tokens": Reason(
        "cannot run with token ids and positions alone",
        OWN_GENERATE,
    ),
    "quantised weights": Reason(
        "has quantised weights, which neither its products here nor their speed were tried with",
        "Load its unquantised weights, or dequantise them (the quantisation config's dequantize=True) before passing "
        "the module.",
    ),
    "quantised format": Reason(
        "has quantised weights in a format that is not read here",
        "Take its unquantised weights, a GGUF file, or a checkpoint of compressed-tensors, GPTQ, AWQ, FP8, MXFP4, "
        "FBGEMM or ModelOpt.",
    ),
    "scales by row": Reason(
        "scales queries by their place in the row (attn_temperature_tuning)",
        "Set max_num_batched_tokens and max_model_len below the place from which the scale changes.",
    ),
    "no plan": Reason(
        "has no tensor parallel plan in `transformers` (base_model_tp_plan)",
        f"{ONE_RANK} Models such as Llama, Qwen, Mistral and Gemma have one.",
    ),
    "part of the plan": Reason(
        "has a tensor parallel plan with a part that is not implemented",
        ONE_RANK,
    ),
    "other results on ranks": Reason(
        "computes something else when ranks share its weights, such as a statistic over a width of which each has a "
        "part",
        ONE_RANK,
    ),
    "dynamic rope": Reason(
        "has 'dynamic' rotary embeddings, whose frequencies depend on the longest sequence of the batch",
        "Set max_model_len to at most the length up to which they do not.",
    ),
}  # fmt: skip
_TYPES_OF_LAYERS = {
    "conv": "recurrent state",
    "hybrid": "recurrent state",
    "hybrid_sliding": "recurrent state",
    "linear_attention": "recurrent state",
    "mamba": "recurrent state",
    "recurrent": "recurrent state",
}


def unsupported(reason: str, subject: str, detail: str = "") -> UnsupportedModelError:
    """The error for a key of REASONS.

    Args:
        subject: the model, or its layer.
        detail: the observation, put in parentheses.
    """
    trait, remedy = REASONS[reason]
    seen = f" ({detail})" if detail else ""
    return UnsupportedModelError(f"{subject} {trait}{seen}. {remedy}", reason=reason)


def reason_of_layer_type(layer_type: str) -> str:
    """The key of REASONS for a layer type of a `transformers` config."""
    is_sparse = any(word in layer_type for word in ("sparse", "indexed", "compressed"))
    return _TYPES_OF_LAYERS.get(layer_type, "sparse attention" if is_sparse else "layer type")


def attending_layers(name: str, text_config: Any, others: Mapping[str, bool]) -> Sequence[int] | None:
    """Indices of the layers with attention, by the config; None if it does not tell. Refuses unknown types.

    Args:
        others: further types of layers, and whether such a layer attends.
    """
    layer_types = getattr(text_config, "layer_types", None)
    for index, layer_type in enumerate(layer_types or ()):
        if layer_type not in ATTENTION_TYPES and layer_type not in others:
            raise unsupported(reason_of_layer_type(layer_type), f"layer {index} of {name}", f"of type {layer_type!r}")
    if layer_types:
        return [index for index, layer_type in enumerate(layer_types) if others.get(layer_type, True)]
    num_layers = getattr(text_config, "num_hidden_layers", None)
    return None if num_layers is None else range(num_layers)
