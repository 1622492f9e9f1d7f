"""Recurrent layers on a GPU, their decodes within graphs and without: greedy tokens of `transformers`, and kernels."""

import copy
import functools
import importlib
import importlib.util
import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.fast.gpu.state_graphs import StateGraphExecutor
from nanovllm.fast.kernels.state_checks import first_wrong
from nanovllm.features.speculation import lengths
from tests.support.class_cases import chunk_prompts, own_answers
from tests.support.llms import check_engine
from tests.support.mock_drafts import KnownAnswers
from tests.support.tiny_classes import VOCAB_SIZE, tiny_class_model

NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "max_model_len": 224, "max_num_seqs": 4, "max_num_batched_tokens": 90, "block_size": 64,
}  # fmt: skip
# In float32 experts are not captured: the library counts their rows on the host.
DENSE = ("Qwen3_5ForCausalLM", "OlmoHybridForCausalLM", "Mamba2ForCausalLM", "Lfm2ForCausalLM", "FalconH1ForCausalLM")
WITH_EXPERTS = ("Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM")


@functools.cache
def model(class_name):
    return tiny_class_model(class_name)


@functools.cache
def expected(class_name):
    """Of `transformers` on a CPU, or on the GPU with flash-linear-attention, which takes no other tensors."""
    if importlib.util.find_spec("fla") is None:
        return own_answers(model(class_name), chunk_prompts(), NUM_TOKENS)
    return own_answers(copy.deepcopy(model(class_name)).cuda(), chunk_prompts(), NUM_TOKENS)


def answers(class_name, rounds=2, **options):
    """Tokens of each round, and statistics."""
    found = []
    with LLM(copy.deepcopy(model(class_name)).cuda(), **(OPTIONS | {"num_kv_blocks": 60} | options)) as llm:
        runner = llm._engine.model_runner
        assert isinstance(runner.executor, StateGraphExecutor)
        assert all(layer.kernel_forward is not None for layer in runner.binding.mixers.layers)
        for _ in range(rounds):
            found.append([o.outputs[0].token_ids for o in llm.generate(chunk_prompts(), GREEDY, use_tqdm=False)])
            check_engine(llm)
        if llm.config.cuda_graphs:
            assert runner.executor._forwards.graphs
            assert all(shape.num_tiles == 0 for shape in runner.executor._forwards.graphs)
        return found, llm.stats()


@pytest.fixture
def kernels():
    return pytest.importorskip("nanovllm.fast.kernels.triton_states").load_state_kernels()


def test_kernels_equal_torch(kernels):
    assert first_wrong(kernels, "cuda") is None


def test_the_null_block_reads_as_zero_and_no_other_slot_is_written(kernels):
    kernels.reads, kernels.writes = (torch.tensor(slots, device="cuda") for slots in ([0, 5, 0], [2, 7, 0]))
    pool = torch.full((9, 4, 16, 24), float("nan"), device="cuda")
    pool[5] = 1.5
    query, value = torch.ones(3, 1, 2, 16, device="cuda"), torch.ones(3, 1, 4, 24, device="cuda")
    zeros, ones = torch.zeros(3, 1, 4, device="cuda"), torch.ones(3, 1, 4, device="cuda")
    output, _ = kernels.delta_rule(query, query, value, zeros, ones, pool)
    assert output.isfinite().all()
    assert [bool(slot.isfinite().all()) for slot in pool] == [n in (0, 2, 5, 7) for n in range(9)]
    assert (pool[5] == 1.5).all()


@pytest.mark.parametrize("class_name", DENSE)
def test_tokens_within_graphs_are_those_of_transformers_with_hits_and_preemption(class_name):
    found, stats = answers(class_name, cuda_graphs=True, num_kv_blocks=7)
    assert found == 2 * [expected(class_name)]
    assert stats.prefix_cache_hits > 0
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("class_name", [DENSE[0], *WITH_EXPERTS])
def test_tokens_without_graphs_are_those_of_transformers(class_name):
    found, _ = answers(class_name, cuda_graphs=False if class_name in DENSE else None)
    assert found == 2 * [expected(class_name)]


def test_poisoned_slots_reach_no_token_without_kernels(monkeypatch):
    """Padding reads and writes the null block, whatever it holds; slots are gathered and scattered here."""
    from nanovllm.features.states import state_kernels

    monkeypatch.setattr(state_kernels, "find_kernel", lambda *_: None)
    with LLM(copy.deepcopy(model(DENSE[0])).cuda(), **OPTIONS, num_kv_blocks=60, cuda_graphs=True) as llm:
        for states in llm._engine.model_runner.binding.caches.of_records:
            for state in states:
                state.fill_(float("nan"))
        outputs = llm.generate(chunk_prompts(), GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected(DENSE[0])


@pytest.mark.costly
@pytest.mark.parametrize("class_name", WITH_EXPERTS)
def test_experts_in_bfloat16_answer_within_graphs_as_without(class_name):
    results = []
    for graphs in (True, False):
        module = copy.deepcopy(model(class_name)).to(torch.bfloat16).cuda()
        with LLM(module, **OPTIONS, num_kv_blocks=60, cuda_graphs=graphs) as llm:
            outputs = llm.generate(chunk_prompts(), GREEDY, use_tqdm=False)
            results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs the extra hybrid")
@pytest.mark.parametrize("class_name", ["Qwen3_5ForCausalLM", "KimiLinearForCausalLM"])
def test_chunks_by_flash_linear_attention_give_the_tokens_of_transformers_with_it(class_name):
    """Chunks of one step, of several lengths, some behind a state."""
    functions = vars(importlib.import_module(type(model(class_name)).__module__))
    name = "torch_chunk_gated_delta_rule" if "Qwen" in class_name else "chunk_kimi_delta_attention"
    taken = [cell.cell_contents for cell in functions[name].__closure__]
    assert any(getattr(each, "__module__", "").startswith("fla.") for each in taken)
    with LLM(copy.deepcopy(model(class_name)).cuda(), **OPTIONS, num_kv_blocks=60) as llm:
        assert all(layer.chunks is not None for layer in llm._engine.model_runner.binding.mixers.layers)
        for _ in range(2):
            outputs = llm.generate(chunk_prompts(), GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected(class_name)


def test_a_loaded_model_answers_as_a_live_one(tmp_path):
    from tests.support.tiny_models import tiny_tokenizer

    model(DENSE[0]).save_pretrained(tmp_path)
    options = OPTIONS | {"num_kv_blocks": 60, "dtype": "float32", "tokenizer": tiny_tokenizer()}
    with LLM(tmp_path, overlap=False, **options) as llm:
        assert llm.config.cuda_graphs
        for _ in range(2):
            outputs = llm.generate(chunk_prompts(), GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected(DENSE[0])


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"cuda_graphs": False}], ids=str)
@pytest.mark.parametrize("class_name", DENSE)
def test_tokens_with_drafts_are_those_without(class_name, options, monkeypatch):
    """A rejected draft leaves no trace in a state; verify steps run as chunks, outside of the graphs of decodes."""
    monkeypatch.setattr(lengths, "PLAIN_WINDOW", 10**9)  # drafts never rest
    choice = random.Random(6)

    def mostly_right(_, drafts):
        return [token_id if choice.random() < 0.85 else choice.randrange(VOCAB_SIZE) for token_id in drafts]

    known = {tuple(prompt): [tokens] for prompt, tokens in zip(chunk_prompts(), expected(class_name), strict=True)}
    found, stats = answers(class_name, speculation=KnownAnswers(known, mostly_right), max_num_seqs=24, **options)
    assert found == [expected(class_name)] * 2
    assert stats.speculation.num_draft_tokens > stats.speculation.num_accepted_tokens > 40
