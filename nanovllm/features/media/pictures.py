"""A prompt's pictures: their rows, and the identity of their content.

Every placeholder of every picture is the same token, so a block of them must not be hashed as it stands: the KV of one
picture would be found for another. The books of the prefix cache hash and compare `Sequence.block_tokens`, which ends
with the digest of each picture and the place of its rows. A block is found for the same rows of the same picture alone,
in another process and in files too.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class Picture:
    """A picture as the model's encoder takes it.

    inputs: the processor's tensors, arguments of the model's `get_image_features`.
    num_tokens: number of its placeholders in a prompt.
    digest: SHA-256 of the inputs.
    """

    inputs: Mapping[str, Any]
    num_tokens: int
    digest: bytes

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in self.inputs.values() if isinstance(value, Tensor))


class Registry:
    """The pictures seen last; equal ones are one object, so their features are computed once. Thread-safe.

    Args:
        max_bytes: most bytes of their tensors.
    """

    def __init__(self, max_bytes: int = 2**30) -> None:
        self._lock = threading.Lock()
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def picture(self, inputs: Mapping[str, Any], num_tokens: int) -> Picture:
        """The picture of these tensors."""
        digest = digest_of(inputs)
        with self._lock:
            known = self._pictures.get(digest)
            if known is None:
                known = self._pictures[digest] = Picture(inputs, num_tokens, digest)
                self._num_bytes += known.num_bytes
            self._pictures.move_to_end(digest)
            while self._num_bytes > self._max_bytes and len(self._pictures) > 1:
                self._num_bytes -= self._pictures.popitem(last=False)[1].num_bytes
            return known

    def received(self, sent: bytes) -> Media:
        """Pictures that another process of this engine sent."""
        spans, inputs, counts, positions, shift = pickle.loads(sent)
        pictures = [
            self.picture({name: as_tensor(value) for name, value in each.items()}, count)
            for each, count in zip(inputs, counts, strict=True)
        ]
        return Media([Span(start, count, pictures[at], offset) for start, count, at, offset in spans], positions, shift)


def placeholder_of(config: Any) -> Any:
    """The token that a model replaces by features of pictures; None if its config names none."""
    return getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)


def as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def digest_of(inputs: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(inputs):
        value = inputs[name]
        is_tensor = isinstance(value, Tensor)
        kind = f"{name} {value.dtype} {tuple(value.shape)}" if is_tensor else f"{name} {value!r}"
        digest.update(struct.pack("<q", len(kind)) + kind.encode())
        if is_tensor:
            digest.update(value.contiguous().view(-1).numpy().tobytes())
    return digest.digest()


class Span(NamedTuple):
    """Placeholders `start` to before `start + length` of a prompt, which take features from row `offset` on."""

    start: int
    length: int
    picture: Picture
    offset: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(eq=False)
class Media:
    """The pictures of one prompt.

    spans: runs of placeholders, in the order of the prompt.
    positions: [3, num_prompt_tokens] int64 positions for rotary embeddings; None where they are the rows' own.
    shift: a number that is added to the positions of rows after the prompt.
    """

    spans: list[Span]
    positions: Any = None
    shift: int = 0

    def within(self, first: int, end: int) -> Iterator[Span]:
        """The parts of spans from position `first` to before `end`."""
        for span in self.spans:
            start = max(span.start, first)
            if start < min(span.end, end):
                yield Span(start, min(span.end, end) - start, span.picture, span.offset + start - span.start)

    def cut(self, end: int) -> Media:
        """The pictures of the first `end` tokens; of any more too, which are text.

        Raises ValueError if the end is within a picture.
        """
        spans = [span for span in self.spans if span.start < end]
        if spans and (spans[-1].end > end or spans[-1].offset + spans[-1].length < spans[-1].picture.num_tokens):
            raise ValueError(f"position {end} is within a picture; begin before or after it.")
        if self.positions is None or end >= self.positions.shape[1]:
            return Media(spans, self.positions, self.shift)
        positions = self.positions[:, :end]
        return Media(spans, positions, int(positions.max()) + 1 - end)

    def sent(self) -> bytes:
        """The pictures for another process of this engine; `Registry.received` reads them."""
        pictures = list(dict.fromkeys(span.picture for span in self.spans))
        spans = [(span.start, span.length, pictures.index(span.picture), span.offset) for span in self.spans]
        inputs = [
            {name: value.numpy() if isinstance(value, Tensor) else value for name, value in picture.inputs.items()}
            for picture in pictures
        ]
        counts = [picture.num_tokens for picture in pictures]
        return pickle.dumps((spans, inputs, counts, self.positions, self.shift))

    def identity(self, first: int, end: int) -> bytes:
        """The identity of the pictures of positions `first` to before `end`; empty where there are none."""
        return b"".join(
            struct.pack("<qqq", span.start - first, span.length, span.offset) + span.picture.digest
            for span in self.within(first, end)
        )


def spans_of(token_ids: list[int], placeholder: int, pictures: Iterable[Picture]) -> list[Span]:
    """The runs of placeholders, one picture after another; raises ValueError where their number is another."""
    spans: list[Span] = []
    waiting = iter(pictures)
    picture = next(waiting, None)
    offset = 0
    at = 0
    while at < len(token_ids):
        if token_ids[at] != placeholder:
            at += 1
            continue
        if picture is None:
            raise ValueError(f"the prompt has more placeholders than its pictures; position {at} is of none.")
        end = at
        while end < len(token_ids) and token_ids[end] == placeholder and end - at < picture.num_tokens - offset:
            end += 1
        spans.append(Span(at, end - at, picture, offset))
        offset += end - at
        at = end
        if offset == picture.num_tokens:
            picture = next(waiting, None)
            offset = 0
    if picture is not None:
        raise ValueError(f"the prompt lacks {picture.num_tokens - offset} placeholders of a picture.")
    return spans
