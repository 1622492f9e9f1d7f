"""Checks of kernels for recurrent states: of their arguments, and of their results against torch on small rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Check = Iterator[tuple[str, Tensor, Tensor]]  # a result's name, the result, the expected one


def first_wrong(kernels: Any, device: str = "cpu") -> str | None:
    """Text that names the first kernel that differs from torch on small rows; None if all are right."""
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):

        def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

        kernels.reads, kernels.writes = (torch.tensor(slots, device=device) for slots in ([1, 2, 4], [1, 3, 5]))
        for check in (_convolutions, _delta_rules, _state_spaces, *([_chunks] if kernels.prefills else [])):
            for name, found, expected in check(kernels, random):
                distance = (found.double() - expected).norm() / expected.norm()
                if not bool(distance <= tolerance):  # NaN is wrong too
                    return f"{name} in {dtype} differ by {distance.item():.1e} of their size"
    return None


def _convolutions(kernels: Any, random: Callable[..., Tensor]) -> Check:
    for channels, width in ((300, 4), (24, 3), (17, 2)):
        pool, inputs, weight, bias = (
            random(*s) for s in ((6, channels, width), (3, channels, 1), (channels, width), (channels,))
        )
        states = torch.cat([pool[kernels.reads], inputs], -1)[..., 1:]
        expected = (states.double() * weight.double()).sum(-1, keepdim=True) + bias.double()[:, None]
        found = kernels.convolution(inputs, pool, weight, bias, "silu")
        yield "convolutions", found, F.silu(expected)
        yield "states of convolutions", pool[kernels.writes], states.double()


def _delta_rules(kernels: Any, random: Callable[..., Tensor]) -> Check:
    for width, value_width, decay_width in ((16, 80, 1), (40, 24, 40)):
        query = random(3, 1, 2, width)
        key = random(3, 1, 2, width)
        value = random(3, 1, 4, value_width)
        pool = random(6, 4, width, value_width, dtype=torch.float32)
        beta = random(3, 1, 4).sigmoid()
        logarithm = -random(3, 1, 4, decay_width, dtype=torch.float32).abs()
        g = logarithm[..., 0] if decay_width == 1 else logarithm
        own_query, own_key = (F.normalize(rows[:, 0].double(), dim=-1).repeat_interleave(2, 1) for rows in (query, key))
        states = pool[kernels.reads].double() * logarithm[:, 0].double().exp()[..., None]
        change = (value[:, 0].double() - torch.einsum("nhkv,nhk->nhv", states, own_key)) * beta[:, 0].double()[
            ..., None
        ]
        states += own_key[..., None] * change[:, :, None]
        expected = torch.einsum("nhkv,nhk->nhv", states, own_query)[:, None] * width**-0.5
        found, _ = kernels.delta_rule(query, key, value, g, beta, pool, use_qk_l2norm_in_kernel=True)
        yield "delta rules", found, expected
        yield "states of delta rules", pool[kernels.writes], states


def _state_spaces(kernels: Any, random: Callable[..., Tensor]) -> Check:
    for width, state_width in ((8, 32), (5, 24)):
        inputs = random(3, 4, width)
        b = random(3, 2, state_width)
        c = random(3, 2, state_width)
        pool = random(6, 4, width, state_width, dtype=torch.float32)
        skip = random(4)
        dt = random(3, 4)
        decay = -random(4, dtype=torch.float32).exp()
        step = F.softplus(dt.double())[..., None, None]
        own_b, own_c = (rows.double().repeat_interleave(2, 1)[:, :, None] for rows in (b, c))
        states = pool[kernels.reads].double() * (step * decay.double()[:, None, None]).exp()
        states += step * own_b * inputs.double()[..., None]
        expected = (states * own_c).sum(-1) + skip.double()[:, None] * inputs.double()
        of_heads = dt[..., None].expand(-1, -1, width), decay[:, None, None].expand(-1, width, state_width)
        found = kernels.state_space(pool, inputs, *of_heads, b, c, D=skip[:, None].expand(-1, width), dt_softplus=True)
        yield "state spaces", found, expected
        yield "states of state spaces", pool[kernels.writes], states


def _chunks(kernels: Any, random: Callable[..., Tensor]) -> Check:
    """Chunks against their rows one by one; the first begins its sequence."""
    bounds = [0, 3, 40]
    own = [1, 3]
    slots = [torch.tensor(values, device="cpu") for values in ([0, 2], own, bounds)]
    query = random(1, 40, 2, 24)
    key = random(1, 40, 2, 24)
    value = random(1, 40, 4, 80)
    g = -random(1, 40, 4, dtype=torch.float32).abs()
    beta = random(1, 40, 4).sigmoid()
    dt = random(1, 40, 4)
    decay = -random(4, dtype=torch.float32).exp()
    skip = random(4)
    of_heads = decay[:, None, None].expand(-1, 80, 24), skip[:, None].expand(-1, 80)
    pools = [random(6, 4, *sizes, dtype=torch.float32) for sizes in ((24, 80), (80, 24))]
    found, expected = ([pool.clone() for pool in pools] for _ in range(2))
    with kernels.over_chunks(*slots):
        rule, _ = kernels.delta_rule(query, key, value, g, beta, found[0], use_qk_l2norm_in_kernel=True)
        options = {"D": skip, "dt_softplus": True, "initial_states": found[1]}
        space, _ = kernels.state_space_chunks(value, dt, decay, query, key, chunk_size=8, **options)
    for width in (4, 3):
        channels = random(1, 40, 300)
        weight = random(300, width)
        bias = random(300)
        pool = random(6, 300, width)
        padded = [torch.zeros(width, 300, device="cpu"), channels[0, :3], pool[2].T, channels[0, 3:]]
        rows = torch.cat([each.double() for each in padded])
        sums = sum(rows[j + 1 : j + 41 + width] * weight[:, j].double() for j in range(width)) + bias.double()
        with kernels.over_chunks(*slots):
            convolved = kernels.convolution(channels.transpose(1, 2), pool, weight, bias, "silu")[0].T
        yield "convolutions of chunks", convolved, F.silu(torch.cat([sums[:3], sums[3 + width :]]))
        yield "states of convolutions of chunks", pool[own], torch.stack([rows[3 : 3 + width].T, rows[-width:].T])
    before = kernels.reads, kernels.writes
    for first, end, read, write in zip(bounds, bounds[1:], (0, 2), own, strict=False):
        for row in range(first, end):
            kernels.reads, kernels.writes = (torch.tensor([slot], device="cpu") for slot in (read, write))
            each = [values[:, row, None] for values in (query, key, value, g, beta)]
            rule[:, row] -= kernels.delta_rule(*each, expected[0], use_qk_l2norm_in_kernel=True)[0][:, 0]
            step = dt[:, row, :, None].expand(-1, -1, 80)
            inputs = step, of_heads[0], query[:, row], key[:, row], of_heads[1]
            space[:, row] -= kernels.state_space(expected[1], value[:, row], *inputs, dt_softplus=True)
            read = write
    kernels.reads, kernels.writes = before
    yield "delta rules of chunks", rule.double() + 1, torch.ones_like(rule, dtype=torch.float64)
    yield "state spaces of chunks", space.double() + 1, torch.ones_like(space, dtype=torch.float64)
    for name, one, other in zip(("delta rules", "state spaces"), found, expected, strict=True):
        yield f"states of {name} of chunks", one[own], other[own].double()


def check_of_heads(dt: Tensor, A: Tensor, D: Tensor | None, dt_bias: Tensor | None) -> None:
    """Raise ValueError unless these arguments of a state space are values of heads, expanded over width and state."""
    expanded = [(dt, 1), (A, 2), *((each, 1) for each in (D, dt_bias) if each is not None)]
    if not all(each.stride()[-count:] == (0,) * count for each, count in expanded):
        raise ValueError("a state space with steps that are not those of heads")
