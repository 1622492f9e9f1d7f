"""The one operator that every attention layer calls: writes this step's K and V, then attends over the pages.

It is opaque to the compiler, so a layer compiles once with only the token count dynamic, while inside the form is
chosen freely. All of a layer's writes come before its reads; so requests of one step may share a prefix that this very
step computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

ATTENTION_NAME = "nanovllm"
# Names under which a layer's cache and the step hang on its attention module and in its keyword arguments.
KEY_CACHE, VALUE_CACHE, STEP_HANDLE = "nanovllm_key_cache", "nanovllm_value_cache", "nanovllm_step"


class AttentionPlan(Protocol):
    """One step's attention in one of the forms."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What every layer of one step shares.

    num_tokens: rows that are real; the dense part may carry padding behind them.
    slots: [num_tokens] int64, where each row's K and V go.
    blocks_to_clear: [n] int64, blocks begun but not filled in this step; none where masked slots are not read.
    """

    plan: AttentionPlan
    num_tokens: int
    block_size: int
    slots: Tensor
    blocks_to_clear: Tensor

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> Tensor:
        """query [1, num_heads, T, head_dim], key and value [1, num_kv_heads, T, head_dim], T >= num_tokens.

        Returns [1, T, num_heads, head_dim], zero in the padding rows.
        """
        n = self.num_tokens
        # [n, heads, head_dim] each; the padding writes nothing, so the null block stays zero
        q, k, v = (states[0].transpose(0, 1)[:n] for states in (query, key, value))
        for cache, states in ((key_cache, k), (value_cache, v)):
            if self.blocks_to_clear.numel():
                cache.view(-1, self.block_size, *cache.shape[1:]).index_fill_(0, self.blocks_to_clear, 0)
            cache.index_copy_(0, self.slots, states)
        attended = self.plan.attend(q.contiguous(), k, v, key_cache, value_cache, scaling)
        if n == query.shape[2]:
            return attended[None]
        output = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])
        output[0, :n] = attended
        return output


# Tensors are all that an opaque operator may take, so a step is named by the number in a tensor of its engine. An
# entry lives while its engine runs the step.
_steps: dict[int, AttentionStep] = {}


def enter_step(handle: int, step: AttentionStep) -> None:
    _steps[handle] = step


def leave_step(handle: int) -> None:
    _steps.pop(handle, None)


def running_step(handle: Tensor) -> AttentionStep:
    return _steps[int(handle)]


@torch.library.custom_op("nanovllm::paged_attention", mutates_args=("key_cache", "value_cache"))
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, handle: Tensor, scaling: float
) -> Tensor:
    return running_step(handle).run(query, key, value, key_cache, value_cache, scaling)


@paged_attention.register_fake
def _(query, key, value, key_cache, value_cache, handle, scaling):
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls in each attention layer while an engine's step runs."""
    handle = kwargs[STEP_HANDLE]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    key_cache, value_cache = getattr(module, KEY_CACHE), getattr(module, VALUE_CACHE)
    if torch.compiler.is_compiling():
        return paged_attention(query, key, value, key_cache, value_cache, handle, scaling), None
    # Uncompiled, the dispatcher would only add its overhead to every layer.
    return running_step(handle).run(query, key, value, key_cache, value_cache, scaling), None
