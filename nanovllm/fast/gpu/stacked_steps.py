"""Steps of few plain decodes in one launch on a GPU, without graphs or copies; see `fast/layers/stacked_step.py`.

A step's inputs are arguments of its launch, and the kernel writes the tokens into memory that the host reads. They are
written number by number: with few rows NumPy's calls take longer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import NON_FINITE, ScheduledBatch
from nanovllm.device import find_kernel
from nanovllm.errors import NotFusedError
from nanovllm.fast.gpu.compared_steps import run_few_decodes
from nanovllm.fast.gpu.step_inputs import Packing
from nanovllm.fast.layers.distances import difference_of_rows, rewriting
from nanovllm.fast.layers.stacked_step import StackedStep
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.forward_passes import head_step
from nanovllm.features.packed_steps import StepInput
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.layout import BatchLayout
from nanovllm.model import ModelBinding
from nanovllm.model_runner import PendingTokens
from nanovllm.sampler import GAMMA_32, DrawInputs, draw, signed_32
from nanovllm.sampling_params import FILTERS, GAMMA, mix64

logger = logging.getLogger("nanovllm")

_MOST_ROWS = 8  # most rows of a stack
_NUM_BUFFERS = 8  # buffers for tokens that the host has not read; two steps are in flight
_DTYPES: dict[str, Any] = {
    **dict.fromkeys(("sample_rows", "noise_keys", "token_ids", "positions", "slot_mapping"), np.int64),
    **dict.fromkeys(("inverse_temperatures", "noise_scales"), np.float32),
    **dict.fromkeys(("decode_tables", "decode_blocks"), np.int32),
}
_INPUTS = *(StepInput(name, dtype, ("rows",)) for name, dtype in _DTYPES.items()), StepInput("tables", np.int32, None)
_draw_options = attrgetter("temperature", *FILTERS)


class PackedLaunch:
    """The launch of steps of one number of rows, padding included.

    Args:
        logits: [num_rows, vocab_size], buffer to write the logits to; None: not written.
    """

    def __init__(self, step: StackedStep, num_rows: int, sampled: Tensor, logits: Tensor | None = None) -> None:
        packing = Packing(_INPUTS, {"rows": num_rows})
        arrays = vars(packing.views(np.zeros(packing.num_words + 1, np.int32)))
        first = min(array.ctypes.data for array in arrays.values())
        places = {name: array.ctypes.data - first for name, array in arrays.items()}
        self._launch = step.token_step(places, num_rows, sampled, logits)
        self._to = packing.views(self._launch.packed)
        self._rows = self._launch.packed[: packing.num_words]

    def pack(self, layout: BatchLayout, block_size: int, sequences: Sequence[Any]) -> int | None:
        """Write a layout's rows; returns the number of their blocks, or None if they are too many or draw otherwise."""
        inverses = [_inverse_temperature(_draw_options(sequence.params)) for sequence in sequences]
        if None in inverses:
            return None
        to = self._to
        positions = layout.positions.tolist()
        counts = [position // block_size + 1 for position in positions]
        num_tables = sum(counts)
        if num_tables > len(to.tables):
            return None
        self._rows[:] = 0
        start = 0
        for row, (entry, count) in enumerate(zip(layout.entries, counts, strict=True)):
            end = start + count
            to.tables[start:end] = entry.block_table[:count]
            to.decode_tables[row], to.decode_blocks[row] = start, count
            start = end
        num_rows = len(positions)
        to.token_ids[:num_rows], to.positions[:num_rows] = layout.token_ids, layout.positions
        to.slot_mapping[:num_rows], to.sample_rows[:num_rows] = layout.slot_mapping, layout.sample_rows
        samples = zip(sequences, layout.sampled_positions.tolist(), inverses, strict=True)
        for sample, (sequence, position, inverse) in enumerate(samples):
            if inverse:
                to.noise_keys[sample] = _noise_key(sequence.seed, position)
                to.inverse_temperatures[sample], to.noise_scales[sample] = inverse, 1.0
        return num_tables

    def run(self, num_tables: int, host_sampled: Tensor | None = None) -> None:
        self._launch.launch(num_tables, host_sampled)


class StackedSteps:
    """The launches of one engine.

    Args:
        sampled: tokens of the previous step, which a step replaces.
        begin: prepares the device for a step, before its launch.
    """

    def __init__(
        self, step: StackedStep, block_size: int, *, sampled: Tensor, begin: Callable[[BatchLayout], None]
    ) -> None:
        self._step = step
        self._block_size = block_size
        self._sampled = sampled
        self._begin = begin
        self._launches = {num_rows: PackedLaunch(step, num_rows, sampled) for num_rows in step.num_rows}
        shape = _NUM_BUFFERS, step.num_rows[-1]
        with torch.inference_mode(False):
            buffers = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=sampled.is_cuda)
        self._buffers = buffers.unbind()
        self.num_launched = 0

    def launch(self, batch: ScheduledBatch, layout: BatchLayout) -> Any | None:
        """Pack a step of plain sequences; returns its launch, to `PendingTokens`, or None for another step."""
        count = layout.num_tokens
        sequences = batch.sampling
        if batch.copies or not count == len(sequences) == layout.num_decodes:
            return None  # the launch samples each row once, in any order
        launch = next((launch for num_rows, launch in self._launches.items() if num_rows >= count), None)
        if launch is None:
            return None
        if (num_tables := launch.pack(layout, self._block_size, sequences)) is None:
            return None

        def draw() -> PendingTokens:
            tokens = self._buffers[self.num_launched % _NUM_BUFFERS]
            self.num_launched += 1
            self._begin(layout)
            launch.run(num_tables, tokens)
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(self._sampled.device))
            return PendingTokens(tokens[:count], None, arrival)

        return draw

    def check(self, layout: BatchLayout, expected: Tensor) -> None:
        """Raise NotFusedError unless a step has the expected logits [num_samples, vocab_size] and K and V, if it fits.

        It runs greedy, then with noise and with tokens of a step before. The expected K and V are at its slots.
        """
        self._check(layout, expected, temperature=0.0)
        count = len(expected)
        self._sampled[:count] = torch.from_numpy(layout.token_ids[::-1].copy()).to(expected.device)
        chained = replace(layout, token_ids=np.arange(count) - count)  # -1 - i for the i-th token of the step before
        self._check(chained, expected, temperature=0.8)

    def _check(self, layout: BatchLayout, expected: Tensor, temperature: float) -> None:
        count = len(expected)
        device = expected.device
        params = SamplingParams(temperature=temperature)
        samples: Any = [SimpleNamespace(params=params, seed=sample) for sample in range(count)]
        num_rows = next(size for size in self._step.num_rows if size >= count)
        logits = expected.new_zeros(num_rows, expected.shape[1])
        launch = PackedLaunch(self._step, num_rows, self._sampled, logits)
        if (num_tables := launch.pack(layout, self._block_size, samples)) is None:
            return
        slots = torch.from_numpy(layout.slot_mapping).to(device)
        with ExitStack() as stack:
            for cache in self._step.caches:
                stack.enter_context(rewriting("the launch", cache, slots))
            launch.run(num_tables)
        own = logits[torch.from_numpy(layout.sample_rows).to(device)]
        tokens = self._sampled[:count]
        if (differs := difference_of_rows(own, expected)) is not None:
            raise NotFusedError(f"its logits are others: rows differ {differs}")
        if temperature:
            inputs: Any = DrawInputs.from_sequences(samples, layout.sampled_positions.tolist()).to_device(device)
            is_right = tokens == draw(own, inputs, has_filters=False)
        else:  # either of equal logits is right
            is_right = own.gather(1, tokens[:, None])[:, 0] == own.amax(dim=1)
        if not is_right.all():
            raise NotFusedError("its tokens are others than its logits give")


def reads_own_rows(layout: BatchLayout, block_size: int) -> bool:
    """Whether a decode attends to a position that another decode of its step computes.

    So do rows of drafts, and a request that claims the block which the last token of another one fills. A stack reads K
    and V of earlier positions before they are written.
    """
    entries = layout.entries
    if not 1 < layout.num_tokens == layout.num_decodes <= _MOST_ROWS:
        return False
    ends = [entry.start // block_size for entry in entries]
    blocks = [entry.block_table[end] for entry, end in zip(entries, ends, strict=True)]
    if len(set(blocks)) < len(blocks):
        return True
    filled = {block for entry, block in zip(entries, blocks, strict=True) if (entry.start + 1) % block_size == 0}
    earlier = (entry.block_table[:end] for entry, end in zip(entries, ends, strict=True))
    return bool(filled) and any(not filled.isdisjoint(blocks) for blocks in earlier)


@lru_cache(maxsize=1024)
def _inverse_temperature(options: tuple[Any, ...]) -> float | None:
    """Inverse temperature, 0 for greedy rows; None for rows with a filter, or cold ones."""
    params = SimpleNamespace(**dict(zip(("temperature", *FILTERS), options, strict=True)))
    inputs = DrawInputs.from_sequences([SimpleNamespace(params=params, seed=0)], [0])  # type: ignore[list-item]
    if inputs.has_filters():
        return None
    return float(inputs.inverse_temperatures[0] * inputs.noise_scales[0])


def _noise_key(seed: int, position: int) -> int:
    """`noise.noise_keys` of one row."""
    key = mix64(mix64(seed + GAMMA) ^ mix64((position + 1) * GAMMA))
    return key - 2**64 if key >= 2**63 else key


def build_stacked_steps(
    binding: ModelBinding, config: EngineConfig, run_layers: Callable[[BatchLayout], Tensor], **parts: Any
) -> StackedSteps | None:
    """The stacked steps of an engine; None if its layers are no stack, or its model has other parts around them.

    Args:
        run_layers: runs the layers of a step; returns hidden states of its sampled rows.
        parts: further arguments of `StackedSteps`.
    """
    if binding.stacked is None:
        return None
    launch_error: Any = find_kernel("nvrtc", "CudaError")
    options = {"non_finite": NON_FINITE, "gamma": signed_32(GAMMA_32)}
    try:
        binding.uninstall()
        step = StackedStep(binding.model, binding.stacked, binding.vocab_size, config.max_model_len, options)
        steps = StackedSteps(step, config.block_size, **parts)
        run_few_decodes(
            binding,
            config,
            lambda layout: steps.check(layout, head_step(binding, run_layers(layout)[: layout.num_tokens])),
        )
    except (NotFusedError, launch_error, torch.OutOfMemoryError) as error:
        logger.info("steps of few decodes run as two graphs: %s", error)
        return None
    return steps
