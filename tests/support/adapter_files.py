"""Adapters as PEFT saves them, and models with an adapter merged into their weights."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Adapters of different ranks and targets, by name.
KINDS = {
    "a": {"targets": ("q_proj", "v_proj", "down_proj"), "rank": 8},
    "b": {"targets": ALL, "rank": 5},
    "c": {"targets": ("o_proj", "gate_proj"), "rank": 16, "use_rslora": True},
    "d": {"targets": ("k_proj", "up_proj"), "rank": 1},
}


def tensors_of(model, targets, rank, seed, gain=1.0):
    """Random factors under PEFT's names; with a gain of 1 they change most tokens."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            down = torch.randn(rank, module.in_features, generator=generator) / module.in_features**0.5
            up = torch.randn(module.out_features, rank, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = gain * up / rank**0.5
    return tensors


def save_adapter(folder, model, *, targets=ALL, rank=8, alpha=None, seed=0, gain=1.0, tensors=None, **config):
    """Write an adapter's folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or tensors_of(model, targets, rank, seed, gain), folder / "adapter_model.safetensors")
    entries = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha or rank, "target_modules": list(targets)} | config
    (folder / "adapter_config.json").write_text(json.dumps(entries))
    return str(folder)


def save_kinds(folder, model):
    """The folder of each of KINDS, by name."""
    return {
        name: save_adapter(folder / name, model, seed=seed, **kind) for seed, (name, kind) in enumerate(KINDS.items())
    }


def merged(model, folder):
    """A copy of the model with the products of an adapter added to its weights."""
    model = copy.deepcopy(model)
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    with torch.no_grad():
        for name, module in model.named_modules():
            down = tensors.get(f"base_model.model.{name}.lora_A.weight")
            if down is not None:
                rank = len(down)
                scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
                up = tensors[f"base_model.model.{name}.lora_B.weight"]
                module.weight += (scale * (up @ down)).to(module.weight.dtype)
    return model
