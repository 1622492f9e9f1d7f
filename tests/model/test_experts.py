"""Routed experts: results as the library's, whatever rows are beside, and nothing left on an owner's module."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.moe import grouped_mm_experts_forward

from nanovllm import LLM
from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.kernels.cpp import load_kernels
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import experts
from nanovllm.models.experts import PackedExperts, can_pack_experts, experts_of, pack_experts, why_not_captured
from tests.support.llms import generate, greedy, token_ids
from tests.support.snapshots import Snapshot, assert_untouched
from tests.support.tiny_classes import VOCAB_SIZE, routed, tiny_class_model
from tests.support.tiny_models import DTYPES

# Plain; transposed, interleaved and with biases; without a gate.
CLASSES = ["OlmoeForCausalLM", "GptOssForCausalLM", "NemotronHForCausalLM"]
OPTIONS = {
    "enforce_eager": True, "block_size": 16, "num_kv_blocks": 33, "max_model_len": 64, "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
}  # fmt: skip
PROMPTS = [[5, 9, 33, 21], [7] * 11, list(range(3, 40))]
GREEDY = greedy(6)


def kernels(dtype):
    return load_kernels(dtype, 64, 3)


@DTYPES
@pytest.mark.parametrize("class_name", CLASSES)
def test_packed_experts_compute_what_the_library_computes(class_name, dtype):
    module = experts_of(tiny_class_model(class_name).to(dtype))[0]
    assert can_pack_experts(module, dtype)
    packed = PackedExperts(module, kernels(dtype))
    for num_rows in (1, 2, 13, 40):
        inputs = routed(module, num_rows, dtype)
        with torch.no_grad():
            expected = grouped_mm_experts_forward(module, *inputs)
            tolerance = 1e-4 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(
                packed(*inputs), expected, rtol=tolerance, atol=tolerance * float(expected.std())
            )


def test_experts_of_releases_without_a_norm_behind_them_are_packed():
    module = experts_of(tiny_class_model("Qwen3NextForCausalLM"))[0]
    inputs = routed(module, 5, torch.float32)
    with torch.no_grad():
        expected = grouped_mm_experts_forward(module, *inputs)
        vars(module).pop("has_post_expert_norm", None)  # before transformers 5.24
        found = PackedExperts(module, kernels(torch.float32))(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_row_does_not_depend_on_the_rows_beside_it_beyond_rounding(is_packed):
    module = experts_of(tiny_class_model("OlmoeForCausalLM"))[0]
    compute = PackedExperts(module, kernels(torch.float32)) if is_packed else experts.experts_function
    states, indices, weights = routed(module, 32, torch.float32)
    with torch.no_grad():
        given = (module,) if not is_packed else ()
        together = compute(*given, states, indices, weights)
        for row in (0, 7, 31):
            alone = compute(*given, states[row : row + 1], indices[row : row + 1], weights[row : row + 1])
            torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


def test_packing_frees_the_plain_weights_and_the_answers_stay():
    model = tiny_class_model("OlmoeForCausalLM")
    with LLM(model, **OPTIONS) as llm:
        expected = token_ids(generate(llm, PROMPTS, GREEDY))
    pack_experts(model, kernels(torch.float32))
    assert all(module.down_proj.numel() == 0 for module in experts_of(model))
    with LLM(model, **OPTIONS) as llm:
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == expected


def test_a_live_module_runs_our_experts_within_steps_and_its_own_outside(monkeypatch):
    model = tiny_class_model("MixtralForCausalLM")
    own, before, seen = model.config._experts_implementation, Snapshot(model), set()
    plain = experts.grouped_mm_experts_forward

    def watched(module, *inputs):
        seen.add(module.config._experts_implementation)
        return plain(module, *inputs)

    monkeypatch.setattr(experts, "grouped_mm_experts_forward", watched)
    with LLM(model, **OPTIONS) as llm:
        assert seen, "the checks at load route through them too"
        seen.clear()
        generate(llm, PROMPTS, GREEDY)
        assert seen == {experts.EXPERTS_NAME}
        assert model.config._experts_implementation == own
        seen.clear()
        model(torch.tensor([PROMPTS[0]]) % VOCAB_SIZE)
        assert seen == set()
    assert_untouched(model, before)


def test_experts_that_no_cuda_graph_can_capture_run_without_one(monkeypatch, caplog):
    weight = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float16)
    monkeypatch.setattr(experts, "experts_of", lambda model: [SimpleNamespace(down_proj=weight)])
    reason = why_not_captured(torch.nn.Identity())
    assert "torch.float16" in reason and "dtype='bfloat16'" in reason
    choice = AttentionChoice("flex", True, True, ())
    assert not choice.captures(EngineConfig(), weight.device, reason)
    assert reason in caplog.text
    assert not choice.captures(EngineConfig(cuda_graphs=False), weight.device, reason)
    with pytest.raises(ValueError, match=r"cuda_graphs=True is unavailable.*torch.float16"):
        choice.captures(EngineConfig(cuda_graphs=True), weight.device, reason)
    weight.dtype = torch.bfloat16
    assert why_not_captured(torch.nn.Identity()) is None
