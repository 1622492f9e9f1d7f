"""Fused decoder layers and packed linears: equal to the modules, and not used on unknown modules."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from nanovllm import LLM
from nanovllm.attention import STEP_HANDLE
from nanovllm.errors import NotFusedError
from nanovllm.fast.kernels.cpp import load_kernels
from nanovllm.fast.kernels.packed_product import can_pack
from nanovllm.fast.layers import fused_layers
from nanovllm.fast.layers.distances import TOLERANCE
from nanovllm.fast.layers.fused_layers import FusedStack
from nanovllm.models.packed_linears import PackedLinear
from tests.support.cpu_answers import GREEDY, ON_A_CPU, OPTIONS, PROMPTS, by_transformers, tokens
from tests.support.llms import generate, greedy, token_ids
from tests.support.other_models import small
from tests.support.scaled_parts import PLACES, computing, scale_part
from tests.support.tiny_models import (
    DTYPES,
    FAMILIES,
    LLAMAS_KIND,
    random_prompts,
    save_tiny,
    tiny_model,
    tiny_tokenizer,
    widen,
)

pytestmark = ON_A_CPU


def num_fused(llm):
    return len(llm._engine.model_runner.binding.fused_layers)


def has_direct_pass(llm):
    return llm._engine.model_runner.binding.passes.direct is not None


def runs_stack(llm):
    stack = llm._engine.model_runner.binding.fused_layers[0].stack
    return stack is not None and stack.is_on


def wide(family, folder, dtype=torch.float32, **fields):
    """A wide random model of any architecture, saved with a tokenizer."""
    model = small(family, max_position_embeddings=512, **fields)
    widen(model)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@pytest.fixture(params=[1, 2, 5, 40])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def kernels(request):
    return load_kernels(request.param, 64, 3)


# ------------------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("num_rows", [*range(1, 36), 100, 385, 800])
def test_a_packed_product_equals_the_dense_one_for_any_number_of_rows(kernels, num_rows):
    """The second depth does not fill the processor's matrix tiles."""
    torch.manual_seed(num_rows)
    for depth in (96, 40):
        check_product(kernels, nn.Linear(depth, 160, dtype=kernels.dtype), num_rows)


def check_product(kernels, linear, num_rows):
    rows = torch.randn(1, num_rows, linear.in_features, dtype=kernels.dtype)
    expected = rows.double() @ linear.weight.double().T + linear.bias.double()
    tolerance = 1e-5 if kernels.dtype == torch.float32 else 5e-3
    with torch.no_grad():
        found = PackedLinear(linear, kernels)(rows).double()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("num_threads")
def test_a_packed_product_is_the_same_with_any_number_of_threads(kernels):
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=False, dtype=kernels.dtype)
    rows = torch.randn(200, 64, dtype=kernels.dtype)
    with torch.no_grad():
        one_by_one = torch.stack([PackedLinear(linear, kernels)(row) for row in rows])
        assert torch.equal(PackedLinear(linear, kernels)(rows), one_by_one)


def test_rows_that_do_not_lie_one_behind_another_are_read_in_order(kernels):
    linear = nn.Linear(32, 64, bias=False, dtype=kernels.dtype)
    columns = torch.randn(32, 9, dtype=kernels.dtype)
    packed = PackedLinear(linear, kernels)
    assert torch.equal(packed(columns.T), packed(columns.T.contiguous()))


def test_not_a_number_stays_in_its_row(kernels):
    linear = nn.Linear(32, 64, bias=False, dtype=kernels.dtype)
    rows = torch.randn(20, 32, dtype=kernels.dtype)
    rows[7, 3] = torch.nan
    output = PackedLinear(linear, kernels)(rows)
    assert output.isnan().any(dim=1).nonzero().flatten().tolist() == [7]


def test_only_products_of_a_known_shape_and_dtype_can_be_packed():
    def linear(depth, outputs, **options):
        return nn.Linear(depth, outputs, bias=False, **options)

    assert can_pack([linear(64, 96)], torch.float32)
    assert can_pack([linear(64, 48), linear(64, 16)], torch.float32)  # side by side
    assert not can_pack([linear(64, 48)], torch.float32)
    assert not can_pack([linear(63, 64)], torch.float32)
    assert not can_pack([linear(64, 64, dtype=torch.bfloat16)], torch.float32)
    assert not can_pack([nn.modules.linear.NonDynamicallyQuantizableLinear(64, 64)], torch.float32)


# -------------------------------------------------------------------------------------------------------------- layers


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_transformers_does_fused_or_not(family, tmp_path, info_log):
    with LLM(save_tiny(tmp_path, family), **OPTIONS) as llm:
        is_known = family != "olmo2"  # which norms behind attention and not before
        assert num_fused(llm) == (2 if is_known else 0)
        assert has_direct_pass(llm) == is_known
        assert ("Olmo2DecoderLayer" in info_log.text) != is_known
        assert llm._engine.model_runner.config.attention_backend == "cpp"
        assert tokens(llm) == by_transformers(tiny_model(family))


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_layers_are_no_further_from_float32_than_the_modules_own(family, tmp_path):
    """The same logits three times: fused, by the modules in bfloat16, and by the modules in float32."""
    folder = save_tiny(tmp_path, family, dtype=torch.bfloat16)
    prompts = random_prompts(12, low=30, high=90, seed=1)

    def logits_in(dtype):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        with torch.no_grad():
            return torch.stack([model(torch.tensor([prompt])).logits[0, -1].float() for prompt in prompts])

    plain, exact = logits_in(torch.bfloat16), logits_in(torch.float32)
    seen = []
    with LLM(folder, **OPTIONS) as llm:
        assert num_fused(llm) == 2
        sampler = llm._engine.model_runner.sampler
        sample = sampler.sample
        sampler.sample = lambda logits, *rest: (seen.append(logits[0].clone()), sample(logits, *rest))[1]
        for prompt in prompts:
            generate(llm, [prompt], greedy(1))
    own_error, plain_error = (torch.stack(seen) - exact).norm(), (plain - exact).norm()
    assert own_error < 1.1 * plain_error
    assert own_error < 0.05 * exact.norm()


@pytest.mark.costly
@DTYPES
@pytest.mark.parametrize(
    "options, reason",
    [
        ({"residual_multiplier": 0.5}, "between attention and its second norm"),
        ({"residual_multiplier": 0.98}, "between attention and its second norm"),
        ({"residual_multiplier": 0.995}, "between attention and its second norm"),
        ({"hidden_act": "gelu"}, "no SiLU"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "no SiLU"),
    ],
)
def test_a_layer_of_the_same_parts_that_computes_something_else_runs_as_it_is(
    options, reason, dtype, tmp_path, info_log
):
    model = wide("Granite", tmp_path, dtype, hidden_size=192, num_attention_heads=3, **options)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert num_fused(llm) == 0
        if dtype == torch.float32:  # in bfloat16 rounding chooses among tokens that are nearly as likely
            assert tokens(llm) == by_transformers(model)
    assert reason in info_log.text


@pytest.mark.costly
@DTYPES
@pytest.mark.parametrize("factor", [1.0, 0.995])
@pytest.mark.parametrize("place", PLACES)
def test_a_factor_of_half_a_percent_anywhere_in_a_layer_keeps_the_modules(place, factor, dtype, tmp_path, monkeypatch):
    folder = save_tiny(tmp_path, dtype=dtype)
    scale_part(monkeypatch, place, factor)
    with LLM(folder, **OPTIONS) as llm:
        assert num_fused(llm) == (2 if factor == 1.0 else 0)


@pytest.mark.costly
@LLAMAS_KIND
def test_layers_of_bfloat16_are_fused_whatever_their_weights(family, tmp_path):
    for seed in range(2):
        folder = save_tiny(tmp_path / str(seed), family, seed=seed, num_layers=8, dtype=torch.bfloat16)
        with LLM(folder, **OPTIONS) as llm:
            assert num_fused(llm) == 8


@pytest.mark.full
def test_a_layer_that_computes_something_else_far_from_the_beginning_runs_as_it_is(tmp_path, info_log):
    """Ministral3 scales queries by a function of the position that is 1 up to the original length."""
    scaled = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
    rope = {"rope_type": "default", "rope_theta": 10000.0} | scaled
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = wide("Ministral3", tmp_path, sliding_window=None, rope_parameters=rope, **sizes)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert num_fused(llm) == 0
        assert tokens(llm) == by_transformers(model)
    assert "computes something else" in info_log.text


@pytest.mark.parametrize("off", [0, 1])
def test_each_sequence_of_a_comparison_has_a_median_of_its_own(off, monkeypatch):
    """Rows at one end may be off by less than what a single row may be."""
    before, output = torch.zeros(1, 16, 64), torch.randn(1, 16, 64)
    own = output.clone()
    own[:, 8:] *= 1 + off * 2 * TOLERANCE[torch.float32]
    step = SimpleNamespace(plan=SimpleNamespace(rows_of_sequences=lambda: [8, 8]))
    monkeypatch.setattr(fused_layers, "running_step", lambda handle: step)
    fused = Mock(return_value=own, has_byte_rows=False)
    angles = torch.zeros(1, 16, 4), torch.zeros(1, 16, 4)
    kwargs = {"position_embeddings": angles, STEP_HANDLE: None}
    equations = Mock(blocks=[SimpleNamespace(kind="Layer")])
    given = (0, fused, equations, (before,), kwargs, output)
    with pytest.raises(NotFusedError) if off else nullcontext():
        fused_layers._compare(*given)


@pytest.mark.parametrize(
    "forward",
    [
        computing(lambda hidden: hidden * 1.5),
        computing(lambda hidden: hidden.mul_(1.5)),
        computing(lambda hidden: hidden, after=lambda states: states[0] + states[1]),
    ],
    ids=["between", "in place", "behind"],
)
def test_layers_of_a_model_that_computes_something_beside_them_are_called_one_by_one(tmp_path, monkeypatch, forward):
    monkeypatch.setattr(LlamaModel, "forward", forward)
    with LLM(save_tiny(tmp_path), **OPTIONS) as llm:
        assert num_fused(llm) == 2 and not has_direct_pass(llm) and not runs_stack(llm)
        own = tokens(llm)
    check_greedy(tiny_model(), own)


def check_greedy(model, answers, slack=0.0, prompts=PROMPTS):
    """Each token of the answers has the largest logit of a dense pass, or at most the slack less."""
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = torch.tensor([prompt + answer[:-1]])
        with torch.no_grad():
            logits = model(whole, position_ids=torch.arange(whole.shape[1])[None], use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 :].float()
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert bool((chosen >= logits.amax(1) - slack).all()), (chosen - logits.amax(1)).tolist()


@DTYPES
@pytest.mark.parametrize("num_layers", [2, 5])
def test_the_output_of_an_early_layer_stays_what_it_was_until_the_pass_ends(tmp_path, monkeypatch, num_layers, dtype):
    """Prompts in chunks of 48 tokens beside decodes.

    The largest logits are about 9. A wrong early output chooses tokens whose logits are up to 5 less, rounding to
    bfloat16 0.3 less.
    """
    monkeypatch.setattr(LlamaModel, "forward", computing(lambda hidden: hidden, after=lambda s: s[-1] + 2 * s[0]))
    folder = save_tiny(tmp_path, num_layers=num_layers, dtype=dtype)
    with LLM(folder, **OPTIONS, max_num_batched_tokens=48, max_num_seqs=8) as llm:
        assert num_fused(llm) == num_layers and not runs_stack(llm)
        own = tokens(llm)
    check_greedy(tiny_model(num_layers=num_layers), own, slack=1e-3 if dtype == torch.float32 else 0.5)


def test_a_forward_pass_of_its_owners_runs_though_its_layers_are_stacked(tmp_path, monkeypatch):
    """Something for one token alone, which no batch at the start has, keeps the model's own pass."""
    plain = LlamaModel.forward

    def forward(self, input_ids, inputs_embeds=None, **kwargs):
        embedded = self.embed_tokens(input_ids)
        embedded = torch.where((input_ids == PROMPTS[0][0])[..., None], -embedded, embedded)
        return plain(self, inputs_embeds=embedded, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with LLM(save_tiny(tmp_path), **OPTIONS) as llm:
        assert runs_stack(llm) and not has_direct_pass(llm)
        assert tokens(llm) == by_transformers(tiny_model())


def test_a_profile_that_begins_within_a_pass_changes_no_token(tmp_path, monkeypatch):
    flips = iter([False, True] * 1000)
    with LLM(save_tiny(tmp_path), **OPTIONS) as llm:
        expected = tokens(llm)
        stack_of = llm._engine.model_runner.binding.fused_layers[0].stack
        llm._engine.model_runner.binding.passes.direct = None  # so that every layer is asked
        original = type(stack_of).runs_pass

        def flipping(self, *, begins):
            runs = original(self, begins=begins)
            FusedStack.is_used = next(flips)
            return runs

        monkeypatch.setattr(FusedStack, "is_used", True)
        monkeypatch.setattr(FusedStack, "runs_pass", flipping)
        llm.reset_prefix_cache()
        assert tokens(llm) == expected


@pytest.mark.costly
@pytest.mark.parametrize("most", [64, 2])
def test_positions_far_beyond_those_whose_angles_are_kept_have_theirs(tmp_path, monkeypatch, most):
    options = {"max_position_embeddings": 4096}
    prompts = random_prompts(2, low=1200, high=1300, seed=3)
    with LLM(save_tiny(tmp_path, **options), **OPTIONS | {"max_model_len": 2048}) as llm:
        direct = llm._engine.model_runner.binding.passes.direct
        assert direct._filled == {0, 3}  # of the comparison at both ends
        monkeypatch.setattr("nanovllm.fast.layers.direct_pass._MOST_PIECES", most)
        own = token_ids(generate(llm, prompts, GREEDY))
        assert (2 in direct._filled) == (most == 64)
    check_greedy(tiny_model(**options), own, prompts=prompts)


def test_with_little_memory_each_layer_is_packed_again_and_freed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.models.packed_linears.available_memory", lambda: 0)
    with LLM(save_tiny(tmp_path), **OPTIONS) as llm:
        assert num_fused(llm) == 2
        model = llm._engine.model_runner.binding.model
        assert all(p.numel() == 0 for name, p in model.named_parameters() if "_proj" in name)
        assert tokens(llm) == by_transformers(tiny_model())


def test_logits_made_in_inference_mode_do_not_bind_later_calls_to_it(tmp_path):
    params = greedy(6, min_tokens=4, stop_token_ids=(3,))
    with LLM(save_tiny(tmp_path), **OPTIONS) as llm:
        with torch.inference_mode():
            inside = generate(llm, PROMPTS, params)
        assert token_ids(generate(llm, PROMPTS, params)) == token_ids(inside)


def test_a_scaling_of_the_scores_that_is_not_the_usual_one_is_kept(tmp_path):
    scales = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 0.5}
    model = wide("Granite", tmp_path, hidden_size=192, num_attention_heads=3, **scales)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert num_fused(llm) == 2 and not has_direct_pass(llm)  # for the scale of its logits
        assert tokens(llm) == by_transformers(model)


def test_a_live_module_is_not_fused():
    with LLM(tiny_model(), **OPTIONS) as llm:
        assert num_fused(llm) == 0


@pytest.mark.parametrize(
    "options, count",
    [
        ({"enforce_eager": True}, 0),
        ({"attention_backend": "sdpa", "enforce_eager": True}, 0),
        ({"max_num_batched_tokens": 96, "max_num_seqs": 8}, 2),  # a step of the whole budget fits the workspace
    ],
    ids=str,
)
def test_eager_mode_and_other_backends_fuse_no_layers(tmp_path, options, count):
    with LLM(save_tiny(tmp_path), **OPTIONS, **options) as llm:
        assert num_fused(llm) == count
        assert tokens(llm) == by_transformers(tiny_model())


def test_the_tolerance_separates_a_missing_term_from_rounding(tmp_path):
    """A norm's epsilon, the smallest thing that could be forgotten, moves small hidden states by far more than that."""
    small = 0.01 * torch.randn(1, 8, 64)
    norms = [torch.nn.functional.rms_norm(small, (64,), eps=eps) for eps in (1e-6, 1e-5)]
    assert (norms[0] - norms[1]).norm() / norms[0].norm() > max(TOLERANCE.values())


@pytest.mark.full
def test_every_engine_has_memory_of_its_own(tmp_path):
    """Two engines of one shape in turn, step by step: neither writes where the other reads."""
    folder = save_tiny(tmp_path)
    expected = by_transformers(tiny_model())[0]
    with LLM(folder, **OPTIONS) as one, LLM(folder, **OPTIONS) as other:
        streams = [llm.stream(PROMPTS[0], GREEDY) for llm in (one, other)]
        for _ in range(12):
            answers = token_ids(next(stream) for stream in streams)
        assert answers == [expected] * 2
