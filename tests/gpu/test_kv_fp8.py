"""K and V in 8-bit floats on a GPU: rows as they are stored, attention over them, engines in every way of stepping."""

import copy
import functools
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.device import find_kernel
from nanovllm.features.kv_fp8.fp8_format import CACHE_DTYPE, parts_of, write_rows
from nanovllm.features.option_checks import why_no_8_bit_kv
from tests.support import layer_kinds
from tests.support.class_cases import chunk_prompts
from tests.support.equality import model, prompts
from tests.support.fp8_caches import OPTION, Fp8Case, own_answer, rounded
from tests.support.gpu_steps import run
from tests.support.llms import check_engine
from tests.support.paged_cases import MIXED_STEPS, SPANS, TRAITS
from tests.support.shared_decodes import SharedDecodes, random_case, wide_group_and_others
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import FAMILIES, save_tiny, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or why_no_8_bit_kv(torch.device("cuda")) is not None,
    reason="needs a GPU that converts 8-bit floats",
)
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DECODES = [(100, 1), (7, 1), (33, 1), (0, 1), (16, 1), (300, 1)]
NUM_NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
OPTIONS = {"num_kv_blocks": 200, "max_model_len": 300, "max_num_seqs": 32, **OPTION}
WAYS = {
    "graphs, overlapped": {},
    "graphs, one by one": {"overlap": False},
    "no graphs": {"cuda_graphs": False},
    "eager": {"enforce_eager": True},
    "small budget": {"max_num_batched_tokens": 48, "max_num_seqs": 8, "block_size": 16},
    "preemption": {"num_kv_blocks": 17, "max_model_len": 230, "block_size": 16, "max_num_batched_tokens": 80},
    "drafts": {"speculation": "suffix"},
}


# ------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "widths"), [(2, (64, 64)), (8, (128, 128)), (3, (80, 80)), (1, (192, 128))])
def test_stored_rows_have_the_bytes_of_the_plain_form(num_heads, widths, dtype):
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(300, generator=generator)[:200]
    sizes = torch.logspace(-3, 3, 200)[:, None, None]
    rows = [(torch.randn(200, num_heads, width, generator=generator) * sizes).to(dtype) for width in widths]
    rows[0][3] = 0
    plain = [torch.zeros(304, num_heads, width + 4, dtype=torch.uint8) for width in widths]
    for part, cache, is_value in zip(rows, plain, (False, True), strict=True):
        write_rows(part, cache, slots, is_value=is_value)
    states = [part.transpose(0, 1)[None].to(CUDA) for part in rows]
    own = [torch.zeros_like(cache).to(CUDA) for cache in plain]
    on_gpu = [torch.zeros_like(cache).to(CUDA) for cache in plain]
    store = find_kernel("fp8_rows", "store_rounded")
    if widths[0] == widths[1]:
        own = torch.stack(own)
        store(*states, own, None, slots.to(CUDA))
    else:
        store(*states, *own, slots.to(CUDA))
    for part, cache, is_value in zip(rows, on_gpu, (False, True), strict=True):
        write_rows(part.to(CUDA), cache, slots.to(CUDA), is_value=is_value)
    for ours, theirs, torchs in zip(own, plain, on_gpu, strict=True):
        assert torch.equal(torchs.cpu(), theirs), "the plain form on both devices"
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
def test_rotated_keys_are_rounded_as_they_are_stored(has_norms):
    """The fused kernel's cache in 8 bits is its plain cache, rounded."""
    torch.manual_seed(0)
    rotate = find_kernel("rotary", "rotate_and_store")
    rows, heads, kv_heads, width = 40, 8, 2, 128
    products = torch.randn(1, rows, (heads + 2 * kv_heads) * width, device=CUDA, dtype=torch.bfloat16)
    turns = [torch.randn(1, rows, width, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
    norms = [torch.rand(width, device=CUDA, dtype=torch.bfloat16) for _ in range(2)] if has_norms else []
    slots = torch.randperm(64, device=CUDA)[:rows]
    plain = torch.zeros(2, 64, kv_heads, width, device=CUDA, dtype=torch.bfloat16)
    own = torch.zeros(2, 64, kv_heads, width + 4, device=CUDA, dtype=torch.uint8)
    queries = [rotate(products, *turns, norms, 1e-6, cache, slots) for cache in (plain, own)]
    assert torch.equal(*queries)
    for part, cache, is_value in zip(plain, own, (False, True), strict=True):
        wanted = torch.zeros_like(cache)
        write_rows(part[slots], wanted, slots, is_value=is_value)
        assert torch.equal(cache, wanted) and parts_of(cache)[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 32), (96, 64), (128, 128), (256, 64), (128, 256)])
def test_decodes_equal_dense_attention_over_rounded_k_and_v(head_dim, block_size, dtype):
    case = Fp8Case(DECODES, head_dim=head_dim, block_size=block_size, groups=4, dtype=dtype)
    case.check(run(case, by_kernel=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_over_poisoned_blocks_equals_dense_attention(trait, dtype):
    for spans in (SPANS, MIXED_STEPS["a whole prompt"], DECODES):
        case = Fp8Case(spans, keeps_for_boundary=True, dtype=dtype, **TRAITS[trait])
        case.check(run(case, by_kernel=True))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_small_and_large_values_keep_their_precision(scale):
    """K and V far from 1 in float16's range, which the kernel computes in."""
    case = Fp8Case(DECODES, groups=4, dtype=torch.bfloat16)
    for number, (keys, values) in enumerate(case.dense):
        case.dense[number] = keys / 4, values * scale
    again = Fp8Case.__new__(Fp8Case)
    again.__dict__ |= case.__dict__
    written = torch.zeros_like(case.caches)
    for entry, (keys, values) in zip(case.entries, case.dense, strict=True):
        slots = torch.tensor([case.slot(entry.block_table, position) for position in range(len(keys))], device=CUDA)
        for part, states, is_value in zip(written, (keys, values), (False, True), strict=True):
            write_rows(states.to(CUDA), part, slots, is_value=is_value)
    again.caches = written
    output = run(again, by_kernel=True).float().cpu() / scale
    torch.testing.assert_close(output, again.expected() / scale, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("seed", range(8))
def test_decodes_that_read_blocks_together_equal_dense_attention(seed):
    case = random_case(seed, "cuda", in_fp8=True)
    case.check(case.run(case.prefixes()))
    case.check(case.run(None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 4, 128), (1, 8, 64)], ids=str)
def test_wide_groups_read_rounded_blocks(heads, dtype):
    tables, contexts = wide_group_and_others(90, 20, block_size=64)
    case = SharedDecodes(
        tables, contexts, heads=heads, block_size=64, dtype=dtype, device="cuda", gpu=(132, 232_448), in_fp8=True
    )
    prefixes = case.prefixes(wide_tokens=64)
    assert prefixes is not None and prefixes.wide is not None and len(prefixes.wide.bundles) > 0
    case.check(case.run(prefixes))


# ------------------------------------------------------------------------------------------------------------- engines


def certain_prompts():
    """All prompts but one: two of Qwen3's tokens are 8e-5 apart there, and whichever way a row is rounded decides."""
    return [prompt for number, prompt in enumerate(prompts()) if number != 15]


@functools.cache
def expected(family):
    return [own_answer(model(family), prompt, NUM_NEW_TOKENS) for prompt in certain_prompts()]


def answers(source, batch, rounds=2, check=None, **options):
    own = {"tokenizer": tiny_tokenizer(), "dtype": "float32"} if isinstance(source, (str, Path)) else {}
    with LLM(source, **(OPTIONS | own | options)) as llm:
        found = []
        for _ in range(rounds):
            found.append([o.outputs[0].token_ids for o in llm.generate(batch, GREEDY, use_tqdm=False)])
            check_engine(llm)
        assert all(part.dtype == CACHE_DTYPE for part in llm._engine.model_runner.binding.caches.of_layers[0])
        if check is not None:
            check(llm)
        return found, llm.stats()


# Layers are compiled anew for each engine: every way for one family, the others in one way.
@pytest.mark.parametrize(
    ("family", "way"), [("llama", way) for way in WAYS] + [(family, next(iter(WAYS))) for family in FAMILIES[1:]]
)
def test_tokens_are_those_of_transformers_over_rounded_k_and_v(family, way):
    found, stats = answers(model(family), certain_prompts(), **WAYS[way])
    assert found == 2 * [expected(family)]
    assert stats.prefix_cache_hits > 0 and (stats.num_preemptions > 0) == (way == "preemption")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(save_tiny(tmp_path_factory.mktemp("model"), "qwen3"))


def test_a_loaded_folder_rounds_in_the_fused_kernel_and_keeps_no_stack(folder):
    def check(llm):
        binding = llm._engine.model_runner.binding
        assert binding.rotary_changes and binding.stacked is None
        assert llm._engine.model_runner.executor._forwards.graphs

    for way in ({}, {"max_num_batched_tokens": 64, "max_num_seqs": 8}):
        found, _ = answers(folder, certain_prompts(), check=check, **way)
        assert found == 2 * [expected("qwen3")]


@functools.cache
def kind_answers(family):
    return [own_answer(layer_kinds.model(family), prompt, NUM_NEW_TOKENS) for prompt in layer_kinds.prompts()]


@pytest.mark.parametrize(
    ("family", "way"),
    [(family, "graphs") for family in layer_kinds.MODELS]
    + [(family, way) for family in ("Gemma2", "GptOss", "DeepseekV2") for way in ("eager", "preemption")],
)
def test_windows_sinks_shared_and_wide_keys_answer_the_same(family, way):
    options = {"block_size": 16, "num_kv_blocks": 80, "max_model_len": 160, "max_num_seqs": 6}
    options |= {"max_num_batched_tokens": 50, "enforce_eager": way == "eager"}
    if way == "preemption":
        options |= {"num_kv_blocks": 14, "max_num_batched_tokens": 22}
    source = copy.deepcopy(layer_kinds.model(family)).cuda()
    found, _ = answers(source, layer_kinds.prompts(), 2 if way == "graphs" else 1, **options)
    assert all(each == kind_answers(family) for each in found)


@pytest.mark.parametrize("class_name", ["Qwen3_5ForCausalLM", "FalconH1ForCausalLM"])
def test_hybrids_answer_the_same_in_any_schedule(class_name):
    options = {"max_model_len": 224, "max_num_seqs": 4, "max_num_batched_tokens": 90, "block_size": 64}
    found = []
    for own in ({"num_kv_blocks": 60}, {"num_kv_blocks": 60, "enforce_eager": True}):
        source = copy.deepcopy(tiny_class_model(class_name)).cuda()
        found += answers(source, chunk_prompts(), **(options | own))[0]
    assert all(each == found[0] for each in found)


def test_blocks_return_from_host_memory_with_their_scales(folder):
    tight = {"num_kv_blocks": 20, "max_model_len": 230, "block_size": 16, "prefix_cache_host_bytes": 2**26}
    found, stats = answers(folder, certain_prompts()[8:], 3, **tight)
    assert found == 3 * [expected("qwen3")[8:]]
    assert stats.tiers.num_loaded_blocks > 0


def test_default_memory_leaves_room_for_widened_chunks(folder):
    """The pool takes the memory that is left; prompts of its whole length fit beside it."""
    free, total = torch.cuda.mem_get_info()
    share = 1 - free / total + 0.1  # of what others have on this GPU, and of this engine
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", gpu_memory_utilization=share, **OPTION) as llm:
        executor = llm._engine.model_runner.executor
        memory = executor.backend._widened._memory
        taken = sum(llm._engine.model_runner.binding.caches.group_bytes.values())
        assert memory.nbytes < 1.05 * taken
        llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert torch.cuda.memory_reserved() < 0.1 * total + 2**30


def prompt_logprobs(folder, **options):
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    options |= {"dtype": "bfloat16", "num_kv_blocks": 200, "max_model_len": 300}
    with LLM(folder, tokenizer=tiny_tokenizer(), **options) as llm:
        outputs = llm.generate(prompts()[5:], params, use_tqdm=False)
    found = []
    for prompt, output in zip(prompts()[5:], outputs, strict=True):
        found += [each[token].logprob for token, each in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
    return torch.tensor(found)


def test_bfloat16_differs_between_ways_as_little_as_without_rounding(folder):
    """A row that rounds to another step may differ; the rest is bfloat16's own difference between kernels."""
    plain, eager = (prompt_logprobs(folder, enforce_eager=each) for each in (False, True))
    own, own_eager = (prompt_logprobs(folder, enforce_eager=each, **OPTION) for each in (False, True))
    noise, difference = (plain - eager).abs().mean(), (own - own_eager).abs().mean()
    assert difference < 4 * noise + 0.02, (noise, difference)
    print("mean difference of logprobs: plain", noise, "rounded", difference, "rounding", (own - plain).abs().mean())


def test_wide_heads_are_read_by_sdpa_or_refused():
    from tests.support.tiny_models import tiny_model

    module = tiny_model("qwen3", head_dim=320).to(CUDA)
    with pytest.raises(ValueError, match="layer 0 has heads of 320 elements in 8-bit floats"):
        LLM(module, attention_backend="flex", **OPTIONS)
    wanted = [own_answer(module, prompt, NUM_NEW_TOKENS) for prompt in prompts()[3:8]]
    assert answers(module, prompts()[3:8])[0] == 2 * [wanted]


def test_rounding_of_the_reference_is_that_of_torch():
    rows = torch.randn(100, 2, 64)
    largest = rows.abs().amax(-1, keepdim=True)
    own = (rows * (torch.full_like(largest, 448) / largest)).to(torch.float8_e4m3fn).float() * (largest * (1 / 448))
    assert torch.equal(own, rounded(rows))
