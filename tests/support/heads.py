"""Tiny checkpoints with heads that were trained for some steps, and their drafts by `transformers` without a cache."""

import functools
import logging
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer, widen

# Sizes of each family: a block of 16 keys holds 8 hidden states of the first one, and of the second one all 16.
FAMILIES = {
    "glm4_moe": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "deepseek_v3": {},
}
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": VOCAB_SIZE, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 16,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 2048,
}  # fmt: skip
ROWS = 63  # of a training example


def tiny_with_heads(family, *, num_heads=1, **sizes):
    """A random model and its random heads."""
    config = CONFIG_MAPPING[family]()
    for name, value in (_SIZES | FAMILIES[family] | sizes).items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.num_mtp_layers = num_heads
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    heads = MtpModel(model, num_heads).float()
    widen(model)
    widen(heads.layers, seed=1)
    return model.eval(), heads.eval()


def text_ids():
    """Tokens of a real text."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return torch.tensor(tiny_tokenizer()(text)["input_ids"])


@functools.cache
def trained(family, *, num_steps=120):
    """The model and its head after some steps on a text, so that some drafts are right and others are not."""
    torch.manual_seed(0)
    model, heads = tiny_with_heads(family)
    token_ids = text_ids()
    optimizer = torch.optim.AdamW([*model.parameters(), *heads.layers.parameters()], lr=3e-3)
    entropy = torch.nn.functional.cross_entropy
    for _ in range(num_steps):
        starts = torch.randint(0, len(token_ids) - ROWS - 2, (8,)).tolist()
        rows = torch.stack([token_ids[start : start + ROWS + 2] for start in starts])
        states = model.model(rows[:, :ROWS]).last_hidden_state
        loss = entropy(model.lm_head(states).flatten(0, 1), rows[:, 1:-1].flatten())
        drafts = heads._project_to_logits(head_rows(heads, rows[:, 1:-1], states, torch.arange(1, 1 + ROWS)))
        loss = loss + entropy(drafts.flatten(0, 1), rows[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, heads


def head_rows(heads, token_ids, before, positions):
    """Outputs [size, num_rows, hidden_size] of the first head for tokens and the hidden states before them."""
    embeds = heads.embed_tokens(token_ids)
    positions = positions[None].expand(len(token_ids), -1)
    count = token_ids.shape[1]
    mask = torch.full((count, count), torch.finfo(torch.float32).min, device=embeds.device).triu(1)[None, None]
    angles = heads.rotary_emb(embeds, position_ids=positions)
    return heads.layers[0](embeds, before, angles, mask, positions, None)


@torch.no_grad()
def greedy_drafts(model, heads, token_ids, count):
    """The drafts that follow known tokens, from a dense pass over all of them."""
    device = model.device
    states = model.model(torch.tensor([token_ids], device=device)).last_hidden_state
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
    known, drafts = list(token_ids), []
    for _ in range(count):
        out = head_rows(heads, torch.tensor([known], device=device), before, torch.arange(len(known), device=device))
        drafts.append(int(heads._project_to_logits(out[:, -1]).argmax()))
        known.append(drafts[-1])
        before = torch.cat([before, out[:, -1:]], dim=1)
    return drafts


def stored_heads(model, heads):
    """Tensors of the heads by their names in a checkpoint."""
    first = model.config.num_hidden_layers
    stored = {}
    for name, tensor in heads.layers.state_dict().items():
        number, part = name.split(".", 1)
        at = f"model.layers.{first + int(number)}."
        part = part.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.", part.startswith("post_norm"))
        if part.startswith("mlp.experts."):
            for expert, own in enumerate(tensor):
                halves = own.chunk(2) if part.endswith("gate_up_proj") else [own]
                names = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
                for projection, half in zip(names, halves, strict=True):
                    stored[f"{at}mlp.experts.{expert}.{projection}.weight"] = half.clone()
        else:
            stored[at + part] = tensor.clone()
    return stored


def save(folder, model, heads, *, without=()):
    """Save a checkpoint as its makers do; returns its path.

    Args:
        without: parts of names of the heads' tensors that are left out.
    """
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    own = {
        name: tensor.detach()
        for name, tensor in stored_heads(model, heads).items()
        if not any(part in name for part in without)
    }
    file = Path(folder) / "model.safetensors"
    save_file(load_file(file) | own, file, metadata={"format": "pt"})
    return str(folder)


def load_reference(folder):
    """The model of a folder as `transformers` loads it, which finds the heads of `generate(use_mtp=True)`."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\."]
    return model
