"""Parts of Llama's decoder layers times a factor, which rounding to bfloat16 hides in a layer's output."""

from transformers.activations import SiLUActivation
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
