"""`ModelRunner` where several processes share the model: rank 0 sends each step to the others, which launch it too."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanovllm.batch import ScheduledBatch
from nanovllm.defaults import LoadedModel, device_of
from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.gpu.rank_sampler import RankSampler
from nanovllm.features.composition.binding import build_binding
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.interrupts import interrupts_put_off
from nanovllm.features.logprobs.logprobs import StepLogprobs
from nanovllm.features.ranks.rank_calls import answer_call, call_together
from nanovllm.features.ranks.ranks import Ranks
from nanovllm.features.ranks.shared_tensors import SharedTensors
from nanovllm.features.ranks.step_order import StepOrder
from nanovllm.features.ranks.workers import CLOSE_SECONDS, Start, WorkerProcesses
from nanovllm.features.refusals import TENSOR_PARALLEL, refuse
from nanovllm.layout import BatchLayout
from nanovllm.model import ModelBinding
from nanovllm.model_runner import ModelRunner, PendingTokens, StepPaths
from nanovllm.models import loader
from nanovllm.models.fingerprint import digest_for_files
from nanovllm.models.sharded_loading import check_shards, load_sharded
from nanovllm.sampler import StepReport

if TYPE_CHECKING:
    from nanovllm.features.tiers.rank_tiers import RankTiers


@contextmanager
def computing_with(num_threads: int | None) -> Iterator[None]:
    """Set PyTorch's number of threads inside the block; None leaves it unchanged.

    PyTorch keeps the number per calling thread, and no other thread can reset it. So rank 0 sets its share in each
    step, not from construction to `close`, which may run in another thread. It costs 0.3 µs.
    """
    before = torch.get_num_threads()
    if num_threads is None or num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class RankPendingTokens(PendingTokens):
    """Tokens of a step of several ranks."""

    workers: WorkerProcesses

    def result(self) -> list[int]:
        token_ids = PendingTokens.result(self)
        self.workers.check()  # a dead rank raises here: without its shard the tokens are wrong
        return token_ids


class RankRunner(ModelRunner):
    """The model runner of one rank.

    At start-up every rank runs the same code, and its collectives meet. From then on the others follow rank 0's orders.

    Args:
        workers: the other ranks, on rank 0.
    """

    sampler: RankSampler
    workers: WorkerProcesses | None = None
    tiers: RankTiers | None = None  # None on the first rank
    adapter_slots: Any = None  # `DeviceSlots` of this rank, once an adapter is loaded
    step_slots: Any = None  # slots of the rows' adapters in the step that the first rank launches

    def __init__(
        self,
        binding: ModelBinding,
        config: EngineConfig,
        choice: AttentionChoice,
        pools: CachePools,
        paths: StepPaths,
        workers: WorkerProcesses | None,
    ) -> None:
        super().__init__(binding, config, choice, pools, paths)
        if workers is not None:
            self.workers = workers
            self.launch_step = self._launch_together
            weakref.finalize(self, workers.close).atexit = False  # an engine dropped without `close` ends its workers

    def _build_sampler(self, **parts: Any) -> RankSampler:
        return RankSampler(self.binding, compiles=self.choice.uses_graphs, **parts)

    def launch(self, batch: ScheduledBatch) -> Callable[[], PendingTokens]:
        if self.workers is None:
            return super().launch(batch)
        with computing_with(self.workers.num_threads):
            return super().launch(batch)

    def _draw(self, draw: Callable[[], Tensor], report: StepReport | None) -> PendingTokens:
        if self.workers is None:
            return super()._draw(draw, report)
        with computing_with(self.workers.num_threads):
            pending = super()._draw(draw, report)
        return RankPendingTokens(pending.token_ids, pending.report, pending.arrival, self.workers)

    def draw_unread(self, steps: Iterable[Any]) -> None:
        with suppress(Exception), interrupts_put_off():  # the next step reports a rank that failed
            for step in steps:
                step.draw()

    def _launch_together(
        self, batch: ScheduledBatch, layout: BatchLayout, masks: Any, report: StepLogprobs | None
    ) -> Callable[[], Tensor]:
        assert self.workers is not None
        draws = self.sampler.begin_step(batch.sampling, layout.sampled_positions.tolist())
        try:
            self.workers.send("follow", StepOrder.from_step(batch, layout, draws, report, self.step_slots))
            return partial(self._draw_together, self.executor.launch(batch, layout, masks, report))
        except BaseException as error:  # the others are in the middle of the step
            self.workers.fail(error)

    def _draw_together(self, draw: Callable[[], Tensor]) -> Tensor:
        assert self.workers is not None
        try:
            self.workers.check()
            return draw()
        except BaseException as error:  # the others are in the middle of the draw
            self.workers.fail(error)

    def follow(self, order: StepOrder) -> None:
        """Launch a step that rank 0 sent, without its requests."""
        if self.device.type == "cuda":
            self.follow_last_stream()
        self.sampler.step_draws = order.draws
        draws_all = order.layout.entries[0]._replace(num_samples=len(order.layout.sample_rows))
        batch = ScheduledBatch(0, (draws_all,), copies=order.copies)
        masks: Any = self.backend.plan(order.layout)
        report = self.sampler.stage.new_report(order.prompt, order.embedded)
        launch = self.executor.launch
        if order.slots is not None:
            launch = partial(self.adapter_slots.launch, slots=order.slots)
        launch(batch, order.layout, masks, report)()

    def follow_tiers(self, kind: str, payload: tuple[Any, ...]) -> None:
        """Execute an order of rank 0's tiers."""
        getattr(self.tiers, kind)(*payload)

    def together(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call function(runner, *arguments) on every rank; see `call_together`. The draws of all steps are launched."""
        assert self.workers is not None
        with computing_with(self.workers.num_threads):
            return call_together(self, function, arguments)

    answer = answer_call
    share = staticmethod(SharedTensors)

    def capture_ahead(self) -> bool:
        if self.workers is None:
            return super().capture_ahead()
        try:
            self.workers.send("capture_ahead")
            return super().capture_ahead()
        except BaseException as error:
            self.workers.fail(error)

    def check_editable(self) -> None:
        refuse("weights_changed", TENSOR_PARALLEL)

    def close(self) -> None:
        if self.workers is None:
            super().close()
            return
        abort = threading.Timer(CLOSE_SECONDS, self.workers.abort)  # ends a step in which a rank hangs
        abort.daemon = True
        with suppress(RuntimeError):  # Python starts no thread while it ends
            abort.start()
        try:
            super().close()  # first: NCCL frees its memory once the graphs that use it are gone
        finally:
            abort.cancel()
            self.workers.close()


Resolve = Callable[[ModelBinding, LoadedModel, EngineConfig], tuple[EngineConfig, Any, Any, StepPaths]]


def build_ranks(
    model: Any, tokenizer: Any, config: EngineConfig, resolve: Resolve
) -> tuple[LoadedModel, RankRunner, str | None]:
    """Start the processes of the other ranks, and load each rank's shard; returns rank 0's, its runner and its digest.

    Args:
        resolve: `build.resolve_options`.

    Raises ValueError before loading if the model cannot be sharded, and DeviceError if a process fails.
    """
    if isinstance(model, nn.Module):
        refuse("a loaded module as model", TENSOR_PARALLEL)
    if ":" in config.device:
        refuse("a GPU by its number as device", TENSOR_PARALLEL)
    source = loader.find_source(model, tokenizer, config)
    device = device_of(config)
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and config.tensor_parallel_size > num_gpus:
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but PyTorch sees {num_gpus} GPUs. "
            "Each rank needs one: set it to at most that, or show more in CUDA_VISIBLE_DEVICES."
        )
    check_shards(source, config)
    workers = WorkerProcesses(source, config, device.type)
    assert workers.ranks is not None
    try:
        with computing_with(workers.num_threads):
            loaded = load_sharded(source, tokenizer, config, workers.ranks)
            return loaded, *build_rank(loaded, config, workers.ranks, resolve, workers)
    except BaseException as error:
        if isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError):
            workers.fail(error)  # a collective ends so where a peer has failed
        workers.close()
        raise


def build_rank(
    loaded: LoadedModel, config: EngineConfig, ranks: Ranks, resolve: Resolve, workers: WorkerProcesses | None = None
) -> tuple[RankRunner, str | None]:
    """The model runner of one rank, and its shard's digest; all ranks come here at the same time."""
    digest = digest_for_files(loaded, config)
    binding = build_binding(loaded.model, is_live=False, ranks=ranks, head=loaded.head)
    runner = RankRunner(binding, *resolve(binding, loaded, config), workers)
    if ranks.rank and (config.prefix_cache_host_bytes is not None or digest is not None):
        from nanovllm.features.tiers.rank_tiers import RankTiers

        runner.tiers = RankTiers.open(binding, runner.config, runner.pools, digest)
    return runner, digest


def build_worker(start: Start, ranks: Ranks, resolve: Resolve) -> RankRunner:
    """The model runner of another rank."""
    return build_rank(load_sharded(start.source, None, start.config, ranks), start.config, ranks, resolve)[0]
