"""From a model's name or module and options to an engine that is ready to step: the only file that knows every part.

A part whose folder is missing is skipped, and its options are refused by name.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanovllm.attention.backends import AttentionChoice
from nanovllm.cache.cache_pools import CachePools, cache_groups_of, resolve_pools
from nanovllm.cache.managers import build_block_manager
from nanovllm.core.config import EngineConfig
from nanovllm.core.features import TENSOR_PARALLEL, refuse
from nanovllm.core.speculation_options import SUFFIX
from nanovllm.engine import Engine, EngineObservers, NoObservers
from nanovllm.execution.memory import memory_for_cache
from nanovllm.model import loader
from nanovllm.model.binding import ModelBinding
from nanovllm.model.building import build_binding
from nanovllm.model.guard import check_row_counted_scales
from nanovllm.model_runner import ModelRunner, StepPaths
from nanovllm.process.device import computing_with
from nanovllm.process.gc_control import collector_paused
from nanovllm.requests.building import build_input_processor
from nanovllm.requests.input_processor import InputProcessor, RequestLimits
from nanovllm.requests.turn_end import log_ends
from nanovllm.scheduler import Queue, Scheduler

if TYPE_CHECKING:
    from nanovllm.execution.workers import Start, WorkerProcesses
    from nanovllm.features.goals.step_budget import StepBudget
    from nanovllm.model.ranks import Ranks
    from nanovllm.observability.kv_events import KvEventPublisher
    from nanovllm.observability.step_records import StepHook
    from nanovllm.observability.trace_writer import TraceWriter
    from nanovllm.rank_runner import RankRunner
    from nanovllm.speculation.drafter import Drafter

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
    config = EngineConfig.from_options(**options)
    publisher = digest = None
    if config.kv_events is not None:
        publisher = _part("observability.kv_events", "KvEventPublisher", option="kv_events")(config)
    model_runner: ModelRunner
    if config.tensor_parallel_size > 1:
        loaded, model_runner, digest = _build_ranks(model, tokenizer, config)
    else:
        with collector_paused():
            loaded = loader.load(model, tokenizer, config)
        digest = _model_digest(loaded, config)  # before weights are packed
        with computing_with(_free_threads(loaded)):
            binding = build_binding(loaded.model, is_live=loaded.is_live)
        binding.memory = loaded.memory
        model_runner = ModelRunner(binding, *resolve_options(binding, loaded, config))
        binding.memory = None  # also where nothing was packed
    binding = model_runner.binding
    budget, costs = _budget(model_runner, observers, clock)
    config = model_runner.config
    if trace is not None:
        trace.begin(config)
    # The seed: everything that the KV of a token depends on besides its prefix.
    hash_seed = f"{loaded.identity}:{binding.dtype}{binding.rope.choice}"
    has_tiers = config.prefix_cache_host_bytes is not None or digest is not None
    block_manager = build_block_manager(config, model_runner.pools, hash_seed=hash_seed, with_tiers=has_tiers)
    if publisher is not None:
        publisher.begin(block_manager, observers)
    input_processor = _build_input_processor(loaded, model_runner, budget, clock)
    scheduler = Scheduler(config, block_manager, budget, _queue(config, block_manager, costs))
    if config.speculation is not None:
        add_drafts = _part("speculation.build", "add_drafts", option="speculation")
        add_drafts(scheduler, model_runner, input_processor, observers, _draft_model)
    engine = Engine(model_runner, scheduler, input_processor, observers)
    if has_tiers:
        _open_tiers(engine, hash_seed, digest, publisher)
    return engine


def _part(module: str, name: str, *, option: str | None = None) -> Any:
    """A class or function of a part; None, said once in the log, if it is missing and no option asks for it.

    Raises ValueError that names the option and the folder.
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


def _open_tiers(engine: Engine, hash_seed: str, digest: str | None, publisher: KvEventPublisher | None) -> None:
    open_tiers = _part("execution.prefix_tiers", "open_tiers", option="prefix_cache_host_bytes or prefix_cache_dir")
    try:
        engine.tiers = open_tiers(engine.block_manager, engine.model_runner, hash_seed, digest, engine.clock)
    except BaseException:  # such as memory that cannot be pinned: other ranks are to end in order
        engine.model_runner.close()
        raise
    engine.tiers.costs.on_decision = partial(engine.observers.notify, "prefix_decided")
    engine.observers.append(engine.tiers)
    if publisher is not None:
        engine.tiers.books.on_change = publisher.tier_changed


def _model_digest(loaded: loader.LoadedModel, config: EngineConfig) -> str | None:
    """The model's name in files of prefixes; None where there are none."""
    if config.prefix_cache_dir is None:
        return None
    if loaded.is_live:
        raise ValueError(
            f"prefix_cache_dir is {config.prefix_cache_dir!r}, but the model is a module, whose weights its owner may "
            "change. Save it (save_pretrained) and pass the folder, or set prefix_cache_host_bytes."
        )
    from nanovllm.model.fingerprint import model_digest

    return model_digest(loaded.model)


def _draft_model(config: EngineConfig, input_processor: InputProcessor) -> Drafter | None:
    """The drafter of `config.draft_model`, whose cache holds as many tokens as the engine's; None without one."""
    if config.draft_model is None:
        return None
    from nanovllm.speculation.build import check_draft_model
    from nanovllm.speculation.model_drafter import ModelDrafter

    own = EngineConfig(
        device=config.device, block_size=config.block_size, num_kv_blocks=config.num_kv_blocks,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens, overlap=False,
        enable_prefix_caching=False, enforce_eager=config.enforce_eager, trust_remote_code=config.trust_remote_code,
        skip_tokenizer_init=input_processor.tokenizer is None, kv_cache_touch="none",
    )  # fmt: skip
    with collector_paused():
        loaded = loader.load(str(config.draft_model), None, own)
    own = replace(own, max_model_len=min(config.max_model_len, loaded.num_positions(config.max_model_len)))
    binding = build_binding(loaded.model, is_live=False)
    binding.memory = loaded.memory
    check_draft_model(config, binding, (loaded.tokenizer, input_processor.tokenizer), input_processor.limits)
    runner = ModelRunner(binding, *resolve_options(binding, loaded, own))
    binding.memory = None
    return ModelDrafter(runner.config, build_block_manager(runner.config, runner.pools), runner)


def _budget(
    model_runner: ModelRunner, observers: EngineObservers, clock: Callable[[], float]
) -> tuple[StepBudget | None, dict[str, float]]:
    """The budget that keeps latency goals, if there are any, and costs of tokens for the shares of clients."""
    if model_runner.config.itl_goal is None and model_runner.config.step_costs is None:
        return None, {}
    open_budget = _part("features.goals.building", "open_budget", option="itl_goal or step_costs")
    budget, decode_cost = open_budget(model_runner, observers, clock)
    return budget, {"decode_cost": decode_cost}


def _queue(config: EngineConfig, block_manager: Any, costs: dict[str, float]) -> Queue | None:
    """The queue that keeps shares of clients; None for the scheduler's own."""
    option = "client_weights" if config.client_weights else None
    client_queue = _part("features.shares.client_queue", "ClientQueue", option=option)
    return None if client_queue is None else client_queue(config, block_manager, **costs)


def _free_threads(loaded: loader.LoadedModel) -> int | None:
    """All threads but one while a thread takes memory: a pass with more threads than cores takes five times as long."""
    is_taking = loaded.memory is not None and loaded.memory.is_taking
    return max(1, torch.get_num_threads() - 1) if is_taking else None


def _build_input_processor(
    loaded: loader.LoadedModel, model_runner: ModelRunner, budget: StepBudget | None, clock: Callable[[], float]
) -> InputProcessor:
    limits = _limits(loaded, model_runner)
    input_processor = build_input_processor(loaded.tokenizer, model_runner.config, limits, clock)
    if budget is not None:
        input_processor.goals = lambda: budget
    if not limits.has_head:
        logger.warning("%s", limits.without_head)
    elif loaded.tokenizer is not None:
        log_ends(loaded.tokenizer, limits.eos_token_ids, input_processor.chat.end_token_ids)
    return input_processor


def _limits(loaded: loader.LoadedModel, model_runner: ModelRunner) -> RequestLimits:
    binding = model_runner.binding
    return RequestLimits(
        vocab_size=loaded.vocab_size,
        num_logits=binding.vocab_size,
        model_name=loaded.name,
        has_base_model=binding.passes.has_base_model,
        has_head=loaded.has_head,
        eos_token_ids=tuple(token for token in loaded.eos_token_ids if 0 <= token < binding.vocab_size),
        sampling_defaults=loaded.sampling_defaults if model_runner.config.generation_config == "auto" else {},
    )


def _build_ranks(model: Any, tokenizer: Any, config: EngineConfig) -> tuple[loader.LoadedModel, RankRunner, str | None]:
    """Start the processes of the other ranks, and load each rank's shard; returns rank 0's, its runner and its digest.

    Raises ValueError before loading if the model cannot be sharded, and DeviceError if a process fails.
    """
    from nanovllm.execution.workers import WorkerProcesses
    from nanovllm.model.sharded_loading import check_shards, load_sharded

    if isinstance(model, nn.Module):
        refuse("a loaded module as model", TENSOR_PARALLEL)
    if ":" in config.device:
        refuse("a GPU by its number as device", TENSOR_PARALLEL)
    source, device = loader.find_source(model, tokenizer, config), loader.device_of(config)
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and config.tensor_parallel_size > num_gpus:
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but PyTorch sees {num_gpus} GPUs. "
            "Each rank needs one: set it to at most that, or show more in CUDA_VISIBLE_DEVICES."
        )
    check_shards(source, config)
    has_object = not isinstance(config.speculation, str | None)  # a drafter, which is this rank's
    workers = WorkerProcesses(source, replace(config, speculation=SUFFIX) if has_object else config, device.type)
    assert workers.ranks is not None
    try:
        with computing_with(workers.num_threads):
            loaded = load_sharded(source, tokenizer, config, workers.ranks)
            return loaded, *build_rank(loaded, config, workers.ranks, workers)
    except BaseException as error:
        if isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError):
            workers.fail(error)  # a collective ends so where a peer has failed
        workers.close()
        raise


def build_rank(
    loaded: loader.LoadedModel, config: EngineConfig, ranks: Ranks, workers: WorkerProcesses | None = None
) -> tuple[RankRunner, str | None]:
    """The model runner of one rank, and its shard's digest; all ranks come here at the same time."""
    from nanovllm.rank_runner import RankRunner

    digest = _model_digest(loaded, config)
    binding = build_binding(loaded.model, is_live=False, ranks=ranks, head=loaded.head)
    runner = RankRunner(binding, *resolve_options(binding, loaded, config), workers)
    if ranks.rank and (config.prefix_cache_host_bytes is not None or digest is not None):
        from nanovllm.execution.rank_tiers import RankTiers

        runner.tiers = RankTiers.open(binding, runner.config, runner.pools, digest)
    return runner, digest


def run_worker(orders: int, lifeline: int) -> None:
    """The main function of another rank's process; see `Worker`."""
    from nanovllm.execution.workers import Worker

    Worker(orders, lifeline).run(build_worker)


def build_worker(start: Start, ranks: Ranks) -> RankRunner:
    """The model runner of another rank."""
    from nanovllm.model.sharded_loading import load_sharded

    loaded = load_sharded(start.source, None, start.config, ranks)
    return build_rank(loaded, start.config, ranks)[0]


def resolve_options(
    binding: ModelBinding, loaded: loader.LoadedModel, config: EngineConfig
) -> tuple[EngineConfig, AttentionChoice, CachePools, StepPaths]:
    """Resolve every option for the model and the device.

    Limits come first, then the attention backend and CUDA graphs, then the KV cache's size, for which a GPU runs a
    step.
    Raises ValueError for options that contradict each other, the model or the device.
    """
    layers, device, max_model_len = binding.layers, binding.device, config.max_model_len
    num_positions = loaded.max_position_embeddings if layers else loaded.num_positions(max_model_len)
    longest = max_model_len or num_positions
    if longest is not None:  # windows and chunks that hold the longest sequence are none
        layers[:] = [replace(layer, traits=layer.traits.within(longest)) for layer in layers]
    config = binding.mixers.fitted(config, device.type).resolve_limits(device.type, num_positions)
    binding.rope.pin(config.max_model_len)
    check_row_counted_scales(binding.model, config)
    choose = AttentionChoice.beside_mixers if binding.mixers else AttentionChoice.for_model
    choice = choose(layers, device, config)
    choose_paths = _part("fast.choice", "choose_paths")
    paths = StepPaths() if choose_paths is None else choose_paths(choice, binding)
    paths.build_stage = _part("sampling.request_options", "RequestOptions")
    obstacle = paths.obstacle_to_graphs(binding, config)
    config = replace(config, cuda_graphs=choice.captures(config, device, obstacle), attention_backend=choice.backend)
    paths.prepare_layers(binding, config)
    memory = memory_for_cache(binding, config, choice)
    block_bytes = [layer.traits.sight.block_bytes(layer.token_bytes, config.block_size) for layer in layers]
    resolved, pools = resolve_pools(
        config,
        cache_groups_of(
            [layer.traits for layer in layers], block_bytes, config.max_model_len, record_bytes=binding.mixers.num_bytes
        ),
        memory if binding.ranks is None else binding.ranks.least(memory),
        max_model_len_is_set=max_model_len is not None,
    )
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
