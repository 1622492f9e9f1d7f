"""Runs a scheduled batch through the model: slot mapping, block masks, one forward pass, sampling.

Invariant: a step writes K and V only to the slots of its rows (padding to the null block), and no slot that is
read holds NaN of another request (where a backend reads more than a sequence's own slots, begun blocks are cleared).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AnySequence
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention import AttentionBackend, AttentionPlan, AttentionStep
from nanovllm.batch import NULL_BLOCK, ScheduledBatch, ScheduledSequence
from nanovllm.config import EngineConfig
from nanovllm.device import give_memory_back, raise_device_error, to_host
from nanovllm.layout import BatchLayout, build_layout
from nanovllm.model import ModelBinding
from nanovllm.sampler import LogitsStage, Sampler, StepReport
from nanovllm.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """A launched step's sampled tokens and log-probabilities, on their way to the host."""

    token_ids: Tensor  # [num_samples] int64, on the host
    report: StepReport | None  # None if nothing but tokens was asked for
    arrival: torch.cuda.Event | None  # None if the tokens are there already

    @classmethod
    def send(cls, token_ids: Any, report: StepReport | None) -> Any:
        """Begin to copy token_ids [num_samples] int64 to the host; the next launch may overwrite them."""
        if not isinstance(token_ids, Tensor):  # a `LateDraw`, which sends them itself
            return token_ids
        if token_ids.device.type == "cpu":
            return cls(token_ids, report, None)
        arrival = torch.cuda.Event()
        pending = cls(to_host(token_ids), report and report.to_host(), arrival)
        arrival.record(torch.cuda.current_stream(token_ids.device))
        return pending

    def result(self) -> list[int]:
        """Wait for the step and return its tokens in the order of `ScheduledBatch.sampling`, and complete `report`."""
        try:
            if self.arrival is not None:
                self.arrival.synchronize()
            return self.token_ids.tolist()
        except RuntimeError as error:
            raise_device_error(error)


class DirectExecutor:
    """Executor that calls the model directly: for every backend except a GPU's `flex`, with compiled layers or not."""

    def __init__(
        self,
        binding: ModelBinding,
        backend: AttentionBackend,
        block_size: int,
        sampler: Sampler,
        kind_groups: AnySequence[int] = (),
    ) -> None:
        self.backend = backend
        self._kind_groups = kind_groups  # the cache group of each kind of layer, where there are several groups
        self._binding = binding
        self._block_size = block_size
        self._sampler = sampler
        self._sampled: Tensor | None = None  # [num_samples] int64, tokens of the step before
        self._null_block_is_dirty = False

    def launch(
        self, batch: ScheduledBatch, layout: BatchLayout, plan: AttentionPlan, report: StepReport | None
    ) -> Callable[[], Tensor]:
        """Launch a step's forward pass with the masks `plan`; returns the draw of its tokens [num_samples] int64.

        Args:
            report: report of the sampler's stage; None if every sequence is plain.
        """
        binding = self._binding
        device = self._binding.device
        num_tokens = layout.num_tokens
        num_rows = max(binding.min_rows, num_tokens)  # padding writes to the null block
        layouts = layout, *layout.others  # the rows in each cache group
        slots_of_kinds = [layouts[group].slot_mapping for group in self._kind_groups or (0,)]
        values = layout.token_ids, layout.positions, *slots_of_kinds
        inputs = np.zeros((len(values), num_rows), np.int64)
        inputs[:, :num_tokens] = values
        token_ids, positions, *_ = rows = torch.from_numpy(inputs).to(device)
        slot_mapping = rows[2:] if self._kind_groups else rows[2]
        if self._sampled is not None and layout.token_ids.min() < 0:
            token_ids = with_sampled(token_ids, self._sampled)
        if batch.copies:
            binding.caches.copy_blocks(batch.copies, self._block_size)
        if self.backend.reads_whole_blocks:
            for group, of_group in enumerate(layouts):
                # The blocks that this step begins and does not fill, and the null block after padding wrote to it.
                blocks = of_group.blocks_to_clear
                if self._null_block_is_dirty:
                    blocks = np.append(blocks, NULL_BLOCK)
                if len(blocks):
                    binding.caches.clear_blocks(torch.from_numpy(blocks).to(device), self._block_size, group=group)
            self._null_block_is_dirty = num_rows > num_tokens
        sample_rows = torch.from_numpy(layout.sample_rows).to(device)
        step = AttentionStep(plan, num_tokens)
        binding.mixers.begin_step(layouts[-1], device)
        logits = binding.forward_step(step, token_ids, positions, slot_mapping, sample_rows, report)
        return partial(self._draw, logits, batch, layout, report)

    def _draw(self, logits: Tensor, batch: ScheduledBatch, layout: BatchLayout, report: StepReport | None) -> Tensor:
        with torch.no_grad():
            sampler = self._sampler
            sequences = batch.sampling
            if report is not None and not report.needs_logits:  # embeddings have no tokens
                self._sampled = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
                return self._sampled
            inputs = None if report is None else sampler.stage.inputs(layout, sequences, self._sampled)
            positions = layout.sampled_positions.tolist()
            self._sampled = sampler.sample(logits, sequences, positions, inputs, report)
        return self._sampled

    def model_changed(self, *, in_place: bool) -> None:
        """Nothing to drop: no state of the model is kept."""

    def close(self) -> None:
        """Nothing to free."""


def with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """token_ids [num_rows] with -1 - i replaced by the i-th token of `sampled`.

    A request with non-finite logits continues with token 0 until the step is read, and then ends.
    """
    indices = (-1 - token_ids).clamp_(0, len(sampled) - 1)
    return torch.where(token_ids < 0, sampled[indices].clamp_(min=0), token_ids)


logger = logging.getLogger("nanovllm")


class Executor(Protocol):
    """Computes the steps of one engine."""

    @property
    def backend(self) -> Any:
        """Plans the masks of a layout: which blocks each row sees."""

    def launch(self, batch: ScheduledBatch, layout: BatchLayout, masks: Any, report: Any, /) -> Callable[[], Tensor]:
        """Launch a step's forward pass with the masks of `backend`; returns the draw of its tokens [num_samples] int64.

        Args:
            report: report of the sampler's stage; None if every sequence is plain.
        """

    def model_changed(self, *, in_place: bool) -> None:
        """Drop copies of weights and captured graphs; `in_place`: the weights have kept their addresses."""

    def close(self) -> None: ...


class Pools(Protocol):
    """The blocks of the KV cache: one pool for all layers, or one for each cache group."""

    @property
    def num_bytes(self) -> int: ...

    def num_longest(self, max_model_len: int, block_size: int) -> int:
        """Number of sequences of max_model_len that fit at once."""

    def kind_groups(self, layers: SequenceABC[Any]) -> SequenceABC[int]:
        """The pool of each kind of attention layers, ordered as by `kinds_of`; empty where one serves all."""

    def allocate(self, caches: Any, block_size: int) -> None: ...

    def lay_out(self, layout: BatchLayout, block_size: int) -> BatchLayout:
        """The layout with the rows in each pool after the first."""


class StepPaths:
    """The way to compute steps: by default with the model's own modules. Subclasses compute the same tokens faster.

    Attributes:
        build_stage: builder of the sampler's stage; None serves plain requests alone.
    """

    build_stage: Callable[..., LogitsStage] | None = None

    def sampler_parts(self, choice: Any) -> dict[str, Any]:
        """Arguments of the sampler: its draws, and its stage."""
        return {} if self.build_stage is None else {"stage": self.build_stage(by_kernels=choice.uses_graphs)}

    def obstacle_to_graphs(self, binding: ModelBinding, config: Any) -> str | None:
        """The part of the model that CUDA graphs cannot capture, in words; None if there is none."""
        return None

    def prepare_layers(self, binding: ModelBinding, config: Any) -> None:
        """Prepare the layers, before memory is measured; limits and block size are resolved."""

    def build_executor(self, runner: ModelRunner) -> Executor:
        binding = runner.binding
        config = runner.config
        pools = runner.pools
        backend = runner.choice.build(binding.layers, binding.device, config, pools)
        kind_groups = pools.kind_groups(binding.layers)
        return DirectExecutor(binding, backend, config.block_size, runner.sampler, kind_groups)

    def prepare(self, runner: ModelRunner) -> None:
        """Prepare the model and the executor for the first step."""

    def entries(self, batch: ScheduledBatch) -> SequenceABC[ScheduledSequence]:
        """The entries of a step, as `build_layout` gets them."""
        return batch.entries

    def use_idle_time(self, runner: ModelRunner) -> bool:
        """Prepare one thing more while no request runs; False if nothing is left."""
        return False


class ModelRunner:
    """Owns the KV caches and the attention backend of one engine.

    Args:
        binding: the hooked model; its caches are allocated here.
        config: configuration that `build.resolve_options` has resolved.
        choice: attention of the model and device, which builds the backend (`PlainAttention` in defaults.py).
        pools: blocks of the KV cache.
        paths: way to compute steps.
    """

    workers: Any = None  # processes of the other ranks, on the first of several

    def __init__(
        self, binding: ModelBinding, config: EngineConfig, choice: Any, pools: Pools, paths: StepPaths
    ) -> None:
        self.binding = binding
        self.device = binding.device
        self.config: Any = config  # Any: `paths` reads options of features, too
        self.pools: Any = pools
        self.choice = choice
        self.paths = paths
        self.sampler = self._build_sampler(**paths.sampler_parts(choice))
        self._last_stream: torch.cuda.Stream | None = None
        self._in_flight: dict[Sequence, int] = {}  # sequences of the latest step -> index of their newest token
        pools.allocate(binding.caches, config.block_size)
        self.executor = paths.build_executor(self)
        self.backend = self.executor.backend
        self.launch_step: Callable[..., Callable[[], Tensor]] = self.executor.launch
        paths.prepare(self)
        logger.info(
            "KV cache: %d blocks = %d tokens, %.2f GiB; at most %d requests of max_model_len (%d tokens)",
            config.num_kv_blocks, (config.num_kv_blocks - 1) * config.block_size, pools.num_bytes / 2**30,
            pools.num_longest(config.max_model_len, config.block_size), config.max_model_len,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- steps

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        """Launch a step and its draw; returns a handle to its tokens."""
        return self.launch(batch)()

    def launch(self, batch: ScheduledBatch) -> Callable[[], PendingTokens]:
        """Launch one forward pass for decodes and chunks alike; returns its draw: call it once, before the next launch.

        The step before may still have to sample a sequence's newest token. Both raise DeviceError if the device failed,
        and any error of the model.
        """
        entries = self.paths.entries(batch)
        layout = build_layout(  # token ids, positions and the slot mapping of all rows
            entries, self.config.block_size, self._in_flight, longest_first=self.choice.uses_graphs
        )
        layout = self.pools.lay_out(layout, self.config.block_size)
        report = None
        if not all(entry.sequence.is_plain for entry in batch.entries):
            report = self.sampler.stage.begin_report(batch, layout)
        try:
            if self.device.type == "cuda":
                self.follow_last_stream()
            masks: Any = self.backend.plan(layout)  # the blocks that each row sees
            draw = self.launch_step(batch, layout, masks, report)
        except RuntimeError as error:
            raise_device_error(error)
        self._in_flight = {sequence: index for index, sequence in enumerate(batch.sampling)}
        return partial(self._draw, draw, report)

    def _draw(self, draw: Callable[[], Tensor], report: StepReport | None) -> PendingTokens:
        try:
            if self.device.type == "cuda":
                self.follow_last_stream()
            return PendingTokens.send(draw(), report)
        except RuntimeError as error:
            raise_device_error(error)

    def draw_unread(self, steps: Iterable[Any]) -> None:
        """Launch the draws of steps that nobody will read, if another process waits for them: here none does."""

    def follow_last_stream(self) -> None:
        """Make launches run in order on the device, whatever streams their callers have set."""
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    # ------------------------------------------------------------------------------------------ start-up and idle

    def _build_sampler(self, **parts: Any) -> Sampler:
        return Sampler(**parts)

    def capture_ahead(self) -> bool:
        """Rehearse an option or capture a usual shape while idle; False if none is left, or for a live module."""
        if self.binding.is_live:  # it is its owner's while no request runs
            return False
        try:
            return self.paths.use_idle_time(self)
        except RuntimeError as error:
            raise_device_error(error)

    # ------------------------------------------------------------------------------------------------ live modules

    def model_changed(self, *, was_idle: bool) -> bool:
        """Whether the owner of a live module changed it since the last call.

        Args:
            was_idle: True checks the structure, too, since no step ran meanwhile; False checks only weights.
        """
        if (watch := self.binding.watch) is None:
            return False
        weights_changed, structure_changed = watch.changes(with_structure=was_idle)
        if weights_changed or structure_changed:
            self.executor.model_changed(in_place=not structure_changed)
        return weights_changed or structure_changed

    def check_editable(self) -> None:
        """Raise ValueError if nobody outside of the engine can have changed the model: here never."""

    def forget_model(self) -> None:
        """Drop captured graphs: the model was changed in a way that `model_changed` cannot see."""
        self.executor.model_changed(in_place=False)

    def close(self) -> None:
        try:
            self.executor.close()
        finally:
            self.binding.close()
        give_memory_back(self.device)
