"""Loads a GGUF file's weights into a `transformers` module; linear layers and embeddings stay quantised blocks.

    file's names ──(architecture)──> names of parameters ──(compared with the class's own)──> blocks or plain tensors

All names and shapes are compared before a weight is read: each tensor has a parameter, and each parameter a tensor.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.models.gguf.config import architecture_of, generation_defaults, read_config, refuse_types, some
from nanovllm.models.gguf.file import GGUFFile, StoredTensor
from nanovllm.models.quantised.blocks import FORMATS, QuantisedEmbedding, QuantisedLinear, dequantise_blocks

logger = logging.getLogger("nanovllm")

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_OUTPUT = "lm_head.weight"
# Factors of the rotary frequencies: read by `_apply_frequencies`, and by the config.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
_EXPERTS = {"ffn_gate_exps": "gate_up_proj", "ffn_up_exps": "gate_up_proj", "ffn_down_exps": "down_proj"}


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of one parameter: one, or the parts of gate_up_proj [experts, 2 * width, hidden_size] in order.

    rows_per_head: rows of a head of q or k, to reorder rows from pairs to halves; 0 for other parameters.
    offset: number to subtract from the values: 1 where modules add 1 to norm weights.
    """

    tensors: tuple[StoredTensor, ...]
    rows_per_head: int = 0
    offset: float = 0.0

    @property
    def kind(self) -> str:
        return self.tensors[0].kind

    @property
    def shape(self) -> tuple[int, ...]:
        first, *rest = (tensor.shape for tensor in self.tensors)
        return (first[0], first[1] + sum(shape[1] for shape in rest), *first[2:]) if rest else first

    def blocks(self) -> Tensor:
        """uint8 [out_features, bytes of a row], a copy."""
        return torch.from_numpy(_rows_in_halves(self.tensors[0].data, self.rows_per_head))

    def values(self, dtype: torch.dtype) -> Tensor:
        """The dequantised parameter."""
        parts = [_values(tensor, self.rows_per_head) - self.offset for tensor in self.tensors]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(dtype)


def _rows_in_halves(data: np.ndarray[Any, Any], rows_per_head: int) -> np.ndarray[Any, Any]:
    """Rows in the order of `transformers`; whole rows move, so blocks are not requantised.

    llama.cpp rotates the neighbouring rows 2i and 2i + 1 of a head, transformers rows i and i + head_dim / 2: the file
    interleaves the two halves of each head, and this undoes it.
    """
    if not rows_per_head:
        return np.array(data)
    halves = data.reshape(-1, rows_per_head // 2, 2, data.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(data.shape)


def _values(tensor: StoredTensor, rows_per_head: int) -> Tensor:
    data = torch.from_numpy(_rows_in_halves(tensor.data, rows_per_head))
    if tensor.kind in _PLAIN:
        return data.view(_PLAIN[tensor.kind]).float().view(tensor.shape)
    rows = data.view(-1, data.shape[-1])
    return torch.cat([dequantise_blocks(tensor.kind, part) for part in rows.split(4096)]).view(tensor.shape)


def sources_of(file: GGUFFile) -> dict[str, Source]:
    """Sources of the parameters, by name in `transformers`.

    Raises UnsupportedModelError for tensors without such a name, or of an unsupported type.
    """
    refuse_types(file)
    architecture = architecture_of(file)
    heads = _PERMUTED if architecture.permutes_heads else {}
    found: dict[str, Source] = {}
    stacks: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)
    unknown = []
    for name, tensor in file.tensors.items():
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if name in _ROPE_TENSORS:
            continue
        if block is None:
            target = _OUTPUT if name == "output.weight" else _TOP.get(name)
        else:
            layer, part, suffix = block.groups()
            if part in _EXPERTS and suffix == "weight" and "expert_count" in architecture.keys:
                stacks[f"model.layers.{layer}.mlp.experts.{_EXPERTS[part]}"][part] = tensor
                continue
            target = f"model.layers.{layer}.{architecture.layer[part]}.{suffix}" if part in architecture.layer else None
            if part in heads and suffix == "bias":
                target = None  # its rows would need reordering too, and no such model has one
        if target is None:
            unknown.append(name)
            continue
        key = heads.get(block[2]) if block else None
        rows = tensor.shape[0] // _num_heads(file, key) if key else 0
        is_norm = "norm" in target.rsplit(".", 2)[-2]
        found[target] = Source((tensor,), rows, 1.0 if architecture.norms_from_zero and is_norm else 0.0)
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} has {len(unknown)} tensors that are not read from GGUF files of the architecture "
            f"{file.architecture!r}: {some(unknown)}. Take the checkpoint in the format of transformers."
        )
    found |= {name: Source(tuple(parts[part] for part in sorted(parts))) for name, parts in stacks.items()}
    return found


def _num_heads(file: GGUFFile, key: str) -> int:
    count = file.of_architecture(key) or file.of_architecture("attention.head_count")
    return int(count[0] if isinstance(count, list) else count)  # equal in all layers, or the config is refused


def model_config(file: GGUFFile) -> PreTrainedConfig:
    """The `transformers` config; raises UnsupportedModelError or ModelLoadError."""
    fields = read_config(file)
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:  # any error of the config class's validators
        raise ModelLoadError(f"{file.path}: transformers does not take its config: {error}") from error


def dtype_of(file: GGUFFile) -> torch.dtype:
    """The dtype for "auto": bfloat16 for a quantised file, else the type of the matrices."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _PLAIN[kinds.pop()] if len(kinds) == 1 and kinds <= set(_PLAIN) else torch.bfloat16


def load_model(file: GGUFFile, dtype: torch.dtype | None, *, keeps_blocks: bool) -> Any:
    """A causal language model on the CPU.

    Args:
        dtype: dtype of plain weights and activations; None for the file's.
        keeps_blocks: linear layers and embeddings stay quantised; else all weights are dequantised.

    Raises UnsupportedModelError and ModelLoadError before a weight is read.
    """
    config = model_config(file)
    sources = sources_of(file)
    dtype = dtype_of(file) if dtype is None else dtype
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    _compare(file, skeleton, sources)
    kept = _kept_modules(skeleton, sources) if keeps_blocks else {}
    _log_dequantised(file, sources, kept)
    state = dict(_state_of(sources, kept, dtype))
    # Not by the Auto class, which would look for a file.
    model, info = type(skeleton).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    if lost := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise ModelLoadError(f"{file.path}: transformers did not take these tensors: {some(sorted(map(str, lost)))}.")
    for path, source in kept.items():
        _keep_blocks(model, path, source, dtype)
    _apply_frequencies(file, model)
    model.generation_config = GenerationConfig(**generation_defaults(file))
    return model


def _compare(file: GGUFFile, skeleton: nn.Module, sources: dict[str, Source]) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    if _OUTPUT not in sources:
        shapes.pop(_OUTPUT, None)  # tied
    if missing := sorted(shapes.keys() - sources.keys()):
        raise ModelLoadError(f"{file.path} is incomplete: {len(missing)} tensors are missing, for {some(missing)}.")
    if surplus := sorted(sources.keys() - shapes.keys()):
        tensors = [sources[name].tensors[0].name for name in surplus]
        raise UnsupportedModelError(
            f"{file.path} has {len(tensors)} tensors that {type(skeleton).__name__} does not: {some(tensors)}. "
            "Take the checkpoint in the format of transformers."
        )
    for name, source in sources.items():
        if source.shape != shapes[name]:
            raise ModelLoadError(
                f"{file.path}: {source.tensors[0].name} has the shape {list(source.shape)}, but the metadata make it "
                f"{list(shapes[name])}."
            )


def _kept_modules(skeleton: nn.Module, sources: dict[str, Source]) -> dict[str, Source]:
    """Sources of the modules that stay quantised, by path; includes a tied head."""
    embedding = sources["model.embed_tokens.weight"]
    of_modules = {name.removesuffix(".weight"): source for name, source in sources.items() if name.endswith(".weight")}
    of_modules.setdefault("lm_head", embedding)
    return {
        path: source
        for path, source in of_modules.items()
        if source.kind in FORMATS and isinstance(skeleton.get_submodule(path), (nn.Linear, nn.Embedding))
    }


def _state_of(sources: dict[str, Source], kept: dict[str, Source], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    placeholder = torch.zeros(1, dtype=dtype)  # one number, seen as a matrix of any shape
    for name, source in sources.items():
        is_kept = name.removesuffix(".weight") in kept
        yield name, placeholder.expand(source.shape) if is_kept else source.values(dtype)


def _keep_blocks(model: nn.Module, path: str, source: Source, dtype: torch.dtype) -> None:
    module: Any = model.get_submodule(path)
    tied = path == "lm_head" and source.tensors[0].name != "output.weight"
    blocks: Any = model.get_submodule("model.embed_tokens").blocks if tied else source.blocks()
    if isinstance(module, nn.Linear):
        quantised: nn.Module = QuantisedLinear(source.kind, blocks, module.bias, dtype=dtype)
    elif (scale := getattr(module, "embed_scale", None)) is not None:
        quantised = ScaledEmbedding(source.kind, blocks, dtype=dtype, scale=scale, padding_idx=module.padding_idx)
    else:
        quantised = QuantisedEmbedding(source.kind, blocks, dtype=dtype, padding_idx=module.padding_idx)
    model.set_submodule(path, quantised)


class ScaledEmbedding(QuantisedEmbedding):
    """Gemma's embedding: rows are multiplied by sqrt(hidden_size)."""

    embed_scale: Tensor

    def __init__(self, *args: Any, scale: Tensor, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("embed_scale", scale.to(self.dtype), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) * self.embed_scale


def _apply_frequencies(file: GGUFFile, model: nn.Module) -> None:
    """Divide the rotary frequencies by the file's factors, stored instead of a scaling rule (Llama 3.1)."""
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return
    divisors = _values(factors, 0)
    buffers = [
        (module, name)
        for module in model.modules()
        for name in module._buffers
        if name in ("inv_freq", "original_inv_freq")
    ]
    for module, name in buffers:
        buffer = getattr(module, name)
        if buffer.shape != divisors.shape:
            raise ModelLoadError(
                f"{file.path}: rope_freqs has {len(divisors)} factors for {len(buffer)} rotary frequencies."
            )
        buffer /= divisors
    if not buffers:
        raise UnsupportedModelError(f"{file.path} has factors of rotary frequencies, and its model no frequencies.")


def _log_dequantised(file: GGUFFile, sources: dict[str, Source], kept: dict[str, Source]) -> None:
    unpacked = Counter(
        source.kind
        for name, source in sources.items()
        if source.kind in FORMATS and name.removesuffix(".weight") not in kept
    )
    if unpacked:
        what = ", ".join(f"{count} of {kind}" for kind, count in unpacked.items())
        logger.info("%s: tensors held dequantised: %s", file.path.name, what)


def dense_weights(file: GGUFFile, dtype: torch.dtype) -> dict[str, Tensor]:
    """All parameters, dequantised, by name in `transformers`."""
    return {name: source.values(dtype) for name, source in sources_of(file).items()}
