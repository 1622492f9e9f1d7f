"""Captures CUDA graphs into one memory pool, which they share since they run one at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.device import DEVICE_LOCK
from nanovllm.fast.layers.kernel_layers import first_layer_alone
from nanovllm.features.interrupts import interrupts_let_through


class GraphPool:
    """The memory of one engine's graphs; the largest is captured first, and the others fit into its memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._is_empty = True

    def capture(self, run: Callable[[], object], *, frees_trial: bool = False) -> torch.cuda.CUDAGraph:
        """Capture the launches of `run`, after a trial run that compiles and loads, which a capture must not do.

        Args:
            frees_trial: give the trial's memory back, which the graph takes again from the pool.
        """
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        with interrupts_let_through(), DEVICE_LOCK:  # it may take seconds and changes no books
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    with first_layer_alone():
                        run()
                    torch.cuda.synchronize(self._device)
                    if self._is_empty or frees_trial:
                        torch.cuda.empty_cache()  # the trial's memory is the graphs' from now on
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        run()
                    finally:
                        graph.capture_end()
            except BaseException:
                if self._is_empty:
                    self.reset()  # a pool ends with its only graph
                raise
            finally:
                current.wait_stream(self._stream)
        self._is_empty = False
        return graph

    def synchronize(self) -> None:
        """Wait for the device, before graphs that it may still run are dropped."""
        with DEVICE_LOCK:
            torch.cuda.synchronize(self._device)

    def reset(self) -> None:
        """Start a new pool, once its graphs are gone and with them the old one."""
        self._pool = torch.cuda.graph_pool_handle()
        self._is_empty = True
