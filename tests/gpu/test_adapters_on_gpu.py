"""Adapters on a GPU: kernels against torch, and tokens of merged weights in every company, in graphs and without."""

import importlib.util
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.fast.gpu.adapter_graphs import AdapterGraphs
from nanovllm.fast.layers import adapted_layers
from nanovllm.fast.layers.adapted_layers import Factors, RowsBySlot, num_starts, sort_rows
from nanovllm.fast.layers.dense_layers import LEAST_ROWS
from nanovllm.fast.layers.kernel_layers import KernelLayer
from tests.support.adapter_files import ALL, KINDS, merged, save_adapter, save_kinds
from tests.support.layer_kinds import own_answer
from tests.support.llms import check_engine, generate, greedy, token_ids
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model, tiny_tokenizer

NAMES = [None, *KINDS]
NUM_TOKENS = 20
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
OPTIONS = {"num_kv_blocks": 400, "max_model_len": 300, "max_num_seqs": 48, "block_size": 16}
PROMPTS = random_prompts(12, low=1, high=120, seed=3)
OF_PROMPTS = [NAMES[number % len(NAMES)] for number in range(len(PROMPTS))]
SPANS = {"qkv": ((0, 384), (384, 512), (512, 640)), "one": ((0, 256),), "odd": ((0, 24), (24, 60), (60, 300))}
STACKED = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "num_layers": 3,
}  # fmt: skip
WAYS = {
    "graphs, overlapped": {},
    "graphs, one by one": {"overlap": False},
    "no graphs": {"cuda_graphs": False},
    "eager": {"enforce_eager": True},
    "two slots": {"max_loras": 2},
    "small pool": {"num_kv_blocks": 22, "max_num_batched_tokens": 80},
    "drafts": {"speculation": "suffix"},
}


# ------------------------------------------------------------------------------------------------------------ kernels


def kernels():
    """By name, since the file needs Triton."""
    from nanovllm.fast.kernels import low_rank

    return low_rank


def by_slot(slots, num_slots=5):
    """The rows of each slot together, on the GPU."""
    found = RowsBySlot(*(np.zeros(size, np.int32) for size in (len(slots), num_starts(num_slots), len(slots))))
    sort_rows(slots.cpu().numpy(), np.arange(len(slots)), found)
    return RowsBySlot(*(torch.from_numpy(numbers).cuda() for numbers in found))


def random_case(num_rows, size, spans, rank, dtype, *, num_slots=5, seed=0):
    """Product, states, factors and slots: decodes of any slots, then runs of one."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*sizes):
        return torch.randn(sizes, generator=generator, device="cuda").to(dtype)

    factors = Factors(
        random(num_slots, len(spans), rank, size) * size**-0.5, random(num_slots, rank, spans[-1][1]), spans
    )
    slots = torch.randint(-1, num_slots, (num_rows,), generator=generator, device="cuda", dtype=torch.int32)
    slots[num_rows // 3 :] = slots[num_rows // 3 :].sort().values
    return random(1, num_rows, spans[-1][1]), random(1, num_rows, size), factors, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("num_rows", [1, 3, 64, 256, 257, 8192])
@pytest.mark.parametrize("size, rank", [(384, 16), (100, 32), (4096, 16), (1000, 48), (2048, 64), (14336, 128)])
def test_rows_equal_those_of_torch_for_every_shape(num_rows, spans, size, rank, dtype):
    product, states, factors, slots = random_case(num_rows, size, SPANS[spans], rank, dtype)
    states[0, slots == 1] = float("nan")  # reaches no row of another slot
    own = kernels().add_low_rank(product.clone(), states, factors, by_slot(slots))
    right = adapted_layers.add_low_rank(product.clone(), states, factors, by_slot(slots))
    assert torch.equal(own[0, slots < 0], product[0, slots < 0])
    rows = slots != 1
    assert own[0, ~rows].isnan().all()
    distance = (own[0, rows].double() - right[0, rows].double()).norm() / right[0, rows].double().norm()
    assert not rows.any() or distance < (1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype):
    product, states, factors, slots = random_case(200, 1024, SPANS["qkv"], 32, dtype, num_slots=11)
    together = kernels().add_low_rank(product.clone(), states, factors, by_slot(slots, 11))
    for row in range(0, 200, 7):
        one = slice(row, row + 1)
        alone = kernels().add_low_rank(product[:, one].clone(), states[:, one], factors, by_slot(slots[one], 11))
        assert torch.equal(alone[0, 0], together[0, row])


def test_strided_states_and_products_are_read_and_other_numbers_of_rows_refused():
    product, states, factors, slots = random_case(40, 512, SPANS["one"], 16, torch.bfloat16)
    rows = by_slot(slots)
    right = kernels().add_low_rank(product.clone(), states, factors, rows)
    wide = torch.cat([states, states], dim=-1)[..., :512]
    strided = torch.cat([product, product], dim=-1)[..., :256]
    assert torch.equal(kernels().add_low_rank(strided, wide, factors, rows), right)
    with pytest.raises(ValueError, match="a product of 40 rows in a step of 39"):
        kernels().add_low_rank(product, states, factors, by_slot(slots[1:]))


def test_a_captured_launch_reads_the_slots_and_factors_of_its_replay():
    product, states, factors, slots = random_case(24, 512, SPANS["qkv"], 16, torch.bfloat16)
    add = kernels().add_low_rank
    slots = by_slot(slots)
    add(product.clone(), states, factors, slots)
    graph, output = torch.cuda.CUDAGraph(), product.clone()
    with torch.cuda.graph(graph):
        add(output, states, factors, slots)
    for seed in (1, 2):
        other, _, changed, rows = random_case(24, 512, SPANS["qkv"], 16, torch.bfloat16, seed=seed)
        for own, new in zip(slots, by_slot(rows), strict=True):
            own.copy_(new)
        factors.down.copy_(changed.down)
        output.copy_(other)
        graph.replay()
        assert torch.equal(output, add(other.clone(), states, factors, slots))


# ------------------------------------------------------------------------------------------------------------ engines


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of a model, adapters' folders by name, the model)"""
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_model()
    save_tiny(folder / "model")
    return folder / "model", save_kinds(folder, model), model.cuda()


@pytest.fixture(scope="module")
def answers(saved):
    """The greedy tokens of each prompt with each adapter, by `transformers`."""
    _, folders, model = saved
    found = {}
    for name in NAMES:
        module = model if name is None else merged(model.cpu(), folders[name]).cuda()
        module.cuda()
        found |= {(number, name): own_answer(module, prompt, NUM_TOKENS) for number, prompt in enumerate(PROMPTS)}
    return found


@contextmanager
def opened(saved, dtype="float32", **options):
    folder, folders, _ = saved
    with LLM(folder, dtype=dtype, tokenizer=tiny_tokenizer(), **OPTIONS | options) as llm:
        for name, path in folders.items():
            llm.load_adapter(name, path)
        yield llm


def adapter_graphs(llm):
    return llm._engine.model_runner.launch_step.__self__._device


def rest(llm):
    while llm._engine.use_idle_time(captures=True):
        pass


def lists(outputs):
    assert not any(output.error for output in outputs)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_merged_weights_cold_warm_and_within_graphs(way, saved, answers):
    with opened(saved, **WAYS[way]) as llm:
        is_graph = way != "eager"
        assert isinstance(adapter_graphs(llm), AdapterGraphs) == is_graph
        expected = [answers[each] for each in enumerate(OF_PROMPTS)]
        for _ in range(3):
            assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)) == expected
            if is_graph:
                rest(llm)
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == [answers[n, None] for n in range(len(PROMPTS))]
        if way.startswith("graphs"):
            assert adapter_graphs(llm)._forwards.graphs
        assert llm.stats().prefix_cache_hits > 0
        check_engine(llm)


def test_forty_requests_at_once_have_the_tokens_of_each_alone(saved, answers):
    each = [(number, NAMES[(number + turn) % len(NAMES)]) for turn in range(4) for number in range(10)]
    with opened(saved) as llm:
        for count in (1, 2, 5, 13, 40):
            outputs = generate(llm, [PROMPTS[n] for n, _ in each[:count]], GREEDY, adapter=[a for _, a in each[:count]])
            assert token_ids(outputs) == [answers[key] for key in each[:count]]


MIXED = [
    SamplingParams(seed=5, max_tokens=12, n=3),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=17, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=1),
    SamplingParams(seed=1, max_tokens=14, repetition_penalty=1.3),
    SamplingParams(seed=2, max_tokens=11, logit_bias={7: 4.0}),
]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "eager"])
def test_requests_of_every_kind_have_the_tokens_of_each_alone(way, saved):
    params = [MIXED[number % len(MIXED)] for number in range(len(PROMPTS))]
    with opened(saved, **WAYS[way]) as llm:
        requests = list(zip(PROMPTS, params, OF_PROMPTS, strict=True))
        alone = [lists(generate(llm, [prompt], own, adapter=name))[0] for prompt, own, name in requests]
        llm.reset_prefix_cache()
        for _ in range(2):
            assert lists(generate(llm, PROMPTS, params, adapter=OF_PROMPTS)) == alone
            rest(llm)
        if way == "small pool":
            assert llm.stats().num_preemptions > 0
        check_engine(llm)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "olmo2"])
def test_bfloat16_is_near_the_float32_model(family, tmp_path):
    """Layers by kernels, or uncompiled modules (Olmo 2); chunks, then decodes within graphs."""
    model = tiny_model(family)
    folder, path = save_tiny(tmp_path / "model", family), save_adapter(tmp_path / "a", model, targets=ALL, rank=12)
    reference = merged(model, path).cuda()
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    with LLM(folder, dtype="bfloat16", **OPTIONS) as llm:
        llm.load_adapter("a", path)
        binding = llm._engine.model_runner.binding
        assert any(isinstance(call, KernelLayer) for call in adapter_calls(binding)) == (family != "olmo2")
        for _ in range(2):
            outputs = generate(llm, PROMPTS, params, adapter=["a", None] * 6)
            for prompt, output in [*zip(PROMPTS, outputs, strict=True)][::2]:
                assert near(reference, prompt, output) < 0.25
            rest(llm)
        generate(llm, PROMPTS, params)


def adapter_calls(binding):
    return (binding.calls if binding.stacked is None else binding.stacked.layered_calls).values()


def near(reference, prompt, output):
    """Mean distance of the log-probabilities of a prompt's and its output's tokens."""
    tokens = prompt + output.outputs[0].token_ids
    with torch.no_grad():
        rows = reference(torch.tensor([tokens], device="cuda")).logits[0].log_softmax(-1)
    given = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    distances = [
        abs(entry[token].logprob - rows[at, token].item())
        for at, (entry, token) in enumerate(zip(given, tokens[1:], strict=True))
    ]
    return sum(distances) / len(distances)


def greedy_gap(reference, prompt, tokens):
    """By how much the logits of greedy tokens are below the largest ones, in the mean: near 0 for the right tokens."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
    return float((logits.amax(-1) - logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]).mean())


@pytest.fixture(scope="module")
def stacked(tmp_path_factory):
    """(folder of a model with layers in one launch, adapters' folders, float32 references by name)"""
    folder = tmp_path_factory.mktemp("stacked")
    model = tiny_model(**STACKED)
    save_tiny(folder / "model", **STACKED)
    folders = save_kinds(folder, model)
    references = {name: model if name is None else merged(model, folders[name]) for name in NAMES}
    return folder / "model", folders, {name: module.cuda() for name, module in references.items()}


def test_steps_often_taken_have_graphs_and_plain_steps_keep_the_stack(stacked):
    with opened(stacked, "bfloat16") as llm:
        executor, graphs = llm._engine.model_runner.executor, adapter_graphs(llm)
        plain = token_ids(generate(llm, PROMPTS[:2], GREEDY))
        stack = executor.stacked
        assert stack is not None and stack.num_launched > 0
        before = set(executor._forwards.graphs.values())
        for _ in range(3):
            generate(llm, PROMPTS[:2], GREEDY, adapter="b")
        assert any(not shape.num_tiles for shape in graphs._forwards.graphs)
        assert not before & set(graphs._forwards.graphs.values())
        assert executor.stacked is stack
        llm.reset_prefix_cache()
        launched = stack.num_launched
        assert token_ids(generate(llm, PROMPTS[:2], GREEDY)) == plain
        assert stack.num_launched > launched
        launched = stack.num_launched
        generate(llm, PROMPTS[:2], GREEDY, adapter="b")
        assert stack.num_launched == launched


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_cross_between_the_stack_and_steps_with_adapters(stacked, overlap):
    """A plain request decodes alone in one launch, and with others, which have adapters, in their steps."""
    _, _, references = stacked
    with opened(stacked, "bfloat16", overlap=overlap) as llm:
        for _ in range(2):
            stream = llm.stream(PROMPTS[0], greedy(80, ignore_eos=True))
            next(stream)
            for name in ("a", "b", "c", "d"):
                for number in (1, 2):
                    *_, last = llm.stream(PROMPTS[number], greedy(6, ignore_eos=True), adapter=name)
                    assert greedy_gap(references[name], PROMPTS[number], last.outputs[0].token_ids) < 0.5
                for _ in range(4):
                    next(stream)
            *_, last = stream
            assert greedy_gap(references[None], PROMPTS[0], last.outputs[0].token_ids) < 0.5
            assert llm._engine.model_runner.executor.stacked.num_launched > 0
            rest(llm)
        check_engine(llm)


def test_many_requests_of_bfloat16_have_greedy_tokens_of_their_adapters(stacked, monkeypatch):
    """Chunks, decodes of every number up to 40, prefix hits; on Hopper, few rows in launches of dense layers."""
    from nanovllm.fast.kernels.dense_layer import DenseLayers

    launches = []
    run = DenseLayers.run
    monkeypatch.setattr(DenseLayers, "run", lambda *given: launches.append(given) or run(*given))
    _, _, references = stacked
    each = [(number, NAMES[(number + turn) % len(NAMES)]) for turn in range(4) for number in range(10)]
    with opened(stacked, "bfloat16") as llm:
        for _ in range(2):
            for count in (1, 6, 40):
                prompts, names = [PROMPTS[n] for n, _ in each[:count]], [name for _, name in each[:count]]
                found = token_ids(generate(llm, prompts, GREEDY, adapter=names))
                for prompt, name, tokens in zip(prompts, names, found, strict=True):
                    assert greedy_gap(references[name], prompt, tokens) < 0.5
            rest(llm)
    rows = {len(given[3]) for given in launches if given[-1] is not None}
    assert not launches or (min(rows) < LEAST_ROWS and max(rows) >= 40)


def test_a_plain_request_has_its_tokens_while_others_with_adapters_come_and_go(saved, answers):
    with opened(saved) as llm:
        alone = token_ids(generate(llm, [PROMPTS[0]], greedy(60, ignore_eos=True)))[0]
        llm.reset_prefix_cache()
        stream = llm.stream(PROMPTS[0], greedy(60, ignore_eos=True))
        next(stream)
        for name in ("a", "b", "c"):
            for number in (1, 2):
                *_, last = llm.stream(PROMPTS[number], greedy(5, ignore_eos=True), adapter=name)
                assert last.outputs[0].token_ids == answers[number, name][:5]
        *_, last = stream
        assert last.outputs[0].token_ids == alone
        check_engine(llm)


def test_a_slot_that_takes_one_adapter_after_another_gives_each_its_tokens(saved, answers):
    with opened(saved, max_loras=1) as llm:
        rest(llm)
        for _ in range(2):
            for name in ("a", "b", "c", "d"):
                assert token_ids(generate(llm, PROMPTS[:3], GREEDY, adapter=name)) == [
                    answers[number, name] for number in range(3)
                ]
            rest(llm)
            llm.reset_prefix_cache()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_keep_their_adapters_apart(quantization, saved):
    with opened(saved, "bfloat16", quantization=quantization) as llm:
        outputs = token_ids(generate(llm, PROMPTS[:1] * len(NAMES), GREEDY, adapter=NAMES))
        assert len({tuple(tokens) for tokens in outputs}) == len(NAMES)
        rest(llm)
        again = token_ids(generate(llm, PROMPTS[:1] * len(NAMES), GREEDY, adapter=NAMES))
        assert len({tuple(tokens) for tokens in again}) == len(NAMES)
        check_engine(llm)


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra structured")
def test_forms_are_kept_with_adapters_too(saved):
    from tests.support.structured import form

    params = SamplingParams(temperature=1.0, seed=4, max_tokens=30, structured_output=form("json_schema"))
    with opened(saved) as llm:
        alone = [
            token_ids(generate(llm, [prompt], params, adapter=name))[0]
            for prompt, name in zip(PROMPTS, OF_PROMPTS, strict=True)
        ]
        llm.reset_prefix_cache()
        assert token_ids(generate(llm, PROMPTS, params, adapter=OF_PROMPTS)) == alone
