"""Parts of Llama's decoder layers times a factor, which rounding to bfloat16 hides; computations around its layers."""

import torch
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama import modeling_llama

# Owner and name of a function, and which of its results is scaled; None for its only one.
PLACES = {
    "norm": (modeling_llama.LlamaRMSNorm, "forward", None),
    "mlp": (modeling_llama.LlamaMLP, "forward", None),
    "attention": (modeling_llama.LlamaAttention, "forward", 0),
    "layer": (modeling_llama.LlamaDecoderLayer, "forward", None),
    "queries": (modeling_llama, "apply_rotary_pos_emb", 0),
    "keys": (modeling_llama, "apply_rotary_pos_emb", 1),
    "activation": (SiLUActivation, "forward", None),
}


def scale_part(monkeypatch, place, factor):
    owner, name, index = PLACES[place]
    function = getattr(owner, name)

    def scaled(*args, **kwargs):
        result = function(*args, **kwargs)
        if index is None:
            return result * factor
        return tuple(part * factor if number == index else part for number, part in enumerate(result))

    monkeypatch.setattr(owner, name, scaled)


def computing(between, after=lambda states: states[-1]):
    """LlamaModel's forward pass with something between two layers, or with more than the last one's output."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        position_ids = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        kwargs |= {"position_embeddings": self.rotary_emb(hidden, position_ids), "attention_mask": None}
        states = []
        for layer in self.layers:
            states.append(hidden := layer(between(hidden), **kwargs))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(after(states)))

    return forward
