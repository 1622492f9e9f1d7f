"""Tiny random models and a tiny real tokenizer, built from configs: no hub, no download, milliseconds each.

The weights are drawn wide: attention is peaked, logits vary strongly, and a greedy continuation depends on the whole
prompt. A model whose output collapses to one repeated token would pass any comparison and prove nothing.
"""

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nanovllm.features.infill.infill import MARKERS

VOCAB_SIZE = 512
MAX_POSITIONS = 2048

# family: (config class, model class, query heads, KV heads, head size, own options). The groups are of 3, 1, 4, 6, 8.
_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, 6, 2, 64, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, 4, 4, 80, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, 8, 2, 128, {}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, 6, 1, 64, {}),
    "mistral": (MistralConfig, MistralForCausalLM, 8, 1, 80, {"sliding_window": None}),
}
FAMILIES = tuple(_FAMILIES)
MAX_BUILT = 4  # of 6 MB
_BUILT = {}  # a copy takes a fifth of the time

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LLAMAS_KIND = pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "mistral"])  # whose layers are fused

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def tiny_model(family="llama", *, num_layers=2, seed=0, dtype=torch.float32, **overrides):
    """A random causal language model of one family, in eval mode, without end-of-sequence tokens.

    Args:
        overrides: fields of the family's config; `eos_token_id` (one or several) reaches the generation config too.
    """
    wanted = repr((family, num_layers, seed, dtype, torch.get_default_device(), sorted(overrides.items())))
    if wanted not in _BUILT:
        while len(_BUILT) >= MAX_BUILT:
            del _BUILT[next(iter(_BUILT))]
        with torch.inference_mode(False):  # a test may be in it
            _BUILT[wanted] = _build(family, num_layers, seed, overrides).to(dtype).eval()
    return copy.deepcopy(_BUILT[wanted])


def _build(family, num_layers, seed, overrides):
    config_class, model_class, num_heads, num_kv_heads, head_dim, own = _FAMILIES[family]
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family in ("qwen3", "mistral"):  # the others divide the hidden size among the heads
        fields |= {"head_dim": head_dim, "hidden_size": 256}
    model = model_class(config_class(**(fields | own | overrides)))
    widen(model, seed=seed)
    return model


def widen(model, *, seed=0):
    """Draw all weights anew, wide enough that outputs vary and depend on every token of the prompt."""
    generator = torch.Generator().manual_seed(seed)
    # Large queries and keys make attention sharp; large values and output projection make it matter.
    gains = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 2.0, "o_proj": 2.0, "lm_head": 3.0}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                mean = 1.75 if "q_norm" in name or "k_norm" in name else 1.0
                parameter.copy_(mean + 0.1 * noise)
            elif parameter.dim() < 2:  # biases
                parameter.copy_(0.1 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)


# Text to learn merges from; it must repeat some words.
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. A block holds the keys and values of sixteen tokens or more. "
    "What is the capital of France? The capital of France is Paris. Two and two are four, and four and four are "
    "eight. Once upon a time there was an engine that answered every question it was asked, one token at a time. "
    "Requests arrive, wait, run and finish; blocks are taken, shared, kept and given back. Größe, café, naïve, 你好. "
    "In the beginning nobody knew how long the answer would be, so the scheduler gave each sequence a small share of "
    "every step. Whoever came first was served first, and whoever asked for little was never kept waiting for long.",
)


@functools.cache
def _byte_level_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(*, eos_token=None):
    """A byte-level BPE tokenizer of exactly `VOCAB_SIZE` tokens, with a chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level_bpe()),
        eos_token=eos_token,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tiny(
    folder,
    family="llama",
    *,
    eos_token_ids=None,
    with_tokenizer=True,
    **options,
):
    """Save a tiny model, and its tokenizer, as a folder that `from_pretrained` loads; returns the folder.

    Args:
        eos_token_ids: of the generation config.
        options: as in `tiny_model`.
    """
    model = tiny_model(family, **options)
    if eos_token_ids is not None:
        model.generation_config = GenerationConfig(eos_token_id=list(eos_token_ids))
    model.save_pretrained(folder)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def edit_json(path, **values):
    """Change values of a file, such as a saved model's config."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def random_prompts(count, *, low=4, high=64, seed=0):
    """Prompts of `low` to `high` random token ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def sharing_prompts(count, *, seed):
    """Random prompts, each third of which begins with the same three blocks."""
    (shared,) = random_prompts(1, low=48, high=48, seed=seed + 1)
    own = random_prompts(count, low=1, high=90, seed=seed)
    return [shared + prompt if number % 3 == 0 else prompt for number, prompt in enumerate(own)]


def favour_next_tokens(model):
    """Replace the model's forward by one whose logits depend on the rows' tokens beside their hidden states."""
    forward, size = model.forward, model.get_input_embeddings().num_embeddings
    bonus = torch.eye(size, device=model.device).roll(1, dims=1) * 5.0

    @functools.wraps(forward)
    def favouring(*args, input_ids=None, logits_to_keep=0, **kwargs):
        output = forward(*args, input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output.logits = output.logits + bonus[input_ids[:, rows]]
        return output

    model.forward = favouring


def code_tokenizer():
    """The tiny tokenizer with Qwen Coder's FIM markers, which need a model of its length."""
    tokenizer, marks = tiny_tokenizer(), MARKERS["Qwen Coder"]
    tokenizer.add_tokens([marks.prefix, marks.suffix, marks.middle, marks.file, marks.repository, *marks.ends])
    return tokenizer
