"""Hidden states and head, computed apart, are the model's own forward pass."""

import pytest
import torch

from nanovllm.fast.gpu.capturable import splits_head
from nanovllm.features.composition.binding import build_binding
from nanovllm.features.forward_passes import ForwardPasses
from nanovllm.model import AttributePatches
from nanovllm.probe import PassProbe
from tests.support.other_models import small
from tests.support.snapshots import Snapshot, assert_untouched
from tests.support.tiny_models import DTYPES, FAMILIES, favour_next_tokens, tiny_model

SPECIAL = {
    "Granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "Cohere": {"logit_scale": 0.3},
    "Gemma2": {"head_dim": 32, "final_logit_softcapping": 5.0, "attn_logit_softcapping": None, "sliding_window": 4096},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "GPT2": {"model_class": "GPT2LMHeadModel"},
}


def parts_and_whole(binding):
    """Logits of three rows of nine, by the parts and by one pass."""
    token_ids, positions = torch.arange(20, 29)[None], torch.arange(9)[None]
    rows = torch.tensor([8, 2, 2])
    with binding.probing(PassProbe()):
        hidden_states = binding.passes.hidden_states(token_ids, positions)
        parts = binding.passes.head(hidden_states[rows])
        return parts.clone(), binding.passes.logits(token_ids, positions, rows).clone()


@pytest.mark.parametrize("family", FAMILIES)
@DTYPES
def test_every_family_computes_its_head_apart(family, dtype):
    model = tiny_model(family, dtype=dtype)
    before = Snapshot(model)
    binding = build_binding(model, is_live=True)
    assert splits_head(binding)
    parts, whole = parts_and_whole(binding)
    torch.testing.assert_close(parts, whole, rtol=0.02, atol=1e-5 if dtype is torch.float32 else 0.05)
    assert parts.argmax(dim=-1).tolist() == whole.argmax(dim=-1).tolist()
    binding.close()
    assert_untouched(model, before)


@pytest.mark.parametrize("name", SPECIAL)
def test_what_a_model_does_to_its_logits_is_done_in_the_head(name):
    binding = build_binding(small(name, **SPECIAL[name]), is_live=True)
    assert splits_head(binding)
    parts, whole = parts_and_whole(binding)
    torch.testing.assert_close(parts, whole)


def test_a_model_that_makes_logits_of_more_than_hidden_states_is_not_split():
    """Its head reads the token ids too, which are not there when the head is computed apart."""
    model = tiny_model("llama")
    original = type(model).forward

    def forward(self, input_ids, **kwargs):
        output = original(self, input_ids=input_ids, **kwargs)
        rows = kwargs.get("logits_to_keep", slice(None))
        output.logits = output.logits + input_ids[0, rows, None] % 7
        return output

    model.__class__ = type("Peeking", (type(model),), {"forward": forward})
    binding = build_binding(model, is_live=True)
    assert not splits_head(binding)
    assert not vars(model.base_model).get("_compiled_call_impl")


def test_whether_the_head_is_apart_may_change_with_the_model():
    model = tiny_model("llama")
    binding = build_binding(model, is_live=True)
    assert splits_head(binding)
    favour_next_tokens(model)
    assert not splits_head(binding)


def test_a_model_that_does_not_call_its_base_model_is_not_split():
    assert not splits_head(build_binding(small("OPT", ffn_dim=64, word_embed_proj_dim=64), is_live=True))


def test_an_error_in_a_pass_leaves_the_base_model_as_it_was():
    model = tiny_model("llama")
    patches = AttributePatches()
    passes = ForwardPasses(model, patches, model.config.vocab_size)
    with pytest.raises(IndexError):
        passes.hidden_states(torch.tensor([[10**6]]), torch.tensor([[0]]))
    assert len(patches) == 0 and vars(model.base_model).get("_compiled_call_impl") is None
