"""`--engine-process`: the server's one engine in another process, as a pool of one replica."""

from __future__ import annotations

from typing import Any

from nanovllm.defaults import device_of
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.refusals import RANKS_OF_REPLICAS, TENSOR_PARALLEL, refuse
from nanovllm.serving.async_llm import AsyncLLM


class EngineProcessLLM(AsyncLLM):
    """`AsyncLLM` with the engine in another interpreter than the event loop; an engine that dies is started again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, engine_process=True, **options)


def front_door(
    options: dict[str, Any], *, engine_process: bool | None, updates_weights: bool = False
) -> type[AsyncLLM]:
    """Class of the server's front door; raises ValueError for engine options that an engine process does not support.

    Args:
        options: the given engine options.
        engine_process: None for the default: on with one rank, on a GPU that no number names.
        updates_weights: True refuses options with which no weights are updated.
    """
    config = EngineConfig.from_options(**options)
    if updates_weights and config.tensor_parallel_size > 1 and (config.data_parallel_size > 1 or engine_process):
        refuse("update_weights", TENSOR_PARALLEL, RANKS_OF_REPLICAS)
    names_gpu = config.device.startswith("cuda:")
    if engine_process is None:
        engine_process = not names_gpu and config.tensor_parallel_size == 1 and device_of(config).type == "cuda"
    elif engine_process and names_gpu:
        raise ValueError(
            f"device is {config.device!r}, which --engine-process does not support: its process sees one GPU alone. "
            f"Leave device at 'auto', and set CUDA_VISIBLE_DEVICES={config.device.removeprefix('cuda:')}."
        )
    return EngineProcessLLM if engine_process else AsyncLLM
