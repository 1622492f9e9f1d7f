"""`EngineConfig`, the engine's options: validated on construction, resolved once against model and device, frozen.

None means "not set": the option takes the device's default and yields to options that were set. Only options that
were set can contradict one another.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

from nanovllm.core.option_checks import check_options
from nanovllm.core.option_fields import documented, option
from nanovllm.core.validation import integer, truth

BLOCK_SIZES = (16, 32, 64, 128, 256)
ATTENTION_BACKENDS = ("auto", "flex", "flash", "sdpa", "cpp")
GENERATION_CONFIGS = ("auto", "none")
ROUTING_POLICIES = ("prefix-aware", "least-loaded", "round-robin")
DTYPES, QUANTIZATIONS = ("auto", "float32", "bfloat16", "float16"), ("int8", "int4")
LOWEST = {"max_queue": 0, "num_kv_blocks": 2, "seed": 0, "kv_events_rank": 0}  # of the other whole numbers: 1
NOT_SET: Any = None  # typed Any: the option is a number once resolved


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Default limits of a device; docs/guide/tuning.md has the measurements behind them."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int = 64
    overlap: bool = False


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(max_num_batched_tokens=1024, max_num_seqs=64),
    "cuda": DeviceDefaults(max_num_batched_tokens=8192, max_num_seqs=1024, overlap=True),
}


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine."""

    dtype: str = option(
        "auto", 'type of weights and KV cache: "auto" (the checkpoint\'s), "float32", "bfloat16" or "float16".'
    )
    device: str = option("auto", '"auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".')
    max_model_len: int = option(
        NOT_SET, "longest sequence in tokens, prompt and output together; default and maximum: the model's own limit."
    )
    max_num_batched_tokens: int = option(
        NOT_SET,
        "token budget of a step; smaller bounds the latency of a step, larger raises throughput. Default: 1024 on a "
        "CPU, 8192 on a GPU.",
    )
    max_num_seqs: int = option(NOT_SET, "maximum number of running sequences. Default: 64 on a CPU, 1024 on a GPU.")
    max_queue: int | None = option(
        None, "most unfinished requests (each sample counts) beyond max_num_seqs, else QueueFullError. None: no limit."
    )
    priority_ageing_s: float | None = option(
        None,
        "seconds of waiting that raise a request's priority by one level, so that none starves. None or 0: no ageing.",
    )
    block_size: int = option(
        NOT_SET, 'tokens per KV block: 16, 32, 64, 128 or 256. Default: 64, and 128 with attention_backend="flash".'
    )
    num_kv_blocks: int = option(
        NOT_SET,
        "blocks in the KV cache, the null block included; overrides kv_cache_memory_bytes and gpu_memory_utilization.",
    )
    kv_cache_memory_bytes: int | None = option(
        None, "memory for the KV cache in bytes; overrides gpu_memory_utilization."
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory for this process, weights and activations included."
    )
    kv_cache_touch: str = option(
        "idle",
        'when a CPU\'s KV cache takes memory: "idle" (ahead of use, while no request runs) or "none" (when blocks are '
        "first written).",
    )
    window_pool_share: float | None = option(
        None,
        "share of the KV cache's memory for layers with a window or chunked attention, where others have full "
        "attention. Default: what sequences of half of max_model_len need.",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes.")
    max_num_partial_prefills: int = option(
        NOT_SET, "maximum number of partially computed prompts at the end of a step. Default: 4."
    )
    max_long_partial_prefills: int = option(
        NOT_SET,
        "maximum number among them with more than `long_prefill_token_threshold` tokens left to compute. Default: 1.",
    )
    long_prefill_token_threshold: int = option(
        NOT_SET,
        "per-prompt token cap per step while others wait, for a prompt or for their next token. Default: half of "
        "max_num_batched_tokens.",
    )
    attention_backend: str = option(
        "auto",
        '"flex", "flash" (flex with FlashAttention-4 for prompts, on some GPUs), "sdpa", "cpp" (CPU only) or "auto".',
    )
    enforce_eager: bool = option(False, "disable compilation.")
    overlap: bool = option(NOT_SET, "schedule and launch a step while the previous one runs. Default: on a GPU.")
    cuda_graphs: bool = option(
        NOT_SET,
        'launch a step as captured CUDA graphs; requires compiled layers on a GPU and attention_backend="flex" or '
        '"flash". Default: wherever it is supported.',
    )
    allow_control_tokens_in_messages: bool = option(
        False,
        "parse control tokens spelled out in messages, which lets a message end its turn or open one of another "
        "role; otherwise such text is encoded as plain text.",
    )
    record_itl: bool = option(False, "keep each inter-token latency of a request in its metrics.")
    seed: int = option(
        0,
        "seed of the sampling noise for requests without a seed, 0 to 2**64 - 1. Engines with the same seed repeat "
        "one another, in other processes and forked children too.",
    )
    kv_events: str | None = option(
        None,
        "ZeroMQ endpoint for block events in vLLM's schema, for routers that follow the prefix cache, such as "
        '"tcp://*:5557". With a `*`, or as ipc://, it is bound, else connected. None: none are published.',
    )
    kv_events_replay: str | None = option(
        None, "endpoint at which subscribers ask for batches that they missed; it is bound."
    )
    kv_events_topic: str = option("", 'first frame of each message; some routers read "kv@POD@MODEL" from it.')
    kv_events_rank: int = option(
        0,
        "number of this engine among those that one server runs; added to the ports of kv_events and "
        "kv_events_replay, and told in each batch.",
    )
    data_parallel_size: int = option(
        1,
        "replicas of the model, each in a process of its own with a GPU of its own, or a share of the cores. Limits "
        "hold for each of them, except max_queue.",
    )
    routing: str | None = option(
        None,
        'how replicas are chosen: "prefix-aware" (the one that has most of the prompt cached, unless it is '
        'overloaded), "least-loaded" or "round-robin". Default: "prefix-aware".',
    )
    generation_config: str = option(
        "auto",
        'for requests without `SamplingParams`: "auto" takes temperature, top_k, top_p, min_p and repetition_penalty '
        'of the model\'s own generation_config.json; "none" takes the defaults of `SamplingParams`.',
    )
    quantization: str | None = option(
        None, '"int8" or "int4" weights on a CPU, quantised as the model is loaded. None: as they are.'
    )
    revision: str | None = option(None, "branch, tag or commit of a hub model.")
    trust_remote_code: bool = option(False, "run code that comes with a hub model.")
    tensor_parallel_size: int = option(
        1,
        "processes, of one GPU each, that share the model: each holds a part of the weights and of the KV cache. It "
        "must divide the attention heads. On a CPU they share its cores.",
    )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build a config from keyword options; raises TypeError with similar names for an unknown one."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                hint = f"Did you mean {' or '.join(near)}?" if near else f"The options are: {', '.join(known)}."
                raise TypeError(f"unknown engine option {name!r}. {hint}")
        return cls(**options)

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if field.type in ("int", "int | None"):
                value = integer(name, value, LOWEST.get(name, 1), 2**64 - 1 if name == "seed" else None)
                object.__setattr__(self, name, value)  # NumPy's integers overflow
            elif field.type == "bool":
                truth(name, value)
        for name, choices in (
            ("dtype", DTYPES),
            ("attention_backend", ATTENTION_BACKENDS),
            ("generation_config", GENERATION_CONFIGS),
            ("routing", (None, *ROUTING_POLICIES)),
            ("quantization", (None, *QUANTIZATIONS)),
            ("kv_cache_touch", ("idle", "none")),
            ("block_size", (None, *BLOCK_SIZES)),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(str(c) for c in choices if c)}.")
        check_options(self)

    # ---------------------------------------------------------------------------------------------- resolution

    def resolve_limits(
        self, device_type: str, max_position_embeddings: int, *, block_size: int | None = None
    ) -> EngineConfig:
        """Resolve every limit except num_kv_blocks, for a device ("cpu", "cuda") and a model's longest sequence.

        Args:
            block_size: default where the user set none; None for the device's.

        Raises ValueError for options that contradict one another or the model.
        """
        if self.max_model_len is not None and self.max_model_len > max_position_embeddings:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but the model has positions for {max_position_embeddings} "
                f"tokens. Set max_model_len to at most {max_position_embeddings}."
            )
        defaults = DEVICE_DEFAULTS[device_type]
        budget, num_seqs, block_size = self._resolve_budget(defaults, block_size or defaults.block_size)
        threshold = self.long_prefill_token_threshold
        if threshold is None:
            threshold = max(block_size, budget // 2 // block_size * block_size)
        elif threshold < block_size:
            raise ValueError(
                f"long_prefill_token_threshold is {threshold}, less than one block of {block_size} tokens, so a long "
                f"prompt could never proceed. Set it to at least {block_size}, or set a smaller block_size."
            )
        partial, long = self.max_num_partial_prefills, self.max_long_partial_prefills
        if partial is not None and long is not None and long > partial:
            raise ValueError(
                f"max_long_partial_prefills is {long}, above max_num_partial_prefills ({partial}), which counts the "
                "long ones too. Lower the first or raise the second."
            )
        return replace(
            self,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            block_size=block_size,
            max_model_len=self.max_model_len or max_position_embeddings,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=partial or max(4, long or 0),
            max_long_partial_prefills=long or 1,
            overlap=defaults.overlap if self.overlap is None else self.overlap,
        )

    def _resolve_budget(self, defaults: DeviceDefaults, block_size: int) -> tuple[int, int, int]:
        """Budget, max_num_seqs and block_size, such that budget >= max_num_seqs + block_size.

        A chunk of at least one block then fits beside max_num_seqs decodes, so prefills always proceed.
        """
        budget = self.max_num_batched_tokens or defaults.max_num_batched_tokens
        num_seqs = self.max_num_seqs or defaults.max_num_seqs
        block_size = self.block_size or block_size
        if self.max_num_batched_tokens is None:
            budget = max(budget, num_seqs + block_size)
        elif budget < num_seqs + block_size:
            if self.block_size is None:
                floor = num_seqs if self.max_num_seqs is not None else 1
                fitting = [size for size in BLOCK_SIZES if size <= block_size and size + floor <= budget]
                block_size = max(fitting, default=BLOCK_SIZES[0])
            if self.max_num_seqs is None:
                num_seqs = max(1, min(num_seqs, budget - block_size))
        if budget < num_seqs + block_size:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, but max_num_seqs ({num_seqs}) running sequences and one block of "
                f"{block_size} prompt tokens must fit into a step. Set it to at least {num_seqs + block_size}, or "
                f"lower max_num_seqs or block_size (smallest: {BLOCK_SIZES[0]})."
            )
        return budget, num_seqs, block_size
