"""Models whose rows depend on the batch are refused by name when they are loaded; others are served."""

from functools import partial
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from nanovllm import LLM, UnsupportedModelError
from nanovllm.features.composition.binding import build_binding
from tests.support import class_cases
from tests.support.llms import generate, greedy, token_ids
from tests.support.other_models import small
from tests.support.refusals import assert_names
from tests.support.snapshots import Snapshot, assert_untouched
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import random_prompts, tiny_model, widen

OPTIONS = {"block_size": 16, "num_kv_blocks": 65, "max_model_len": 128}
GREEDY = greedy(8)
DTYPES = [torch.float32, torch.bfloat16]

_DECODER = {"d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 2, "pad_token_id": 1}
ROW_COUNTING = ["Bart", "Marian", "MBart", "PLBart", "Pegasus", "Blenderbot", "BlenderbotSmall"]
COUNTING_FROM_PADDING = ["Roberta", "XLMRoberta", "Camembert", "RobertaPreLayerNorm"]
HONEST = [
    f"{family}ForCausalLM"
    for family in [
        "Llama",
        "Qwen2",
        "Qwen3",
        "Mistral",
        "Mixtral",
        "Qwen2Moe",
        "Qwen3Moe",
        "Olmoe",
        "GraniteMoe",
        "GPTBigCode",
        "GPTNeoX",
        "OPT",
        "BioGpt",
        "Phi",
        "Phi3",
        "Gemma",
        "Starcoder2",
        "Cohere",
        "Granite",
        "Glm4",
        "Olmo2",
        "SmolLM3",
        "Nemotron",
        "StableLm",
    ]
]


def refusal(model):
    """The message that refuses a model, which is left as it was."""
    before = Snapshot(model)
    with pytest.raises(UnsupportedModelError) as caught:
        build_binding(model, is_live=True)
    assert_untouched(model, before)
    return str(caught.value)


def answers(model, prompts, **options):
    with LLM(model, **(OPTIONS | options)) as llm:
        return token_ids(generate(llm, prompts, GREEDY))


def own_answers(model, prompts):
    return class_cases.own_answers(model, prompts, 8)


@pytest.mark.costly
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("class_name", [*HONEST, "GPT2LMHeadModel", "BertLMHeadModel"])
def test_a_model_whose_rows_are_independent_is_accepted_and_left_as_it_was(class_name, dtype):
    model = tiny_class_model(class_name).to(dtype)
    before = Snapshot(model)
    build_binding(model, is_live=True).close()
    assert_untouched(model, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ROW_COUNTING)
def test_a_model_that_ignores_position_ids_is_refused(family, dtype):
    message = refusal(small(family, model_class=f"{family}ForCausalLM", **_DECODER).to(dtype))
    assert_names(message, f"{family}ForCausalLM", "ignores position_ids", "along the row", "generate()")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", COUNTING_FROM_PADDING)
def test_a_model_whose_positions_do_not_begin_at_zero_is_refused(family, dtype):
    message = refusal(small(family, is_decoder=True, pad_token_id=1).to(dtype))
    assert_names(message, f"{family}ForCausalLM", "without position_ids", "padding", "generate()")


class _ShiftedMLP(nn.Module):
    """Mixes each row with its neighbour, as a token shift or a convolution does."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, states):
        return self.mlp(states + 0.5 * states.roll(1, dims=1))


class _PooledMLP(_ShiftedMLP):
    """Mixes all rows, whatever their order."""

    def forward(self, states):
        return self.mlp(states + states.mean(dim=1, keepdim=True) * states.shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [_ShiftedMLP, _PooledMLP])
def test_a_model_that_mixes_rows_outside_of_attention_is_refused(kind, dtype):
    model = tiny_model(dtype=dtype)
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
    message = refusal(model)
    assert "LlamaForCausalLM" in message and "mixes rows outside of attention" in message


def _forward_without(name, model):
    """Let a model swallow one of the arguments of its forward."""
    plain = type(model).forward

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        kwargs.pop(name, None)
        return plain(self, input_ids=input_ids, position_ids=position_ids, **kwargs)

    model.forward = MethodType(forward, model)


def test_a_forward_that_ignores_logits_to_keep_is_refused_with_the_number_of_rows():
    model = tiny_model()
    _forward_without("logits_to_keep", model)
    message = refusal(model)
    assert_names(message, "LlamaForCausalLM", "logits_to_keep", "logits of 6 rows", "returned 16")


def test_a_forward_that_gives_the_logits_of_other_rows_is_refused():
    model = tiny_model()
    plain = type(model).forward

    def forward(self, logits_to_keep=0, **kwargs):
        keep = logits_to_keep.sort().values if isinstance(logits_to_keep, Tensor) else logits_to_keep
        return plain(self, logits_to_keep=keep, **kwargs)

    model.forward = MethodType(forward, model)
    message = refusal(model)
    assert "logits_to_keep" in message
    assert "other rows" in message


def _llama4(**fields):
    return small(
        "Llama4Text", head_dim=32, num_local_experts=2, intermediate_size_mlp=64, no_rope_layers=[1, 0],
        attention_chunk_size=4096, attn_temperature_tuning=True,
        **fields,
    )  # fmt: skip


def test_queries_scaled_by_their_place_in_the_row_are_refused_with_both_limits():
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(_llama4(floor_scale=128), **OPTIONS, max_num_batched_tokens=80, max_num_seqs=4)
    assert_names(
        str(caught.value), "Llama4ForCausalLM", "attn_temperature_tuning", "128", "max_model_len (128)", "(80)"
    )
    with pytest.raises(UnsupportedModelError, match=r"max_num_batched_tokens \(300\)"):
        LLM(_llama4(floor_scale=256), **OPTIONS, max_num_batched_tokens=300)


def test_queries_whose_scale_never_changes_are_served():
    model = _llama4(floor_scale=256)
    widen(model)
    prompts = random_prompts(3, low=20, high=60)
    options = {"max_num_batched_tokens": 200, "max_num_seqs": 4}
    assert answers(model, prompts, **options) == own_answers(model, prompts)


@pytest.mark.parametrize("family", ["Nemotron", "StableLm"])
@pytest.mark.parametrize("options", [{"enforce_eager": True}, {}], ids=str)
def test_a_model_that_does_not_pass_keyword_arguments_to_attention_is_served(family, options):
    model = small(family)
    widen(model)
    before = Snapshot(model)
    prompts = random_prompts(4, low=5, high=60)
    assert answers(model, prompts, max_num_batched_tokens=40, max_num_seqs=4, **options) == own_answers(model, prompts)
    assert_untouched(model, before)


@pytest.mark.full
def test_compiled_layers_without_keyword_arguments_share_one_graph_at_any_number_of_rows(monkeypatch):
    model = small("StableLm", num_hidden_layers=3)
    widen(model)
    prompts = random_prompts(4, low=5, high=60)
    expected = own_answers(model, prompts)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    assert answers(model, prompts, attention_backend="sdpa", max_num_batched_tokens=40, max_num_seqs=4) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
