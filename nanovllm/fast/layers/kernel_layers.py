"""Llama-style decoder layers on a GPU as our kernels and the library's products, without torch.compile.

The compiler makes the same launches, but takes half of a start with empty caches, and a tenth of one with full ones.
`decoder_block.py` recognises the layers; each is then compared with its module in a few steps. If one differs, all are
compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.attention import STEP_SLOT_MAPPING, AttentionLayer, attend_in_step
from nanovllm.device import find_kernel
from nanovllm.errors import NotFusedError
from nanovllm.fast.layers.decoder_block import Parts, describe_blocks, model_parts
from nanovllm.fast.layers.distances import check_change, difference_of_rows, in_another_way
from nanovllm.fast.layers.layer_equations import LayerEquations
from nanovllm.fast.layers.merged_linears import FirstPart, MergedPart, SkinnyLinear
from nanovllm.fast.layers.rotary_attention import RotaryAttention
from nanovllm.model import Change

_KERNELS = "norm", "add_and_norm", "gated", "turns"
_COMPARED_ROWS = 64  # rows of norms and angles in a comparison


class _Thread(threading.local):
    runs_first_alone = False


_thread = _Thread()


@contextmanager
def first_layer_alone() -> Iterator[None]:
    """Context manager: this thread runs the first layer alone by kernels, which loads the code of all layers."""
    _thread.runs_first_alone = True
    try:
        yield
    finally:
        _thread.runs_first_alone = False


class KernelLayer:
    """One decoder layer; replaces its module's call.

    Raises NotFusedError if its parts are of another kind.
    """

    is_first = False

    def __init__(self, block: Parts, attention: RotaryAttention, kernels: dict[str, Any]) -> None:
        gate = block.linears["gate"]
        up = block.linears["up"]
        if not _are_one_product(gate, up):
            raise NotFusedError(f"{block.kind} has no product of gate and up alone")
        if any(_is_compiled(linear) for linear in block.linears.values()):
            raise NotFusedError(f"{block.kind} has products that the compiler joins with the rounding of their inputs")
        self._attention = attention
        self._gate = gate
        self._down = block.linears["down"]
        self._norms = (block.norms["input"], block.norms["post"])
        self._kernels = kernels
        self.parts = block, attention, kernels

    @property
    def is_skipped(self) -> bool:
        """Whether this thread runs the first layer alone, and this is another."""
        return _thread.runs_first_alone and not self.is_first

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any) -> Tensor:
        """Compute the layer: [1, num_rows, hidden_size]; arguments as of its module."""
        if self.is_skipped:
            return hidden_states
        (first, epsilon), (second, second_epsilon) = self._norms
        normed = self._kernels["norm"](hidden_states, first.weight, epsilon)
        attended = self._attention.attended(normed, position_embeddings, attend_in_step, kwargs)
        residual, normed = self._kernels["add_and_norm"](
            self._attention.projected(attended), hidden_states, second.weight, second_epsilon
        )
        states = self._kernels["gated"](self._gate.product(normed))
        if type(self._down) is SkinnyLinear and "forward" not in vars(self._down):  # one that no adapter changes
            output: Tensor = torch.ops.nanovllm.linear_and_add(states, self._down.weight, residual)
            return output
        output = self._down(states)
        return output.add_(residual)

    by_kernels = __call__  # also where a subclass runs a step in another way


def _is_compiled(linear: Any) -> bool:
    """Whether a product is several launches, which the compiler reduces."""
    return not getattr(getattr(linear, "joined_layer", linear), "is_packed", True)


def _form(block: Parts) -> Any:
    """Equal for layers that run the same code."""
    parts = ((name, type(part), getattr(part, "bias", None) is None) for name, part in block.linears.items())
    return block.sizes, tuple(block.norms), tuple(parts)


def _are_one_product(gate: Any, up: Any) -> bool:
    if not isinstance(gate, FirstPart) or not isinstance(up, MergedPart) or not up.shares_with(gate):
        return False
    return up.start == gate.end and up.end == gate.num_outputs == 2 * gate.end


class KernelLayers:
    """The decoder layers of a model, and the modules around them; `calls()` replaces the modules' calls.

    Raises NotFusedError if the layers are of another kind, or if there are no kernels for them.

    Args:
        modules, layers: decoder layers and their attention, in one order.
        attention: changes of a model, each to a fused attention module.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        layers: Sequence[AttentionLayer],
        attention: Iterable[Change],
    ) -> None:
        self._blocks, kernels = describe_blocks(modules, layers), _find_kernels()
        fused = {part.attention: part for *_, part in attention}
        if len({_form(block) for block in self._blocks}) > 1:
            raise NotFusedError("the layers are of different sizes, or some have parts that others have not")
        if kernels is None or not all(isinstance(fused.get(b.attention), RotaryAttention) for b in self._blocks):
            raise NotFusedError("there are no kernels for them")
        self._model = model
        self._modules = modules
        self._kernels = kernels
        with torch.no_grad():
            _check_kernels(kernels, self._blocks[0])
        self._layers = [KernelLayer(block, fused[block.attention], kernels) for block in self._blocks]
        self._layers[0].is_first = True
        self.equations = LayerEquations(modules, self._blocks)
        self.num_compared = 0  # layers, each in several steps

    def calls(self) -> dict[nn.Module, Callable[..., Any]]:
        """Replacements of the modules' calls; raises NotFusedError if none was compared."""
        if not self.num_compared:
            raise NotFusedError("the KV cache has no room to compare them")
        calls: dict[nn.Module, Callable[..., Any]] = dict(zip(self._modules, self._layers, strict=True))
        return calls | self._calls_around()

    def comparing_calls(self) -> dict[nn.Module, Callable[..., Any]]:
        """Calls that run each module and compare its kernels with it, while `equations` watches.

        Padding comes last in the steps. The calls raise NotFusedError.
        """
        return {module: partial(self._compare, index, module) for index, module in enumerate(self._modules)}

    def _compare(self, index: int, module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kind = self._blocks[index].kind
        before = hidden_states.clone()
        expected: Any = module._call_impl(hidden_states, *args, **kwargs)
        if not isinstance(expected, Tensor) or expected.shape != before.shape:
            raise NotFusedError(f"{kind} returns something else than one tensor of its input's shape")
        count = int((kwargs[STEP_SLOT_MAPPING] > 0).sum())
        self.equations.check(index, kwargs, expected, [count])
        with in_another_way(f"{kind} is called", RuntimeError):  # also if memory runs out
            own = self._layers[index](before, *args, **kwargs)
        check_change(kind, before[0, :count], expected[0, :count], own[0, :count])
        self.num_compared += 1
        return expected

    def _calls_around(self) -> dict[nn.Module, Callable[..., Any]]:
        """Replacements of the last norm's and the rotary embedding's calls; raises NotFusedError if these differ."""
        if (parts := model_parts(self._model)) is None:
            raise NotFusedError("other modules are around them")
        norm = parts.norm
        rotary = parts.rotary
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        frequencies, scale = (getattr(rotary, name, None) for name in ("inv_freq", "attention_scaling"))
        if epsilon is None or frequencies is None or scale is None:
            raise NotFusedError("the norm or the rotary embedding around them is of another kind")
        weight = norm.weight.detach()
        turns = self._kernels["turns"]
        row = torch.linspace(-1.0, 3.0, len(weight), device=weight.device)
        sizes = torch.linspace(float(epsilon) ** 0.5, 8.0, _COMPARED_ROWS, device=weight.device)
        rows = (sizes[:, None] * row.roll(7)).to(weight.dtype)[None]
        ends = torch.linspace(0, getattr(rotary, "max_seq_len_cached", 4096) - 1, _COMPARED_ROWS, device=weight.device)
        calls: dict[nn.Module, Callable[..., Any]] = {
            norm: lambda states: self._kernels["norm"](states, norm.weight, epsilon),
            rotary: lambda states, position_ids: turns(position_ids, rotary.inv_freq, scale, states.dtype),
        }
        for module, given in ((norm, (rows,)), (rotary, (rows, ends.long()[None]))):
            try:
                pairs = [*zip(_listed(calls[module](*given)), _listed(module._call_impl(*given)), strict=True)]
            except Exception as error:  # the kernels' compiler raises whatever it likes
                raise NotFusedError(f"their kernels fail: {error!r}") from error
            if any(own.shape != right.shape or difference_of_rows(own, right) for own, right in pairs):
                raise NotFusedError(f"{type(module).__name__} around them computes something else")
        return calls


def _listed(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _check_kernels(kernels: dict[str, Any], block: Parts) -> None:
    """Compare the kernels within a layer with PyTorch on some rows: a layer's output may hide an error of one.

    Raises NotFusedError.
    """
    (weight, epsilon), inner = (block.norms["post"].module.weight, block.norms["post"].epsilon), block.sizes[1]
    generator = torch.Generator(weight.device).manual_seed(0)

    def random(size: int) -> Tensor:
        rows = torch.randn(1, _COMPARED_ROWS, size, generator=generator, device=weight.device)
        return (rows * torch.linspace(0.01, 4.0, _COMPARED_ROWS, device=weight.device)[:, None]).to(weight.dtype)

    first = random(len(weight))
    second = random(len(weight))
    product = random(2 * inner)
    gate, up = product.float().chunk(2, dim=-1)
    size = (len(weight),)
    try:
        total, normed = kernels["add_and_norm"](first, second, weight, epsilon)
        pairs = {
            "norm": (kernels["norm"](first, weight, epsilon), F.rms_norm(first, size, weight, epsilon)),
            "sum": (total, first + second),
            "norm of a sum": (normed, F.rms_norm(first + second, size, weight, epsilon)),
            "gate": (kernels["gated"](product), (F.silu(gate) * up).to(weight.dtype)),
        }
    except Exception as error:  # the kernels' compiler raises whatever it likes
        raise NotFusedError(f"their kernels fail: {error!r}") from error
    for name, (own, expected) in pairs.items():
        if (differs := difference_of_rows(own, expected)) is not None:
            raise NotFusedError(f"the kernel of the {name} computes something else: rows differ {differs}")


def _find_kernels() -> dict[str, Any] | None:
    kernels = {name: find_kernel("layer_parts", name) for name in _KERNELS}
    return None if None in kernels.values() else kernels


def kernel_layer_calls(
    modules: Sequence[nn.Module], layers: Sequence[AttentionLayer], num_rows: int
) -> list[Callable[[], Any]]:
    """Calls that compile the kernels, for threads at start; empty if the layers are of another kind."""
    kernels = _find_kernels()
    if kernels is None:
        return []
    try:
        block = describe_blocks(modules[:1], layers[:1])[0]
    except NotFusedError:
        return []
    (hidden, inner), weight = block.sizes, block.norms["input"].module.weight
    if not _are_one_product(block.linears["gate"], block.linears["up"]):
        return []
    states, product = (weight.new_zeros(1, num_rows, size) for size in (hidden, 2 * inner))
    positions = torch.zeros(1, num_rows, dtype=torch.int64, device=weight.device)
    frequencies = weight.new_ones(layers[0].traits.head_dim // 2, dtype=torch.float32)
    epsilon = block.norms["input"].epsilon
    return [
        partial(kernels["norm"], states, weight, epsilon),
        partial(kernels["add_and_norm"], states, states, weight, epsilon),
        partial(kernels["gated"], product),
        partial(kernels["turns"], positions, frequencies, 1.0, weight.dtype),
    ]
