"""All layers in one launch: equal to a reference, within a step's graph, and for an engine as for its modules."""

import itertools

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.batch import NON_FINITE
from nanovllm.device import find_kernel
from nanovllm.fast.gpu import cuda_graphs
from nanovllm.fast.gpu.stacked_steps import reads_own_rows
from nanovllm.fast.kernels import layer_stack
from nanovllm.fast.kernels.layer_stack import (  # fmt: skip
    NUM_ROWS,
    DecodeRows,
    LayerStack,
    StackSizes,
    StepWeights,
    why_not,
)
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.features.speculation import lengths
from nanovllm.sampler import FILTERS, GAMMA_32, DrawTensors, signed_32
from tests.support.llama_layers import angles, random_layers, random_rows, run_layers
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model, tiny_tokenizer

draw_on_gpu = find_kernel("gumbel_draw", "draw_on_gpu")  # by name, since its file needs Triton

QWEN3, LLAMA = StackSizes(1024, 3072, 16, 8, 128, 64), StackSizes(512, 1280, 8, 2, 64, 16)
WIDE, ALONE = StackSizes(2560, 4096, 8, 8, 256, 32), StackSizes(256, 512, 4, 1, 64, 16)
NUM_BLOCKS = 200
OPTIONS = {"max_num_seqs": 8, "num_kv_blocks": 100, "max_model_len": 300}
FIELDS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
          "intermediate_size": 512, "num_layers": 3}  # fmt: skip
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
DRAW_OPTIONS = {"non_finite": NON_FINITE, "gamma": signed_32(GAMMA_32)}
STEPS = [[1], [700], [64, 65], [3, 500, 17], [900, 1, 63, 128], [5] * 4, [40, 700] * 2, [256, 257, 1, 2, 600], [9] * 8]


@pytest.fixture(autouse=True)
def traps_instead_of_hanging(monkeypatch):
    monkeypatch.setitem(layer_stack.TUNING, "PATIENCE", 10**7)


def distance(own, right):
    return float((own.float() - right.float()).norm() / right.float().norm())


@pytest.mark.parametrize("contexts", STEPS, ids=str)
@pytest.mark.parametrize("sizes", [QWEN3, LLAMA, WIDE, ALONE], ids=str)
def test_layers_give_what_their_reference_does(sizes, contexts):
    torch.manual_seed(0)
    device = torch.device("cuda")
    assert why_not(sizes, torch.bfloat16, device) is None
    options = {"has_norms": sizes is not LLAMA, "has_biases": sizes is LLAMA}
    layers = random_layers(3, sizes, NUM_BLOCKS * sizes.block_size, device=device, **options)
    copies = [layer._replace(keys=layer.keys.clone(), values=layer.values.clone()) for layer in layers]
    num_rows = next(size for size in NUM_ROWS if size >= len(contexts))
    rows = random_rows(contexts, num_rows, sizes, NUM_BLOCKS, device)
    hidden = torch.randn(num_rows, sizes.hidden, device=device).bfloat16()
    given = (hidden, *angles(rows, sizes.head_dim), rows)
    stack, count = LayerStack(layers, sizes, 0.1, device), len(contexts)
    for first in range(3):
        own = stack.run(*given, first=first, count=1)
        right = run_layers(copies[first : first + 1], sizes, 0.1, *given)
        assert distance(own[:count] - hidden[:count], right[:count] - hidden[:count]) < 0.01
        for name in ("keys", "values"):
            # Block 0 takes what padding writes.
            written, expected = (getattr(of[first], name)[sizes.block_size :] for of in (layers, copies))
            assert distance(written, expected) < 1e-3
    right = run_layers(copies, sizes, 0.1, *given)
    own = stack.run(*given)
    assert distance(own[:count], right[:count]) < 0.03
    # The same bits again: what blocks leave one another is read when it is there.
    for _ in range(20):
        assert torch.equal(stack.run(*given)[:count], own[:count])


def test_a_captured_launch_reads_the_step_that_is_there_when_it_is_replayed():
    torch.manual_seed(0)
    device = torch.device("cuda")
    layers = random_layers(2, QWEN3, NUM_BLOCKS * QWEN3.block_size, device=device)
    stack = LayerStack(layers, QWEN3, 0.1, device)
    steps = [random_rows(contexts, 4, QWEN3, NUM_BLOCKS, device) for contexts in ([9, 70], [300, 5, 640], [8000])]
    tables = torch.zeros(200, dtype=torch.int32, device=device)
    held = steps[0]._replace(tables=tables, **{
        name: torch.zeros_like(getattr(steps[0], name)) for name in steps[0]._fields if name != "tables"
    })  # fmt: skip
    hidden, turns = torch.randn(4, 1024, device=device).bfloat16(), angles(steps[0], 128)
    stack.run(hidden, *turns, held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = stack.run(hidden, *turns, held)
    for step in steps:
        for name in held._fields:
            getattr(held, name)[: len(getattr(step, name))] = getattr(step, name)
        graph.replay()
        count = int((step.block_counts > 0).sum())
        assert torch.equal(output[:count], stack.run(hidden, *turns, step)[:count])


@pytest.mark.parametrize("sizes", [QWEN3, LLAMA], ids=str)
def test_a_row_has_the_same_bits_beside_any_others(sizes):
    torch.manual_seed(0)
    device = torch.device("cuda")
    layers = random_layers(3, sizes, NUM_BLOCKS * sizes.block_size, device=device)
    stack = LayerStack(layers, sizes, 0.1, device)
    contexts = [300, 700, 5, 128, 1, 257, 513, 64]
    rows = random_rows(contexts, 8, sizes, NUM_BLOCKS, device)
    hidden, turns = torch.randn(8, sizes.hidden, device=device).bfloat16(), angles(rows, sizes.head_dim)
    together = stack.run(hidden, *turns, rows)
    for first, count, num_rows in ((0, 1, 4), (1, 1, 8), (2, 3, 4), (3, 5, 8)):
        chosen = torch.arange(first, first + num_rows, device=device).clamp(max=7)
        fewer = DecodeRows(rows.positions[chosen], rows.slot_mapping[chosen], rows.tables, *(
            part[chosen] for part in (rows.table_starts, rows.block_counts)
        ))  # fmt: skip
        fewer.block_counts[count:] = 0
        alone = stack.run(hidden[chosen], *(part[chosen] for part in turns), fewer)
        assert torch.equal(alone[:count], together[first : first + count])


class TokenSteps:
    """A stack of random layers with a random embedding and head: its steps from tokens to tokens."""

    VOCAB_SIZE = 5003

    def __init__(self, sizes, contexts):
        torch.manual_seed(0)
        self.device, self.sizes, self.count = torch.device("cuda"), sizes, len(contexts)
        self.layers = random_layers(3, sizes, NUM_BLOCKS * sizes.block_size, device=self.device)
        self.stack = LayerStack(self.layers, sizes, 0.1, self.device)
        num_rows = next(size for size in NUM_ROWS if size >= self.count)
        self.rows = random_rows(contexts, num_rows, sizes, NUM_BLOCKS, self.device)

        def random(*shape):
            return torch.randn(*shape, device=self.device).bfloat16()

        embedding, head = random(self.VOCAB_SIZE + 5, sizes.hidden), random(self.VOCAB_SIZE + 5, sizes.hidden) / 8
        turns = (random(1000, sizes.head_dim) for _ in range(2))
        self.weights = StepWeights(embedding, random(sizes.hidden), head, *turns, 1e-6, self.VOCAB_SIZE)
        self.token_ids = torch.randint(self.VOCAB_SIZE, (num_rows,), device=self.device)
        self.token_ids[0] = -6
        self.sampled = torch.randint(self.VOCAB_SIZE, (16,), device=self.device)
        self.keys = torch.randint(-(2**62), 2**62, (16,), device=self.device)
        self.inverse = torch.rand(16, device=self.device) + 0.5
        self.scales = (torch.arange(16, device=self.device) % 3 > 0).float()
        self.sample_rows = torch.zeros(16, dtype=torch.int64, device=self.device)
        self.sample_rows[: self.count] = torch.randperm(self.count)

    def run(self, *, packs=True):
        """Tokens of a step after the same tokens [16], and its logits."""
        sampled = self.sampled.clone()
        logits = torch.zeros(len(self.token_ids), self.VOCAB_SIZE, dtype=torch.bfloat16, device=self.device)
        names = "positions", "slot_mapping", "tables", "decode_tables", "decode_blocks"
        inputs = dict(zip(names, self.rows, strict=True)) | {
            "token_ids": self.token_ids, "sample_rows": self.sample_rows, "noise_keys": self.keys,
            "inverse_temperatures": self.inverse, "noise_scales": self.scales,
        }  # fmt: skip
        values = inputs
        if packs:
            arrays = {name: part[: 8 if name != "tables" else None].cpu().numpy() for name, part in inputs.items()}
            ends = list(itertools.accumulate(-(-array.nbytes // 8) * 8 for array in arrays.values()))
            values = dict(zip(arrays, [0, *ends], strict=False))
        num_rows, host_sampled = len(self.token_ids), torch.zeros(8, dtype=torch.int64).pin_memory()
        step = self.stack.token_step(self.weights, values, num_rows, sampled, logits=logits, **DRAW_OPTIONS)
        if packs:
            for name, array in arrays.items():
                step.packed.view(np.uint8)[values[name] :][: array.nbytes] = array.view(np.uint8)
        step.launch(len(self.rows.tables), host_sampled)
        torch.cuda.synchronize()
        assert host_sampled[: self.count].tolist() == sampled[: self.count].tolist()
        return sampled, logits

    def drawn(self, logits):
        """Tokens that the engine's draw gives for these logits."""
        zeros = torch.zeros(self.count, device=self.device)
        inputs = DrawTensors(
            *(part[: self.count] for part in (self.keys, self.inverse, self.scales)), *(zeros for _ in FILTERS), zeros
        )
        rows = logits[self.sample_rows[: self.count]]
        return draw_on_gpu(rows, inputs, has_filters=False, nothing_left=-2, **DRAW_OPTIONS)


@pytest.mark.parametrize("contexts", [[1], [700, 64, 3], [900, 1, 63, 128, 257, 40, 5]], ids=str)
@pytest.mark.parametrize("sizes", [QWEN3, LLAMA, ALONE], ids=str)
def test_a_step_from_tokens_to_tokens_is_its_layers_norm_head_and_draw(sizes, contexts):
    steps = TokenSteps(sizes, contexts)
    count, weights, rows = steps.count, steps.weights, steps.rows
    tokens = torch.where(steps.token_ids < 0, steps.sampled[5], steps.token_ids)
    turns = weights.cosines[rows.positions], weights.sines[rows.positions]
    hidden = steps.stack.run(weights.embedding[tokens], *turns, rows)[:count].float()
    normed = hidden * (hidden.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
    right = (normed.bfloat16() * weights.norm).float() @ weights.head[: steps.VOCAB_SIZE].float().T
    sampled, logits = steps.run()
    assert distance(logits[:count], right) < 0.005
    assert torch.equal(sampled[:count], steps.drawn(logits))
    assert torch.equal(sampled[count:], steps.sampled[count:])
    assert all(map(torch.equal, steps.run(packs=False), (sampled, logits)))


def test_a_step_gives_the_same_bits_each_time():
    steps = TokenSteps(QWEN3, [300, 700, 5, 128, 1])
    sampled, logits = steps.run()
    for _ in range(200):
        again, own = steps.run()
        assert torch.equal(again, sampled) and torch.equal(own, logits)


def test_a_row_without_finite_logits_has_no_token():
    steps = TokenSteps(QWEN3, [3, 70])
    steps.weights.embedding[steps.token_ids[1]] = float("nan")
    sampled, logits = steps.run()
    assert sampled[: steps.count][steps.sample_rows[: steps.count] == 1].tolist() == [NON_FINITE]
    assert torch.equal(sampled[: steps.count], steps.drawn(logits))


def tokens_of(folder, options):
    """Tokens of five requests, and whether steps ran in one launch."""
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", **OPTIONS) as llm:
        outputs = llm.generate(random_prompts(5), options, use_tqdm=False)
        executor = llm._engine.model_runner.executor
        is_one = executor.stacked is not None and executor.stacked.num_launched > 0
    return [list(output.outputs[0].token_ids) for output in outputs], is_one


def test_an_engine_draws_the_same_tokens_with_its_steps_in_one_launch(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path, "qwen3", dtype=torch.bfloat16, **FIELDS)
    options = [SamplingParams(temperature=0.8 * (n > 0), seed=n, max_tokens=10 + n, ignore_eos=True) for n in range(5)]
    own, is_one = tokens_of(folder, options)
    assert is_one
    monkeypatch.setattr(cuda_graphs, "build_stacked_steps", lambda *_, **__: None)
    other, is_one = tokens_of(folder, options)
    assert not is_one
    same = [a == b for of_own, of_other in zip(own, other, strict=True) for a, b in zip(of_own, of_other, strict=True)]
    # The head's sums have another order, so a near tie may end otherwise, and what follows differs.
    assert sum(same) > 0.8 * len(same)


def error_of(outputs, exact):
    """How far the log-probabilities of greedy tokens are from float32's, on average."""
    errors = []
    for output in outputs:
        assert output.error is None
        answer = output.outputs[0]
        tokens = torch.tensor([[*output.prompt_token_ids, *answer.token_ids]], device="cuda")
        with torch.no_grad():
            right = exact(tokens).logits[0].log_softmax(-1)
        for place, (token, own) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            errors.append(abs(own[token].logprob - right[len(output.prompt_token_ids) + place - 1, token].item()))
    return sum(errors) / len(errors)


def run_greedy(folder, **options):
    """Outputs of five requests with log-probabilities, and whether layers ran as one."""
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", **(OPTIONS | options)) as llm:
        outputs = llm.generate(random_prompts(5), SamplingParams(logprobs=0, **GREEDY), use_tqdm=False)
        calls = llm._engine.model_runner.binding.calls.values()
        return outputs, any("StackedLayers" in repr(call) for call in calls)


@pytest.mark.parametrize(("family", "max_num_seqs"), [("llama", 8), ("qwen3", 6)])
def test_an_engine_is_as_exact_with_its_layers_in_one_launch(family, max_num_seqs, tmp_path, monkeypatch):
    folder = save_tiny(tmp_path, family, dtype=torch.bfloat16, **FIELDS)
    exact = tiny_model(family, dtype=torch.bfloat16, **FIELDS).float().cuda()
    own, is_stacked = run_greedy(folder, max_num_seqs=max_num_seqs)
    assert is_stacked
    monkeypatch.setattr(FastLayers, "stack_layers", lambda *_: None)
    other, is_stacked = run_greedy(folder, max_num_seqs=max_num_seqs)
    assert not is_stacked and error_of(own, exact) < 1.5 * error_of(other, exact)


class ExactDrafter:
    """Greedy tokens of a float32 model, of which a bfloat16 one draws most."""

    def __init__(self, model):
        self._model = model

    def propose(self, requests):
        return [self._continuation([*request.token_ids], request.max_tokens) for request in requests]

    def _continuation(self, token_ids, count):
        for _ in range(count):
            with torch.no_grad():
                logits = self._model(torch.tensor([token_ids], device=self._model.device)).logits
            token_ids.append(int(logits[0, -1].argmax()))
        return token_ids[len(token_ids) - count :]


def test_drafts_whose_rows_read_one_another_run_layer_by_layer_and_are_as_exact(tmp_path, monkeypatch):
    """Cold, and with prompts from the prefix cache; in blocks that hold large K and V before."""
    monkeypatch.setattr(lengths, "PLAIN_WINDOW", 10**9)  # drafts never rest
    chains = []

    def noted(*step):
        chains.append(reads_own_rows(*step))
        return chains[-1]

    monkeypatch.setattr(cuda_graphs, "reads_own_rows", noted)
    folder = save_tiny(tmp_path, "qwen3", dtype=torch.bfloat16, **FIELDS)
    exact = tiny_model("qwen3", dtype=torch.bfloat16, **FIELDS).float().cuda()
    plain, is_stacked = run_greedy(folder)
    assert is_stacked
    options = OPTIONS | {"block_size": 16, "speculation": ExactDrafter(exact)}
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", **options) as llm:
        runner = llm._engine.model_runner
        launch = runner.executor.stacked.launch

        def only_without_chains(*step):
            assert not chains[-1]
            return launch(*step)

        monkeypatch.setattr(runner.executor.stacked, "launch", only_without_chains)
        for cache in runner.binding.caches.of_layers:
            cache[:, 16:].normal_(std=20)

        def answers(batch, **params):
            chains.clear()
            before = llm.stats().speculation
            prompts = [output.prompt_token_ids for output in batch]
            outputs = llm.generate(prompts, SamplingParams(**GREEDY, **params), use_tqdm=False)
            drafted, accepted = (
                getattr(llm.stats().speculation, name) - getattr(before, name)
                for name in ("num_draft_tokens", "num_accepted_tokens")
            )
            assert any(chains) and accepted > 0.4 * drafted > 0
            return outputs

        for batch in (plain[:1], plain[1:3], plain) * 2:
            assert error_of(answers(batch, logprobs=0), exact) < 2 * error_of(batch, exact)
            assert all(len(output.outputs[0].token_ids) == 24 for output in answers(batch))


@pytest.mark.parametrize("fields", [{"hidden_act": "gelu"}, {"attention_bias": True}], ids=str)
def test_a_model_that_differs_runs_layer_by_layer(fields, tmp_path):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    folder = save_tiny(tmp_path, "llama", dtype=torch.bfloat16, intermediate_size=512, **sizes, **fields)
    with LLM(folder, tokenizer=tiny_tokenizer(), dtype="bfloat16", **OPTIONS) as llm:
        calls = llm._engine.model_runner.binding.calls.values()
        assert not any("StackedLayers" in repr(call) for call in calls)
