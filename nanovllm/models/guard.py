"""Checks at load that a model computes each row of a flat batch from its token and its position alone.

A probe replaces attention, so nothing may connect the rows. The checks compare q, k and v of every layer and the
logits, between batches of equal length: matrix products of equal shapes round alike, so independent rows agree almost
bit for bit, also in half precision and with routed experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from nanovllm.config import positions_of
from nanovllm.errors import UnsupportedModelError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.unsupported import unsupported
from nanovllm.probe import PassProbe, Probe, Probing

Hiding = Callable[[], AbstractContextManager[None]]  # hides weights

NUM_ROWS = 16  # rows a pass: so few that the pass takes no longer than reading the weights


class _Tolerance(NamedTuple):
    """Accepted difference relative to a row's norm, and the share of rows that may exceed it."""

    difference: float
    share_of_rows: float


FULL = _Tolerance(1e-3, 0.0)
_HALF = _Tolerance(1e-2, 0.25)  # a router may pick the second-best expert for some rows
_NONE = _Tolerance(0.0, 0.0)


@dataclass
class StateProbe(PassProbe):
    """Records q, k and v of each attention layer: name -> states [num_rows, heads, head_dim], in their order."""

    states: dict[str, Tensor] = field(default_factory=dict)

    def record(self, module: nn.Module, *tensors: Any, **_: Any) -> None:
        layer = len(self.states) // 3
        for name, tensor in zip(("queries", "keys", "values"), tensors, strict=False):
            self.states[f"{name} of layer {layer}"] = tensor[0].transpose(0, 1).clone()


@dataclass
class RowProbe(Probe):
    """Probes at the first positions and records states too; with the parts of a second batch that reorders the first.

    preceding_ids: tokens that precede most of the first ones in the second batch.
    last: the model's last positions.
    """

    preceding_ids: Sequence[int] = ()
    last: Sequence[int] = ()
    rows: StateProbe = field(default_factory=StateProbe)

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> RowProbe:
        """The probe of a model; options: further fields."""
        num_positions = positions_of(model.config.get_text_config(decoder=True)) or NUM_ROWS
        num_rows = min(NUM_ROWS, num_positions)
        token_ids = plain_tokens(model, num_rows + num_rows // 4)
        return cls(
            token_ids=token_ids[:num_rows],
            sample_rows=range(num_rows - num_rows // 4)[::-2],
            preceding_ids=token_ids[num_rows:],
            last=range(num_positions - num_rows, num_positions),
            **options,
        )

    def record(self, *arguments: Any, **_: Any) -> None:
        super().record(*arguments)
        self.rows.record(*arguments)


def refuse_quantised_weights(model: nn.Module) -> None:
    """Refuse quantised weights by their dtype; dequantised ones pass, though the config still names a quantisation."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        is_plain = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        if not is_plain and "weight" in name.rpartition(".")[2]:
            raise unsupported("quantised weights", type(model).__name__, f"{name} in {tensor.dtype}")


def refuse_cached_windows(model: Any, probe: Probe) -> None:
    """Refuse layers without a window in their mask if `transformers`' cache drops tokens by the config's window."""
    caches = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    # Older releases have none of layers that share K and V.
    attending = range(len(caches)) if probe.attending is None else probe.attending
    for index, layer in zip((index for index in attending if index < len(caches)), probe.layers, strict=False):
        window = getattr(caches[index], "sliding_window", None)
        if window and layer.traits.sight.is_full:
            raise unsupported("window of the cache", f"{type(model).__name__} (layer {index})", f"{window} tokens")


def check_rows(model: Any, probing: Probing, probe: Probe, hiding: Hiding = nullcontext) -> None:
    """Refuse a model if its rows depend on each other, on their order or on positions other than the given ones.

    Args:
        probe: a `RowProbe` that has run.
        hiding: context manager around the reordered pass (hides weights that the engine would free).

    Raises UnsupportedModelError with the difference seen.
    """
    name = type(model).__name__
    run = partial(_run, model, probing)
    assert isinstance(probe, RowProbe)
    first = probe.rows.states
    token_ids = list(probe.token_ids)
    sampled = list(probe.sample_rows)
    far = list(probe.last)
    near = list(range(len(token_ids)))
    kept = list(range(len(token_ids) - len(probe.preceding_ids)))
    is_half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    tolerance = _HALF if is_half else FULL

    # Three passes: the probe's; without position_ids; most rows reversed, after other tokens at the last positions.
    own = run(token_ids, None, None)
    moved_to = near[::-1]
    moved_ids = [*probe.preceding_ids, *token_ids[: len(kept)][::-1]]
    with hiding():
        moved = run(moved_ids, far[len(kept) :] + kept[::-1], [moved_to[row] for row in sampled])

    seen = first_difference(own.states, first, tolerance)
    if seen is not None:
        raise unsupported(
            "positions from padding",
            f"{name} cannot be served: it",
            f"{seen} between its own forward without position_ids and one at positions 0, 1, 2 and so on",
        )
    seen = first_difference(_rows_of(first, kept), _rows_of(moved.states, moved_to[: len(kept)]), tolerance)
    if seen is None:
        _check_sampled_rows(name, own, probe, sampled, tolerance)
        seen = first_difference({"logits": probe.logits}, {"logits": moved.logits}, tolerance)
    if seen is not None:
        reason = "mixed rows"
        at_far = run(token_ids, far, sampled)
        if far != near and first_difference(first, at_far.states, _NONE) is None:
            reason = "positions by row"
        raise unsupported(
            reason,
            f"{name} cannot be served: it",
            f"without attention, {seen} when other rows precede them, so that the requests of one flat batch would "
            "change each other's results",
        )


def _run(
    model: Any, probing: Probing, token_ids: list[int], positions: list[int] | None, sample_rows: list[int] | None
) -> StateProbe:
    """Forward pass with each token attending only to itself; positions, sample_rows: None leaves them to the model."""
    device = next(model.parameters()).device
    probe = StateProbe()
    given: dict[str, Any] = {
        "input_ids": [token_ids],
        "position_ids": positions and [positions],
        "logits_to_keep": sample_rows,
    }
    inputs = {name: torch.tensor(ids, device=device) for name, ids in given.items() if ids is not None}
    with probing(probe):
        try:
            probe.logits = model(**inputs, use_cache=False, return_dict=True).logits[0].clone()
        except UnsupportedModelError:
            raise
        except Exception as error:
            where = "without position_ids" if positions is None else f"at positions {positions[0]} to {positions[-1]}"
            seen = f"could not run a probe of {len(token_ids)} tokens {where}: {error}"
            raise unsupported("more inputs than tokens", type(model).__name__, seen) from error
    return probe


def _check_sampled_rows(name: str, own: PassProbe, ours: PassProbe, rows: list[int], tolerance: _Tolerance) -> None:
    returned = None
    if len(ours.logits) != len(rows):
        returned = str(len(ours.logits))
    elif len(own.logits) > rows[0]:  # not where the model's own forward keeps fewer rows
        seen = first_difference({"logits": own.logits[rows]}, {"logits": ours.logits}, tolerance)
        returned = seen and "the logits of other rows"
    if returned is not None:
        seen = f"asked for the logits of {len(rows)} rows, it returned {returned}"
        raise unsupported("logits of other rows", f"{name} cannot be served: it", seen)


def plain_tokens(model: Any, count: int) -> list[int]:
    """Token ids spread over the vocabulary, without special tokens, which a model may treat differently."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                special.update(value if isinstance(value, (list, tuple)) else [value])
    # A model with several embeddings is refused later, with its own error.
    vocab_size = getattr(model.get_input_embeddings(), "num_embeddings", 1)
    plain = [token_id for token_id in range(vocab_size) if token_id not in special] or [0]
    step = max(1, len(plain) // count)
    return [plain[(1 + i * step) % len(plain)] for i in range(count)]


def _rows_of(states: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: tensor[rows] for name, tensor in states.items()}


def first_difference(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: _Tolerance) -> str | None:
    """The first tensor with differences beyond the tolerance, relative to the mean norm of a row, as text; or None."""
    for name, states in one.items():
        # Overflows of a broken model say nothing about its rows.
        rows, expected = (t.float().flatten(1).nan_to_num(0.0, 0.0, 0.0) for t in (states, other[name]))
        size = torch.linalg.vector_norm(expected, dim=1).mean().clamp(min=torch.finfo(torch.float32).tiny)
        differences = torch.linalg.vector_norm(rows - expected, dim=1) / size  # [num_rows]
        if int((differences > tolerance.difference).sum()) > tolerance.share_of_rows * len(differences):
            return f"{name} differ by up to {100 * float(differences.max()):.2g} % of their size"
    return None


def check_row_counted_scales(model: Any, config: EngineConfig) -> None:
    """Refuse queries scaled by a position counted along the flat batch (Llama 4).

    Raises UnsupportedModelError unless the scale is 1 for every row and position within the limits.
    """
    longest = max(config.max_num_batched_tokens, config.max_model_len)
    for module in model.modules():
        is_tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False)
        floor_scale = getattr(module, "floor_scale", None)
        if is_tuned and floor_scale and longest >= floor_scale:
            raise unsupported(
                "scales by row",
                type(model).__name__,
                f"from row {floor_scale:g} (floor_scale) on, which is wrong for a flat batch of requests; "
                f"max_num_batched_tokens ({config.max_num_batched_tokens}), max_model_len ({config.max_model_len})",
            )
