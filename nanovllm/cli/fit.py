"""The command `nanovllm fit`: a model's bytes, the contexts and requests that fit this machine, and their speed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanovllm.cli.flags import add_model_argument, add_model_flags, engine_options, model_source, take_model_argument
from nanovllm.config import DEVICE_DEFAULTS
from nanovllm.features.costs.cost_model import StepWork
from nanovllm.features.engine_config import QUANTISED_ON_LOAD, EngineConfig
from nanovllm.models.sizes import QUANTISED_BYTES, ModelSizes, read_sizes
from nanovllm.models.source import find, is_gguf
from nanovllm.tools.simulate.calibration import Calibration

USED_OPTIONS = {
    "dtype", "device", "quantization", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization", "revision",
    "kv_cache_dtype",
}  # fmt: skip
UNUSED_OPTIONS = {field.name for field in dataclasses.fields(EngineConfig)} - USED_OPTIONS
DEFAULT_CALIBRATION = "calibration.json"
CONTEXTS = (1024, 4096, 16384, 65536, 262144)
STEP_BYTES = 2**29  # GPU memory for a step's activations; a running engine measures it
DESCRIPTION = """
Tell a model's needs: bytes of its weights, KV cache per token, contexts and number of requests that fit this
machine's memory, and the tokens per second to expect, by a file of `nanovllm calibrate`. Nothing is loaded.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One context length.

    num_requests: requests of this length that run at once, at most max_num_seqs.
    tokens_per_second_alone: output tokens/s of one request; None without a calibration.
    tokens_per_second: output tokens/s of all requests together; None without a calibration.
    """

    context: int
    kv_bytes: int
    num_requests: int
    tokens_per_second_alone: float | None = None
    tokens_per_second: float | None = None


def add_fit_command(commands: Any) -> None:
    """Register the subcommand."""
    fit = commands.add_parser(
        "fit", help="tell which contexts and requests fit this machine", description=DESCRIPTION, allow_abbrev=False,
        usage="nanovllm fit [options] [MODEL]",
    )  # fmt: skip
    add_model_argument(fit)
    fit.add_argument(
        "--calibration", metavar="FILE",
        help=f"output of `nanovllm calibrate` (default: {DEFAULT_CALIBRATION}, if it is here)",
    )  # fmt: skip
    fit.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_model_flags(fit, leave_out=UNUSED_OPTIONS)
    fit.set_defaults(run=_fit)


def _fit(options: argparse.Namespace) -> int:
    take_model_argument(options)
    config = EngineConfig.from_options(**engine_options(options))
    calibration = _calibration(options.calibration)
    source = find(model_source(options.model), needs_tokenizer=False, revision=config.revision)
    if config.quantization in QUANTISED_ON_LOAD and is_gguf(source):
        raise ValueError(f"{options.model} is a GGUF file, and its weights are quantised. Leave --quantization out.")
    device, available = _memory(config)
    if config.kv_cache_dtype != "auto" and device != "cuda":
        raise ValueError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, which is for GPUs alone, and the device is a CPU. Leave "
            "--kv-cache-dtype out."
        )
    sizes = read_sizes(
        source, dtype=config.dtype, quantization=config.quantization, device=device,
        kv_cache_dtype=config.kv_cache_dtype,
    )  # fmt: skip
    cache_bytes = _cache_bytes(config, sizes, device, available)
    speed = None if calibration is None else _Speed(calibration, sizes, options.model, config)
    max_num_seqs = config.max_num_seqs or DEVICE_DEFAULTS[device].max_num_seqs
    rows = [_row(context, sizes, cache_bytes, max_num_seqs, speed) for context in _contexts(sizes)]
    if options.json:
        found = {"model": options.model, "device": device, "available_bytes": available, "cache_bytes": cache_bytes}
        print(json.dumps(found | asdict(sizes) | {"rows": [asdict(row) for row in rows]}))
        return 0
    print("\n".join(_about(options.model, sizes, device, available, cache_bytes)))
    if cache_bytes <= 0:
        print(_too_large(sizes, available, device))
        return 0
    print(_table(rows))
    print(f"\n{speed.about if speed is not None else _how_to_calibrate(options.model)}")
    return 0


def _calibration(path: str | None) -> Calibration | None:
    if path is None and not Path(DEFAULT_CALIBRATION).is_file():
        return None
    return Calibration.load(path or DEFAULT_CALIBRATION)


def _memory(config: EngineConfig) -> tuple[str, int]:
    """("cpu" or "cuda", bytes that a new process may take there)."""
    if config.device != "cpu":
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(None if config.device in ("auto", "cuda") else config.device)
            return "cuda", min(free, int(config.gpu_memory_utilization * total) - (total - free))
        if config.device != "auto":
            raise ValueError(f"device is {config.device!r}, and this machine has no such GPU. Leave it at 'auto'.")
    from nanovllm.fast.host.memory import available_memory  # imports torch

    return "cpu", available_memory()


def _cache_bytes(config: EngineConfig, sizes: ModelSizes, device: str, available: int) -> int:
    """Bytes of the KV cache that an engine would take; 0 or less if the weights do not fit."""
    from nanovllm.fast.gpu.memory import GPU_RESERVE_BYTES  # imports torch
    from nanovllm.fast.host.memory import MAX_DEFAULT_CPU_CACHE_BYTES

    left = available - sizes.weight_bytes - sizes.picture_bytes
    if config.kv_cache_memory_bytes is not None:
        return min(config.kv_cache_memory_bytes, left)
    return left - GPU_RESERVE_BYTES - STEP_BYTES if device == "cuda" else min(MAX_DEFAULT_CPU_CACHE_BYTES, left // 2)


def _contexts(sizes: ModelSizes) -> list[int]:
    longest = sizes.max_position_embeddings
    return [*(context for context in CONTEXTS if context < longest), longest]


def _row(context: int, sizes: ModelSizes, cache_bytes: int, max_num_seqs: int, speed: _Speed | None) -> Row:
    kv_bytes = sizes.kv_bytes(context)
    num_requests = min(max_num_seqs, max(0, cache_bytes) // kv_bytes) if kv_bytes else 0
    if speed is None or not num_requests:
        return Row(context, kv_bytes, num_requests)
    return Row(context, kv_bytes, num_requests, speed(1, context), speed(num_requests, context))


class _Speed:
    """Tokens per second of decodes, by the costs of a calibration.

    Those of another model are scaled by the bytes that a step reads: weights, and K and V of the contexts.
    """

    def __init__(self, calibration: Calibration, sizes: ModelSizes, model: str, config: EngineConfig) -> None:
        self._cost = calibration.cost_model.step_cost(overlap=calibration.device == "cuda")
        self._sizes = sizes
        self._measured = sizes
        of_same = calibration.model == model and calibration.dtype == sizes.dtype
        self.about = f"Speeds were calibrated for {calibration.model}."
        own = calibration.quantization, calibration.kv_cache_dtype
        if not (of_same and own == (config.quantization, config.kv_cache_dtype)):
            source = find(model_source(calibration.model), needs_tokenizer=False)
            self._measured = read_sizes(
                source, dtype=calibration.dtype, quantization=own[0], kv_cache_dtype=own[1]
            )  # fmt: skip
            self.about = f"Speeds are scaled from {calibration.model} by bytes read: {_how_to_calibrate(model).lower()}"

    def __call__(self, num_requests: int, context: int) -> float:
        seconds = self._cost.seconds(
            StepWork(num_requests, num_requests, 0, num_requests * context, 0, 0, num_requests)
        )
        return num_requests / (
            seconds * self._read(self._sizes, num_requests, context) / self._read(self._measured, num_requests, context)
        )

    @staticmethod
    def _read(sizes: ModelSizes, num_requests: int, context: int) -> int:
        return sizes.weight_bytes + num_requests * sizes.kv_bytes(context)


# -------------------------------------------------------------------------------------------------------------- output


def _about(model: str, sizes: ModelSizes, device: str, available: int, cache_bytes: int) -> list[str]:
    count = f", {sizes.num_weights / 1e6:,.0f} million weights" if sizes.num_weights else ""
    place = "GPU" if device == "cuda" else "machine"
    windows = sorted({window for window, _ in sizes.kv_layers if window})
    kept = f", of the last {', '.join(f'{window:,}' for window in windows)} tokens in some layers" if windows else ""
    stored = f" in memory, {_gigabytes(sizes.stored_bytes)} in files ({sizes.stored})" if sizes.stored else ""
    return [
        f"{model}: {sizes.architecture}{count}, {sizes.dtype}",
        f"weights       {_gigabytes(sizes.weight_bytes)}{stored}",
        *([f"pictures      features of up to {_gigabytes(sizes.picture_bytes)}"] if sizes.picture_bytes else []),
        f"KV per token  {sizes.kv_token_bytes:,} bytes in {len(sizes.kv_layers)} layers{kept}",
        f"memory        {_gigabytes(available)} are available on this {place}",
        f"KV cache      {_gigabytes(max(0, cache_bytes))}; kv_cache_memory_bytes sets another size",
        "",
    ]


def _too_large(sizes: ModelSizes, available: int, device: str) -> str:
    text = f"It does not fit: the weights take {_gigabytes(sizes.weight_bytes)} of {_gigabytes(available)}."
    if sizes.num_weights and device == "cpu":
        each = ", ".join(f"{name} {_gigabytes(sizes.num_weights * size)}" for name, size in QUANTISED_BYTES.items())
        return f"{text} With --quantization: {each}."
    return f"{text} Take a smaller model, or a GGUF file of fewer bits."


def _table(rows: list[Row]) -> str:
    cells: list[tuple[str, ...]] = [("CONTEXT", "KV OF ONE", "REQUESTS AT ONCE", "TOKENS/S, ONE", "TOKENS/S, ALL")]
    for row in rows:
        speeds = (
            "" if speed is None else f"{speed:,.1f}" for speed in (row.tokens_per_second_alone, row.tokens_per_second)
        )
        cells.append((f"{row.context:,}", f"{row.kv_bytes / 1e6:,.1f} MB", f"{row.num_requests:,}", *speeds))
    if all(row.tokens_per_second is None for row in rows):
        cells = [row[:3] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _how_to_calibrate(model: str) -> str:
    return f"For measured speeds: nanovllm calibrate -m {model} --output {DEFAULT_CALIBRATION}"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
