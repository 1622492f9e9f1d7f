"""A cost model on disk: with the model, options and hardware that it was measured for, and for no others."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.tools.simulate.cost_model import CostModel, DeviceCost, HostCost, IntakeCost

FORMAT = 4


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `nanovllm calibrate` measured.

    model: as it was named.
    dtype, device, attention_backend, enforce_eager, cuda_graphs, block_size: of the engine that was measured; device is
        "cpu" or "cuda".
    max_position_embeddings: the longest sequence that the model takes, in tokens.
    kv_token_bytes: bytes of K and V of a token over all layers.
    kv_cache_bytes: the measured engine's pool.
    residuals: "median", "p90" and "max" of the relative errors of the device's time, over `num_samples` steps.
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

    def resolve(self, config: EngineConfig, *, model: str | None = None) -> EngineConfig:
        """The options as an engine of this calibration would resolve them.

        Args:
            model: the model that is meant; None for that of the calibration.

        Raises ValueError if they ask for what was not measured, or contradict one another.
        """
        wants = {
            "model": model,
            "dtype": None if config.dtype == "auto" else config.dtype,
            "device": None if config.device == "auto" else config.device.partition(":")[0],
            "attention_backend": None if config.attention_backend == "auto" else config.attention_backend,
            "enforce_eager": config.enforce_eager or None,  # False is what it is when nobody says anything
            "cuda_graphs": config.cuda_graphs,
        }
        for name, wanted in wants.items():
            if wanted is not None and wanted != getattr(self, name):
                raise ValueError(
                    f"this calibration is of {name}={getattr(self, name)!r}, and {name}={wanted!r} is asked for. Its "
                    "steps take another time; run `nanovllm calibrate` for it."
                )
        config = replace(
            config,
            dtype=self.dtype,
            device=self.device,
            attention_backend=self.attention_backend,
            enforce_eager=self.enforce_eager,
            cuda_graphs=self.cuda_graphs,
        )
        limits = config.resolve_limits(self.device, self.max_position_embeddings, block_size=self.block_size)
        return limits.resolve_pool(
            self.kv_token_bytes * limits.block_size,
            self.kv_cache_bytes,
            max_model_len_is_set=config.max_model_len is not None,
        )

    def save(self, path: str | Path) -> None:
        text = json.dumps({"format": FORMAT} | asdict(self), indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Raises OSError for a file that cannot be read, ValueError for one that is no calibration."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            found = fields.pop("format")
            if found != FORMAT:
                raise ValueError(f"its format is {found}, and this version reads {FORMAT}")
            cost = fields.pop("cost_model")
            cost_model = CostModel(
                schedule=HostCost(**cost.pop("schedule")),
                device=DeviceCost(**cost.pop("device")),
                update=HostCost(**cost.pop("update")),
                launch=HostCost(**cost.pop("launch")),
                intake=IntakeCost(**cost.pop("intake")),
                **cost,
            )
            return cls(cost_model=cost_model, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{str(path)!r} is no calibration ({type(error).__name__}: {error}); `nanovllm calibrate` writes one."
            ) from error
