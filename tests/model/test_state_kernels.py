"""C++ kernels for decodes of recurrent layers: equal to torch, tried on each layer, and without a trace in modules."""

import inspect

import pytest
import torch

from nanovllm import LLM
from nanovllm.fast.kernels.cpp_states import load_state_kernels
from nanovllm.fast.kernels.processor_classes import VARIABLE, targets
from nanovllm.fast.kernels.state_checks import first_wrong
from tests.support import llms
from tests.support.class_cases import own_answers
from tests.support.llms import check_engine, greedy, token_ids
from tests.support.tiny_classes import VOCAB_SIZE, tiny_class_model

# Of each function that a kernel replaces, and the states that stay in their slots.
BOTH, CONVOLUTION = {"conv_states", "recurrent_states"}, {"conv_states"}
CLASSES = {
    "Qwen3_5ForCausalLM": BOTH, "OlmoHybridForCausalLM": BOTH, "KimiLinearForCausalLM": BOTH,
    "Mamba2ForCausalLM": BOTH, "FalconH1ForCausalLM": BOTH, "Lfm2ForCausalLM": CONVOLUTION,
    "MambaForCausalLM": CONVOLUTION,
}  # fmt: skip
OPTIONS = {
    "max_model_len": 224, "max_num_seqs": 4, "num_kv_blocks": 10, "max_num_batched_tokens": 90, "block_size": 64,
}  # fmt: skip
ANSWER = 14
GREEDY = greedy(ANSWER, ignore_eos=True)


def prompts():
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, VOCAB_SIZE, (130,), generator=generator).tolist()
    own = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 60, 64, 125, 190, 9, 40)]
    return [*own[:5], shared + own[5], shared + own[6]]


def layers_of(llm):
    return llm._engine.model_runner.binding.mixers.layers


def generate(llm, asked):
    return token_ids(llms.generate(llm, asked, GREEDY))


@pytest.fixture(scope="module")
def kernels():
    return load_state_kernels()


@pytest.mark.full
@pytest.mark.parametrize("name", [target.name for target in targets({})][:: len(targets({})) - 1 or 1])
def test_kernels_of_the_best_and_of_the_least_class_equal_torch(monkeypatch, name):
    monkeypatch.setenv(VARIABLE, name)
    assert first_wrong(load_state_kernels()) is None


@pytest.mark.costly
@pytest.mark.parametrize("class_name", CLASSES)
def test_decodes_over_slots_give_the_tokens_of_transformers_with_hits_and_preemptions(class_name):
    model, asked = tiny_class_model(class_name), prompts()
    expected = own_answers(model, asked, ANSWER)
    with LLM(model, overlap=True, **OPTIONS) as llm:
        assert all(layer.kernel_forward is not None for layer in layers_of(llm))
        assert {name for layer in layers_of(llm) for name, _ in layer.in_place} == CLASSES[class_name]
        is_apart = class_name == "MambaForCausalLM"  # one chunk after another
        assert all((layer.chunks is None) == is_apart for layer in layers_of(llm))
        for _ in range(2):
            assert generate(llm, asked) == expected
        assert llm.stats().num_preemptions > 0
        assert llm.stats().prefix_cache_hits > 0
        check_engine(llm)


@pytest.mark.costly
@pytest.mark.parametrize("class_name", CLASSES)
def test_they_serve_bfloat16(class_name):
    """Their results are within its rounding of the module's own: a layer is tried before it is served."""
    with LLM(tiny_class_model(class_name).bfloat16(), **OPTIONS) as llm:
        assert all(layer.kernel_forward is not None for layer in layers_of(llm))
        assert all(len(tokens) == ANSWER for tokens in generate(llm, prompts()))


def test_the_modules_own_functions_stay_as_they_are():
    """Another model of the class, or the owner's training, calls them meanwhile."""
    model = tiny_class_model("Qwen3_5ForCausalLM")
    with LLM(model, **OPTIONS) as llm:
        generate(llm, prompts()[:2])
        module = layers_of(llm)[0].module
        functions = inspect.unwrap(type(module).forward).__globals__
        for name in ("causal_conv1d_update", "torch_recurrent_gated_delta_rule"):
            assert functions[name].__module__ == type(module).__module__
            assert layers_of(llm)[0].kernel_forward.__func__.__globals__[name] is not functions[name]
        assert "forward" not in vars(module)


def test_a_forward_that_the_owner_set_is_the_one_that_runs():
    model = tiny_class_model("Lfm2ForCausalLM")
    with LLM(model, **OPTIONS) as llm:
        module, called = layers_of(llm)[0].module, []
        own = module.forward
        module.forward = lambda *args, **kwargs: called.append(1) or own(*args, **kwargs)
        tokens = generate(llm, prompts()[:2])
        assert len(called) >= ANSWER
    del module.forward
    assert tokens == own_answers(model, prompts()[:2], ANSWER)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["convolution", "delta_rule"])
def test_a_kernel_that_differs_is_not_used(monkeypatch, info_log, kernels, kind):
    right = getattr(kernels, kind)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        (result[0] if isinstance(result, tuple) else result).add_(0.1)
        return result

    by_name = {name: (state, wrong if call == right else call) for name, (state, call) in kernels.by_name.items()}
    monkeypatch.setattr(kernels, "by_name", by_name)
    monkeypatch.setattr("nanovllm.features.states.state_kernels.find_kernel", lambda *_: lambda: kernels)
    model = tiny_class_model("Qwen3_5ForCausalLM")
    with LLM(model, **OPTIONS) as llm:
        assert not any(layer.kernel_forward for layer in layers_of(llm))
        assert "decodes of Qwen3_5GatedDeltaNet update states by torch's operations: results differ by" in info_log.text
        assert generate(llm, prompts()[:3]) == own_answers(model, prompts()[:3], ANSWER)


@pytest.mark.costly
@pytest.mark.parametrize("way", ["raises", "differs"])
def test_chunks_are_computed_by_the_library_where_a_kernel_does_not_serve_them(monkeypatch, kernels, way):
    right = kernels.delta_rule

    def wrong(*args, **kwargs):
        if way == "raises":
            raise ValueError("rows of another kind")
        output, pool = right(*args, **kwargs)
        return output + 0.1, pool

    monkeypatch.setitem(kernels.prefills, "torch_chunk_gated_delta_rule", wrong)
    monkeypatch.setattr("nanovllm.features.states.state_kernels.find_kernel", lambda *_: lambda: kernels)
    model, asked = tiny_class_model("Qwen3_5ForCausalLM"), prompts()
    with LLM(model, **OPTIONS) as llm:
        assert all(layer.chunks is not None and layer.chunks.kernels is None for layer in layers_of(llm))
        assert generate(llm, asked) == own_answers(model, asked, ANSWER)


def test_a_step_writes_no_slot_but_its_own(kernels):
    """Slots that a call neither reads nor writes may hold anything."""
    pool = torch.full((9, 4, 16, 24), float("nan"))
    pool[2], pool[5] = 0.5, 1.5
    kernels.reads, kernels.writes = torch.tensor([2, 5]), torch.tensor([2, 7])
    query, value = torch.ones(2, 1, 2, 16), torch.ones(2, 1, 4, 24)
    output, _ = kernels.delta_rule(query, query, value, torch.zeros(2, 1, 4), torch.ones(2, 1, 4), pool)
    assert output.isfinite().all()
    assert [bool(slot.isfinite().all()) for slot in pool] == [n in (2, 5, 7) for n in range(9)]
    assert (pool[5] == 1.5).all()


@pytest.mark.costly
@pytest.mark.parametrize("change", ["rows", "dtype", "activation"])
def test_calls_that_they_do_not_serve_are_refused_before_a_state_changes(kernels, change):
    pool = torch.ones(3, 8, 4)
    length, dtype = 2 if change == "rows" else 1, torch.float64 if change == "dtype" else torch.float32
    kernels.reads = kernels.writes = torch.tensor([1])
    activation = "gelu" if change == "activation" else "silu"
    with pytest.raises(ValueError, match=r"tokens a sequence|activation"):
        kernels.convolution(torch.ones(1, 8, length, dtype=dtype), pool, torch.ones(8, 4), None, activation)
    assert (pool == 1).all()
