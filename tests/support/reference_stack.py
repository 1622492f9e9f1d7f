"""`fast/kernels/layer_stack.py` and decode attention in plain PyTorch, for tests without a GPU."""

from typing import ClassVar

import numpy as np
import torch

from nanovllm.fast.kernels import layer_stack
from nanovllm.fast.kernels.layer_stack import DecodeRows
from nanovllm.fast.kernels.token_steps import PACKED_BYTES
from nanovllm.sampler import DrawTensors, draw
from tests.support.llama_layers import attend, run_layers, slots_of


class ReferenceStack:
    """`LayerStack` without a GPU; counts its launches."""

    launches: ClassVar = []
    logits_factor = 1.0

    def __init__(self, layers, sizes, scaling, device):
        self._layers, self._sizes, self._scaling = layers, sizes, scaling

    def run(self, hidden, cosines, sines, rows, *, first=0, count=0):
        layers = self._layers[first : first + count] if count else self._layers
        self.launches.append(len(layers))
        return run_layers(layers, self._sizes, self._scaling, hidden, cosines, sines, rows)

    def token_step(self, weights, places, num_rows, sampled, *, logits=None, **_):
        return ReferenceStep(self, weights, places, num_rows, sampled, logits)


class ReferenceStep:
    """`TokenStep` without a GPU."""

    def __init__(self, stack, weights, places, num_rows, sampled, logits):
        self._stack, self._weights, self._places = stack, weights, places
        self._num_rows, self._sampled, self._logits = num_rows, sampled, logits
        self.packed = np.zeros(PACKED_BYTES // 4, np.int32)

    def _input(self, name, count, dtype=np.int64):
        start, size = self._places[name], count * np.dtype(dtype).itemsize
        return torch.from_numpy(self.packed.view(np.uint8)[start : start + size].view(dtype).copy())

    def launch(self, num_tables=0, host_sampled=None):
        weights, count = self._weights, self._num_rows
        positions, slots = self._input("positions", count), self._input("slot_mapping", count)
        tables, *starts = (
            self._input(name, size, np.int32)
            for name, size in (("tables", num_tables), ("decode_tables", count), ("decode_blocks", count))
        )
        rows = DecodeRows(positions, slots, tables, *starts)
        tokens = self._input("token_ids", count)
        tokens = torch.where(tokens < 0, self._sampled[(-1 - tokens).clamp(min=0)], tokens)
        hidden = weights.embedding[tokens]
        hidden = self._stack.run(hidden, weights.cosines[positions], weights.sines[positions], rows).float()
        normed = hidden * (hidden.square().mean(-1, keepdim=True) + weights.epsilon).rsqrt()
        head = weights.head[: weights.vocab_size] * self._stack.logits_factor
        logits = (normed.bfloat16() * weights.norm) @ head.T
        if self._logits is not None:
            self._logits.copy_(logits)
        num_real = int((starts[1] > 0).sum())
        floats = (self._input(name, num_real, np.float32) for name in ("inverse_temperatures", "noise_scales"))
        zeros = torch.zeros(len(DrawTensors._fields) - 3, num_real)
        inputs = DrawTensors(self._input("noise_keys", num_real), *floats, *zeros)
        rows = logits[self._input("sample_rows", num_real)]
        self._sampled[:num_real] = draw(rows, inputs, has_filters=False)
        if host_sampled is not None:
            host_sampled[:num_real] = self._sampled[:num_real]


class DenseDecodes:
    """Attention of a step's decodes over their block tables, one by one."""

    def __init__(self, block_size):
        self.step = None
        self._block_size = block_size

    def attend(self, query, keys, values, scaling, *_):
        output = torch.zeros_like(query)
        for row, count in enumerate(self.step.decode_blocks.tolist()):
            table = self.step.tables[int(self.step.decode_tables[row]) :][:count]
            slots = slots_of(table, self._block_size)[: int(self.step.decode_positions[row]) + 1]
            output[row] = attend(query[row], keys[slots], values[slots], scaling)
        return output


def stand_in(monkeypatch):
    """Let it be the kernel of all layers, whatever they are."""
    monkeypatch.setattr(layer_stack, "LayerStack", ReferenceStack)
    monkeypatch.setattr(layer_stack, "why_not", lambda *_: None)
    monkeypatch.setattr(ReferenceStack, "launches", [])
