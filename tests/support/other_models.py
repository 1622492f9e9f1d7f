"""Small models of any configuration class of `transformers`."""

import transformers

from tests.support.tiny_models import VOCAB_SIZE

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def small(family, *, model_class=None, without=(), **fields):
    """A small model of any architecture of `transformers`."""
    config_class = getattr(transformers, f"{family}Config")
    known = {name: value for name, value in SMALL.items() if name not in without}
    model = getattr(transformers, model_class or f"{family.removesuffix('Text')}ForCausalLM")
    return model(config_class(**(known | fields))).eval()
