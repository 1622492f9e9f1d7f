"""All between two layers' attention in one launch: equal to a reference, and for an engine as exact as its kernels."""

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.fast.kernels import dense_layer as kernels
from nanovllm.fast.kernels import layer_stack
from nanovllm.fast.kernels.dense_layer import NUM_ROWS, DenseLayers, DenseSizes, StepAdapters, why_not
from nanovllm.fast.layers.adapted_layers import Factors, RowsBySlot, num_starts, sort_rows
from nanovllm.fast.layers.dense_layers import DenseLayer
from nanovllm.fast.layers.stacked_layers import unstack_layers
from tests.support.reference_dense import dense_layer, random_step, random_weights
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model, tiny_tokenizer

QWEN3, LLAMA = DenseSizes(1024, 3072, 16, 8, 128), DenseSizes(512, 1280, 8, 2, 64)
QWEN2, TINY = DenseSizes(896, 4864, 14, 2, 64), DenseSizes(256, 512, 4, 2, 64)
LARGE, UNEVEN = DenseSizes(4096, 12_288, 32, 8, 128), DenseSizes(2560, 9728, 32, 8, 128)
OPTIONS = {
    QWEN3: {"has_norms": True, "has_bias": False}, LLAMA: {"has_norms": False, "has_bias": False},
    QWEN2: {"has_norms": False, "has_bias": True}, TINY: {"has_norms": True, "has_bias": True},
}  # fmt: skip
LARGE_OPTIONS = {"has_norms": True, "has_bias": False}
ROWS = (9, 16, 17, 40, 64, 100, 128)


def is_hopper():
    return torch.cuda.get_device_capability()[0] == 9


@pytest.fixture(autouse=True)
def traps_instead_of_hanging(monkeypatch):
    monkeypatch.setitem(kernels.TUNING, "PATIENCE", 10**7)
    if not is_hopper():
        pytest.skip("the kernel is for Hopper")


def kernel_of(sizes, num_rows):
    assert why_not(sizes, torch.bfloat16, torch.device("cuda")) is None
    size = next(size for size in NUM_ROWS if size >= num_rows)
    return DenseLayers(sizes, torch.device("cuda"), size, **OPTIONS.get(sizes, LARGE_OPTIONS))


def results(kernel, layer, step, index=0, adapters=None):
    """Hidden states, queries, K and V of the step's rows."""
    states = kernel.run(index, layer, *step, adapters)
    assert layer.keys is not None and layer.values is not None
    return [*states, *(cache[step.slots].flatten(1) for cache in (layer.keys, layer.values))]


def distance(own, right):
    """Largest error of a row, by norm."""
    own, right = own.float().flatten(1), right.float().flatten(1)
    return float(((own - right).norm(dim=1) / right.norm(dim=1)).max())


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("sizes", OPTIONS, ids=str)
def test_a_layer_gives_what_its_reference_does(sizes, num_rows):
    torch.manual_seed(num_rows)
    layer, step = random_weights(sizes, 2 * num_rows, "cuda", **OPTIONS[sizes]), random_step(sizes, num_rows, "cuda")
    kernel = kernel_of(sizes, num_rows)
    first = results(kernel, layer, step)
    for own, right in zip(first, dense_layer(sizes, layer, *step[:3]), strict=True):
        assert distance(own, right) < 0.012
    for _ in range(200):  # the same bits again: no launch helps or disturbs the next
        assert all(map(torch.equal, first, results(kernel, layer, step)))


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 16, 40, 64])
@pytest.mark.parametrize("sizes", [LARGE, UNEVEN], ids=str)
def test_a_large_layer_gives_what_its_reference_does_and_writes_no_other_slot(sizes, num_rows):
    torch.manual_seed(num_rows)
    layer, step = random_weights(sizes, 2 * num_rows, "cuda", **LARGE_OPTIONS), random_step(sizes, num_rows, "cuda")
    kernel = kernel_of(sizes, num_rows)
    first = results(kernel, layer, step)
    for own, right in zip(first, dense_layer(sizes, layer, *step[:3]), strict=True):
        assert distance(own, right) < 0.012
    others = torch.ones(2 * num_rows, dtype=torch.bool, device="cuda").index_fill_(0, step.slots, False)
    assert layer.keys is not None and layer.values is not None
    assert not layer.keys[others].any() and not layer.values[others].any()
    for _ in range(50):
        assert all(map(torch.equal, first, results(kernel, layer, step)))


def test_launches_of_few_rows_one_after_the_other_do_not_disturb_each_other():
    """A launch may begin before the one before it ends, and reads what that one wrote."""
    torch.manual_seed(0)
    layers = [random_weights(LARGE, 16, "cuda", **LARGE_OPTIONS) for _ in range(3)]
    step, kernel = random_step(LARGE, 3, "cuda"), kernel_of(LARGE, 3)

    def pass_through():
        attended, states = step.attended, step.residual
        for index, layer in enumerate(layers):
            states, attended = kernel.run(index, layer, attended, states, *step[2:])
        return [states, attended]

    expected = [step.residual.float(), step.attended.float()]
    for layer in layers:
        states, query, *_ = dense_layer(LARGE, layer, expected[1].bfloat16(), expected[0].bfloat16(), step.turns)
        expected = [states, query.flatten(1)]
    own = pass_through()
    assert all(distance(*pair) < 0.03 for pair in zip(own, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pass_through()
    for _ in range(50):
        graph.replay()
        assert all(map(torch.equal, captured, own))


@pytest.mark.parametrize("num_rows", [9, 64, 128])
def test_the_last_layer_gives_its_output_alone(num_rows):
    torch.manual_seed(0)
    layer = random_weights(QWEN3, 1, "cuda", **OPTIONS[QWEN3], is_last=True)
    step, kernel = random_step(QWEN3, num_rows, "cuda"), kernel_of(QWEN3, num_rows)
    assert distance(kernel.run(27, layer, *step)[0], dense_layer(QWEN3, layer, *step[:3])[0]) < 0.012


@pytest.mark.parametrize("sizes", [QWEN3, QWEN2], ids=str)
def test_a_row_has_the_same_bits_beside_any_others_within_a_compiled_size(sizes):
    torch.manual_seed(0)
    layer, step = random_weights(sizes, 256, "cuda", **OPTIONS[sizes]), random_step(sizes, 128, "cuda")
    kernel = kernel_of(sizes, 128)
    together = results(kernel, layer, step)
    for first, last in ((0, 65), (30, 100), (63, 128), (120, 128)):
        alone = results(kernel, layer, step.rows(slice(first, last)))
        assert all(torch.equal(own, whole[first:last]) for own, whole in zip(alone, together, strict=True))


def test_a_captured_launch_reads_the_step_that_is_there_when_it_is_replayed():
    torch.manual_seed(0)
    layer, kernel = random_weights(QWEN3, 80, "cuda", **OPTIONS[QWEN3]), kernel_of(QWEN3, 40)
    held, steps = random_step(QWEN3, 40, "cuda"), [random_step(QWEN3, 40, "cuda") for _ in range(3)]
    results(kernel, layer, held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = kernel.run(0, layer, *held)
    for step in steps:
        for own, given in zip((*held[:2], *held.turns, held.slots), (*step[:2], *step.turns, step.slots), strict=True):
            own.copy_(given)
        graph.replay()
        own = [part.clone() for part in states]
        assert all(map(torch.equal, own, kernel.run(0, layer, *step)))


# ----------------------------------------------------------------------------------------------------------- adapters

DEPTHS = {0: "query", 1: "hidden", 2: "inner", 3: "hidden"}
WEIGHTS = ("output", "gate_up", "down", "qkv")


def random_adapters(sizes, num_rows, rank, num_slots, *, without=()):
    """Adapters of a step's rows: any slot or none each."""
    inner, query, kv = sizes.inner, sizes.query, (sizes.qkv - sizes.query) // 2
    spans = [
        ((0, sizes.hidden),), ((0, inner), (inner, 2 * inner)), ((0, sizes.hidden),),
        ((0, query), (query, query + kv), (query + kv, sizes.qkv)),
    ]  # fmt: skip

    def draw(*sides):
        return (torch.randn(sides, device="cuda") * sides[-1] ** -0.5).bfloat16()

    factors = [
        Factors(draw(num_slots, len(parts), rank, getattr(sizes, DEPTHS[at])),
                0.5 * draw(num_slots, parts[-1][1], rank).mT.contiguous(), parts)
        for at, parts in enumerate(spans)
    ]  # fmt: skip
    slots = np.random.default_rng(num_rows).integers(-1, num_slots, num_rows).astype(np.int32)
    return StepAdapters([None if at in without else each for at, each in enumerate(factors)], rows_of(slots, num_slots))


def rows_of(slots, num_slots):
    rows = RowsBySlot(*(np.zeros(size, np.int32) for size in (len(slots), num_starts(num_slots), len(slots))))
    sort_rows(slots, np.arange(len(slots)), rows)
    return RowsBySlot(*(torch.from_numpy(part).cuda() for part in rows))


def with_slot(layer, adapters, slot):
    """The layer's weights with the products of a slot's factors added."""
    changed = {}
    for name, factors in zip(WEIGHTS, adapters.factors, strict=True):
        if factors is not None:
            changed[name] = getattr(layer, name).float()
            for part, (begin, end) in enumerate(factors.spans):
                changed[name][begin:end] += factors.up[slot, :, begin:end].float().T @ factors.down[slot, part].float()
    return layer._replace(**changed)


@pytest.mark.parametrize("num_rows", [1, 16, 40, 64, 128])
@pytest.mark.parametrize(
    "sizes, rank, num_slots, without",
    [(QWEN3, 16, 8, ()), (QWEN3, 48, 3, (1,)), (LLAMA, 16, 40, (0, 3)), (QWEN2, 64, 2, (2,)), (TINY, 32, 1, ())],
    ids=str,
)
def test_rows_have_the_products_of_their_adapters(sizes, rank, num_slots, without, num_rows):
    torch.manual_seed(num_rows)
    layer, step = random_weights(sizes, 2 * num_rows, "cuda", **OPTIONS[sizes]), random_step(sizes, num_rows, "cuda")
    adapters, kernel = random_adapters(sizes, num_rows, rank, num_slots, without=without), kernel_of(sizes, num_rows)
    plain, first = results(kernel, layer, step), results(kernel, layer, step, adapters=adapters)
    for slot in range(-1, num_slots):
        rows = (adapters.rows.slots == slot).nonzero()[:, 0]
        if len(rows) and slot < 0:  # the bits of a step without adapters
            assert all(torch.equal(own[rows], right[rows]) for own, right in zip(first, plain, strict=True))
        elif len(rows):
            expected = dense_layer(sizes, with_slot(layer, adapters, slot), *step.rows(rows)[:3])
            for own, right in zip(first, expected, strict=True):
                assert distance(own[rows], right) < 0.015
    for _ in range(50):
        assert all(map(torch.equal, first, results(kernel, layer, step, adapters=adapters)))
    assert all(map(torch.equal, plain, results(kernel, layer, step)))


@pytest.mark.parametrize("num_rows", [3, 64])
def test_rows_of_a_large_layer_have_the_products_of_their_adapters(num_rows):
    torch.manual_seed(num_rows)
    layer = random_weights(UNEVEN, 2 * num_rows, "cuda", **LARGE_OPTIONS)
    step, adapters = random_step(UNEVEN, num_rows, "cuda"), random_adapters(UNEVEN, num_rows, 16, 3)
    own = results(kernel_of(UNEVEN, num_rows), layer, step, adapters=adapters)
    for row, slot in enumerate(adapters.rows.slots.tolist()):
        weights = layer if slot < 0 else with_slot(layer, adapters, slot)
        expected = dense_layer(UNEVEN, weights, *step.rows([row])[:3])
        assert all(distance(part[row : row + 1], right) < 0.015 for part, right in zip(own, expected, strict=True))


def test_a_row_with_an_adapter_has_the_same_bits_beside_any_others():
    torch.manual_seed(0)
    layer, step = random_weights(QWEN3, 256, "cuda", **OPTIONS[QWEN3]), random_step(QWEN3, 128, "cuda")
    adapters, kernel = random_adapters(QWEN3, 128, 32, 6), kernel_of(QWEN3, 128)
    together = results(kernel, layer, step, adapters=adapters)
    step.attended[90:91] = float("nan")
    for first, last in ((0, 65), (30, 100), (63, 128), (120, 128)):
        few = adapters._replace(rows=rows_of(adapters.rows.slots[first:last].cpu().numpy(), 6))
        alone = results(kernel, layer, step.rows(slice(first, last)), adapters=few)
        kept = torch.arange(first, last) != 90
        for own, whole in zip(alone, together, strict=True):
            assert torch.equal(own[kept], whole[first:last][kept])


# ------------------------------------------------------------------------------------------------------------ engines

FIELDS = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "num_layers": 3,
}  # fmt: skip
ENGINE = {"max_num_seqs": 48, "num_kv_blocks": 400, "max_model_len": 300}


def is_used(llm):
    """Whether the layers run by it in steps of more rows than a stack serves; the stack is gone afterwards."""
    binding = llm._engine.model_runner.binding
    unstack_layers(binding)
    return all(isinstance(binding.calls[module], DenseLayer) for module in binding.layer_modules)


def log_probabilities(model, output, answer):
    """Of the answer's tokens by a pass of `transformers`."""
    tokens, count = [*output.prompt_token_ids, *answer.token_ids], len(answer.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device="cuda")).logits[0, -count - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids, device="cuda")[:, None])[:, 0]


def is_exact(outputs, exact, rounded):
    """Whether the answers' log-probabilities are as near to float32's as those of the modules in bfloat16."""
    errors = []
    for output in outputs:
        assert output.error is None
        for answer in output.outputs:
            own = [chosen[token].logprob for token, chosen in zip(answer.token_ids, answer.logprobs, strict=True)]
            right = log_probabilities(exact, output, answer)
            pair = torch.tensor(own, device="cuda"), log_probabilities(rounded, output, answer)
            errors.append(torch.stack([(each - right).abs().mean() for each in pair]))
    own_error, error = torch.stack(errors).mean(0).tolist()
    print(f"mean error of a log-probability {own_error:.4f}, of the modules {error:.4f}")
    return own_error < 1.5 * error


def params(**options):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 16, "logprobs": 0, "ignore_eos": True} | options))


def models(family, folder):
    """The folder of a model, the model in float32, and in bfloat16."""
    saved = save_tiny(folder, family, dtype=torch.bfloat16, **FIELDS)
    exact, rounded = (tiny_model(family, dtype=torch.bfloat16, **FIELDS) for _ in range(2))
    return saved, exact.float().cuda(), rounded.cuda()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_engine_is_as_exact_with_it(family, tmp_path):
    folder, *pair = models(family, tmp_path)
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", **ENGINE) as llm:
        assert is_exact(llm.generate(random_prompts(40), params(), use_tqdm=False), *pair)
        assert is_used(llm)


def test_few_decodes_of_layers_too_large_for_a_stack_run_by_it(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_stack, "MAX_LAYER_BYTES", 0)
    monkeypatch.setattr(kernels, "_LARGE_BYTES", 0)
    launches = []
    run = DenseLayers.run
    monkeypatch.setattr(DenseLayers, "run", lambda self, *given: launches.append(len(given[2])) or run(self, *given))
    folder, *pair = models("qwen3", tmp_path)
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", **ENGINE | {"max_num_seqs": 6}) as llm:
        assert llm._engine.model_runner.binding.stacked is None
        for count in (1, 3, 6):
            assert is_exact(llm.generate(random_prompts(count), params(), use_tqdm=False), *pair)
        assert min(launches) <= 4
        assert is_used(llm)


def test_an_engine_without_it_runs_its_layers_in_several_launches(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "why_not", lambda *_: "a test is without it")
    folder, *_ = models("llama", tmp_path)
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", **ENGINE) as llm:
        assert not is_used(llm)


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"num_kv_blocks": 60}], ids=str)
def test_requests_of_all_kinds_stay_exact(options, tmp_path, monkeypatch):
    """Preempted requests, cached prefixes, chunks beside decodes, several samples of a prompt, changed weights."""
    folder, *pair = models("qwen3", tmp_path)
    launches = []
    run = DenseLayers.run
    monkeypatch.setattr(DenseLayers, "run", lambda self, *given: launches.append(len(given[2])) or run(self, *given))
    sizes = ENGINE | {"block_size": 16, "max_num_batched_tokens": 256} | options
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", **sizes) as llm:
        prompts = random_prompts(40)
        for given in (prompts, [[*prompts[0], *prompt] for prompt in prompts]):
            assert is_exact(llm.generate(given, params(), use_tqdm=False), *pair)
        several = params(n=3, temperature=1.0, seed=1)
        assert is_exact(llm.generate(prompts[:12], several, use_tqdm=False), *pair)
        launches.clear()
        llm.weights_changed()
        assert is_exact(llm.generate(prompts, params(), use_tqdm=False), *pair)
        assert max(launches) > 16
        assert is_used(llm)
