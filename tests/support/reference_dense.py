"""All between two layers' attention in plain PyTorch: the reference of `fast/kernels/dense_layer.py`."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from nanovllm.fast.kernels.dense_layer import DenseWeights


class DenseStep(NamedTuple):
    """The step's arguments of `DenseLayers.run`."""

    attended: Tensor
    residual: Tensor
    turns: tuple[Tensor, Tensor]
    slots: Tensor

    def rows(self, chosen):
        """A step of some of the rows."""
        turns = self.turns[0][chosen], self.turns[1][chosen]
        return DenseStep(self.attended[chosen], self.residual[chosen], turns, self.slots[chosen])


def random_weights(sizes, num_slots, device, *, has_norms, has_bias, is_last=False):
    """Weights whose every part matters to the answer."""

    def draw(*sides):
        return (torch.randn(sides, device=device) * sides[-1] ** -0.5).bfloat16()

    def norm(size):
        return (1 + 0.2 * torch.randn(size, device=device)).bfloat16()

    own = draw(sizes.hidden, sizes.query), draw(2 * sizes.inner, sizes.hidden), draw(sizes.hidden, sizes.inner)
    if is_last:
        return DenseWeights(*own, norm(sizes.hidden), *(None,) * 7, (1e-6, 0.0, 0.0, 0.0))
    caches = torch.zeros(2, num_slots, sizes.num_kv_heads, sizes.head_dim, dtype=torch.bfloat16, device=device)
    heads = [norm(sizes.head_dim) if has_norms else None for _ in range(2)]
    bias = draw(sizes.qkv) * sizes.qkv**0.5 if has_bias else None
    following = draw(sizes.qkv, sizes.hidden), norm(sizes.hidden), *heads, bias, *caches
    return DenseWeights(*own, norm(sizes.hidden), *following, (1e-6, 1e-5, 1e-6, 1e-6))


def random_step(sizes, num_rows, device):
    angles = torch.rand(num_rows, sizes.head_dim // 2, device=device).mul(6).repeat(1, 2)
    attended, residual = (torch.randn(num_rows, n, device=device).bfloat16() for n in (sizes.query, sizes.hidden))
    slots = torch.randperm(2 * num_rows, device=device)[:num_rows]
    return DenseStep(attended, residual, (angles.cos().bfloat16(), angles.sin().bfloat16()), slots)


def dense_layer(sizes, layer, attended, residual, turns):
    """Hidden states, and queries, K and V [rows, heads, head_dim] of the next layer, if there is one; of float32."""
    own = DenseWeights(*(part.float() if isinstance(part, Tensor) else part for part in layer))
    hidden = residual.float() + linear(attended.float(), own.output)
    gate, up = linear(_norm(hidden, own.post_norm, own.epsilons[0]), own.gate_up).chunk(2, -1)
    hidden = hidden + linear(silu(gate) * up, own.down)
    if own.qkv is None:
        return [hidden]
    products = linear(_norm(hidden, own.next_norm, own.epsilons[1]), own.qkv, own.bias)
    heads = products.unflatten(-1, (-1, sizes.head_dim))
    query, key, value = heads.split((sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads), 1)
    cosines, sines = (part.float()[:, None] for part in turns)

    def turned(states, weight, epsilon):
        states = _norm(states, weight, epsilon)
        first, second = states.chunk(2, -1)
        return states * cosines + torch.cat([-second, first], -1) * sines

    return [hidden, turned(query, own.q_norm, own.epsilons[2]), turned(key, own.k_norm, own.epsilons[3]), value]


def _norm(states, weight, epsilon):
    if weight is None:
        return states
    return states * (states.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


class ReferenceDense:
    """`DenseLayers` without a GPU; notes layer and rows of its launches, and the compiled sizes."""

    launches: ClassVar = []
    compiled: ClassVar = []

    def __init__(self, sizes, device, num_rows, **options):
        self._sizes, self._num_rows, self._options = sizes, num_rows, options
        self.compiled.append(num_rows)

    def run(self, index, layer, attended, residual, turns, slots, adapters):
        assert adapters is None
        assert len(attended) <= self._num_rows
        assert self._options == {"has_norms": layer.q_norm is not None, "has_bias": layer.bias is not None} or (
            layer.qkv is None
        )
        self.launches.append((index, len(attended)))
        hidden, *heads = (part.bfloat16() for part in dense_layer(self._sizes, layer, attended, residual, turns))
        query = torch.zeros_like(attended)
        if layer.keys is not None and layer.values is not None:
            layer.keys[slots], layer.values[slots] = heads[1:]
            query = heads[0].flatten(1)
        return hidden, query
