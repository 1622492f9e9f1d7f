"""K and V in 8-bit floats by Triton's interpreter: rows as they are stored, decodes that read them, chunks.

Run with TRITON_INTERPRET=1 where Triton is installed. tests/gpu/test_kv_fp8.py is for a GPU.
"""

import importlib.util
import os
from contextlib import nullcontext

import pytest
import torch

from nanovllm import LLM
from nanovllm.device import find_kernel
from nanovllm.fast.attention import flex_gpu_options
from nanovllm.fast.attention.step_tables import StepTables
from nanovllm.features import option_checks
from nanovllm.features.costs.buckets import Buckets
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.kv_fp8.fp8_format import Fp8Format, parts_of, write_rows
from tests.support.equality import model, prompts
from tests.support.fp8_caches import OPTION, Fp8Case, own_answer
from tests.support.gpu_steps import GpuStep, compute_without_kernels, run, run_graphs_on_a_cpu
from tests.support.llms import generate, greedy, token_ids
from tests.support.paged_cases import MIXED_STEPS, NUM_BLOCKS, SPANS, TRAITS
from tests.support.shared_decodes import SharedDecodes, random_case, wide_group_and_others
from tests.support.tiny_models import save_tiny, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton, and TRITON_INTERPRET=1",
)


def hard_rows(num_rows, num_heads, width, dtype):
    """Rows of all sizes, with zeros, ties of the rounding, and numbers far below a row's largest."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, num_heads, width, generator=generator)
    rows *= torch.exp2(torch.randint(-30, 30, (num_rows, num_heads, 1), generator=generator).float())
    rows *= torch.exp2(-torch.randint(0, 20, rows.shape, generator=generator).float())
    rows[0] = 0
    rows[1] = torch.linspace(-448, 448, width)
    rows[2, :, 0] = 448.0
    rows[2, :, 1:] = torch.arange(width - 1) / 1024  # halves of the finest steps
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads, widths", [(3, (48, 48)), (1, (64, 32)), (8, (128, 128))])
def test_stored_rows_have_the_bytes_of_the_plain_form(num_heads, widths, dtype):
    from nanovllm.fast.kernels.fp8_rows import _store_rounded

    slots = torch.randperm(63)[:40] + 1
    rows = [hard_rows(40, num_heads, width, dtype) for width in widths]
    plain = [torch.zeros(64, num_heads, width + 4, dtype=torch.uint8) for width in widths]
    for part, cache, is_value in zip(rows, plain, (False, True), strict=True):
        write_rows(part, cache, slots, is_value=is_value)
    states = [part.transpose(0, 1)[None] for part in rows]
    own = [torch.zeros_like(cache) for cache in plain]
    if widths[0] == widths[1]:
        together = torch.stack(own)
        _store_rounded(*states, together, None, slots)
        own = [*together]
    else:
        _store_rounded(*states, *own, slots)
    for ours, theirs, is_value in zip(own, plain, (False, True), strict=True):
        assert torch.equal(ours, theirs)
        values, scales = parts_of(ours, is_value=is_value)
        assert values.any() and not values[0, 0].any() and not scales[0, :, 0].any(), "the null block is not written"


@pytest.mark.parametrize("trait", ["none", *TRAITS])
def test_decodes_equal_dense_attention_over_rounded_k_and_v(trait):
    for contexts in ([100, 7, 33, 0, 16], [300], [250, 120]):
        case = Fp8Case([(context, 1) for context in contexts], head_dim=48, groups=2, **TRAITS.get(trait, {}))
        case.check(run(case, "cpu", by_kernel=True))


@pytest.mark.parametrize("seed", range(6))
def test_decodes_that_read_blocks_together_equal_dense_attention(seed):
    case = random_case(seed, "cpu", most=16, in_fp8=True)
    case.check(case.run(case.prefixes()))
    case.check(case.run(None))


def test_a_wide_group_reads_rounded_blocks():
    tables, contexts = wide_group_and_others(45, 9, block_size=16)
    case = SharedDecodes(tables, contexts, heads=(2, 4, 48), gpu=(4, 232_448), in_fp8=True)
    prefixes = case.prefixes(wide_tokens=64)
    assert prefixes.wide is not None and len(prefixes.wide.bundles) > 0
    case.check(case.run(prefixes))


@pytest.mark.parametrize("step", MIXED_STEPS)
def test_chunks_read_blocks_that_were_widened_for_them(monkeypatch, step):
    compute_without_kernels(monkeypatch)
    case = Fp8Case(MIXED_STEPS[step], head_dim=32, groups=2, keeps_for_boundary=True)
    case.check(run(case, "cpu", by_kernel=True))


@pytest.mark.parametrize("trait", TRAITS)
def test_chunks_of_every_trait_read_widened_blocks(monkeypatch, trait):
    compute_without_kernels(monkeypatch)
    case = Fp8Case(SPANS, head_dim=32, groups=2, keeps_for_boundary=True, **TRAITS[trait])
    case.check(run(case, "cpu", by_kernel=True))


def test_only_the_null_block_and_those_of_chunks_are_widened():
    from nanovllm.fast.kernels.fp8_rows import WidenedChunks

    case = Fp8Case([(37, 1), (20, 40), (0, 7)], head_dim=32)
    write_rows(torch.ones(16, 2, 32), case.caches[0], torch.arange(16))
    buckets = Buckets(EngineConfig(max_num_seqs=8, max_num_batched_tokens=512, block_size=16))
    step = GpuStep(case, "cpu", buckets)
    widened = WidenedChunks([case.traits], [NUM_BLOCKS * 16], 16, case.dtype, torch.device("cpu"))
    keys, values = widened.of_step(*case.caches, StepTables.from_inputs(step.inputs))
    changed = keys.view(NUM_BLOCKS, -1).any(1).nonzero()[:, 0].tolist()
    wanted = {0, *(block for entry in case.layout.chunks for block in entry.block_table)}
    assert set(changed) == wanted
    for own, cache, is_value in zip((keys, values), case.caches, (False, True), strict=True):
        expected = Fp8Format().read(cache, case.dtype, is_value).view(NUM_BLOCKS, -1)[changed]
        assert torch.equal(own.view(NUM_BLOCKS, -1)[changed].nan_to_num(7), expected.nan_to_num(7))


def test_an_engine_of_graphs_answers_as_transformers_over_rounded_k_and_v(monkeypatch, tmp_path):
    """Fused rotary kernel, decodes, widened chunks, prefix hits; graphs replay by calls."""
    run_graphs_on_a_cpu(monkeypatch, left_out=["use_kernel_layers", "stack_layers", "compile_layers"])
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(
        flex_gpu_options, "find_kernel", lambda file, name: find_kernel(file, name) if file == "paged_decode" else None
    )
    monkeypatch.setattr(option_checks, "why_no_8_bit_kv", lambda _: None)
    batch = [prompts()[number] for number in (1, 4, 14)]
    options = {"num_kv_blocks": 60, "max_model_len": 240, "block_size": 16, "max_num_seqs": 4}
    folder = save_tiny(tmp_path, "qwen3")
    with LLM(
        folder, tokenizer=tiny_tokenizer(), dtype="float32", max_num_batched_tokens=70, **options, **OPTION
    ) as llm:
        found = [token_ids(generate(llm, batch, greedy(3))) for _ in range(2)]
        assert llm._engine.model_runner.binding.rotary_changes and llm.stats().prefix_cache_hits > 0
    assert found == 2 * [[own_answer(model("qwen3"), prompt, 3) for prompt in batch]]


def test_compiled_layers_store_by_the_operator():
    from nanovllm.fast.kernels.fp8_rows import store_rounded

    def write(key, value, caches, slots):
        store_rounded(key, value, *caches, slots)
        return key + 1

    compiled = torch.compile(write, fullgraph=True, backend="aot_eager")
    key, value = torch.randn(2, 1, 2, 5, 32).unbind()
    slots = torch.tensor([3, 17, 18, 40, 1])
    plain = torch.zeros(2, 48, 2, 36, dtype=torch.uint8)
    Fp8Format().write(key, value, plain, slots)
    for own, apart in ((torch.zeros_like(plain), False), (torch.zeros_like(plain), True)):
        compiled(key, value, (*own,) if apart else (own, None), slots)
        assert torch.equal(own, plain)
