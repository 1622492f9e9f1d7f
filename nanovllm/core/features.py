"""What works in one process alone, and what works beyond it: the one table that refusals are made from.

Every public option, sampling parameter and call has a row here, which a test checks; a new one adds its own. A mode is
the option that turns it on, or the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

REPLICAS = "data_parallel_size"
TENSOR_PARALLEL = "tensor_parallel_size"
RAY = "nanovllm.ray"

# Why a feature is refused in a mode, and what would work instead; a mode that is not named works.
Refusals = Mapping[str, str]
WORKS: Refusals = {}

FEATURES: dict[str, Refusals] = {
    # Arguments of `LLM` and `AsyncLLM`.
    "model": WORKS,
    "a GGUF file as model": WORKS,  # of ranks, each dequantises its part
    "a loaded module as model": {
        REPLICAS: "a module lives in this process. Save it (save_pretrained) and pass the folder.",
        TENSOR_PARALLEL: "a module lives in this process, and other ranks need parts of it. Save it (save_pretrained) "
        "and pass the folder.",
    },
    "tokenizer": WORKS,
    "a tokenizer that cannot be pickled": {REPLICAS: "each replica needs a copy. Pass a folder or hub id of it."},
    "on_step": WORKS,  # with the steps of all replicas
    "trace": {REPLICAS: "a trace shows one engine's steps and blocks. Trace one replica's share of the requests."},
    "prepares_when_idle": WORKS,
    # Commands and tools beside `nanovllm serve`, `generate` and `chat`, which take replicas.
    "nanovllm bench": {REPLICAS: "it steps one engine. Measure replicas by bench/machines/replicas.py."},
    "nanovllm tune": {REPLICAS: "it measures one engine. Tune one, and give its options to every replica."},
    "nanovllm calibrate": {REPLICAS: "it measures one engine. Calibrate one, and simulate several by --replicas."},
    "nanovllm simulate": {REPLICAS: "set --replicas instead (num_replicas of `simulate`)."},
    # Calls.
    "generate": WORKS,
    "as_completed": WORKS,
    "default_sampling_params": WORKS,
    "sampling_defaults": WORKS,
    "chat": WORKS,
    "embed": WORKS,
    "score": WORKS,
    "stream": WORKS,
    "submit": WORKS,
    "submit_chat": WORKS,
    "plan_scores": WORKS,
    "query": WORKS,  # of `score`, and so are the next four
    "documents": WORKS,
    "method": WORKS,
    "instruction": WORKS,
    "template": WORKS,
    "normalize": WORKS,  # of `embed`
    "abort": WORKS,
    "apply_chat_template": WORKS,
    "tokenize": WORKS,
    "detokenize": WORKS,
    "stats": WORKS,
    "heartbeat": WORKS,
    "is_dead": WORKS,
    "replicas": WORKS,
    "reset_prefix_cache": {RAY: "a front knows a replica by its requests alone. Start the application anew."},
    "weights_changed": {
        REPLICAS: "nobody can have edited the weights of another process. Build a new LLM.",
        TENSOR_PARALLEL: "nobody can have edited the weights of other processes. Build a new engine.",
    },
    "inspect": WORKS,
    "close": WORKS,
    # Options of a request beside its sampling parameters.
    "prompts": WORKS,
    "output_kind": WORKS,
    "request_id": WORKS,
    "priority": WORKS,
    "cache_salt": WORKS,
    "timeout": WORKS,
    # Sampling parameters.
    "n": WORKS,
    "truncate_prompt_tokens": WORKS,
    "allowed_token_ids": WORKS,
    "structured_output": WORKS,
    "bad_words": WORKS,
    "logit_bias": WORKS,
    "repetition_penalty": WORKS,
    "frequency_penalty": WORKS,
    "presence_penalty": WORKS,
    "logits_processors": {
        REPLICAS: "a function lives in this process. Use logit_bias, bad_words or allowed_token_ids."
    },
    "temperature": WORKS,
    "top_k": WORKS,
    "top_p": WORKS,
    "min_p": WORKS,
    "logprobs": WORKS,
    "prompt_logprobs": WORKS,
    "prompt_logprobs_start": WORKS,
    "max_tokens": WORKS,
    "min_tokens": WORKS,
    "ignore_eos": WORKS,
    "stop_token_ids": WORKS,
    "stop": WORKS,
    "include_stop_str_in_output": WORKS,
    "skip_special_tokens": WORKS,
    "seed": WORKS,  # of a request, and of the engine
    # Engine options; limits hold for each replica, except max_queue.
    "data_parallel_size": {RAY: "on Ray a replica is one engine. Set num_replicas, or concurrency of a batch job."},
    "routing": WORKS,
    "tensor_parallel_size": WORKS,  # with data_parallel_size each replica has so many GPUs
    "dtype": WORKS,
    "quantization": {
        TENSOR_PARALLEL: "quantised weights are a CPU's, and of one process. Use data_parallel_size, or leave it out."
    },
    "device": WORKS,
    "a GPU by its number as device": {
        REPLICAS: "each replica has a GPU of its own. Leave device at 'auto', and choose GPUs by CUDA_VISIBLE_DEVICES.",
        TENSOR_PARALLEL: "ranks take the GPUs from cuda:0 on. Leave device at 'auto', and choose GPUs by "
        "CUDA_VISIBLE_DEVICES.",
    },
    "max_model_len": WORKS,
    "max_num_batched_tokens": WORKS,
    "max_num_seqs": WORKS,
    "max_queue": WORKS,
    "priority_ageing_s": WORKS,
    "block_size": WORKS,
    "num_kv_blocks": WORKS,
    "window_pool_share": WORKS,
    "kv_cache_touch": WORKS,
    "kv_cache_memory_bytes": WORKS,
    "gpu_memory_utilization": WORKS,
    "enable_prefix_caching": WORKS,
    "max_num_partial_prefills": WORKS,
    "max_long_partial_prefills": WORKS,
    "long_prefill_token_threshold": WORKS,
    "attention_backend": WORKS,
    "enforce_eager": WORKS,
    "overlap": WORKS,
    "cuda_graphs": WORKS,
    "allow_control_tokens_in_messages": WORKS,
    "kv_events": {
        RAY: "engines of one machine would share a port. Its router follows their caches itself; for another router "
        "start `nanovllm serve` on each machine."
    },
    "kv_events_replay": WORKS,
    "kv_events_topic": WORKS,
    "kv_events_rank": WORKS,  # of the first replica; the others follow
    "generation_config": WORKS,  # read by every replica, the same everywhere
    "record_itl": WORKS,  # of a request that moved, the gaps since then
    "revision": WORKS,
    "trust_remote_code": WORKS,
}


def refuse(feature: str, mode: str) -> NoReturn:
    """Raise the ValueError of a feature that a mode does not have."""
    raise ValueError(f"{feature} does not work with {mode}: {FEATURES[feature][mode]}")


def check_one_process(feature: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if engine options ask for more than the one process that a feature knows."""
    for mode in FEATURES[feature]:
        if options.get(mode, 1) != 1:
            refuse(feature, mode)


def check_sampling_params(params: Any, mode: str) -> None:
    """Raise ValueError for a sampling parameter that is set and does not work in a mode."""
    for name, attribute in REFUSED_PARAMS[mode].items():
        if getattr(params, attribute):
            refuse(name, mode)


# Features that sampling parameters ask for, each with the attribute that tells it.
REFUSED_PARAMS = {REPLICAS: {"logits_processors": "logits_processors"}}


def check_on_ray(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an engine option that is set and does not work on Ray."""
    for name in ("data_parallel_size", "kv_events"):
        if options.get(name) not in (None, 1):
            refuse(name, RAY)
