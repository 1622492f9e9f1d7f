"""Features of pictures: computed by the model's own encoder, kept by bytes, and given to the rows of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.features.media.pictures import Picture
from nanovllm.model import ModelBinding

LEVELS = "deepstack_features"  # Some models' later layers add these to a picture's rows
PIXELS = "pixel_values"  # an encoder's input, and a forward pass's argument
_MOST_LEFT = 4096  # digests
_MOST_ROWS = 1024  # features of pictures that one call takes together: streams wait for it


class Features:
    """The features of one picture: [num_tokens, hidden_size] for its embeddings, and for each level of deepstack.

    Args:
        output: result of the encoder for this picture and others.
        rows: features of this picture, and for each level.
    """

    def __init__(self, output: Any, rows: Sequence[Tensor]) -> None:
        self.kind = type(output)
        self.has_levels = output.get(LEVELS) is not None
        # Leading sizes of each part, None of a list: some models ask for the rank that their encoder returns.
        self.leading = [None if isinstance(part, (list, tuple)) else (1,) * (part.dim() - 2) for part in _parts(output)]
        self.rows, *self.levels = rows

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.rows, *self.levels))


def _parts(output: Any) -> list[Any]:
    return [output.pooler_output, *(output.get(LEVELS) or ())]


def _flat(output: Any) -> Tensor:
    rows = torch.cat(list(output)) if isinstance(output, (list, tuple)) else output
    return rows.reshape(-1, rows.shape[-1])


class Encoder:
    """Computes features by the model, and keeps those used last.

    Args:
        max_bytes: bytes of kept features, but one; a step that needs more encodes some of them twice.
    """

    def __init__(self, binding: ModelBinding, max_bytes: int) -> None:
        self._binding = binding
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Picture, Features] = OrderedDict()
        self._num_bytes = 0
        self._wanted: OrderedDict[Picture, None] = OrderedDict()
        self.device = binding.device
        # Digests of pictures that only the steps of their own requests encode: one failed, or made room for others.
        self._left: set[bytes] = set()

    def reserve(self, picture: Picture) -> None:
        """Take the memory that a picture needs from a GPU, and keep features in at most half of the rest."""
        self.features(picture)
        self._max_bytes = min(self._max_bytes, torch.cuda.mem_get_info(self.device)[0] // 2)

    def forget(self) -> None:
        """Forget all features, after a change of the weights."""
        self._kept.clear()
        self._num_bytes = 0

    def is_ready(self, pictures: Iterable[Picture]) -> bool:
        """Whether all have their features; the others are encoded in the next steps."""
        missing = [picture for picture in pictures if picture not in self._kept and picture.digest not in self._left]
        self._wanted |= dict.fromkeys(missing)
        return not missing

    def encode_next(self) -> None:
        """Encode pictures that wait, by one call; one that fails must not fail this step, which others are in."""
        together = self._taken(self._wanted)
        try:
            if together:
                self._encode(together)
        except Exception:
            self._leave(together)

    def encode(self, pictures: Iterable[Picture]) -> None:
        """Encode pictures without features, for the coming step."""
        waiting = OrderedDict.fromkeys(pictures)
        while together := self._taken(waiting):
            self._encode(together)

    def _taken(self, waiting: OrderedDict[Picture, None]) -> list[Picture]:
        """Pictures without features for one call; they no longer wait."""
        together: list[Picture] = []
        while waiting and (not together or self._may_join(together, next(iter(waiting)))):
            picture, _ = waiting.popitem(last=False)
            if picture not in self._kept:
                together.append(picture)
        return together

    def _may_join(self, pictures: list[Picture], other: Picture) -> bool:
        """Whether one call takes another picture too: tensors of one shape after the first dimension, on a GPU.

        On a CPU a picture's features must not depend on other pictures, since a step's rows do not.
        """
        if self.device.type == "cpu" or sum(each.num_tokens for each in (*pictures, other)) > _MOST_ROWS:
            return False
        first = pictures[0].inputs
        names = {"image_grid_thw", PIXELS} if "image_grid_thw" in first else {PIXELS}
        return first.keys() == other.inputs.keys() == names and all(
            value.shape[1:] == other.inputs[name].shape[1:] for name, value in first.items()
        )

    def features(self, picture: Picture) -> Features:
        self.encode([picture])
        self._kept.move_to_end(picture)
        return self._kept[picture]

    def _encode(self, pictures: list[Picture]) -> None:
        binding = self._binding
        inputs, *others = (
            {
                name: value.to(binding.device) if isinstance(value, Tensor) else value
                for name, value in picture.inputs.items()
            }
            for picture in pictures
        )
        if others:
            inputs = {name: torch.cat([value, *(other[name] for other in others)]) for name, value in inputs.items()}
        with as_its_owner_has_it(binding):
            output = binding.model.base_model.get_image_features(**inputs, return_dict=True)
        counts = [picture.num_tokens for picture in pictures]
        parts = [_flat(part) for part in _parts(output)]
        if sum(counts) != len(parts[0]):
            raise RuntimeError(f"pictures of {sum(counts)} placeholders have {len(parts[0])} features")
        for picture, *rows in zip(pictures, *(part.split(counts) for part in parts), strict=True):
            self._keep(picture, Features(output, rows if len(counts) == 1 else [part.clone() for part in rows]))

    def _keep(self, picture: Picture, features: Features) -> None:
        self._kept[picture] = features
        self._num_bytes += features.num_bytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            other, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            self._leave([other])  # a request with more features than are kept has to start while others run

    def _leave(self, pictures: Iterable[Picture]) -> None:
        if len(self._left) > _MOST_LEFT:
            self._left.clear()
        self._left |= {picture.digest for picture in pictures}


@contextmanager
def as_its_owner_has_it(binding: ModelBinding) -> Iterator[None]:
    """The model with its own attention, between steps."""
    with binding._lock, torch.no_grad(), torch.autocast(binding.device.type, enabled=False):
        binding.uninstall()
        yield


class StepFeatures:
    """The features of a step's rows.

    Args:
        parts: the runs of placeholders, in the order of rows: (first row, features of the picture, first feature, end).
    """

    def __init__(self, parts: Sequence[tuple[int, Features, int, int]]) -> None:
        self._first = parts[0][1]
        self._rows = [row for start, _, first, end in parts for row in range(start, start + end - first)]
        self._embeddings = torch.cat([features.rows[first:end] for _, features, first, end in parts])
        self._levels = [
            torch.cat([features.levels[level][first:end] for _, features, first, end in parts])
            for level in range(len(self._first.levels))
        ]

    def output(self, token_ids: Tensor, placeholder: int, embedding: nn.Module, rows: Tensor) -> Any:
        """The result of an encoder for token_ids [1, num_rows], where `rows` are the rows of the step.

        The model replaces the rows of all placeholders. One that is text, or was drawn, gets its own embedding.
        """
        is_placeholder = token_ids[0] == placeholder
        rows = rows[self._rows]
        own = embedding(token_ids)[0]

        others = [own, *(torch.zeros_like(own) for _ in self._levels)]
        parts: list[Any] = [
            of_others.index_copy(0, rows, values.to(own.dtype))[is_placeholder]
            for values, of_others in zip((self._embeddings, *self._levels), others, strict=True)
        ]
        embeddings, *levels = [
            (part,) if leading is None else part.reshape(*leading, *part.shape)
            for part, leading in zip(parts, self._first.leading, strict=True)
        ]
        output = self._first.kind(pooler_output=embeddings)
        if self._first.has_levels:
            output[LEVELS] = levels
        return output


@contextmanager
def encoded_already(base_model: Any, output: Any) -> Iterator[dict[str, Tensor]]:
    """Let an encoder return `output`; yields the arguments with which a forward pass asks it for features."""
    base_model.get_image_features = lambda *_, **__: output  # its instance's attribute, in front of its class's
    try:
        yield {PIXELS: torch.empty(1)}
    finally:
        del base_model.get_image_features
