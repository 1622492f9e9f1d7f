"""Reads quantised checkpoints through the loader of `transformers`; weights stay quantised where kernels multiply them.

    headers of the files ──(the library's renames)──> layouts of each parameter: checked and planned, without memory
    tensors ──(the library's loader, `_FillWeight`)──> blocks, as parameters ──> QuantisedLinear

Renames, fused experts and shards of files are the library's. `HfQuantizer` is its public seam; ours stands in for the
checkpoint's own: reading needs neither its packages nor its devices.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.models.quantised.blocks import QuantisedLinear, SortedLinear
from nanovllm.models.quantised.checkpoint import SUFFIXES, Layout, NoLayoutError, layout_of
from nanovllm.models.quantised.kept_experts import is_experts, keep_experts, projections_of
from nanovllm.models.quantised.rows import RowFormat

logger = logging.getLogger("nanovllm")

METHOD = "nanovllm"  # quant_method of our quantizer, in place of the checkpoint's
_ROWS_AT_ONCE = 1 << 20  # weights dequantised at a time
_NAMED = 3  # modules that a message names


def why_not_read(quantisation: Mapping[str, Any]) -> str | None:
    """The reason why checkpoints of this `quantization_config` are not read here; None if they are."""
    method = quantisation.get("quant_method")
    if method not in SUFFIXES:
        return f"quant_method {method!r} has no layout that is kept"
    if quantisation.get("transform_config"):
        return "its inputs are rotated (transform_config)"
    if not hasattr(HfQuantizer, "serialized_names"):  # 5.17
        return f"transformers {transformers.__version__} does not hand a module's serialized tensors to a quantizer"
    return None


def can_read(quantisation: Mapping[str, Any]) -> bool:
    """Whether checkpoints of this `quantization_config` are read here."""
    return why_not_read(quantisation) is None


def config_to_keep(settings: Mapping[str, Any], *, keeps: bool = True) -> dict[str, Any]:
    """The `quantization_config` that lets `transformers` read the checkpoint through this module.

    Args:
        settings: the checkpoint's own, for which `can_read` holds.
        keeps: weights stay quantised; else all are dequantised.
    """
    return {"quant_method": METHOD, "stored": dict(settings), "keeps": keeps}


@register_quantization_config(METHOD)
class _StoredConfig(QuantizationConfigMixin):
    def __init__(self, stored: dict[str, Any], keeps: bool = True, **_: Any) -> None:
        self.quant_method = METHOD
        self.stored = stored
        self.keeps = keeps


@register_quantizer(METHOD)
class _Reader(HfQuantizer):
    """Plans the layouts of a model's parameters, and puts quantised modules in place of plain ones."""

    requires_calibration = True

    def __init__(self, quantization_config: _StoredConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.settings = quantization_config.stored
        self.suffixes = SUFFIXES[self.settings["quant_method"]]
        self.serialized_names = _names_by_parameter(self.suffixes)
        self.planned: dict[str, RowFormat] = {}  # parameters that stay quantised
        self.changed: set[str] = set()  # parameters that the library makes of several otherwise than by joining rows
        self.kept: dict[str, Tensor | None] = {}  # the order of inputs of each, once it is loaded
        self.faults: list[str] = []  # the library makes a long report of an error within the load

    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": _FillWeight, "dequantize": _FillWeight}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        conversions: list[Any] = super().update_weight_conversions(weight_conversions, model)
        for converter in conversions:
            first, *others = getattr(converter, "operations", ()) or (None,)
            if isinstance(first, _FillWeight):  # blocks are stacked and joined by rows, and cannot be changed otherwise
                first.keeps = all(type(other) in (MergeModulelist, Concatenate) for other in others)
        return conversions

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return param_name in self.planned  # blocks have another shape than the weight

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        refused: dict[str, str] = {}
        reasons: dict[str, str | None] = {}
        for target, modules in self._modules_of(model, _headers(checkpoint_files)).items():
            layouts = self._layouts_of(model, target, modules, refused)
            forms = {layout.form for layout in layouts}
            if not forms:
                continue
            are_all = len(layouts) == len(modules)
            reasons[target] = _why_plain(model, target, forms) if are_all else "they join quantised and plain modules"
            self.planned[target] = forms.pop()
            if target in self.changed or any(layout.order is not None and len(modules) > 1 for layout in layouts):
                reasons[target] = "the library changes them otherwise than by joining rows"
        if refused:
            first = "; ".join(f"{name}: {what}" for name, what in list(refused.items())[:_NAMED])
            raise UnsupportedModelError(
                f"{len(refused)} quantised tensors are of no layout that is read: {first}. Set "
                'quantization="dequantize".'
            )
        for target in _halves(model, reasons):
            reasons[target] = "the other projection of their experts is"
        for target, reason in reasons.items():
            if reason is not None or not self.quantization_config.keeps:
                del self.planned[target]
        if self.quantization_config.keeps:
            for reason, count in Counter(filter(None, reasons.values())).items():
                logger.info("%d quantised weights are held dequantised: %s", count, reason)

    def _modules_of(self, model: Any, headers: Mapping[str, Tensor]) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Tensors by parameter of the model, module in the files, and last part of the name."""
        conversions = get_model_conversion_mapping(model, None, self)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        parameters = model.state_dict()
        found: defaultdict[str, defaultdict[str, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
        for name, tensor in headers.items():
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
            module, _, suffix = name.rpartition(".")
            if target in parameters and suffix in self.suffixes:
                found[target][module][suffix] = tensor
                first, *_ = by_pattern[pattern].operations if pattern in by_pattern else (None,)
                if not isinstance(first, _FillWeight) or not first.keeps:
                    self.changed.add(target)
        return {target: dict(modules) for target, modules in found.items()}

    def _layouts_of(
        self, model: Any, target: str, modules: dict[str, dict[str, Tensor]], refused: dict[str, str]
    ) -> list[Layout]:
        shape = tuple(_parameter(model, target).shape)
        width = _width(model, target)
        layouts = []
        named: dict[str, set[str]] = {}
        for name, tensors in modules.items():
            if named.setdefault(name.rpartition(".")[2], {*tensors}) != {*tensors}:
                refused[name] = f"{', '.join(sorted(tensors))}, other tensors than the experts before it have"
                continue
            try:
                layout = layout_of(self.settings, name, tensors, width)
            except NoLayoutError as error:
                refused[name] = str(error)
                continue
            if layout is not None:
                layouts.append(layout)
        rows = sum(layout.num_rows for layout in layouts)
        if len(layouts) == len(modules) and rows * width != math.prod(shape):
            raise ModelLoadError(
                f"the quantised tensors of {next(iter(modules))} have {rows} rows of {width} weights, but the "
                f"config's {target} has the shape {list(shape)}. Take both from one revision."
            )
        return layouts

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.faults:
            raise ModelLoadError(f"{self.faults[0]}.")
        for name, order in self.kept.items():
            path = name.rpartition(".")[0]
            module: Any = model.get_submodule(path)
            if is_experts(module):
                forms = [f"{path}.{projection}" for projection in projections_of(module)]
                if name == forms[0]:
                    keep_experts(module, {each.rpartition(".")[2]: self.planned[each] for each in forms}, model.dtype)
                continue
            blocks = module.weight.data
            dtype = next((each.dtype for each in (module.bias,) if each is not None), model.dtype)
            linear = QuantisedLinear(self.planned[name], blocks, module.bias, dtype=dtype)
            model.set_submodule(path, linear if order is None else SortedLinear(linear, order))
        self.remove_quantization_config(model)
        return model


class _FillWeight(ConversionOps):
    """Makes a parameter of a module's serialized tensors: blocks where weights stay quantised, else plain weights."""

    def __init__(self, hf_quantizer: _Reader) -> None:
        self.hf_quantizer = hf_quantizer  # the loader sees by this name that tensors come in their own dtypes
        self.keeps = True

    def __deepcopy__(self, memo: Any) -> _FillWeight:
        return self  # the loader copies an operation for each parameter, and the quantizer with it

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **_: Any
    ) -> dict[str, Any]:
        lists = {key: value if isinstance(value, list) else [value] for key, value in input_dict.items()}
        if lists.keys() <= set(self.hf_quantizer.suffixes):
            of_module = {key: tensors[0] for key, tensors in lists.items()}
            return {full_layer_name: self._filled(full_layer_name, of_module, model)}
        experts: defaultdict[str, dict[str, list[Tensor]]] = defaultdict(dict)
        for key, found in lists.items():
            module, suffix = key.rpartition(".")[::2]
            experts[f"{module}.weight"][suffix] = found
        filled: dict[str, Any] = {}
        for pattern, parts in experts.items():
            count = len(next(iter(parts.values())))
            of_each = [{last: tensors[number] for last, tensors in parts.items()} for number in range(count)]
            filled[pattern] = [self._filled(full_layer_name, one, model) for one in of_each]
        return filled

    def _filled(self, name: str, tensors: dict[str, Tensor], model: Any) -> Tensor:
        reader = self.hf_quantizer
        parameter = _parameter(model, name)
        width = _width(model, name)
        layout = layout_of(reader.settings, name.rpartition(".")[0], tensors, width)
        if layout is None:
            return tensors["weight"].to(parameter.dtype)
        if (fault := layout.fault(tensors)) is not None:
            reader.faults.append(fault)
        blocks = layout.blocks(tensors)
        order = layout.order
        holds_all = parameter.numel() == layout.num_rows * width
        if name in reader.planned:
            reader.kept[name] = order
            return blocks.unflatten(0, (len(parameter), -1)) if holds_all and parameter.dim() == 3 else blocks
        weight = torch.empty(layout.num_rows, width, dtype=parameter.dtype)
        step = max(1, _ROWS_AT_ONCE // width)
        for at in range(0, layout.num_rows, step):
            part = layout.form.weights(blocks[at : at + step]).to(parameter.dtype)
            weight[at : at + step, slice(None) if order is None else order] = part
        if not holds_all or parameter.dim() == 2:
            return weight
        experts = weight.unflatten(0, (len(parameter), -1))
        return experts if experts.shape == parameter.shape else experts.transpose(1, 2).contiguous()


def _parameter(model: Any, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), last)
    return found


def _width(model: Any, name: str) -> int:
    """Inputs of the rows of a parameter, which may be stored by inputs."""
    path = name.rpartition(".")[0]
    parameter = _parameter(model, name)
    by_inputs = parameter.dim() == 3 and getattr(model.get_submodule(path), "is_transposed", False)
    return parameter.shape[-2 if by_inputs else -1]


def _names_by_parameter(suffixes: tuple[str, ...]) -> dict[str, list[str]]:
    """Last parts of names in files by the last part of the parameter that they make."""
    projections = ("gate_up_proj", "down_proj")
    named = {each: [suffix for suffix in suffixes if suffix.startswith(each)] for each in projections}
    return {name: found for name, found in named.items() if found} or {"weight": [*suffixes]}


def _halves(model: Any, reasons: dict[str, str | None]) -> list[str]:
    """Parameters of experts that would stay quantised while the other projection does not."""
    found = []
    for target in [name for name, reason in reasons.items() if reason is None]:
        path = target.rpartition(".")[0]
        module = model.get_submodule(path)
        if is_experts(module):
            both = [f"{path}.{projection}" for projection in projections_of(module)]
            found += [target] if any(reasons.get(each, "plain") is not None for each in both) else []
    return found


def _why_plain(model: Any, target: str, forms: set[RowFormat]) -> str | None:
    """The reason why a parameter is dequantised at load; None if it stays quantised."""
    path = target.rpartition(".")[0]
    module = model.get_submodule(path)
    if len(forms) > 1:
        return "they join modules of several layouts"
    if not (form := next(iter(forms))).has_kernel:
        return f"no kernel multiplies {form.values} in runs of {form.run}"
    if type(module) is not nn.Linear and not is_experts(module):
        return f"{type(module).__name__} is no linear layer"
    return None


def _headers(files: list[str]) -> dict[str, Tensor]:
    """All tensors of the files: those of one dimension read, the others without memory."""
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (a file has no iterator)
                stored = opened.get_slice(name)
                dtype = _DTYPES.get(stored.get_dtype())
                if dtype is not None:
                    shape = stored.get_shape()
                    is_small = len(shape) < 2  # shapes, groups, units
                    found[name] = (
                        opened.get_tensor(name) if is_small else torch.empty(shape, dtype=dtype, device="meta")
                    )
    return found


_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
