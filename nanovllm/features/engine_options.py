"""The keywords of `LLM(...)` for type checkers; `EngineConfig` declares them, and a test compares the two."""

from __future__ import annotations

from typing import Any, TypedDict


class EngineOptions(TypedDict, total=False):
    """Options of `EngineConfig` by name; None takes the default where the type has it."""

    dtype: str
    device: str
    max_model_len: int | None
    max_num_batched_tokens: int | None
    itl_goal: float | str | None
    ttft_goal: float | None
    step_costs: str | None
    max_num_seqs: int | None
    max_queue: int | None
    step_timeout: float
    priority_ageing_s: float | None
    client_weights: dict[str, float] | None
    policies: dict[str, Any] | None
    block_size: int | None
    num_kv_blocks: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    kv_cache_dtype: str
    kv_cache_touch: str
    window_pool_share: float | None
    enable_prefix_caching: bool
    prefix_cache_host_bytes: int | None
    prefix_cache_dir: str | None
    prefix_cache_dir_bytes: int
    max_num_partial_prefills: int | None
    max_long_partial_prefills: int | None
    long_prefill_token_threshold: int | None
    attention_backend: str
    enforce_eager: bool
    overlap: bool | None
    cuda_graphs: bool | None
    skip_tokenizer_init: bool
    allow_control_tokens_in_messages: bool
    chat_template: str | None
    chat_template_content_format: str
    limit_mm_per_prompt: dict[str, int] | None
    mm_processor_kwargs: dict[str, Any] | None
    max_loras: int
    max_lora_rank: int
    record_itl: bool
    seed: int
    kv_events: str | None
    kv_events_replay: str | None
    kv_events_topic: str
    kv_events_rank: int
    data_parallel_size: int
    routing: str | None
    generation_config: str
    quantization: str | None
    exact_activations: bool
    revision: str | None
    trust_remote_code: bool
    tensor_parallel_size: int
    speculation: str | Any | None
    draft_model: str | None
    num_speculative_tokens: int
