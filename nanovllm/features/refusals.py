"""Features that do not work beyond one process, with the reason and remedy that each refusal shows.

A mode is the option that turns it on, or the package. Options name their own refusals (`option(refused=...)`); here are
those of calls, arguments and commands. A feature without a reason works, as the tests of the product table show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

REPLICAS = "data_parallel_size"
TENSOR_PARALLEL = "tensor_parallel_size"
RAY = "nanovllm.ray"

# Feature -> mode -> reason and remedy.
REFUSALS: dict[str, Mapping[str, str]] = {
    "a loaded module as model": {
        REPLICAS: "a module lives in this process. Save it (save_pretrained) and pass the folder.",
        TENSOR_PARALLEL: "a module lives in this process, and other ranks need parts of it. Save it (save_pretrained) "
        "and pass the folder.",
    },
    "a tokenizer that cannot be pickled": {REPLICAS: "each replica needs a copy. Pass a folder or hub id of it."},
    "trace": {REPLICAS: "a trace shows one engine's steps and blocks. Trace one replica's share of the requests."},
    "exact_activations": {TENSOR_PARALLEL: "ranks multiply no weights as bytes. Leave it out."},
    "nanovllm bench": {REPLICAS: "it steps one engine. Measure replicas by bench/machines/replicas.py."},
    "nanovllm tune": {REPLICAS: "it measures one engine. Tune one, and give its options to every replica."},
    "nanovllm calibrate": {REPLICAS: "it measures one engine. Calibrate one, and simulate several by --replicas."},
    "nanovllm simulate": {REPLICAS: "set --replicas instead (num_replicas of `simulate`)."},
    "resume": {REPLICAS: "the tokens so far would go to any replica. Give them as the end of a prompt."},
    "beam_search": {REPLICAS: "beams fork sequences of one engine. Use one, or tensor_parallel_size."},
    "fork": {REPLICAS: "a request's KV is in one of them. Give its tokens as a prompt, for the prefix cache to find."},
    "load_adapter": {RAY: "a front knows a replica by its requests alone. Merge the adapter into its base model."},
    "pause_generation": {RAY: "engines of other machines are not paused. Use replicas of one."},
    "reset_prefix_cache": {RAY: "a front knows a replica by its requests alone. Start the application anew."},
    "sleep": {RAY: "engines of other machines keep their memory. Close them instead."},
    "wake": {RAY: "such engines do not sleep. Leave it out."},
    "update_weights": {RAY: "weights of other machines are not updated. Use one machine."},
    "weights_changed": {
        REPLICAS: "nobody can have edited the weights of another process. Build a new LLM.",
        TENSOR_PARALLEL: "nobody can have edited the weights of other processes. Build a new engine.",
    },
    "a Drafter that cannot be pickled": {
        REPLICAS: "each replica needs a copy. Define its class in a module that can be imported, with data alone."
    },
    "a policy that cannot be pickled": {
        REPLICAS: "each replica needs one. Define it in a module that can be imported, and name it as 'module:Class'."
    },
    "logits_processors": {
        REPLICAS: "a function lives in this process. Use logit_bias, bad_words or allowed_token_ids."
    },
    "a report of draws": {REPLICAS: "entries of draws stay in one process. Use one engine, or SamplingParams."},
    "a GPU by its number as device": {
        REPLICAS: "each replica has a GPU of its own. Leave device at 'auto', and choose GPUs by CUDA_VISIBLE_DEVICES.",
        TENSOR_PARALLEL: "ranks take the GPUs from cuda:0 on. Leave device at 'auto', and choose GPUs by "
        "CUDA_VISIBLE_DEVICES.",
    },
}


RANKS_OF_REPLICAS = "replicas of several ranks are not changed together. Use one engine of several ranks."


def refuse(feature: str, mode: str, reason: str | None = None) -> NoReturn:
    """Raise the ValueError of a feature that a mode does not have; the reason is the table's unless given."""
    raise ValueError(f"{feature} does not work with {mode}: {reason or REFUSALS[feature][mode]}")


def check_one_process(feature: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if engine options need several processes and the feature works in one."""
    for mode in REFUSALS[feature]:
        if options.get(mode, 1) != 1:
            refuse(feature, mode)


def check_options(options: Any, mode: str) -> None:
    """Raise ValueError for an option of a dataclass that is not its default, and refused in a mode."""
    for field in dataclasses.fields(options):
        reason = field.metadata["refused"].get(mode)
        if reason and getattr(options, field.name) != field.default:
            refuse(field.name, mode, reason)
