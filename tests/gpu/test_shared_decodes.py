"""Decodes that read shared blocks together, against dense float32 attention, and in whole engines."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.fast.attention import shared_prefixes
from nanovllm.fast.attention.shared_prefixes import SharedPrefixes, SharingRule
from nanovllm.fast.kernels.prompt_attention import TOLERANCE, AttentionSizes, why_not
from nanovllm.fast.kernels.wide_attention import WideAttention
from tests.support.equality import model
from tests.support.llms import check_engine
from tests.support.shared_decodes import KernelSizes, SharedDecodes, random_case, wide_group_and_others
from tests.support.tiny_models import random_prompts, tiny_tokenizer

# Few, since each takes a compilation; the interpreted kernels are tested with any (tests/attention).
SIZES = [
    KernelSizes((1, 1, 64), 16, torch.float32),
    KernelSizes((2, 3, 128), 64, torch.bfloat16),
    KernelSizes((3, 8, 64), 128, torch.float16),
    KernelSizes((1, 4, 128), 16, torch.bfloat16),
]


@pytest.mark.parametrize("sizes", SIZES, ids=["alone", "by three", "by eight", "by four"])
def test_random_groups_equal_dense_attention(sizes):
    for seed in range(8):
        case = random_case(seed, "cuda", most=100, sizes=sizes)
        case.check(case.run(case.prefixes()))
        assert int(case.kernel._arrivals.abs().sum()) == 0, "ready for the next layer"
        case.check(case.run(None))


def test_a_step_with_groups_gives_the_same_bits_whenever_it_is_computed():
    tables = [[*range(1, 33), 100 + 3 * number, 101 + 3 * number] for number in range(60)]
    case = SharedDecodes(
        tables, [32 * 64 + 70 + number % 50 for number in range(60)], heads=(8, 2, 128), block_size=64,
        dtype=torch.bfloat16, device="cuda", gpu=(132, 232_448),
    )  # fmt: skip
    prefixes = case.prefixes()
    first = case.run(prefixes)
    case.check(first)
    for _ in range(50):
        assert torch.equal(case.run(prefixes), first)


@pytest.mark.parametrize("sizes", SIZES, ids=["alone", "by three", "by eight", "by four"])
@pytest.mark.parametrize(("num_members", "num_tokens"), [(33, 4096), (64, 8192), (100, 4096), (256, 5120)])
def test_wide_groups_beside_others_equal_dense_attention(sizes, num_members, num_tokens):
    heads, block_size, dtype = sizes
    tables, contexts = wide_group_and_others(num_members, num_tokens // block_size, block_size=block_size)
    case = SharedDecodes(
        tables, contexts, heads=heads, block_size=block_size, dtype=dtype, device="cuda", gpu=(132, 232_448)
    )  # fmt: skip
    prefixes = case.prefixes(wide_tokens=4096)
    assert prefixes is not None and prefixes.wide is not None
    first = case.run(prefixes)
    case.check(first)
    for _ in range(20):
        assert torch.equal(case.run(prefixes), first), "the same bits"
    assert int(case.kernel._arrivals.abs().sum()) == 0, "ready for the next layer"
    case.check(case.run(case.prefixes()))


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(
    ("heads", "value_dim"), [((16, 8, 128), None), ((9, 3, 64), None), ((8, 1, 256), None), ((4, 4, 192), 128)]
)
def test_the_check_of_wide_groups_admits_each_form_and_no_wrong_one(
    heads, value_dim, block_size, dtype, softcap, monkeypatch
):
    sizes = AttentionSizes(*heads, block_size, dtype, None, softcap, None, value_dim)
    if reason := why_not(sizes, torch.device("cuda")):
        pytest.skip(reason)
    kernel = WideAttention(sizes, torch.device("cuda"))
    assert kernel.error_at_start() <= TOLERANCE
    attend = kernel.attend
    monkeypatch.setattr(kernel, "attend", lambda *args: attend(*args[:-1], 0.9 * args[-1]))
    assert kernel.error_at_start() > TOLERANCE


def test_wide_groups_are_read_by_the_kernel_for_hopper_and_by_triton_alike():
    heads = 2, 3, 128
    if reason := why_not(AttentionSizes(6, *heads[::2], 64, torch.bfloat16), torch.device("cuda")):
        pytest.skip(reason)
    tables, contexts = wide_group_and_others(100, 70, block_size=64)
    case = SharedDecodes(
        tables, contexts, heads=heads, block_size=64, dtype=torch.bfloat16, device="cuda", gpu=(132, 232_448)
    )  # fmt: skip
    prefixes, kernel = case.prefixes(wide_tokens=4096), case.kernel
    outputs = []
    for kernel.uses_wide_kernel in (True, False):
        outputs.append(case.run(prefixes))
        case.check(outputs[-1])
    assert not torch.equal(*outputs), "two kernels"


def test_an_engine_with_a_wide_group_answers_the_same_in_float32(monkeypatch):
    """Before and after the graph of its steps is captured, as decodes end."""
    monkeypatch.setattr(shared_prefixes, "_MEMBER_BYTES", 0.0)
    monkeypatch.setattr(shared_prefixes, "_STEP_BYTES", 0.0)
    system = random_prompts(1, low=80, high=80, seed=9)[0]
    prompts = [system + prompt for prompt in random_prompts(50, low=1, high=30, seed=1)]
    params = [
        SamplingParams(temperature=number % 2, max_tokens=30 + number, seed=number) for number in range(len(prompts))
    ]
    answers = []
    for wide_tokens in (64, 10**6):
        for_kernel = SharingRule.for_kernel.__func__

        def with_tokens(cls, *args, for_kernel=for_kernel, wide_tokens=wide_tokens, **kw):
            return for_kernel(cls, *args, **kw)._replace(wide_tokens=wide_tokens, wide_reads=0)

        with monkeypatch.context() as context:
            context.setattr(SharingRule, "for_kernel", classmethod(with_tokens))
            with LLM(
                model("llama"), tokenizer=tiny_tokenizer(), num_kv_blocks=800, max_model_len=300, max_num_seqs=64,
                block_size=16,
            ) as llm:  # fmt: skip
                outputs = llm.generate(prompts, params, use_tqdm=False)
                executor = llm._engine.model_runner.executor
                assert any(shape.is_wide for shape in executor._forwards.graphs) == (wide_tokens == 64)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def groups_of_steps(monkeypatch, *, shares):
    """Let whatever can be shared be, or nothing; returns the list of each step's number of bundles."""
    monkeypatch.setattr(shared_prefixes, "_MEMBER_BYTES", 0.0)
    monkeypatch.setattr(shared_prefixes, "_STEP_BYTES", 0.0)
    original, counts = SharedPrefixes.from_layout.__func__, []

    def from_layout(cls, *args):
        prefixes = original(cls, *args) if shares else None
        counts.append(0 if prefixes is None else len(prefixes.bundles))
        return prefixes

    monkeypatch.setattr(SharedPrefixes, "from_layout", classmethod(from_layout))
    return counts


@pytest.mark.parametrize("pool", [400, 40])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_whose_decodes_share_blocks_answers_the_same_in_float32(monkeypatch, overlap, pool):
    """A system prompt of all, a longer one of some, several samples of one prompt, and in a small pool preemption."""
    system, examples = (random_prompts(1, low=size, high=size, seed=size)[0] for size in (50, 40))
    prompts = [system + prompt for prompt in random_prompts(8, low=1, high=30, seed=1)]
    prompts += [system + examples + prompt for prompt in random_prompts(6, low=1, high=30, seed=2)]
    prompts += random_prompts(3, low=1, high=90, seed=3)
    params = [
        SamplingParams(temperature=number % 2, max_tokens=8 + 3 * number, n=3 if number % 4 == 1 else 1, seed=number)
        for number in range(len(prompts))
    ]
    answers = []
    for shares in (True, False):
        with monkeypatch.context() as context:
            counts = groups_of_steps(context, shares=shares)
            with LLM(
                model("llama"), tokenizer=tiny_tokenizer(), num_kv_blocks=pool, max_model_len=300, max_num_seqs=32,
                block_size=16, overlap=overlap,
            ) as llm:  # fmt: skip
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert (llm.stats().num_preemptions > 0) == (pool == 40)
                check_engine(llm)
            answers.append([[sample.token_ids for sample in output.outputs] for output in outputs])
            assert (max(counts) > 1) == shares
    assert answers[0] == answers[1]
