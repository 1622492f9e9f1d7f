"""Memory of packed weights: tensors one behind another in one mapping, of the allocator where that has no room."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nanovllm.kernels.huge_pages import HugePages
from nanovllm.kernels.packed_product import PackedProduct, pack, packed_bytes

HUGE_PAGE = 2**21


def test_tensors_lie_one_behind_another_and_apart():
    memory = HugePages(HUGE_PAGE)
    first, second = memory.take([100], torch.uint8), memory.take([4, 8], torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 128  # whole lines of the cache
    first.fill_(7)
    second.fill_(3.0)
    assert first.eq(7).all() and second.eq(3).all() and second.shape == (4, 8)


@pytest.mark.parametrize("num_bytes", [1024, HUGE_PAGE])
def test_what_has_no_room_is_of_the_allocator(num_bytes):
    memory = HugePages(num_bytes)
    large = memory.take([num_bytes + 2**20], torch.uint8)
    small = memory.take([32, 2], torch.float32)
    large.fill_(1)
    small.fill_(2.0)
    assert large.eq(1).all() and small.eq(2).all()


def test_tensors_outlive_their_memory_object():
    tensor = HugePages(HUGE_PAGE).take([HUGE_PAGE // 4], torch.float32)
    tensor.fill_(5.0)
    others = [HugePages(HUGE_PAGE).take([HUGE_PAGE // 4], torch.float32).fill_(1.0) for _ in range(3)]
    assert tensor.eq(5).all() and all(other.eq(1).all() for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_packs_into_the_memory_that_it_is_given(dtype):
    linears = [nn.Linear(256, 2048, dtype=dtype) for _ in range(2)]
    memory = HugePages(packed_bytes(linears))
    products = [PackedProduct([linear], memory=memory) for linear in linears]
    pointers = [product.struct.weight for product in products]
    assert pointers[1] - pointers[0] == linears[0].weight.nbytes
    for linear, product in zip(linears, products, strict=True):
        torch.testing.assert_close(product._weight, pack(linear.weight.detach()), rtol=0, atol=0)
