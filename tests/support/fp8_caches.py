"""Caches of K and V in 8-bit floats, their rounding by a formula of its own, and cases of attention over them."""

from contextlib import ExitStack
from unittest import mock

import torch
from transformers import DynamicCache

from nanovllm.attention import kv_formats
from nanovllm.features.kv_fp8.fp8_format import CACHE_DTYPE, SCALE_BYTES, Fp8Format, write_rows
from tests.support import layer_kinds
from tests.support.paged_cases import PagedCase

OPTION = {"kv_cache_dtype": "fp8"}


def rounded(states):
    """Rows [..., head_dim] as a cache keeps them: by each row's largest number, to 4 bits of a fraction."""
    values = states.float()
    largest = values.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    values = values * (torch.full_like(largest, 448) / largest)
    step = torch.exp2(torch.frexp(values)[1].clamp(min=-5) - 4.0)
    return (torch.round(values / step) * step * (largest * (1 / 448))).to(states.dtype)


def kept(cache, is_value):
    """A cache [num_slots, num_kv_heads, head_dim] in 8-bit floats, of the same content."""
    kv_formats.setdefault(CACHE_DTYPE, Fp8Format())
    width = cache.shape[2] + SCALE_BYTES
    found = torch.zeros(*cache.shape[:2], width, dtype=CACHE_DTYPE, device=cache.device)
    write_rows(cache, found, torch.arange(len(cache), device=cache.device), is_value=is_value)
    return found


class Fp8Case(PagedCase):
    """A `PagedCase` over such caches; its reference is dense attention over K and V that are rounded as they are."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        caches = [*map(kept, self.caches, (False, True))]
        self.caches = torch.stack(caches) if isinstance(self.caches, torch.Tensor) else caches

    def expected(self):
        plain = self.dense
        self.dense = [tuple(rounded(states) for states in pair) for pair in plain]
        try:
            return super().expected()
        finally:
            self.dense = plain


class RoundedCache(DynamicCache):
    """A cache of `transformers` that rounds each row as it takes it: dense attention over it is the reference."""

    def update(self, key_states, value_states, *arguments, **options):
        return super().update(rounded(key_states), rounded(value_states), *arguments, **options)


def own_answer(module, prompt, num_new_tokens):
    """What `generate` of `transformers` answers over a `RoundedCache`.

    A layer that caches latents, from which it expands K and V at each use, has these rounded then.
    """
    expanding = {type(part) for part in module.modules() if hasattr(part, "expand_kv")}
    with ExitStack() as stack:
        for kind in expanding:
            expand = kind.expand_kv
            stack.enter_context(mock.patch.object(kind, "expand_kv", lambda *a, of=expand: tuple(map(rounded, of(*a)))))
        cache = (DynamicCache if expanding else RoundedCache)(config=module.config)
        return layer_kinds.own_answer(module, prompt, num_new_tokens, past_key_values=cache)
