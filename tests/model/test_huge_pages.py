"""Memory of packed weights: tensors one behind another in one mapping, of the allocator where that has no room."""

import pytest
import torch
from torch import nn

from nanovllm import LLM
from nanovllm.fast.host.memory import HugePages
from nanovllm.fast.kernels.packed_product import PackedProduct, pack, packed_bytes
from tests.support.tiny_models import DTYPES, save_tiny

HUGE_PAGE = 2**21


def test_tensors_lie_one_behind_another_and_apart():
    memory = HugePages(HUGE_PAGE)
    first, second = memory.allocate([100], torch.uint8), memory.allocate([4, 8], torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 128  # whole lines of the cache
    first.fill_(7)
    second.fill_(3.0)
    assert first.eq(7).all() and second.eq(3).all() and second.shape == (4, 8)


@pytest.mark.parametrize("num_bytes", [1024, HUGE_PAGE])
def test_what_has_no_room_is_of_the_allocator(num_bytes):
    memory = HugePages(num_bytes)
    large = memory.allocate([num_bytes + 2**20], torch.uint8)
    small = memory.allocate([32, 2], torch.float32)
    large.fill_(1)
    small.fill_(2.0)
    assert large.eq(1).all() and small.eq(2).all()


def test_tensors_outlive_their_memory_object():
    tensor = HugePages(HUGE_PAGE).allocate([HUGE_PAGE // 4], torch.float32)
    tensor.fill_(5.0)
    others = [HugePages(HUGE_PAGE).allocate([HUGE_PAGE // 4], torch.float32).fill_(1.0) for _ in range(3)]
    assert tensor.eq(5).all() and all(other.eq(1).all() for other in others)


@DTYPES
def test_a_product_packs_into_the_memory_that_it_is_given(dtype):
    linears = [nn.Linear(256, 2048, dtype=dtype) for _ in range(2)]
    memory = HugePages(packed_bytes(linears))
    products = [PackedProduct([linear], memory=memory) for linear in linears]
    pointers = [product.struct.weight for product in products]
    assert pointers[1] - pointers[0] == linears[0].weight.nbytes
    for linear, product in zip(linears, products, strict=True):
        torch.testing.assert_close(product._weight, pack(linear.weight.detach()), rtol=0, atol=0)


def test_memory_serves_others_when_its_tensors_are_forgotten():
    memory = HugePages(HUGE_PAGE)
    first = memory.allocate([HUGE_PAGE], torch.uint8)
    memory.forget_tensors()
    assert memory.allocate([HUGE_PAGE], torch.uint8).data_ptr() == first.data_ptr()


def test_a_models_packed_weights_lie_one_behind_another(tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.fast.host.memory.HUGE_PAGE_BYTES", 1)
    folder = save_tiny(tmp_path)
    with LLM(folder, attention_backend="cpp", block_size=16, num_kv_blocks=9, max_model_len=64) as llm:
        binding = llm._engine.model_runner.binding
        products = [product for layer in binding.fused_layers for product in layer._keep]
        assert products
        products.append(vars(binding.model.get_output_embeddings())["forward"]._product)
        weights = [product._weight for product in products]
        first, end = min(w.data_ptr() for w in weights), max(w.data_ptr() + w.nbytes for w in weights)
        assert end - first == sum(weight.nbytes for weight in weights)
