"""`LLM(model=module)`: the owner's weights, without a copy; and between calls the module is the owner's, untouched."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from nanovllm import StepError
from nanovllm import attention as operator
from tests.support import llms
from tests.support.layer_kinds import own_answer
from tests.support.llms import GREEDY, open_llm, token_ids
from tests.support.snapshots import Snapshot, assert_untouched
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model

PROMPTS = random_prompts(3, low=40, high=100)


def generate(llm, prompts=PROMPTS):
    return token_ids(llms.generate(llm, prompts))


def num_cached(llm):
    return [output.num_cached_tokens for output in llms.generate(llm, PROMPTS)]


def by_a_fresh_engine(model):
    """What an engine answers that has never seen other weights than the module's present ones."""
    with open_llm(copy.deepcopy(model)) as llm:
        return generate(llm)


def by_its_own_generate(model):
    return [own_answer(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]


def train(model, optimizer, seed=0):
    """One step of training: forward, backward, AdamW; returns the loss."""
    model.train()
    ids = torch.randint(0, VOCAB_SIZE, (2, 32), generator=torch.Generator().manual_seed(seed))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def before(model):
    return Snapshot(model)


@pytest.fixture
def llm(model):
    with open_llm(model) as llm:
        yield llm


# -------------------------------------------------------------------------------------------------------------- no copy


def test_the_modules_own_parameters_are_used_without_a_copy(model):
    storages = [parameter.data_ptr() for parameter in model.parameters()]
    with open_llm(model) as llm:
        generate(llm)
        assert [parameter.data_ptr() for parameter in model.parameters()] == storages
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.lm_head.weight[3] = 1.0
            model.model.norm.weight.zero_()
        # All logits are equal now, so the lowest id wins.
        assert {token for answer in generate(llm) for token in answer} == {0}


def test_a_dtype_that_is_the_modules_own_is_accepted():
    with open_llm(tiny_model(dtype=torch.bfloat16), dtype="bfloat16") as llm:
        assert all(len(answer) == 12 for answer in generate(llm))


@pytest.mark.parametrize(
    "options, named",
    [
        ({"dtype": "bfloat16"}, ["dtype", "bfloat16", "float32", "auto"]),
        ({"device": "cuda"}, ["device", "cuda", "cpu", "auto"]),
        ({"device": "cuda:1"}, ["device", "cuda:1", "cpu", "auto"]),
        ({"revision": "main"}, ["revision", "hub"]),
        ({"trust_remote_code": True}, ["trust_remote_code", "loaded module"]),
        ({"num_kv_blocks": 3}, ["num_kv_blocks"]),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_and_leave_no_trace(options, named, model, before):
    with pytest.raises(ValueError) as caught:
        open_llm(model, **options)
    assert all(part in str(caught.value) for part in named)
    assert_untouched(model, before)


# ---------------------------------------------------------------------------------------------------- between the calls


def test_between_the_calls_the_module_is_exactly_as_it_was(model, before):
    with open_llm(model) as llm:
        assert_untouched(model, before)
        generate(llm)
        assert_untouched(model, before)
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        assert_untouched(model, before)
        stream.close()
    assert_untouched(model, before)
    assert not operator.steps_in_force


@pytest.mark.full
def test_closing_frees_the_caches_and_leaves_the_owner_the_only_reference():
    model = tiny_model()
    llm = open_llm(model)
    generate(llm)
    caches = [weakref.ref(cache) for cache in llm._engine.model_runner.binding.caches.of_layers]
    assert len(caches) == 2
    assert all(cache() is not None for cache in caches)
    llm.close()
    gc.collect()
    assert all(cache() is None for cache in caches)
    reference = weakref.ref(model)
    del llm, model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_step_that_failed_inside_the_model_leaves_nothing_behind(error, model):
    llm = open_llm(model)
    expected = generate(llm)

    def fail(*_):
        hook.remove()
        raise error

    before = Snapshot(model)
    hook = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises((StepError, KeyboardInterrupt)):
        generate(llm, random_prompts(2, seed=9))
    assert_untouched(model, before)
    assert not operator.steps_in_force
    assert generate(llm) == expected
    llm.close()
    assert_untouched(model, before)


def test_the_attention_implementation_is_the_owners_between_calls(model):
    model.set_attn_implementation("eager")
    with open_llm(model) as llm:
        generate(llm)
        assert model.config._attn_implementation == "eager"
        assert model.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_a_mixture_of_training_and_eval_submodules_is_restored():
    model = tiny_model().train()
    model.model.layers[0].eval()
    model.model.layers[1].mlp.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    with open_llm(model) as llm:
        generate(llm)
        assert {name: module.training for name, module in model.named_modules()} == modes
    assert len(set(modes.values())) == 2


def test_dropout_of_a_module_in_training_mode_is_off_inside_a_step_and_on_again_after_it():
    model = tiny_model(attention_dropout=0.5)
    with open_llm(model) as llm:
        expected = generate(llm)
        llm.reset_prefix_cache()
        model.train()
        assert generate(llm) == expected
        assert all(module.training for module in model.modules())


def test_the_owners_forward_hooks_stay_and_run(model):
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    before = Snapshot(model)
    with open_llm(model) as llm:
        generate(llm)
        assert_untouched(model, before)
    assert len(calls) > 12


def test_the_callers_autocast_does_not_reach_our_passes(model):
    expected = by_a_fresh_engine(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), open_llm(model) as llm:
        assert llm._engine.model_runner.binding.dtype == torch.float32
        assert generate(llm) == expected


def test_the_loss_and_gradients_are_those_of_a_module_that_no_llm_ever_touched():
    untouched, model = tiny_model(), tiny_model()
    ids = torch.tensor([PROMPTS[0]])
    with open_llm(model) as llm:
        generate(llm)
        assert torch.is_grad_enabled()
        for module in (untouched, model):
            module.train()
            module(input_ids=ids, labels=ids).loss.backward()
    for expected, parameter in zip(untouched.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


# ----------------------------------------------------------------------------------------------------- changing weights


@pytest.mark.costly
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_train_generate_train_generate_equals_a_fresh_engine_on_the_same_weights(family):
    model = tiny_model(family)
    optimizer = adamw(model)
    answers = []
    with open_llm(model) as llm:
        answers.append(generate(llm))
        for seed in range(3):
            train(model, optimizer, seed)
            answers.append(generate(llm))
            assert answers[-1] == by_a_fresh_engine(model)
            assert all(module.training for module in model.modules())
    assert len({str(answer) for answer in answers}) == 4  # each step of training did change what it says


def test_the_prefix_cache_is_kept_while_the_weights_stay(model, llm):
    generate(llm)
    by_its_own_generate(model)
    model.train()
    model.eval()
    ids = torch.tensor([PROMPTS[0]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(num_cached(llm))


def values_of(model):
    return model.model.layers[0].self_attn.v_proj


def scale_in_place(model):
    with torch.no_grad():
        values_of(model).weight.mul_(0.5)


def assign_another_parameter(model):
    values_of(model).weight = nn.Parameter(values_of(model).weight.detach() * 0.5)


def give_a_parameter_another_storage(model):
    values_of(model).weight.data = values_of(model).weight.data * 0.5


def load_other_weights(model):
    model.load_state_dict(tiny_model(seed=5).state_dict())


def replace_a_submodule(model):
    mlp = copy.deepcopy(model.model.layers[0].mlp)
    with torch.no_grad():
        mlp.down_proj.weight.mul_(-1)
    model.model.layers[0].mlp = mlp


class LowRank(nn.Module):
    """An adapter around a linear layer, as libraries for fine-tuning inject them."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(0.2 * torch.randn(4, base.in_features, generator=generator))
        self.up = nn.Parameter(0.5 * torch.randn(base.out_features, 4, generator=generator))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def wrap_with_adapters(model):
    for layer in model.model.layers:
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)


def set_a_number(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 10.0


def replace_a_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda states: -type(mlp).forward(mlp, states)


CHANGES = [
    scale_in_place,
    load_other_weights,
    assign_another_parameter,
    give_a_parameter_another_storage,
    replace_a_submodule,
    wrap_with_adapters,
    set_a_number,
    replace_a_forward,
]


@pytest.mark.costly
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_prefix_cache_is_dropped_when_the_owner_changed_the_module(change, model, llm):
    before = generate(llm)
    change(model)
    outputs = llms.generate(llm, PROMPTS)
    assert not any(output.num_cached_tokens for output in outputs)
    assert token_ids(outputs) == by_a_fresh_engine(model) != before
    assert all(num_cached(llm)), "once for each change"


@pytest.mark.full
@pytest.mark.parametrize("replace", ["data", "parameter"])
def test_weights_replaced_over_and_over_are_seen_though_their_memory_is_used_again(replace, model, llm):
    """The allocator gives the address of the weights before last to the newest ones."""
    layer = model.model.layers[0].mlp.down_proj
    generate(llm)
    for round_ in range(12):
        for _ in range(2 + round_ % 3):
            if replace == "data":
                layer.weight.data = layer.weight.data * 1.01
            else:
                layer.weight = nn.Parameter(layer.weight.detach() * 1.01)
        assert num_cached(llm) == [0, 0, 0]


def test_an_edit_that_leaves_no_trace_needs_weights_changed(model, llm):
    generate(llm)
    values_of(model).weight.data.mul_(0.5)
    llm.weights_changed()
    outputs = llms.generate(llm, PROMPTS)
    assert not any(output.num_cached_tokens for output in outputs)
    assert token_ids(outputs) == by_a_fresh_engine(model)


def test_a_change_of_the_weights_is_seen_by_each_of_two_llms_on_one_module(model):
    with open_llm(model) as first, open_llm(model, block_size=32, num_kv_blocks=65) as second:
        assert generate(first) == generate(second)
        scale_in_place(model)
        expected = by_a_fresh_engine(model)
        assert generate(first) == expected
        assert generate(second) == expected


def test_two_llms_on_one_module_generate_from_two_threads(model):
    expected = by_a_fresh_engine(model)
    before = Snapshot(model)
    answers = []
    with open_llm(model) as first, open_llm(model) as second:

        def ask(llm):
            for _ in range(5):
                answers.append(generate(llm))

        threads = [threading.Thread(target=ask, args=(llm,)) for llm in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert answers == [expected] * 10
    assert_untouched(model, before)


def test_closing_one_of_two_llms_on_a_module_leaves_the_other_one_usable(model):
    first, second = open_llm(model), open_llm(model)
    expected = generate(first)
    first.close()
    assert generate(second) == expected
    second.close()


# ------------------------------------------------------------------------------------------------------ compiled layers


def test_with_compiled_layers_too_the_module_is_its_owners_between_calls_and_new_weights_count(model):
    layer = model.model.layers[0]
    layer._compiled_call_impl = compiled = lambda *args, **kwargs: layer._call_impl(*args, **kwargs)
    optimizer = adamw(model)
    before = Snapshot(model)
    with open_llm(model, enforce_eager=False) as llm:
        assert_untouched(model, before)
        answers = [generate(llm)]
        assert answers[0] == by_its_own_generate(model)
        for seed in range(2):
            train(model, optimizer, seed)
            answers.append(generate(llm))
            assert answers[-1] == by_its_own_generate(model.eval())
            assert layer._compiled_call_impl is compiled
    assert len({str(answer) for answer in answers}) == 3
    assert_untouched(model, before)
