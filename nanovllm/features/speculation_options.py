"""The engine options of speculative decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.config import integer, option
from nanovllm.features.option_checks import string

MAX_DRAFTS = 32  # limit for a sequence in a step
SUFFIX = "suffix"
DRAFT = "draft"
HEADS = "heads"
AUTO = "auto"
HEADS_OF_MODEL = "nanovllm_heads"  # attribute of a model: its loaded heads, in a tuple, so that they are no submodule
_SOURCES = SUFFIX, DRAFT, HEADS, AUTO


def _source(name: str, value: Any) -> Any:
    if value not in _SOURCES and not callable(getattr(value, "propose", None)):
        raise ValueError(
            f"{name} is {value!r}; it must be one of {', '.join(map(repr, _SOURCES))}, or an object with a method "
            "`propose`, as `nanovllm.Drafter` has it."
        )
    return value


SPECULATION = option(
    None,
    'source of draft tokens, which a step verifies together: "suffix" (text after the same words earlier in the '
    'request or in outputs of the same prefix), "draft" (draft_model), "heads" (layers of the checkpoint that predict '
    'further tokens), "auto" (heads if there are any, else suffix), or a `Drafter`. Outputs stay the same. None: no '
    "drafts.",
    check=_source,
    needs="features.speculation.build",
)
DRAFT_MODEL = option(
    None,
    'small model of the same vocabulary, for speculation="draft": folder, GGUF file or hub id.',
    check=string,
    needs="features.speculation.model_drafter",
)
NUM_SPECULATIVE_TOKENS = option(
    7, "most draft tokens of a sequence in one step.", check=partial(integer, low=1, high=MAX_DRAFTS)
)


def check_speculation(config: Any) -> None:
    """Raise ValueError for options of an `EngineConfig` about speculation that contradict others."""
    if (config.speculation == DRAFT) != (config.draft_model is not None):
        raise ValueError(
            f"speculation is {config.speculation!r} and draft_model {config.draft_model!r}, but each needs the other. "
            "Set speculation='draft' and a draft_model, or neither."
        )
    if config.speculation is None:
        return
    if config.speculation == HEADS and config.tensor_parallel_size > 1:
        raise ValueError(
            f"speculation is {HEADS!r} and tensor_parallel_size {config.tensor_parallel_size}, but heads are not split "
            "among ranks. Use data_parallel_size, or set speculation='suffix'."
        )
    if config.max_num_seqs == 1:
        raise ValueError(
            "max_num_seqs is 1, so a step draws one token and has no room for drafts. Raise max_num_seqs to at least "
            f"{1 + config.num_speculative_tokens}, or leave speculation out."
        )
