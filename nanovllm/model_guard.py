"""Checks at load that a model computes each row of a flat batch from its token and its position alone.

Attention is stood in for, so that nothing may connect the rows. What is seen are q, k and v of every layer, and the
logits. Rows are compared between batches of the same rows in another order: products of equal shapes round alike, so
that honest models differ by nothing or next to it, in half precision and with routed experts too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.model_probe import Probing, StateProbe, UnsupportedModelError, positions_of

NUM_ROWS = 40  # in the longest batch; half of them at the last positions


@dataclass(frozen=True, slots=True)
class Observation:
    """One forward pass: states [num_rows, heads, head_dim] by name, in their order, and logits [num_samples, vocab]."""

    states: dict[str, Tensor]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """Relative differences that rounding explains.

    same_shape: between passes of as many rows; of all but `share_of_rows`, where a router may have taken the next best
        expert.
    other_shape: between passes of different sizes, of the middle row.
    """

    same_shape: float
    other_shape: float
    share_of_rows: float


_FULL = _Tolerance(same_shape=1e-3, other_shape=1e-2, share_of_rows=0.0)  # TF32 included
_HALF = _Tolerance(same_shape=0.01, other_shape=0.25, share_of_rows=0.25)


def check_rows(model: Any, probing: Probing) -> int:
    """Refuse a model whose rows depend on each other or on their order, with what was seen.

    Returns how many tokens can be sampled: those with a row in the head and a row in the embedding. Raises
    UnsupportedModelError.
    """
    name, run = type(model).__name__, partial(_run, model, probing)
    num_positions = positions_of(model.config.get_text_config(decoder=True)) or NUM_ROWS
    half = max(1, min(NUM_ROWS // 2, num_positions))
    vocab_size = model.get_input_embeddings().num_embeddings
    token_ids = _plain_tokens(model, 2 * half, vocab_size)
    near, far = list(range(half)), list(range(num_positions - half, num_positions))
    tolerance = _HALF if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()) else _FULL

    sampled = near[::-2]
    own = run(token_ids[:half], None, None)
    ours = run(token_ids[:half], near, sampled)
    _check_positions(name, own, ours, tolerance)
    _check_sampled_rows(name, own, ours, sampled, tolerance)

    rows = list(range(2 * half))
    positions = near + far
    forwards = run(token_ids, positions, rows)
    backwards = _reordered(run(token_ids[::-1], positions[::-1], rows), rows[::-1])
    first_rows = _reordered(forwards, near, logits=sampled), ours
    seen = _first_difference(forwards, backwards, tolerance.same_shape, share=tolerance.share_of_rows)
    seen = seen or _first_difference(*first_rows, tolerance.other_shape, share=0.5)
    if seen is not None:
        moved = run(token_ids[:half], far, sampled)
        ignores = half < num_positions and _first_difference(ours, moved, 0.0, share=0.0) is None
        raise UnsupportedModelError(
            f"{name} cannot be served: "
            + ("it ignores position_ids and counts positions along the row. " if ignores else "")
            + f"With attention stood in for, {seen} when other rows stand before them, so that requests of one flat "
            "batch would change each other's results. "
            + (
                "Its forward must compute positions from position_ids."
                if ignores
                else "It counts positions along the row, or mixes rows outside of attention (a convolution, a token "
                "shift), where paged attention keeps no state."
            )
            + " Use the model's own generate()."
        )
    return min(vocab_size, ours.logits.shape[1])


def _run(
    model: Any, probing: Probing, token_ids: list[int], positions: list[int] | None, sample_rows: list[int] | None
) -> Observation:
    """A forward pass in which each token attends to itself alone; positions and sample_rows None: the model's own."""
    device, probe = next(model.parameters()).device, StateProbe()
    inputs = {"input_ids": torch.tensor([token_ids], device=device)}
    if positions is not None:
        inputs["position_ids"] = torch.tensor([positions], device=device)
    if sample_rows is not None:
        inputs["logits_to_keep"] = torch.tensor(sample_rows, device=device)
    with probing(probe):
        try:
            logits = model(**inputs, use_cache=False, return_dict=True).logits[0]
        except UnsupportedModelError:
            raise
        except Exception as error:
            where = "without position_ids" if positions is None else f"at positions {positions[0]} to {positions[-1]}"
            raise UnsupportedModelError(
                f"{type(model).__name__} could not run a probe of {len(token_ids)} tokens {where}: {error}"
            ) from error
    return Observation(probe.states, logits.clone())


def _check_positions(name: str, own: Observation, ours: Observation, tolerance: _Tolerance) -> None:
    seen = _first_difference(
        Observation(own.states, own.logits[:0]),
        Observation(ours.states, ours.logits[:0]),
        tolerance.same_shape,
        share=tolerance.share_of_rows,
    )
    if seen is not None:
        raise UnsupportedModelError(
            f"{name} cannot be served: {seen} between its own forward without position_ids and one at positions 0, 1, "
            "2 and so on, so it counts positions in a way of its own (such as from its padding token's id + 1). "
            "Use the model's own generate()."
        )


def _check_sampled_rows(name: str, own: Observation, ours: Observation, rows: list[int], tolerance: _Tolerance) -> None:
    asked = f"{name} cannot be served: asked by logits_to_keep for the logits of {len(rows)} rows, its "
    remedy = " Its forward must compute logits of the rows in logits_to_keep, in their order."
    if len(ours.logits) != len(rows) or ours.logits.shape[-1] != own.logits.shape[-1]:
        raise UnsupportedModelError(f"{asked}forward returned {len(ours.logits)}.{remedy}")
    if len(own.logits) <= rows[0]:
        return  # by itself the forward keeps fewer rows
    expected = Observation({}, own.logits[rows])
    if _first_difference(expected, Observation({}, ours.logits), tolerance.other_shape, share=0.5) is not None:
        raise UnsupportedModelError(f"{asked}forward returned the logits of other rows.{remedy}")


def _plain_tokens(model: Any, count: int, vocab_size: int) -> list[int]:
    """Ids all over the vocabulary but for special ones, which a model may treat in a way of its own."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                special.update(value if isinstance(value, (list, tuple)) else [value])
    plain = [token_id for token_id in range(vocab_size) if token_id not in special] or [0]
    step = max(1, len(plain) // count)
    return [plain[(1 + i * step) % len(plain)] for i in range(count)]


def _reordered(seen: Observation, rows: list[int], *, logits: list[int] | None = None) -> Observation:
    """Some rows of a pass, in this order."""
    return Observation(
        {name: states[rows] for name, states in seen.states.items()}, seen.logits[rows if logits is None else logits]
    )


def _first_difference(one: Observation, other: Observation, tolerance: float, *, share: float) -> str | None:
    """Where more than a share of the rows differ by more than a tolerance, in words; None if nowhere."""
    for (name, states), (_, others) in zip(_tensors(one), _tensors(other), strict=True):
        differences = _relative(states, others)
        if len(differences) and int((differences > tolerance).sum()) > share * len(differences):
            return f"{name} differ by up to {100 * float(differences.max()):.2g} % of their size"
    return None


def _tensors(seen: Observation) -> Iterator[tuple[str, Tensor]]:
    yield from seen.states.items()
    yield "logits", seen.logits


def _relative(states: Tensor, others: Tensor) -> Tensor:
    """[num_rows]: how far rows are from others, relative to the mean size of a row."""
    # What a broken model overflows in is no matter of its rows.
    one, other = (t.float().flatten(1).nan_to_num(0.0, 0.0, 0.0) for t in (states, others))
    size = torch.linalg.vector_norm(other, dim=1).mean().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.linalg.vector_norm(one - other, dim=1) / size


def check_row_counted_scales(model: Any, *, max_num_batched_tokens: int, max_model_len: int) -> None:
    """Raise UnsupportedModelError for queries scaled by a position that is counted along the row (Llama 4), unless the
    scale is 1 in every row of every batch and at every position.
    """
    longest = max(max_num_batched_tokens, max_model_len)
    for module in model.modules():
        is_tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False)
        floor_scale = getattr(module, "floor_scale", None)
        if is_tuned and floor_scale and longest >= floor_scale:
            raise UnsupportedModelError(
                f"{type(model).__name__} scales queries by their place in the row (attn_temperature_tuning), from row "
                f"{floor_scale:g} (floor_scale) on, which is wrong for a flat batch of requests. Set "
                f"max_num_batched_tokens ({max_num_batched_tokens}) and max_model_len ({max_model_len}) below it."
            )
