"""Steps with pictures: an executor in front of an engine's own gives rows their features and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention import AttentionPlan
from nanovllm.batch import ScheduledBatch
from nanovllm.features.media.budget import EncodedFirst
from nanovllm.features.media.features import Encoder, StepFeatures, encoded_already
from nanovllm.features.media.opening import open_reader
from nanovllm.features.media.pictures import Span, placeholder_of
from nanovllm.layout import BatchLayout
from nanovllm.model import ModelBinding
from nanovllm.model_runner import DirectExecutor
from nanovllm.models.sizes import PICTURE_BYTES
from nanovllm.sampler import StepReport


class PictureLaunches:
    """Launches steps with rows that have features or other rotary positions, by an engine's own launch."""

    def __init__(
        self, inner: Callable[..., Callable[[], Tensor]], passes: MediaPasses, encoder: Encoder, *, is_packed: bool
    ) -> None:
        self._inner = inner
        self._passes = passes
        self._encoder = encoder
        self._is_packed = is_packed

    def launch(
        self, batch: ScheduledBatch, layout: BatchLayout, masks: AttentionPlan, report: StepReport | None
    ) -> Callable[[], Tensor]:
        """See `Executor`."""
        self._encoder.encode_next()
        if all(entry.sequence.media is None for entry in layout.entries):
            return self._inner(batch, layout, masks, report)
        spans = spans_of_step(layout)
        has_own = any(entry.sequence.media and entry.sequence.media.positions is not None for entry in layout.entries)
        positions = rotary_positions(layout) if has_own else layout.positions
        if not (spans or (has_own and self._is_packed) or positions.ndim > 1):
            return self._inner(batch, replace(layout, positions=positions), masks, report)
        features = None
        if spans:
            self._encoder.encode(span.picture for span in spans)
            features = StepFeatures(
                [(s.start, self._encoder.features(s.picture), s.offset, s.offset + s.length) for s in spans]
            )
        given = GivenRows(features, positions, layout.num_decodes)
        with self._passes.giving(given):
            draw = self._inner(batch, layout, masks, report)
        return partial(self._draw, given, draw) if given.is_whole else draw

    def _draw(self, given: GivenRows, draw: Callable[[], Tensor]) -> Tensor:
        with self._passes.giving(given):  # a GPU computes such a step here
            return draw()


class GivenRows:
    """Features and positions of a step's rows, which replace their tokens' embeddings and numbers.

    Args:
        features: None without pictures among the rows.
        positions: see `rotary_positions`.
        num_decodes: number of decode rows; a packed step has chunks after a gap.
    """

    def __init__(self, features: StepFeatures | None, positions: NDArray[np.int64], num_decodes: int) -> None:
        self.features = features
        self.positions = positions
        self.num_decodes = num_decodes
        self.distance = 0
        self.is_whole = features is not None or positions.ndim > 1

    def place(self, to: NDArray[np.int64], distance: int) -> None:
        """Write rotary positions to the rows of a packed step, with chunks `distance` rows further on."""
        self.distance = distance
        if self.positions.ndim == 1:
            to[self.rows()] = self.positions

    def rows(self) -> NDArray[np.int64]:
        """The row of each position in the computed step."""
        rows = np.arange(self.positions.shape[-1])
        return rows + self.distance * (rows >= self.num_decodes)


def spans_of_step(layout: BatchLayout) -> list[Span]:
    """The placeholders among the rows of a step, in their order; `start` is a row."""
    spans: list[Span] = []
    for entry, first, end in zip(layout.entries, layout.row_starts[:-1], layout.row_starts[1:], strict=True):
        media = entry.sequence.media
        if media is not None:
            start = entry.start
            spans += [
                span._replace(start=int(first) + span.start - start)
                for span in media.within(start, start + int(end - first))
            ]
    return spans


def rotary_positions(layout: BatchLayout) -> NDArray[np.int64]:
    """Positions [num_rows] of rotary embeddings, or [3, num_rows] where a row has three different ones."""
    positions = layout.positions.copy()
    threefold: list[tuple[int, int, Any]] = []
    for entry, first, end in zip(layout.entries, layout.row_starts[:-1], layout.row_starts[1:], strict=True):
        media = entry.sequence.media
        if media is None or media.positions is None:
            continue
        num_prompt = media.positions.shape[1]
        in_prompt = max(0, min(num_prompt - entry.start, int(end - first)))
        given = media.positions[:, entry.start : entry.start + in_prompt]
        if (given == given[0]).all():
            positions[int(first) : int(first) + in_prompt] = given[0]
        else:
            threefold.append((int(first), int(first) + in_prompt, given))
        positions[int(first) + in_prompt : int(end)] += media.shift
    if not threefold:
        return positions
    positions = np.repeat(positions[None], 3, axis=0)
    for first, end, given in threefold:
        positions[:, first:end] = given
    return positions


class MediaPasses:
    """Lets the forward passes of a binding take a step's features and threefold positions, while there are any.

    Args:
        binding: the `logits` of its `ForwardPasses` is replaced.
        executor: a GPU's launches decodes of plain sequences in one, which has no positions of their own.
    """

    def __init__(self, binding: ModelBinding, executor: Any) -> None:
        self._binding = binding
        self._executor = executor
        self._passes = passes = binding.passes
        self._logits: Callable[..., Tensor] = passes.logits
        passes.given = None
        passes.logits = self.logits
        self._placeholder = placeholder_of(binding.model.config)

    @contextmanager
    def giving(self, given: GivenRows) -> Iterator[None]:
        """Let the passes within have these rows, and call each layer, since there may be sums in between."""
        passes = self._passes
        binding = self._binding
        stacks = [binding.stacked, *(layer.stack for layer in binding.fused_layers[:1])]
        attributes: list[tuple[Any, str, Any]] = [(passes, "given", given)]
        if hasattr(self._executor, "stacked"):
            attributes.append((self._executor, "stacked", None))
        if given.is_whole:
            attributes += [
                (passes, "direct", None),
                *((stack, "is_on", False) for stack in stacks if stack is not None),
            ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
        try:
            for owner, name, value in attributes:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def logits(self, token_ids: Tensor, positions: Tensor, sample_rows: Any, **kwargs: Any) -> Tensor:
        given = self._passes.given
        if given is not None and given.is_whole:
            rows = torch.from_numpy(given.rows()).to(positions.device)
            is_threefold = given.positions.ndim > 1
            positions = positions.expand(3, -1).clone()[:, None] if is_threefold else positions.clone()
            positions[..., 0, rows] = torch.from_numpy(given.positions).to(positions.device)
            if given.features is not None:
                embedding = self._binding.model.get_input_embeddings()
                output = given.features.output(token_ids, self._placeholder, embedding, rows)
                with encoded_already(self._binding.model.base_model, output) as inputs:
                    return self._logits(token_ids, positions, sample_rows, **inputs, **kwargs)
        return self._logits(token_ids, positions, sample_rows, **kwargs)


def add_pictures(engine: Any) -> None:
    """Let requests of an engine have pictures, which are encoded ahead of them."""
    runner = engine.model_runner
    binding = runner.binding
    encoder = None if binding.ranks is not None else Encoder(binding, PICTURE_BYTES)
    if use_pictures := getattr(engine.input_processor.parts, "use_pictures", None):
        use_pictures(open_reader(binding.model, runner.config, encoder))
    if encoder is None:
        return
    is_packed = not isinstance(runner.executor, DirectExecutor)
    launches = PictureLaunches(runner.launch_step, MediaPasses(binding, runner.executor), encoder, is_packed=is_packed)
    runner.launch_step = launches.launch
    engine.scheduler.budget = EncodedFirst(engine.scheduler, encoder)
    inner = runner.executor.model_changed

    def model_changed(*, in_place: bool) -> None:
        encoder.forget()
        inner(in_place=in_place)

    runner.executor.model_changed = model_changed
