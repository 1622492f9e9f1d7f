"""Captures CUDA graphs into one memory pool, which they share since they run one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import torch

from nanovllm.process.device import DEVICE_LOCK
from nanovllm.process.gc_control import OldObjectsFrozen
from nanovllm.process.interrupts import interrupts_let_through

logger = logging.getLogger("nanovllm")


class GraphPool:
    """The memory of one engine's graphs; the largest is captured first, and the others fit into its memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._is_empty = True

    def capture(
        self, run: Callable[[], None], *, frees_trial: bool = False, needs_trial: bool = True
    ) -> torch.cuda.CUDAGraph:
        """Capture the launches of `run`, after a trial run that compiles and loads, which a capture must not do.

        Args:
            frees_trial: give the trial's memory back, which the graph takes again from the pool.
            needs_trial: False if such launches were captured before; where this capture fails, a trial comes after all.
        """
        # It may take seconds, most of them in compilers with a million objects, and changes no books.
        with interrupts_let_through(), DEVICE_LOCK, OldObjectsFrozen():
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    if not needs_trial and (graph := self._without_trial(run)) is not None:
                        return graph
                    run()
                    torch.cuda.synchronize(self._device)
                    if self._is_empty or frees_trial:
                        torch.cuda.empty_cache()  # the trial's memory is the graphs' from now on
                    graph = self._captured(run, "thread_local")
            finally:
                current.wait_stream(self._stream)
        self._is_empty = False
        return graph

    def _captured(self, run: Callable[[], None], mode: str) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode=mode)
        try:
            run()
        finally:
            graph.capture_end()
        return graph

    def _without_trial(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The graph; None if the launches needed more than the loading of compiled code, such as a compilation."""
        try:
            return self._captured(run, "relaxed")  # other modes forbid loading
        except RuntimeError as error:
            logger.debug("captured after a trial run, since without one there was an error: %s", error)
        with suppress(RuntimeError):  # a capture that fails does not end its allocations
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
        return None

    def synchronize(self) -> None:
        """Wait for the device, before graphs that it may still run are dropped."""
        with DEVICE_LOCK:
            torch.cuda.synchronize(self._device)

    def reset(self) -> None:
        """Start a new pool, once its graphs are gone and with them the old one."""
        self._pool = torch.cuda.graph_pool_handle()
        self._is_empty = True
