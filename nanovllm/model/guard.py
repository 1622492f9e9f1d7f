"""Checks at load that a model computes each row of a flat batch from its token and its position alone.

Attention is stood in for, so that nothing may connect the rows. What is seen are q, k and v of every layer, and the
logits. Batches of equal length are compared: products of equal shapes round alike, so that honest models differ by
nothing or next to it, in half precision and with routed experts too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.errors import UnsupportedModelError
from nanovllm.model.probe import Probing, StateProbe, positions_of

NUM_ROWS = 16  # of a pass, whose time is that of reading the weights


@dataclass(frozen=True, slots=True)
class Observation:
    """One forward pass: states [num_rows, heads, head_dim] by name, in their order, and logits [num_samples, vocab]."""

    states: dict[str, Tensor]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """Differences that rounding explains: relative to the size of a row, in more than a share of the rows."""

    difference: float
    share_of_rows: float


_FULL = _Tolerance(1e-3, 0.0)
_HALF = _Tolerance(1e-2, 0.25)  # a router may have taken the next best expert for some rows
_NONE = _Tolerance(0.0, 0.0)


def check_rows(model: Any, probing: Probing) -> int:
    """Refuse a model whose rows depend on each other, on their order or on other positions than the given ones.

    Returns how many tokens can be sampled: those with a row in the head and a row in the embedding. Raises
    UnsupportedModelError, which says what was seen.
    """
    name, run = type(model).__name__, partial(_run, model, probing)
    num_positions = positions_of(model.config.get_text_config(decoder=True)) or NUM_ROWS
    num_rows = min(NUM_ROWS, num_positions)
    num_far = num_rows // 4
    vocab_size = model.get_input_embeddings().num_embeddings
    token_ids = _plain_tokens(model, num_rows + num_far, vocab_size)
    near, far = list(range(num_rows)), list(range(num_positions - num_rows, num_positions))
    is_half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    tolerance = _HALF if is_half else _FULL

    # The model by itself; the same by us; and most of these rows backwards, behind others at the last positions.
    kept = near[: num_rows - num_far]
    sampled = kept[::-2]
    places = [num_rows - 1 - row for row in near]
    own = run(token_ids[:num_rows], None, None)
    ours = run(token_ids[:num_rows], near, sampled)
    others = token_ids[num_rows:] + token_ids[: len(kept)][::-1], far[num_rows - num_far :] + kept[::-1]
    moved = run(*others, [places[row] for row in sampled])

    seen = _first_difference(own.states, ours.states, tolerance)
    if seen is not None:
        raise UnsupportedModelError(
            f"{name} cannot be served: {seen} between its own forward without position_ids and one at positions 0, 1, "
            "2 and so on, so it counts positions in a way of its own (such as from its padding token's id + 1). "
            "Use the model's own generate()."
        )
    seen = _first_difference(_rows_of(ours.states, kept), _rows_of(moved.states, places[: len(kept)]), tolerance)
    if seen is None:
        _check_sampled_rows(name, own, ours, sampled, tolerance)
        seen = _first_difference({"logits": ours.logits}, {"logits": moved.logits}, tolerance)
    if seen is not None:
        at_far = run(token_ids[:num_rows], far, sampled)
        ignores = far != near and _first_difference(ours.states, at_far.states, _NONE) is None
        raise UnsupportedModelError(_of_rows(name, seen, ignores_positions=ignores))
    return min(vocab_size, ours.logits.shape[1])


def _of_rows(name: str, seen: str, *, ignores_positions: bool) -> str:
    if ignores_positions:
        cause = "It ignores position_ids and counts positions along the row."
        remedy = "Let its forward compute positions from position_ids, or use the model's own generate()."
    else:
        cause = (
            "It counts positions along the row, or mixes rows outside of attention (a convolution, a token shift), "
            "where paged attention keeps no state."
        )
        remedy = "Use the model's own generate()."
    return (
        f"{name} cannot be served: with attention stood in for, {seen} when other rows stand before them, so that the "
        f"requests of one flat batch would change each other's results. {cause} {remedy}"
    )


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


def _check_sampled_rows(name: str, own: Observation, ours: Observation, rows: list[int], tolerance: _Tolerance) -> None:
    asked = f"{name} cannot be served: asked by logits_to_keep for the logits of {len(rows)} rows, its "
    remedy = " Its forward must compute logits of the rows in logits_to_keep, in their order."
    if len(ours.logits) != len(rows):
        raise UnsupportedModelError(f"{asked}forward returned {len(ours.logits)}.{remedy}")
    if len(own.logits) <= rows[0]:
        return  # by itself the forward keeps fewer rows
    if _first_difference({"logits": own.logits[rows]}, {"logits": ours.logits}, tolerance) is not None:
        raise UnsupportedModelError(f"{asked}forward returned the logits of other rows.{remedy}")


def _plain_tokens(model: Any, count: int, vocab_size: int) -> list[int]:
    """Ids spread over the vocabulary, without special ones, which a model may treat differently."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                special.update(value if isinstance(value, (list, tuple)) else [value])
    plain = [token_id for token_id in range(vocab_size) if token_id not in special] or [0]
    step = max(1, len(plain) // count)
    return [plain[(1 + i * step) % len(plain)] for i in range(count)]


def _rows_of(states: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: tensor[rows] for name, tensor in states.items()}


def _first_difference(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: _Tolerance) -> str | None:
    """Where rows differ by more than a tolerance, in words; None if nowhere."""
    for name, states in one.items():
        differences = _relative(states, other[name])
        if int((differences > tolerance.difference).sum()) > tolerance.share_of_rows * len(differences):
            return f"{name} differ by up to {100 * float(differences.max()):.2g} % of their size"
    return None


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
