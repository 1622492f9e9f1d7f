"""Routed experts of few rows in one launch, and a norm with a product: as in float32, in graphs and engines."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

from nanovllm import LLM, SamplingParams
from tests.support.llms import check_engine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs a GPU of sm_90 or later"
)
# hidden, inner, experts, of which some are chosen: Qwen3-30B-A3B's, OLMoE's, and small ones.
SIZES = [(2048, 768, 128, 8), (2048, 1024, 64, 8), (512, 768, 20, 4), (256, 256, 8, 2), (256, 1024, 40, 1)]
EPSILON = 1e-5


class Layer:
    """Random experts with a router and a norm, and what they give in float32."""

    def __init__(self, sizes):
        from nanovllm.fast.kernels.few_experts import Sizes, few_experts

        self.hidden, inner, num_experts, self.top_k = sizes
        generator = torch.Generator("cuda").manual_seed(sum(sizes))

        def randn(*shape, scale):
            return scale * torch.randn(*shape, generator=generator, device="cuda").bfloat16()

        self.gate_up = randn(num_experts, 2 * inner, self.hidden, scale=self.hidden**-0.5)
        self.down = randn(num_experts, self.hidden, inner, scale=inner**-0.5)
        self.router = randn(num_experts, self.hidden, scale=self.hidden**-0.5)
        self.norm = randn(self.hidden, scale=1.0)
        self.states = randn(8, self.hidden, scale=3.0)
        self.kernel = few_experts(Sizes(*sizes), self.states.device)

    def run(self, states, choice, slots=None):
        return self.kernel.run(states, self.gate_up, self.down, choice, slots)

    def route(self, states, *, normalises, rounds):
        """Experts, the first of equal scores, and their weights, from scores in bfloat16."""
        logits = F.linear(states.double(), self.router.double()).bfloat16()
        weights, ids = (part[:, : self.top_k] for part in logits.float().sort(stable=True, descending=True))
        weights = (weights - torch.logsumexp(logits.float(), -1, keepdim=True)).exp()
        if normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.contiguous(), weights.bfloat16().float() if rounds else weights.contiguous()

    def normed(self, states):
        wide = states.float()
        return self.norm * (wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).bfloat16()

    def expected(self, states, ids, weights):
        output = torch.zeros(len(states), self.hidden, device="cuda")
        for row, chosen in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            for expert, weight in zip(*chosen, strict=True):
                gate, upper = F.linear(states[row].float(), self.gate_up[expert].float()).chunk(2)
                output[row] += weight * F.linear(F.silu(gate) * upper, self.down[expert].float())
        return output


def distance(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_rows", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("sizes", SIZES)
def test_given_experts_give_what_float32_gives(sizes, num_rows):
    layer = Layer(sizes)
    states = layer.states[:num_rows]
    choice = layer.route(states, normalises=False, rounds=True)
    found = layer.run(states, choice)
    assert found.dtype == torch.bfloat16
    assert distance(found, layer.expected(states, *choice)) < 1e-2


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_router_chooses_the_highest_scores(sizes, flags):
    from nanovllm.fast.kernels.few_experts import Router

    layer, (normalises, rounds) = Layer(sizes), flags
    for num_rows in (1, 5, 8):
        states = layer.states[:num_rows]
        choice = layer.route(states, normalises=normalises, rounds=rounds)
        found = layer.run(states, Router(layer.router, normalises, rounds))
        assert distance(found, layer.expected(states, *choice)) < 1e-2


@pytest.mark.parametrize("sizes", SIZES)
def test_a_norm_comes_before_the_router_and_its_input_is_added(sizes):
    from nanovllm.fast.kernels.few_experts import Router

    layer = Layer(sizes)
    states = 0.01 * layer.states  # so small that the epsilon counts, and rounding of the sum does not
    normed = layer.normed(states)
    expected = layer.expected(normed, *layer.route(normed, normalises=True, rounds=True))
    found = layer.run(states, Router(layer.router, True, True, layer.norm, EPSILON))
    assert distance(found, states.float() + expected) < 1e-2


def test_of_equal_scores_the_first_expert_is_chosen():
    from nanovllm.fast.kernels.few_experts import Router

    layer = Layer((256, 256, 8, 2))
    layer.router[:] = layer.router[:1]
    found = layer.run(layer.states, Router(layer.router, True, True))
    ids = torch.tensor([[0, 1]], device="cuda").expand(8, 2)
    assert distance(found, layer.expected(layer.states, ids, torch.full((8, 2), 0.5))) < 1e-2


@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_has_the_same_bits_whatever_rows_are_beside(sizes):
    from nanovllm.fast.kernels.few_experts import Router

    layer = Layer(sizes)
    router = Router(layer.router, True, True, layer.norm, EPSILON)
    choice = layer.route(layer.states, normalises=True, rounds=True)
    together, given = layer.run(layer.states, router), layer.run(layer.states, choice)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 8)):
        assert torch.equal(layer.run(layer.states[rows], router), together[rows])
        own = tuple(part[rows] for part in choice)
        assert torch.equal(layer.run(layer.states[rows], own), given[rows])
    for _ in range(100):
        assert torch.equal(layer.run(layer.states, router), together)


def test_all_rows_may_choose_the_same_experts():
    layer = Layer((512, 768, 20, 4))
    ids = torch.tensor([[19, 3, 7, 0]], device="cuda").repeat(8, 1)
    weights = torch.rand(8, 4, device="cuda")
    assert distance(layer.run(layer.states, (ids, weights)), layer.expected(layer.states, ids, weights)) < 1e-2


@pytest.mark.parametrize("has_norm", [False, True])
def test_padding_rows_choose_no_expert(has_norm):
    from nanovllm.fast.kernels.few_experts import Router

    layer = Layer((512, 768, 20, 4))
    router = Router(layer.router, True, True, layer.norm if has_norm else None, EPSILON)
    whole = layer.run(layer.states, router)
    states = layer.states.clone()
    states[[1, 2, 6, 7]] = float("nan")
    slots = torch.tensor([70, 0, 0, 65, 3, 90], device="cuda")  # rows from the sixth on are padding too
    found = layer.run(states, router, slots)
    real = torch.tensor([0, 3, 4, 5], device="cuda")
    assert torch.equal(found[real], whole[real])
    padding = torch.tensor([1, 2, 6, 7], device="cuda")
    if not has_norm:
        assert not found[padding].any()
    assert not layer.run(states, router, torch.zeros_like(slots))[real].sub(states[real] if has_norm else 0).any()


def test_a_replay_reads_its_inputs_anew():
    from nanovllm.fast.kernels.few_experts import Router

    layer = Layer((512, 768, 20, 4))
    router = Router(layer.router, True, True, layer.norm, EPSILON)
    states, slots = layer.states.clone(), torch.ones(8, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.run(layer.run(states, router, slots), router, slots)
    for shift, padding in ((0, 0), (3, 5), (1, 2)):
        states.copy_(layer.states.roll(shift, dims=0))
        slots.fill_(1)[8 - padding :] = 0
        graph.replay()
        assert torch.equal(found, layer.run(layer.run(states, router, slots), router, slots))


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize(("num_outputs", "depth"), [(5120, 2048), (2048, 3072), (90, 256), (1024, 768)])
def test_a_norm_and_a_product_in_one_launch_give_what_float32_gives(num_outputs, depth, num_rows):
    from nanovllm.fast.kernels.normed_linear import normed_linear, suits

    generator = torch.Generator("cuda").manual_seed(num_outputs)
    states, weight, norm = (
        torch.randn(*shape, generator=generator, device="cuda").bfloat16()
        for shape in ((8, depth), (num_outputs, depth), (depth,))
    )
    states *= 0.01
    assert suits(weight)
    kernel = normed_linear(num_outputs, depth, states.device)
    wide = states.float()
    normed = norm * (wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).bfloat16()
    expected = F.linear(normed.float(), weight.float())
    found = kernel.run(states[:num_rows], norm, EPSILON, weight, None)
    assert distance(found, expected[:num_rows]) < 5e-3
    slots = torch.tensor([9, 0, 9], device="cuda")  # rows from the third on are padding too
    padded = kernel.run(states, norm, EPSILON, weight, slots)
    assert torch.equal(padded[0], kernel.run(states, norm, EPSILON, weight, None)[0])
    assert torch.equal(padded[2], kernel.run(states[2:], norm, EPSILON, weight, None)[0])
    assert not padded[[1, 3, 4, 5, 6, 7]].any()


# ----------------------------------------------------------------------------------------------------------- engines


def mixture(family):
    """A random model in bfloat16 with experts that the kernel suits."""
    torch.manual_seed(5)
    inner = "intermediate_size" if family in ("Mixtral", "Olmoe") else "moe_intermediate_size"
    number = "num_local_experts" if family == "Mixtral" else "num_experts"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=300, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=1024, num_experts_per_tok=3, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **{inner: 256, number: 16},
    )  # fmt: skip
    with torch.device("cuda"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.08)
    return model


def prompts(lengths):
    return [[(7 * at + 13 * number) % 300 for at in range(length)] for number, length in enumerate(lengths)]


def answers(model, lengths, **options):
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
    given = {"block_size": 16, "num_kv_blocks": 200, "max_model_len": 256, "max_num_seqs": 12}
    with LLM(copy.deepcopy(model), **(given | options)) as llm:
        outputs = [llm.generate(prompts(lengths), params, use_tqdm=False) for _ in range(2)][-1]
        check_engine(llm)
        return [output.outputs[0] for output in outputs], llm.stats()


def launches(monkeypatch):
    """Fills with an entry a launch: whether the router and the norm are in it."""
    from nanovllm.fast.kernels.few_experts import FewExperts, Router

    run, seen = FewExperts.run, []

    def noting(self, states, gate_up, down, choice, slots):
        seen.append(isinstance(choice, Router) and choice.norm is not None)
        return run(self, states, gate_up, down, choice, slots)

    monkeypatch.setattr(FewExperts, "run", noting)
    return seen


@pytest.mark.parametrize("lengths", [(9,), (40, 3, 17), (5, 60, 8, 9, 33, 2)], ids=["1", "3", "6"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_an_engine_of_few_decodes_launches_it_and_answers_as_transformers_in_float32(family, lengths, monkeypatch):
    seen = launches(monkeypatch)
    model = mixture(family)
    found, _ = answers(model, lengths, cuda_graphs=True)
    assert seen and all(seen)
    model = model.float()
    for prompt, output in zip(prompts(lengths), found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids], device="cuda")).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1)[torch.arange(len(output.token_ids)), output.token_ids]
        reported = torch.tensor(
            [chosen[token].logprob for chosen, token in zip(output.logprobs, output.token_ids, strict=True)]
        )
        assert float((own.cpu() - reported).abs().median()) < 0.05
        assert float((logits.log_softmax(-1).max(-1).values - own).median()) < 0.05  # among the likeliest in float32


def test_graphs_and_overlap_change_no_token():
    """Steps of the same kernels, so to the last bit."""
    model, lengths = mixture("Qwen3Moe"), (40, 33, 17, 60)
    expected = [output.token_ids for output in answers(model, lengths, cuda_graphs=False, overlap=False)[0]]
    for overlap in (False, True):
        found, _ = answers(model, lengths, cuda_graphs=True, overlap=overlap)
        assert [output.token_ids for output in found] == expected
