"""`EngineConfig`, the engine's options: validated on construction, resolved once against model and device, frozen.

None means "not set": the option takes the device's default and yields to options that were set. Only options that
were set can contradict each other.
"""

from __future__ import annotations

import difflib
import logging
import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from nanovllm.core import validation
from nanovllm.core.device_limits import BLOCK_SIZES, DEVICE_DEFAULTS, fit_budget
from nanovllm.core.features import RAY, REPLICAS, TENSOR_PARALLEL, check_options
from nanovllm.core.option_fields import documented, option
from nanovllm.core.sampling_params import MODEL_OPTIONS
from nanovllm.core.speculation_options import DRAFT_MODEL, NUM_SPECULATIVE_TOKENS, SPECULATION, check_speculation
from nanovllm.core.validation import MIN_GOAL_S, check_fields, integer, matching, one_of, real, share, string, weights

logger = logging.getLogger("nanovllm")

ATTENTION_BACKENDS = ("auto", "flex", "sdpa", "cpp")
RETIRED_BACKEND = "flash"  # runs as "flex" until 0.4
ROUTING_POLICIES = ("prefix-aware", "least-loaded", "round-robin")
DTYPES, QUANTIZATIONS = ("auto", "float32", "bfloat16", "float16"), ("int8", "int4")
AUTO_GOAL = "auto"
Seconds = float  # its flags take units: 50ms
NOT_SET: Any = None  # typed Any: the option is a number once resolved


def _attention_backend(name: str, value: Any) -> Any:
    return value if value == RETIRED_BACKEND else one_of(name, value, ATTENTION_BACKENDS)


def _block_size(name: str, value: Any) -> Any:
    return one_of(name, integer(name, value, 1), BLOCK_SIZES)


def _goal(name: str, value: Any) -> Any:
    return value if value == AUTO_GOAL else real(name, value, MIN_GOAL_S, math.inf)


_seconds = partial(real, low=MIN_GOAL_S, high=math.inf)
_endpoint = partial(
    matching, pattern=r"tcp://.+:\d{1,5}|ipc://.+", expected="like 'tcp://*:5557', 'tcp://HOST:PORT' or 'ipc://PATH'"
)
# Options that do nothing while another one has some value: names, the other one, that value, and the rest of the error.
_NEEDS: tuple[tuple[tuple[str, ...], str, Any, str], ...] = (
    (("ttft_goal",), "itl_goal", None, "no itl_goal is set, which it is for. Set itl_goal too."),
    (
        ("kv_events_replay", "kv_events_topic", "kv_events_rank"), "kv_events", None,
        "no events are published. Set kv_events too.",
    ),
    (
        ("kv_events", "prefix_cache_host_bytes", "prefix_cache_dir"), "enable_prefix_caching", False,
        "enable_prefix_caching=False caches no prefix. Leave one of them out.",
    ),
    (
        ("routing",), "data_parallel_size", 1,
        "there is one replica to route to. Set data_parallel_size to at least 2, or leave routing out.",
    ),
)  # fmt: skip


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine."""

    dtype: str = option(
        "auto",
        'type of weights and KV cache: "auto" (the checkpoint\'s), "float32", "bfloat16" or "float16".',
        check=partial(one_of, choices=DTYPES),
    )
    device: str = option(
        "auto",
        '"auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".',
        check=partial(matching, pattern=r"auto|cpu|cuda(:\d+)?", expected="'auto', 'cpu', 'cuda' or 'cuda:N'"),
    )
    max_model_len: int = option(
        NOT_SET, "longest sequence in tokens, prompt and output together; default and maximum: the model's own limit."
    )
    max_num_batched_tokens: int = option(
        NOT_SET,
        "token budget of a step; smaller bounds the latency of a step, larger raises throughput. Default: 1024 on a "
        "CPU, 8192 on a GPU.",
    )
    itl_goal: Seconds | Any = option(
        None,
        "inter-token latency that steps keep to: while requests decode, a step takes only as many prompt tokens as are "
        'predicted to fit. "auto": 0.1 on a CPU and 0.05 on a GPU, or four times a step of one block. None: every step '
        "has max_num_batched_tokens.",
        check=_goal,
    )
    ttft_goal: Seconds | None = option(
        None,
        "time to the first token that is worth longer steps: a prompt that has waited half of it relaxes itl_goal "
        'for its client, up to four times. Default: 50 times itl_goal with itl_goal="auto" on a CPU, else none.',
        check=_seconds,
    )
    step_costs: str | None = option(
        None,
        "file of `nanovllm calibrate`, whose costs begin the predictions for itl_goal, which steps then correct, and "
        "weigh generated tokens against prompt tokens in clients' shares.",
    )
    max_num_seqs: int = option(NOT_SET, "maximum number of running sequences. Default: 64 on a CPU, 1024 on a GPU.")
    max_queue: int | None = option(
        None,
        "most unfinished requests (each sample counts) beyond max_num_seqs, else QueueFullError. None: no limit.",
        check=partial(integer, low=0),
    )
    step_timeout: float = option(3600.0, "seconds after which a step that has not ended is given up.", check=_seconds)
    priority_ageing_s: float | None = option(
        None,
        "seconds of waiting that raise a request's priority by one level, so that none starves. None or 0: no ageing.",
        check=validation.ageing,
    )
    client_weights: dict[str, float] | None = option(
        None,
        "shares of clients by name, against 1 for each other client, such as {'batch': 0.25}. Clients of one priority "
        "that all wait are served in proportion to them. None: equal shares.",
        check=weights,
    )
    block_size: int = option(
        NOT_SET,
        "tokens per KV block: 16, 32, 64, 128 or 256. Default: 64.",
        check=_block_size,
    )
    num_kv_blocks: int = option(
        NOT_SET,
        "blocks in the KV cache, the null block included; overrides kv_cache_memory_bytes and gpu_memory_utilization.",
        check=partial(integer, low=2),
    )
    kv_cache_memory_bytes: int | None = option(
        None, "memory for the KV cache in bytes; overrides gpu_memory_utilization."
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory for this process, weights and activations included.",
        check=partial(share, high=1),
    )
    kv_cache_touch: str = option(
        "idle",
        'when a CPU\'s KV cache takes memory: "idle" (ahead of use, while no request runs) or "none" (when blocks are '
        "first written).",
        check=partial(one_of, choices=("idle", "none")),
    )
    window_pool_share: float | None = option(
        None,
        "share of the KV cache's memory for layers with a window or chunked attention, where others have full "
        "attention. Default: what sequences of half of max_model_len need.",
        check=partial(share, high=0.99),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes.")
    prefix_cache_host_bytes: int | None = option(
        None,
        "host memory for prefixes that leave the KV cache, in bytes, of each rank. None: none.",
        check=validation.memory_bytes,
    )
    prefix_cache_dir: str | None = option(
        None,
        "folder for prefixes that outlive the process; one process writes there, others read. None: none.",
        check=validation.cache_folder,
    )
    prefix_cache_dir_bytes: int = option(
        8 * 2**30, "limit of the files in prefix_cache_dir, in bytes, for all ranks; those used longest ago go first."
    )
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
        '"flex", "sdpa", "cpp" (CPU only) or "auto".',
        check=_attention_backend,
    )
    enforce_eager: bool = option(False, "disable compilation.")
    overlap: bool = option(NOT_SET, "schedule and launch a step while the previous one runs. Default: on a GPU.")
    cuda_graphs: bool = option(
        NOT_SET,
        'launch a step as captured CUDA graphs; requires compiled layers on a GPU and attention_backend="flex". '
        "Default: wherever it is supported.",
    )
    skip_tokenizer_init: bool = option(
        False,
        "load no tokenizer: prompts are token ids, and outputs have no text. A folder without a tokenizer needs it.",
    )
    allow_control_tokens_in_messages: bool = option(
        False,
        "parse control tokens spelled out in messages, which lets a message end its turn or open one of another "
        "role; otherwise such text is encoded as plain text.",
    )
    chat_template: str | None = option(
        None, "file with a Jinja chat template. None: the tokenizer's.", check=validation.text_file
    )
    chat_template_content_format: str = option(
        "auto",
        "form in which the chat template gets a message's content: string, parts, or auto (what it reads).",
        check=partial(one_of, choices=("auto", "string", "parts")),
    )
    record_itl: bool = option(False, "keep each inter-token latency of a request in its metrics.")
    seed: int = option(
        0,
        "seed of the sampling noise for requests without a seed, 0 to 2**64 - 1. Engines with the same seed repeat "
        "one another, in other processes and forked children too.",
        check=partial(integer, low=0, high=2**64 - 1),
        flag="engine_seed",
    )
    kv_events: str | None = option(
        None,
        "ZeroMQ endpoint for block events in vLLM's schema, for routers that follow the prefix cache, such as "
        '"tcp://*:5557". With a `*`, or as ipc://, it is bound, else connected. None: none are published.',
        check=_endpoint,
        refused={
            RAY: "engines of one machine would share a port. Its router follows their caches itself; for another "
            "router start `nanovllm serve` on each machine."
        },
    )
    kv_events_replay: str | None = option(
        None, "endpoint at which subscribers ask for batches that they missed; it is bound.", check=_endpoint
    )
    kv_events_topic: str = option("", 'first frame of each message; some routers read "kv@POD@MODEL" from it.')
    kv_events_rank: int = option(
        0,
        "this engine's number in its server; added to the ports of kv_events and kv_events_replay, sent in each batch.",
        check=partial(integer, low=0),
    )
    data_parallel_size: int = option(
        1,
        "replicas of the model, each in a process of its own with a GPU of its own, or a share of the cores. Limits "
        "hold for each of them, except max_queue.",
        refused={RAY: "on Ray a replica is one engine. Set num_replicas, or concurrency of a batch job."},
    )
    routing: str | None = option(
        None,
        'how replicas are chosen: "prefix-aware" (the one that has most of the prompt cached, unless it is '
        'overloaded), "least-loaded" or "round-robin". Default: "prefix-aware".',
        check=partial(one_of, choices=ROUTING_POLICIES),
    )
    generation_config: str = option(
        "auto",
        f'for requests without `SamplingParams`: "auto" takes {", ".join(MODEL_OPTIONS[:-1])} and {MODEL_OPTIONS[-1]} '
        'of the model\'s own generation_config.json; "none" takes the defaults of `SamplingParams`.',
        check=partial(one_of, choices=("auto", "none")),
    )
    quantization: str | None = option(
        None,
        '"int8" or "int4" weights on a CPU, quantised as the model is loaded. None: as they are.',
        check=partial(one_of, choices=QUANTIZATIONS),
        refused={
            TENSOR_PARALLEL: "quantised weights are a CPU's, of one process. Use data_parallel_size, or leave it out."
        },
    )
    exact_activations: bool = option(False, "15 bits for activations where a CPU multiplies quantised weights with 8.")
    revision: str | None = option(None, "branch, tag or commit of a hub model.")
    trust_remote_code: bool = option(False, "run code that comes with a hub model.")
    tensor_parallel_size: int = option(
        1,
        "processes, of one GPU each, that share the model: each holds a part of the weights and of the KV cache. It "
        "must divide the attention heads. On a CPU they share its cores.",
    )
    speculation: str | Any = SPECULATION
    draft_model: str | None = DRAFT_MODEL
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS

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
        check_fields(self, {"str": string})
        if self.attention_backend == RETIRED_BACKEND:
            logger.warning("attention_backend='flash' is retired and runs as 'flex'; leave it out")
            object.__setattr__(self, "attention_backend", "flex")
        for mode in (REPLICAS, TENSOR_PARALLEL):
            if getattr(self, mode) != 1:
                check_options(self, mode)
        self._check_together()
        validation.check_kv_events(self)
        if self.speculation is not None or self.draft_model is not None:
            check_speculation(self)

    def _check_together(self) -> None:
        """Raise ValueError for options that contradict each other on every model and device."""
        if self.enforce_eager and self.attention_backend in ("flex", "cpp"):
            raise ValueError(
                f"attention_backend={self.attention_backend!r} needs compilation, which enforce_eager=True forbids. "
                "Use attention_backend='sdpa' or 'auto', or drop enforce_eager."
            )
        for names, needed, default, error in _NEEDS:
            for name in names:
                if getattr(self, name) and getattr(self, needed) == default:
                    raise ValueError(f"{name} is {getattr(self, name)!r}, but {error}")

    # ---------------------------------------------------------------------------------------------- resolution

    def resolve_limits(self, device_type: str, num_positions: int, *, block_size: int | None = None) -> EngineConfig:
        """Resolve all but num_kv_blocks, for a type of device ("cpu", "cuda") and a model's longest sequence.

        Args:
            block_size: default where the user set none; None for the device's.

        Raises ValueError for options that contradict each other or the model.
        """
        if self.max_model_len is not None and self.max_model_len > num_positions:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but the model has positions for {num_positions} "
                f"tokens. Set max_model_len to at most {num_positions}."
            )
        defaults = DEVICE_DEFAULTS[device_type]
        defaults = replace(defaults, block_size=block_size or defaults.block_size)
        budget, num_seqs, block_size = fit_budget(
            self.max_num_batched_tokens, self.max_num_seqs, self.block_size, defaults
        )
        threshold = self.long_prefill_token_threshold or max(block_size, budget // 2 // block_size * block_size)
        if threshold < block_size:
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
            device=device_type if self.device == "auto" else self.device,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            block_size=block_size,
            max_model_len=self.max_model_len or num_positions,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=partial or max(4, long or 0),
            max_long_partial_prefills=long or 1,
            overlap=defaults.overlap if self.overlap is None else self.overlap,
        )
