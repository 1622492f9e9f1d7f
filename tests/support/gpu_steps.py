"""Steps of `PagedCase` by a GPU's `flex` backend, from entries to the attention of one layer, padding included."""

from dataclasses import replace

import numpy as np
import torch

from nanovllm.attention import write_states
from nanovllm.device import find_kernel
from nanovllm.fast import graph_paths
from nanovllm.fast.attention import flex_chunks, flex_decodes, flex_gpu_options
from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.attention.flex_gpu import GpuFlexAttention
from nanovllm.fast.attention.flex_gpu_options import Gpu, KernelOptions
from nanovllm.fast.attention.step_tables import TableInputs
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.gpu import cuda_graphs
from nanovllm.fast.gpu.step_inputs import RowInputs, SampleInputs, StepPacking
from nanovllm.fast.kernels.paged_decode import PagedDecode
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.features.costs.buckets import Buckets
from nanovllm.features.engine_config import EngineConfig
from tests.support.paged_cases import NUM_BLOCKS

SMALL_GPU = Gpu(4, 232_448)  # for which a CPU computes in its place


def packing_of(shape, block_size, max_samples):
    """The packed steps of one shape for an engine with one cache group."""
    return StepPacking(shape, max_samples, (SampleInputs(), RowInputs(), TableInputs(block_size)))


class GpuStep:
    """One packed step of a case on a device; its tensors keep their addresses."""

    def __init__(self, case, device, buckets, shape=None):
        self.case, layout, block_size = case, case.layout, case.block_size
        tiles = Tiles.from_layout(layout, block_size)
        self.shape = shape or buckets.shape(layout, len(tiles.blocks))
        self.packing = packing_of(self.shape, block_size, buckets.max_decodes)
        packed = np.empty(self.packing.num_words_for(layout), np.int32)
        self.packing.pack(layout, tiles, None, packed)
        self.packed = torch.from_numpy(packed).to(device)
        self.inputs = self.packing.views(self.packed)
        self.rows = torch.arange(layout.num_tokens)
        self.rows[layout.num_decodes :] += self.shape.num_decodes - layout.num_decodes
        self.rows = self.rows.to(device)
        self.states = []
        for real in case.inputs():
            padded = torch.zeros(*real.shape[:2], self.shape.num_rows, real.shape[3], dtype=real.dtype, device=device)
            padded[:, :, self.rows] = real.to(device)
            self.states.append(padded)
        self.sinks = None if case.sinks is None else case.sinks.to(device)

    def write(self):
        blocks = torch.from_numpy(self.case.layout.blocks_to_clear).to(self.case.caches[0].device)
        for cache in self.case.caches:
            cache.view(NUM_BLOCKS, -1).index_fill_(0, blocks, 0)
        write_states(self.states[1], self.states[2], self.case.caches, self.inputs.slot_mapping)

    def attend(self, backend):
        """[num_rows, num_heads, value_dim]."""
        plan = backend.fill(self.inputs)
        query = self.states[0][0].transpose(0, 1).contiguous()
        return plan.attend(query, *self.case.caches, self.case.scaling, 0, self.sinks)


_backends = {}


def backend_of(case, device, *, by_kernel=False):
    """One backend per shape: it keeps its compiled kernels over many steps, as in an engine."""
    cache = case.caches[0]
    is_scaled = not cache.is_floating_point()
    key = case.block_size, case.traits, case.dtype, device, by_kernel, is_scaled
    if key not in _backends:
        config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=512, block_size=case.block_size)
        traits, gpu = case.traits, SMALL_GPU if device == "cpu" else Gpu.from_device(torch.device(device))
        head_bytes = max(traits.head_dim, traits.value_dim) * cache.itemsize
        options = KernelOptions(gpu, traits.num_kv_heads, traits.num_groups, head_bytes, case.block_size)
        options = replace(
            options, paged_decode=PagedDecode if by_kernel else None, sight=traits.sight, softcap=traits.softcap,
            element_bytes=min(2, cache.itemsize),
        )  # fmt: skip
        widened = None
        if is_scaled:
            make = find_kernel("fp8_rows", "WidenedChunks")
            widened = make([traits], [NUM_BLOCKS * case.block_size], case.block_size, case.dtype, torch.device(device))
        buckets = Buckets(config)
        backend = GpuFlexAttention(
            options=[options],
            groups=[],
            num_blocks=[NUM_BLOCKS],
            max_decodes=buckets.max_decodes,
            max_tiles=buckets.max_tiles,
            max_blocks=NUM_BLOCKS - 1,
            device=torch.device(device),
            widened=widened,
        )
        _backends[key] = backend, buckets
    return _backends[key]


def run(case, device="cuda", *, by_kernel=False):
    """[num_tokens, num_heads, value_dim] in the layout's order, computed as an engine's step is, padding included."""
    backend, buckets = backend_of(case, device, by_kernel=by_kernel)
    step = GpuStep(case, device, buckets)
    step.write()
    with torch.no_grad():
        output = step.attend(backend)
    assert output.isfinite().all()  # in the padding too: it goes through the rest of the layers
    return output[step.rows]


def flex_attention_by_lists(
    query, keys, values, *, score_mod, block_mask, scale, enable_gqa,
    kernel_options, return_aux,
):  # fmt: skip
    """What FlexAttention's kernels compute: a tile of rows reads the blocks that are listed for it, and no other.

    PyTorch's own uncompiled form knows the mask's function alone.
    """
    assert enable_gqa
    num_batches, num_heads, num_rows, _ = query.shape
    groups, (tile, width) = num_heads // keys.shape[1], block_mask.BLOCK_SIZE
    output = query.new_zeros(*query.shape[:3], values.shape[3], dtype=torch.float32)
    log_sums = torch.full(query.shape[:3], float("-inf"))
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, True)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, False))
    for batch in range(num_batches):
        for number in range(-(-num_rows // tile)):
            rows = torch.arange(number * tile, min(num_rows, (number + 1) * tile))
            slots, is_partial = [], []
            for counts, blocks, partial in lists:
                listed = blocks[batch, 0, number, : int(counts[batch, 0, number])].long()
                assert listed.numel() == listed.unique().numel(), "no block is listed twice"
                slots.append((listed[:, None] * width + torch.arange(width)).flatten())
                is_partial.append(torch.full((len(slots[-1]),), partial))
            slot, partial = torch.cat(slots), torch.cat(is_partial)
            if not len(slot):
                continue
            for head in range(num_heads):
                at = torch.tensor(batch), torch.tensor(head), rows[:, None], slot[None]
                scores = query[batch, head, rows].float() @ keys[0, head // groups, slot].float().T * scale
                if score_mod is not None:
                    scores = score_mod(scores, *at)
                is_seen = block_mask.mask_mod(*at) | ~partial
                scores = torch.where(is_seen, scores, float("-inf"))
                log_sums[batch, head, rows] = scores.logsumexp(-1)
                weights = scores.softmax(-1).nan_to_num()  # NaN for a row that sees nothing
                output[batch, head, rows] = weights @ values[0, head // groups, slot].float()
    output = output.to(query.dtype)
    return output if return_aux is None else (output, type("Aux", (), {"lse": log_sums}))


def compute_without_kernels(monkeypatch):
    """Compile nothing, and let FlexAttention be the function above: no GPU is needed then."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function)
    for module in (flex_chunks, flex_decodes):
        monkeypatch.setattr(module, "flex_attention", flex_attention_by_lists)
    _backends.clear()


class CalledAgain:
    """A pool of graphs that run their function at each replay."""

    def __init__(self, device): ...

    def capture(self, run, **_):
        run()
        return type("Graph", (), {"replay": staticmethod(run)})

    def synchronize(self): ...

    def reset(self): ...


def run_graphs_on_a_cpu(monkeypatch, pool=CalledAgain, *, chosen_by="for_model", compiles=True, left_out=()):
    """Let engines on a CPU run their steps as captured graphs, without kernels and compilation.

    Args:
        pool: in the place of `GraphPool`.
        chosen_by: method of `AttentionChoice` that chooses for the engine's models.
        left_out: methods of `FastLayers` that do nothing.
    """
    compute_without_kernels(monkeypatch)
    monkeypatch.setattr(flex_gpu_options.Gpu, "from_device", classmethod(lambda *_: SMALL_GPU))
    monkeypatch.setattr(flex_gpu_options, "find_kernel", lambda *_: None)
    choice = AttentionChoice("flex", compiles=compiles, uses_graphs=True, kernels=())
    monkeypatch.setattr(AttentionChoice, chosen_by, classmethod(lambda *_: choice))
    monkeypatch.setattr(graph_paths, "compile_ahead", lambda *_: None)
    for name in left_out:
        monkeypatch.setattr(FastLayers, name, lambda *_: None)
    monkeypatch.setattr(cuda_graphs, "GraphPool", pool)
    monkeypatch.setattr(cuda_graphs, "to_device", lambda array, _: torch.from_numpy(array))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **rest: empty(*sizes, **rest))
