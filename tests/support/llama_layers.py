"""Decoder layers of Llama's kind in plain PyTorch, over paged caches: the reference of `kernels/layer_stack.py`."""

import torch
from torch.nn.functional import silu

from nanovllm.fast.kernels.layer_stack import DecodeRows, LayerWeights


def random_layers(
    count,
    sizes,
    num_slots,
    *,
    has_norms=True,
    has_biases=False,
    device=None,
):
    """Layers whose every part matters to their answer."""

    def draw(*shape, mean=0.0, scale=1.0):
        return (mean + scale * torch.randn(shape, device=device)).bfloat16()

    query, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    shapes = [(query, sizes.hidden), (kv, sizes.hidden), (kv, sizes.hidden), (sizes.hidden, query),
              (sizes.inner, sizes.hidden), (sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)]  # fmt: skip
    norms = [sizes.hidden, sizes.hidden, *[sizes.head_dim if has_norms else None] * 2]
    biases = [size if has_biases else None for size in (query, kv, kv)]
    return [
        LayerWeights(
            *(draw(*shape, scale=2 * shape[1] ** -0.5) for shape in shapes),
            *(None if size is None else draw(size, mean=1.0, scale=0.1) for size in norms),
            *(None if size is None else draw(size) for size in biases),
            *(draw(num_slots, sizes.num_kv_heads, sizes.head_dim) for _ in range(2)),
            (1e-6, 1e-5, 1e-6, 1e-5),
        )
        for _ in range(count)
    ]  # fmt: skip


def random_rows(contexts, num_rows, sizes, num_blocks, device=None):
    """Decodes of these contexts in blocks that lie anywhere, none of them block 0, and padding behind them."""
    counts = [-(-context // sizes.block_size) for context in contexts] + [0] * (num_rows - len(contexts))
    starts = [sum(counts[:row]) * (count > 0) for row, count in enumerate(counts)]
    positions = [context - 1 for context in contexts] + [0] * (num_rows - len(contexts))
    tables = torch.randperm(num_blocks - 1)[: sum(counts)] + 1
    last = [tables[start + count - 1] if count else 0 for start, count in zip(starts, counts, strict=True)]
    slots = [int(block) * sizes.block_size + p % sizes.block_size for block, p in zip(last, positions, strict=True)]
    int64 = (torch.tensor(values, device=device) for values in (positions, slots))
    return DecodeRows(*int64, *(torch.tensor(v).int().to(device) for v in (tables.tolist(), starts, counts)))


def angles(rows, head_dim):
    """Cosines and sines [num_rows, head_dim] of the rows' positions."""
    steps = torch.arange(head_dim // 2, device=rows.positions.device)
    turns = rows.positions[:, None] * 10_000.0 ** (-2 * steps / head_dim)
    both = torch.cat([turns, turns], -1)
    return both.cos().bfloat16(), both.sin().bfloat16()


def run_layers(
    layers, sizes, scaling, hidden, cosines, sines,
    rows,
):  # fmt: skip
    """[num_rows, hidden], of which padding is left as it is; K and V are written as the kernel writes them."""
    for layer in layers:
        hidden = _run_layer(layer, sizes, scaling, hidden, cosines, sines, rows)
    return hidden


def _run_layer(
    layer, sizes, scaling, hidden, cosines, sines,
    rows,
):  # fmt: skip
    normed = _norm(hidden, layer.input_norm, layer.epsilons[0])
    query, key, value = (
        _linear(normed, weight, bias).view(len(hidden), -1, sizes.head_dim)
        for weight, bias in zip(layer[:3], (layer.q_bias, layer.k_bias, layer.v_bias), strict=True)
    )
    query = _turn(_norm(query, layer.q_norm, layer.epsilons[2]), cosines, sines)
    key = _turn(_norm(key, layer.k_norm, layer.epsilons[3]), cosines, sines)
    output = hidden.clone()
    for row, count in enumerate(rows.block_counts.tolist()):
        if not count:
            continue
        layer.keys[rows.slot_mapping[row]], layer.values[rows.slot_mapping[row]] = key[row], value[row]
        table = rows.tables[int(rows.table_starts[row]) :][:count]
        slots = slots_of(table, sizes.block_size)[: int(rows.positions[row]) + 1]
        attended = attend(query[row], layer.keys[slots], layer.values[slots], scaling)
        output[row] = hidden[row] + _linear(attended.flatten().bfloat16(), layer.o)
    normed = _norm(output, layer.post_norm, layer.epsilons[1])
    inner = (silu(_linear(normed, layer.gate).float()) * _linear(normed, layer.up).float()).bfloat16()
    return torch.where(rows.block_counts[:, None] > 0, output + _linear(inner, layer.down), hidden)


def slots_of(table, block_size):
    """Slots of the blocks of a table, in order."""
    return (table.long()[:, None] * block_size + torch.arange(block_size, device=table.device)).flatten()


def attend(query, keys, values, scaling):
    """[heads, head_dim] in float32 of one row over K and V [tokens, KV heads, head_dim]."""
    groups = query.shape[0] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(groups, 1) for part in (keys, values))
    weights = (torch.einsum("hd,thd->ht", query.float(), keys) * scaling).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values)


def _norm(states, weight, epsilon):
    if weight is None:
        return states
    factor = (states.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (states.float() * factor).bfloat16() * weight


def _linear(states, weight, bias=None):
    product = states.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).bfloat16()


def _turn(states, cosines, sines):
    first, second = states.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (states.float() * cosines[:, None].float() + turned * sines[:, None].float()).bfloat16()
