"""Reads a `GenerationConfig`: sampling options that the engine honours, hints, and refusals of the rest by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from nanovllm.features.trainers.rollout_params import RolloutParams
from nanovllm.sampling_params import MAX_SEED

logger = logging.getLogger(__name__)

_DRAWS = ("temperature", "top_k", "top_p", "min_p")  # options that need do_sample, as in `transformers`
_HONOURED = {
    "max_new_tokens", "do_sample", *_DRAWS, "repetition_penalty", "eos_token_id", "num_return_sequences", "seed",
}  # fmt: skip
# Options that leave the tokens unchanged: caches, compilation, form of the result, settings of drafts and of padding.
_HINTS = {
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "prefill_chunk_size", "low_memory", "continuous_batching_config", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id",
    "decoder_start_token_id", "early_stopping", "length_penalty", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
    "transformers_version",
}  # fmt: skip
_SILENT = {"pad_token_id", "bos_token_id", "transformers_version", "use_cache"}  # hints that nearly every config has
_OFF_AT_ONE = {"num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty", "guidance_scale"}
_logged: set[str] = set()


def checked_options(config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The options of a call by name: those of a `GenerationConfig`, replaced by arguments that are not None.

    Raises ValueError, naming every option that would change the tokens and that the engine does not honour.
    """
    options = vars(config) | {name: value for name, value in arguments.items() if value is not None}
    options = {name: value for name, value in options.items() if not name.startswith("_")}
    hints = _HINTS | ({"max_length"} if options["max_new_tokens"] is not None else set())
    refused = [
        f"{name}={value!r}"
        for name, value in options.items()
        if name not in _HONOURED | hints and not _is_off(name, value)
    ]
    if refused:
        raise ValueError(
            f"generate_batch got {', '.join(refused)}, which this engine does not apply; it would change the tokens. "
            f"Leave it out, or call nanovllm.trainers.uninstall. Options in effect: {', '.join(sorted(_HONOURED))}."
        )
    log_hints(name for name in hints - _SILENT if options.get(name) is not None)
    return options


def log_hints(names: Iterable[str]) -> None:
    """Log hints without an effect, each once in a process."""
    new = sorted(set(names) - _logged)
    if new:
        _logged.update(new)
        logger.info("generate_batch: %s: no effect in this engine.", ", ".join(new))


def _is_off(name: str, value: Any) -> bool:
    if value is None or value is False:
        return True
    return value is not True and (value in (0, [], {}, ()) or (value == 1 and name in _OFF_AT_ONE))


def end_tokens(model: Any, options: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence tokens: the call's, else those of the model's generation config, else of its config."""
    sources = (
        options["eos_token_id"],
        *(getattr(s, "eos_token_id", None) for s in (model.generation_config, model.config)),
    )
    found = next((eos for eos in sources if eos is not None), -1)
    named = found.tolist() if isinstance(found, torch.Tensor) else found
    return tuple(token_id for token_id in (named if isinstance(named, (list, tuple)) else [named]) if token_id >= 0)


def sampling_params(options: dict[str, Any], eos_token_ids: tuple[int, ...]) -> RolloutParams:
    """Sampling parameters of one sequence, without a seed; options that are None are off, as in `generate_batch`."""
    names = ("repetition_penalty", *(_DRAWS if options["do_sample"] else ()))
    given = {name: options[name] for name in names if options[name] is not None}
    if not options["do_sample"]:
        given["temperature"] = 0.0
    return RolloutParams(max_tokens=options["max_new_tokens"], ignore_eos=True, stop_token_ids=eos_token_ids, **given)


def seed_of(options: dict[str, Any]) -> int:
    """The call's seed; without one, a draw of torch's generator, so that `set_seed` repeats a run."""
    seed = options.get("seed")
    return int(torch.randint(MAX_SEED // 2, ()).item()) if seed is None else int(seed)
