"""Finds the visible positions of a model's layers (all, a window or chunks) from the masks of `transformers`.

The library describes each mask by a function of positions. During a probe a placeholder tensor represents each
function; the layer's mask argument identifies it, and the function is evaluated for some rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.unsupported import unsupported
from nanovllm.layout import FULL, Sight
from nanovllm.probe import MaskFunction, Masks

DEFAULT_END = 1 << 17  # number of positions evaluated if the model's config names no window or chunk


@dataclass
class MaskProbe(Masks):
    """Masks of one forward pass.

    sizes: windows and chunks of the config, at which masks may change.
    """

    sizes: tuple[int, ...] = ()
    # Keys are addresses of the tensors.
    _functions: dict[int, tuple[Tensor, MaskFunction]] = field(default_factory=dict)
    _sights: dict[int, Sight] = field(default_factory=dict)

    @classmethod
    def from_config(cls, text_config: Any) -> MaskProbe:
        named = (getattr(text_config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        return cls(tuple(size for size in named if isinstance(size, int) and size > 0))

    def make(self, mask_function: MaskFunction, *shape: int, device: torch.device) -> Tensor:
        mask = super().make(mask_function, *shape, device=device)
        self._functions[mask.untyped_storage().data_ptr()] = mask, mask_function
        return mask

    def check(self, layer: str, mask: Tensor) -> None:
        if mask.untyped_storage().data_ptr() not in self._functions:
            raise unsupported("own mask", layer)

    def sight(self, layer: str, mask: Tensor | None, window: int | None) -> Sight:
        sight = FULL if mask is None else self._sight(mask)
        if sight is None:
            raise unsupported("other mask", layer)
        if window is not None and sight.window != window:
            seen = f"a sliding window of {window} tokens, while the mask has {sight.window or 'none'}"
            raise unsupported("window of the mask", layer, seen)
        return sight

    def _sight(self, mask: Tensor) -> Sight | None:
        address = mask.untyped_storage().data_ptr()
        if address not in self._sights:
            found = _sight_of(self._functions[address][1], self.sizes, mask.device)
            if found is None:
                return None
            self._sights[address] = found
        return self._sights[address]


def _sight_of(function: MaskFunction, sizes: Iterable[int], device: torch.device) -> Sight | None:
    borders = {border for size in sizes for border in (size, 2 * size)}
    end = 2 + max(borders, default=DEFAULT_END)
    near = {border + step for border in (1, *borders) for step in (-1, 0, 1)} | {end // 2, end - 1}
    queries = torch.tensor(sorted(near), device=device)
    keys = torch.arange(end, device=device)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    try:
        seen = function(zero, zero, queries[None, None, :, None], keys[None, None, None, :])
        seen = seen.expand(1, 1, len(queries), end)[0, 0].cpu()
    except Exception as error:  # any error of a model's own function, which may expect other arguments
        raise unsupported("own mask", "a layer of attention", f"its mask cannot be read: {error}") from error
    counts = seen.sum(dim=1)
    last = int(queries[-1])
    candidates = [FULL, Sight(window=int(counts[-1])), *(Sight(chunk=size) for size in sizes)]
    positions = queries.cpu().numpy()
    for sight in candidates:
        first = torch.from_numpy(sight.first_seen(positions))[:, None]
        column = torch.arange(last + 1)
        if bool((seen[:, : last + 1] == ((column >= first) & (column <= queries.cpu()[:, None]))).all()):
            return sight
    return None
