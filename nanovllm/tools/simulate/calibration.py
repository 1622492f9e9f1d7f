"""Calibration file: a cost model with the model, options and hardware that it was measured for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.features.costs.cost_model import CostModel
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CacheGroup, CachePools, resolve_pools
from nanovllm.features.groups.state_kinds import StateKind

FORMAT = 4


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of `nanovllm calibrate`.

    model: the model's name as given.
    dtype, device, attention_backend, enforce_eager, cuda_graphs, block_size, tensor_parallel_size, quantization,
        kv_cache_dtype: options of the measured engine; device is "cpu" or "cuda".
    max_position_embeddings: longest sequence of the model, in tokens.
    kv_token_bytes: bytes of K and V per token, over all layers; of one rank.
    kv_cache_bytes: size of the measured engine's KV cache, likewise.
    cache_groups: window, chunk and bytes per token of each cache group; empty for full attention alone. For recurrent
        states the fourth number is their bytes per sequence.
    residuals: "median", "p90" and "max" of the device time's errors, relative to launch and device, of `num_samples`
        steps.
    """

    model: str
    dtype: str
    device: str
    attention_backend: str
    enforce_eager: bool
    cuda_graphs: bool
    block_size: int
    max_position_embeddings: int
    kv_token_bytes: int
    kv_cache_bytes: int
    hardware: dict[str, Any]
    versions: dict[str, str]
    num_samples: int
    residuals: dict[str, float]
    cost_model: CostModel
    tensor_parallel_size: int = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    cache_groups: tuple[tuple[int | None, ...], ...] = ()

    def resolve(self, config: EngineConfig, *, model: str | None = None) -> EngineConfig:
        """Resolve options as the measured engine would.

        Args:
            model: name of the expected model; None for the calibration's.

        Raises ValueError for options that were not measured, and for contradictory ones.
        """
        wants = {
            "model": model,
            "dtype": None if config.dtype == "auto" else config.dtype,
            "device": None if config.device == "auto" else config.device.partition(":")[0],
            "attention_backend": None if config.attention_backend == "auto" else config.attention_backend,
            "enforce_eager": config.enforce_eager or None,  # False is the default, hence "not set"
            "cuda_graphs": config.cuda_graphs,
            "quantization": config.quantization,
            "kv_cache_dtype": None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            "tensor_parallel_size": None if config.tensor_parallel_size == 1 else config.tensor_parallel_size,
        }
        for name, wanted in wants.items():
            if wanted is not None and wanted != getattr(self, name):
                raise ValueError(
                    f"this calibration is of {name}={getattr(self, name)!r}, and {name}={wanted!r} is asked for. The "
                    "step times differ; run `nanovllm calibrate` for it."
                )
        config = replace(
            config,
            dtype=self.dtype,
            device=self.device,
            attention_backend=self.attention_backend,
            enforce_eager=self.enforce_eager,
            cuda_graphs=self.cuda_graphs,
            tensor_parallel_size=self.tensor_parallel_size,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        limits = config.resolve_limits(self.device, self.max_position_embeddings, block_size=self.block_size)
        resolved, _ = resolve_pools(
            limits,
            self._groups(limits.block_size),
            self.kv_cache_bytes,
            max_model_len_is_set=config.max_model_len is not None,
        )
        return resolved

    def pools(self, config: EngineConfig) -> CachePools:
        """The pools of an engine with a resolved config."""
        return resolve_pools(config, self._groups(config.block_size), 0, max_model_len_is_set=True)[1]

    def _groups(self, block_size: int) -> tuple[CacheGroup, ...]:
        groups = self.cache_groups or ((None, None, self.kv_token_bytes),)
        return tuple(_group(number, block_size, *numbers) for number, numbers in enumerate(groups))

    def save(self, path: str | Path) -> None:
        text = json.dumps({"format": FORMAT} | asdict(self), indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a calibration file; raises OSError if it cannot be read, ValueError for any other file."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            found = fields.pop("format")
            if found != FORMAT:
                raise ValueError(f"its format is {found}, and this version reads {FORMAT}")
            cost_model = CostModel.from_dict(fields.pop("cost_model"))
            groups = tuple(map(tuple, fields.pop("cache_groups", ())))
            if any(len(numbers) not in (3, 4) for numbers in groups):
                raise ValueError(f"its cache_groups are {groups}")
            return cls(cost_model=cost_model, cache_groups=groups, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{str(path)!r} is no calibration ({type(error).__name__}: {error}); `nanovllm calibrate` writes one."
            ) from error


def _group(
    number: int,
    block_size: int,
    window: int | None,
    chunk: int | None,
    token_bytes: int | None,
    record: int | None = None,
) -> CacheGroup:
    if record is not None:
        return CacheGroup((), record, StateKind.record(record))
    return CacheGroup((number,), (token_bytes or 0) * block_size, StateKind(window, chunk))
