"""From a model's name or module and options to an engine that is ready to step: the only file that knows every part.

A part is skipped if its folder is missing; its options are then refused by name.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from nanovllm import config as plain_config
from nanovllm.block_manager import BlockManager
from nanovllm.defaults import LoadedModel, PlainAttention, load_plain, memory_share
from nanovllm.engine import Engine, EngineObservers, NoObservers
from nanovllm.model import ModelBinding
from nanovllm.model_runner import ModelRunner, Pools, StepPaths
from nanovllm.one_pool import one_pool
from nanovllm.requests import InputProcessor, RequestLimits
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler

if TYPE_CHECKING:
    from nanovllm.fast.gpu.rank_runner import RankRunner
    from nanovllm.features.engine_config import EngineConfig
    from nanovllm.features.goals.step_budget import StepBudget
    from nanovllm.features.kv_events.kv_events import KvEventPublisher
    from nanovllm.features.ranks.ranks import Ranks
    from nanovllm.features.ranks.workers import Start
    from nanovllm.features.speculation.drafter import Drafter
    from nanovllm.observability.step_records import StepHook
    from nanovllm.observability.trace_writer import TraceWriter

logger = logging.getLogger("nanovllm")


def build_engine(
    model: str | os.PathLike[str] | nn.Module,
    tokenizer: Any,
    on_step: StepHook | None,
    options: dict[str, Any],
    *,
    trace: TraceWriter | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load, hook and warm up a model; arguments and errors as for `LLM`. `clock`: in seconds, never goes back."""
    observers = _observers_from(on_step, trace)
    config = _config_class().from_options(**options)
    if _asks(config, "policies"):
        _part("features.policies.opening", "check_policies", option="policies")(config)
    publisher = digest = None
    if _asks(config, "kv_events"):
        publisher = _part("features.kv_events.kv_events", "KvEventPublisher", option="kv_events")(config)
    model_runner: ModelRunner
    if _asks(config, "tensor_parallel_size"):
        build_ranks = _part("fast.gpu.rank_runner", "build_ranks", option="tensor_parallel_size")
        loaded, model_runner, digest = build_ranks(model, tokenizer, config, resolve_options)
    else:
        loaded = _load(model, tokenizer, config)
        if _asks(config, "prefix_cache_dir"):  # the digest is of weights before they are packed
            digest = _part("models.fingerprint", "digest_for_files", option="prefix_cache_dir")(loaded, config)
        binding = _build_binding(loaded)
        model_runner = ModelRunner(binding, *resolve_options(binding, loaded, config))
    binding = model_runner.binding
    budget, costs = _budget(model_runner, observers, clock)
    config = model_runner.config
    if trace is not None:
        trace.begin(config)
    # The seed names all that the KV of a token depends on besides its prefix.
    hash_seed = f"{loaded.identity}:{binding.dtype}{binding.rope.choice}{binding.caches.choice}"
    has_tiers = _asks(config, "prefix_cache_host_bytes") or digest is not None
    block_manager = _block_manager(config, model_runner.pools, hash_seed=hash_seed, with_tiers=has_tiers)
    if publisher is not None:
        publisher.begin(block_manager, observers)
    input_processor = _build_input_processor(loaded, model_runner, budget, clock)
    scheduler = _scheduler(config, block_manager, budget, costs, clock)
    if _asks(config, "speculation"):
        add_drafts = _part("features.speculation.build", "add_drafts", option="speculation")
        add_drafts(scheduler, model_runner, input_processor, observers, _draft_model)
    engine = Engine(model_runner, scheduler, input_processor, observers)
    has_encoder = hasattr(binding.model.base_model, "get_image_features")
    if has_encoder and (add_pictures := _part("features.media.steps", "add_pictures")):
        add_pictures(engine)
    if has_tiers:
        _open_tiers(engine, hash_seed, digest, publisher)
    if binding.watch is not None:
        _part("features.live_modules.switches", "follow")(engine)
    return _frozen(engine)


def _config_class() -> type[EngineConfig]:
    """The class of options: those of all parts, or of the engine alone."""
    declared: Any = _part("features.engine_config", "EngineConfig") or plain_config.EngineConfig
    return declared


def _asks(config: EngineConfig, option: str) -> bool:
    """Whether an option differs from its default; False if no part declares it."""
    return any(field.name == option and getattr(config, option) != field.default for field in fields(config))


def _part(module: str, name: str, *, option: str | None = None) -> Any:
    """A class or function of a part; None, with a line in the log, if its folder is missing.

    Raises ValueError, naming `option` and the folder, if an option that is set needs the missing part.
    """
    try:
        return getattr(import_module(f"nanovllm.{module}"), name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if option is not None and missing.startswith("nanovllm."):
            raise ValueError(
                f"{option} is set, and {missing}, which it needs, is not installed. Leave the option out, or install "
                "the whole package."
            ) from None
        if not f"nanovllm.{module}".startswith(missing):
            raise
        logger.info("%s is not installed: the engine runs without it", missing)
        return None


def _frozen(engine: Engine) -> Engine:
    if freeze := _part("fast.host.gc_control", "freeze_while_alive"):
        freeze(engine)
    return engine


def _open_tiers(engine: Engine, hash_seed: str, digest: str | None, publisher: KvEventPublisher | None) -> None:
    open_tiers = _part(
        "features.tiers.prefix_tiers", "open_tiers", option="prefix_cache_host_bytes or prefix_cache_dir"
    )
    try:
        engine.tiers = open_tiers(engine.block_manager, engine.model_runner, hash_seed, digest, engine.clock)
        engine.tiers.costs.on_decision = partial(engine.observers.notify, "prefix_decided")
        engine.observers.append(engine.tiers)
        if publisher is not None:
            engine.tiers.books.on_change = publisher.tier_changed
    except BaseException:  # such as memory that cannot be pinned: other ranks are to end in order
        engine.model_runner.close()
        raise


def _load(model: str | os.PathLike[str] | nn.Module, tokenizer: Any, config: EngineConfig) -> LoadedModel:
    paused = _part("fast.host.gc_control", "collector_paused") or nullcontext
    load = _part("models.loader", "load") or load_plain
    with paused():
        loaded: LoadedModel = load(model, tokenizer, config)
    return loaded


def _build_binding(loaded: LoadedModel) -> ModelBinding:
    build = _part("features.composition.binding", "build_binding") or ModelBinding
    binding: ModelBinding = build(loaded.model, is_live=loaded.is_live)
    return binding


def _block_manager(config: EngineConfig, pools: Pools, *, hash_seed: str = "", with_tiers: bool = False) -> Any:
    build = _part("features.composition.block_managers", "build_block_manager")
    if build is not None:
        return build(config, pools, hash_seed=hash_seed, with_tiers=with_tiers)
    prefixes: dict[str, Any] = {"enable_prefix_caching": config.enable_prefix_caching, "hash_seed": hash_seed}
    return BlockManager(config.num_kv_blocks, config.block_size, **prefixes)


def _draft_model(config: EngineConfig, input_processor: InputProcessor) -> Drafter | None:
    """The drafter of `config.draft_model`, with a cache for as many tokens as the engine's; None without one."""
    if config.draft_model is None:
        return None
    own = type(config)(
        device=config.device, block_size=config.block_size, num_kv_blocks=config.num_kv_blocks,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens, overlap=False,
        enable_prefix_caching=False, enforce_eager=config.enforce_eager, trust_remote_code=config.trust_remote_code,
        skip_tokenizer_init=input_processor.tokenizer is None,
    )  # fmt: skip
    loaded = _load(str(config.draft_model), None, own)
    own = replace(own, max_model_len=min(config.max_model_len, loaded.num_positions(config.max_model_len)))
    binding = _build_binding(loaded)
    check_draft_model = _part("features.speculation.build", "check_draft_model", option="draft_model")
    check_draft_model(config, binding, (loaded.tokenizer, input_processor.tokenizer), input_processor.limits)
    runner = ModelRunner(binding, *resolve_options(binding, loaded, own))
    drafter = _part("features.speculation.model_drafter", "ModelDrafter", option="draft_model")
    own_drafter: Drafter = drafter(runner.config, _block_manager(runner.config, runner.pools), runner)
    return own_drafter


def _budget(
    model_runner: ModelRunner, observers: EngineObservers, clock: Callable[[], float]
) -> tuple[StepBudget | None, dict[str, float]]:
    """The budget that keeps latency goals, if there are any, and costs of tokens for the shares of clients."""
    if not (_asks(model_runner.config, "itl_goal") or _asks(model_runner.config, "step_costs")):
        return None, {}
    open_budget = _part("features.goals.building", "open_budget", option="itl_goal or step_costs")
    budget, decode_cost = open_budget(model_runner, observers, clock)
    return budget, {"decode_cost": decode_cost}


def _scheduler(
    config: EngineConfig, block_manager: Any, budget: Any, costs: dict[str, float], clock: Callable[[], float]
) -> Scheduler:
    """The scheduler: its queue keeps shares of clients, if that part is installed; policies replace queue or budget."""
    option = "client_weights" if _asks(config, "client_weights") else None
    client_queue = _part("features.shares.client_queue", "ClientQueue", option=option)
    queue = None if client_queue is None else client_queue(config, block_manager, **costs)
    scheduler = Scheduler(config, block_manager, budget, queue)
    if _asks(config, "policies"):
        _part("features.policies.opening", "set_policies")(scheduler, clock)
    return scheduler


def _build_input_processor(
    loaded: LoadedModel, model_runner: ModelRunner, budget: StepBudget | None, clock: Callable[[], float]
) -> InputProcessor:
    params = _part("features.composition.input_processor", "SamplingParams") or SamplingParams
    limits = _limits(loaded, model_runner, params)
    build = _part("features.composition.input_processor", "build_input_processor") or InputProcessor
    input_processor: InputProcessor = build(loaded.tokenizer, model_runner.config, limits, clock)
    if budget is not None:
        input_processor.parts.goals = lambda: budget
    if (log_ends := _part("features.composition.input_processor", "log_ends_of")) is not None:
        log_ends(input_processor)
    return input_processor


def _limits(loaded: LoadedModel, model_runner: ModelRunner, params: type[SamplingParams]) -> RequestLimits:
    binding = model_runner.binding
    return RequestLimits(
        vocab_size=loaded.vocab_size,
        num_logits=binding.vocab_size,
        model_name=loaded.name,
        has_base_model=binding.passes.has_base_model,
        has_head=loaded.has_head,
        eos_token_ids=tuple(token for token in loaded.eos_token_ids if 0 <= token < binding.vocab_size),
        sampling_defaults={} if _asks(model_runner.config, "generation_config") else loaded.sampling_defaults(params),
    )


def run_worker(orders: int, lifeline: int) -> None:
    """The main function of another rank's process; see `Worker`."""
    _part("features.ranks.workers", "Worker")(orders, lifeline).run(build_worker)


def build_worker(start: Start, ranks: Ranks) -> RankRunner:
    """The model runner of another rank."""
    runner: RankRunner = _part("fast.gpu.rank_runner", "build_worker")(start, ranks, resolve_options)
    return runner


def resolve_options(
    binding: ModelBinding, loaded: LoadedModel, config: EngineConfig
) -> tuple[EngineConfig, Any, Pools, StepPaths]:
    """Resolve every option for the model and the device.

    Limits come first, then the attention backend and CUDA graphs, then the size of the KV cache: a GPU runs a step to
    measure the memory that it leaves.

    Raises ValueError for options that contradict each other, the model or the device.
    """
    layers = binding.layers
    device = binding.device
    max_model_len = config.max_model_len
    num_positions = loaded.max_position_embeddings if layers else loaded.num_positions(max_model_len)
    longest = max_model_len or num_positions
    if longest is not None and (widen := _part("features.groups.state_kinds", "widen")):
        widen(layers, longest)
    if _asks(config, "kv_cache_dtype"):
        _part("features.kv_fp8.fp8_format", "use_format")(binding, config)
    config = binding.mixers.fitted(config, device.type).resolve_limits(device.type, num_positions)
    binding.rope.pin(config.max_model_len)
    if (check := _part("models.guard", "check_row_counted_scales")) is not None:
        check(binding.model, config)
    attention: Any = _part("fast.attention.backends", "AttentionChoice") or PlainAttention
    choice = (attention.beside_mixers if binding.mixers else attention.for_model)(layers, device, config)
    choose_paths = _part("fast.choice", "choose_paths")
    paths = StepPaths() if choose_paths is None else choose_paths(choice, binding)
    paths.build_stage = _part("features.request_options", "RequestOptions")
    obstacle = paths.obstacle_to_graphs(binding, config)
    config = replace(config, cuda_graphs=choice.captures(config, device, obstacle), attention_backend=choice.backend)
    paths.prepare_layers(binding, config)
    of_device = "fast.gpu.memory" if device.type == "cuda" else "fast.host.memory"
    memory = (_part(of_device, "memory_for_cache") or memory_share)(binding, config, choice)
    if binding.ranks is not None:
        memory = binding.ranks.least(memory)
    split = _part("features.groups.cache_pools", "pools_of") or one_pool
    resolved, pools = split(config, binding, memory, max_model_len_is_set=max_model_len is not None)
    if resolved.max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len is %d instead of the model's %d: that is what the KV cache holds",
            resolved.max_model_len, config.max_model_len,
        )  # fmt: skip
    return resolved, choice, pools, paths


def _observers_from(on_step: StepHook | None, trace: TraceWriter | None) -> EngineObservers:
    observers: EngineObservers = (_part("observability.step_records", "StepObservers") or NoObservers)()
    if on_step is not None:
        observers.append(_part("observability.step_records", "OnStep", option="on_step")(on_step))
    if trace is not None:
        if not isinstance(trace, _part("observability.trace_writer", "TraceWriter", option="trace")):
            raise TypeError(f"trace must be a TraceWriter, such as TraceWriter('out.json'), not {trace!r}.")
        trace.check_unused()
        observers.append(trace)
    return observers
