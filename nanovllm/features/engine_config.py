"""The public `EngineConfig`: the options of the engine alone, of `config`, and those of features."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanovllm import config as plain_config
from nanovllm.config import documented, integer, matching, one_of, option, real, share
from nanovllm.features import option_checks
from nanovllm.features.extras import check_extra, check_parts
from nanovllm.features.option_checks import MIN_GOAL_S, weights
from nanovllm.features.refusals import RAY, REPLICAS, TENSOR_PARALLEL, check_options, refuse
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.features.speculation_options import DRAFT_MODEL, NUM_SPECULATIVE_TOKENS, SPECULATION, check_speculation

logger = logging.getLogger("nanovllm")

RETIRED_BACKEND = "flash"  # runs as "flex" until 0.4
ROUTING_POLICIES = ("prefix-aware", "least-loaded", "round-robin")
QUANTISED_ON_LOAD = ("int8", "int4", "fp8")
ABOUT_CHECKPOINTS = ("keep", "dequantize")  # values that plain weights contradict
KV_CACHE_DTYPES = ("auto", "fp8")
QUANTIZATIONS = ("auto", *ABOUT_CHECKPOINTS, *QUANTISED_ON_LOAD)
AUTO_GOAL = "auto"
Seconds = float  # its flags take units: 50ms
Modality = str  # its flag counts
PolicyKind = str  # its flag tells it by the policy's methods
ProcessorOption = str  # its flag takes JSON


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


def fields_by_flag(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of an option dataclass by the names of their flags, with _ for -."""
    return {field.metadata["flag"] or field.name: field for field in dataclasses.fields(cls)}


@dataclass(frozen=True, kw_only=True)
class _InOrder:
    """All options in their documented order: features' with their declarations, the engine's by name."""

    __slots__ = ()

    dtype: str
    device: str
    max_model_len: int
    max_num_batched_tokens: int
    itl_goal: Seconds | Any = option(
        None,
        "inter-token latency that steps keep to: while requests decode, a step takes only as many prompt tokens as are "
        'predicted to fit. "auto": 0.1 on a CPU and 0.05 on a GPU, or four times a step of one block. None: every step '
        "has max_num_batched_tokens.",
        check=_goal,
        needs="features.goals.building",
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
        check=option_checks.string,
        needs="features.goals.building",
    )
    max_num_seqs: int
    max_queue: int | None
    step_timeout: float = option(3600.0, "seconds after which a step that has not ended is given up.", check=_seconds)
    priority_ageing_s: float | None
    client_weights: dict[str, float] | None = option(
        None,
        "shares of clients by name, against 1 for each other client, such as {'batch': 0.25}. Clients of one priority "
        "that all wait are served in proportion to them. None: equal shares.",
        check=weights,
        needs="features.shares.client_queue",
    )
    policies: dict[PolicyKind, Any] | None = option(
        None,
        'your own "queue" of waiting requests, with the order of preemption, and "budget" of steps: a class, its name '
        "as module:Class, or the name of an entry point. None: the engine's.",
        check=option_checks.policies,
        flag="policy",
    )
    block_size: int
    num_kv_blocks: int
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    kv_cache_dtype: str = option(
        "auto",
        'form of K and V in the cache: "auto" (the model\'s dtype) or "fp8" (8-bit floats with a scale for each token '
        "and head, half of the bytes, on a GPU of capability 8.9 or later).",
        check=partial(one_of, choices=KV_CACHE_DTYPES),
        needs="features.kv_fp8.fp8_format",
    )
    kv_cache_touch: str
    window_pool_share: float | None = option(
        None,
        "share of the KV cache's memory for layers with a window or chunked attention, where others have full "
        "attention. Default: what sequences of half of max_model_len need.",
        check=partial(share, high=0.99),
    )
    enable_prefix_caching: bool
    prefix_cache_host_bytes: int | None = option(
        None,
        "host memory for prefixes that leave the KV cache, in bytes, of each rank. None: none.",
        check=option_checks.memory_bytes,
        needs="features.tiers.prefix_tiers",
    )
    prefix_cache_dir: str | None = option(
        None,
        "folder for prefixes that outlive the process; one process writes there, others read. None: none.",
        check=option_checks.cache_folder,
        needs="features.tiers.prefix_tiers",
    )
    prefix_cache_dir_bytes: int = option(
        8 * 2**30, "limit of the files in prefix_cache_dir, in bytes, for all ranks; those used longest ago go first."
    )
    max_num_partial_prefills: int
    max_long_partial_prefills: int
    long_prefill_token_threshold: int
    attention_backend: str
    enforce_eager: bool
    overlap: bool
    cuda_graphs: bool
    skip_tokenizer_init: bool
    allow_control_tokens_in_messages: bool = option(
        False,
        "parse control tokens spelled out in messages, which lets a message end its turn or open one of another "
        "role; otherwise such text is encoded as plain text.",
    )
    chat_template: str | None = option(
        None, "file with a Jinja chat template. None: the tokenizer's.", check=option_checks.text_file
    )
    chat_template_content_format: str = option(
        "auto",
        "form in which the chat template gets a message's content: string, parts, or auto (what it reads).",
        check=partial(one_of, choices=("auto", "string", "parts")),
    )
    limit_mm_per_prompt: dict[Modality, int] | None = option(
        None,
        "most pictures of a prompt, such as {'image': 4}. None: 64.",
        check=option_checks.picture_limit,
        needs="features.media.reading",
    )
    mm_processor_kwargs: dict[ProcessorOption, Any] | None = option(
        None,
        "arguments of the model's image processor, such as {'max_pixels': 1003520}.",
        check=option_checks.named_values,
        needs="features.media.reading",
    )
    max_loras: int = option(
        8,
        "most adapters (LoRA) that compute in one step; requests of further ones wait.",
        check=partial(integer, low=1),
        needs="features.adapters.opening",
    )
    max_lora_rank: int = option(
        64,
        "largest rank of an adapter.",
        check=partial(integer, low=1, high=512),
        needs="features.adapters.opening",
    )
    record_itl: bool
    seed: int
    kv_events: str | None = option(
        None,
        "ZeroMQ endpoint for block events in vLLM's schema, for routers that follow the prefix cache, such as "
        '"tcp://*:5557". With a `*`, or as ipc://, it is bound, else connected. None: none are published.',
        check=_endpoint,
        refused={
            RAY: "engines of one machine would share a port. Its router follows their caches itself; for another "
            "router start `nanovllm serve` on each machine."
        },
        needs="features.kv_events.kv_events",
    )
    kv_events_replay: str | None = option(
        None, "endpoint at which subscribers ask for batches that they missed; it is bound.", check=_endpoint
    )
    kv_events_topic: str = option(
        "", 'first frame of each message; some routers read "kv@POD@MODEL" from it.', check=option_checks.string
    )
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
        f'for requests without `SamplingParams`: "auto" takes {", ".join(SamplingParams.model_options[:-1])} and '
        f"{SamplingParams.model_options[-1]} "
        'of the model\'s own generation_config.json; "none" takes the defaults of `SamplingParams`.',
        check=partial(one_of, choices=("auto", "none")),
    )
    quantization: str | None = option(
        None,
        'weights of a quantised checkpoint: "keep" them so, or "dequantize" them as they are loaded; "auto", the '
        'default, keeps those that have kernels here. "int8" or "int4" quantises weights as they are loaded, '
        '"fp8" on a GPU.',
        check=partial(one_of, choices=QUANTIZATIONS),
    )
    exact_activations: bool = option(False, "15 bits for activations where a CPU multiplies quantised weights with 8.")
    revision: str | None = option(None, "branch, tag or commit of a hub model.", check=option_checks.string)
    trust_remote_code: bool = option(False, "run code that comes with a hub model.")
    tensor_parallel_size: int = option(
        1,
        "processes, of one GPU each, that share the model: each holds a part of the weights and of the KV cache. It "
        "must divide the attention heads. On a CPU they share its cores.",
        needs="fast.gpu.rank_runner",
    )
    speculation: str | Any = SPECULATION
    draft_model: str | None = DRAFT_MODEL
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(plain_config.EngineConfig, _InOrder):
    """Options of one engine."""

    def __post_init__(self) -> None:
        if self.attention_backend == RETIRED_BACKEND:
            logger.warning("attention_backend='flash' is retired and runs as 'flex'; leave it out")
            object.__setattr__(self, "attention_backend", "flex")
        plain_config.EngineConfig.__post_init__(self)
        if self.quantization == "auto":
            object.__setattr__(self, "quantization", None)
        for mode in (REPLICAS, TENSOR_PARALLEL):
            if getattr(self, mode) != 1:
                check_options(self, mode)
        check_parts(self)
        self._check_together()
        option_checks.check_policies(self)
        if self.kv_events is not None:
            check_extra("kv_events", "kv-events", "zmq", "msgspec")
        option_checks.check_kv_events(self)
        if self.speculation is not None or self.draft_model is not None:
            check_speculation(self)

    def _check_together(self) -> None:
        """Raise ValueError for options that contradict each other on every model and device."""
        for names, needed, default, error in _NEEDS:
            for name in names:
                if getattr(self, name) and getattr(self, needed) == default:
                    raise ValueError(f"{name} is {getattr(self, name)!r}, but {error}")
        if self.tensor_parallel_size > 1 and self.quantization in QUANTISED_ON_LOAD:
            refuse(
                "quantization", TENSOR_PARALLEL,
                f"ranks share weights as they are stored, not those of {self.quantization!r}. Use data_parallel_size, "
                "or leave it out.",
            )  # fmt: skip
