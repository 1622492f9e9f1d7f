"""Norms of q and k, rotary embedding and KV write as `fast.kernels.rotary.rotate_and_store` does them, in float64."""

import torch


def dense_rotate(products, cosines, sines, norms, epsilon, cache, slots):
    """Write K and V; returns the queries."""
    num_kv_heads, head_dim = cache.shape[2:]
    heads = products[0].double().unflatten(1, (-1, head_dim))  # [num_rows, heads, head_dim]
    query, key, value = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = (part[0, :, None].double() for part in (cosines, sines))

    def turned(states, number):
        if norms:
            states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + epsilon) * norms[number].double()
        first, second = states.chunk(2, dim=-1)
        return states * cos + torch.cat((-second, first), dim=-1) * sin

    cache[:, slots] = torch.stack((turned(key, 1), value)).to(cache.dtype)
    return turned(query, 0).to(products.dtype)
