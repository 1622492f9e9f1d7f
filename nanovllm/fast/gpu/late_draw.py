"""A draw that waits for threads on the host, which fill masks while the next step is scheduled and packed.

::

    host     update 1   consume tokens   schedule 3   pack 3   draw 2   launch 3 (forward)   read 2   update 2 ...
    threads                              [ masks of 2 .....]
    device   [ forward 2 .........................................][draw 2][ forward 3 ..............
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanovllm.device import raise_device_error
from nanovllm.model_runner import PendingTokens
from nanovllm.sampler import StepReport


class LateDraw:
    """`PendingTokens` of a draw that is launched before the next step's inputs are sent, or when it is read.

    Args:
        draw: launches it, once; None if there is nothing to draw.
        reported: report of the step, see `PendingTokens`.
        on_drop: callback if it is dropped without a launch, as by a step that is undone.
    """

    def __init__(
        self,
        draw: Callable[[], Tensor] | None = None,
        reported: StepReport | None = None,
        on_drop: Callable[[], None] | None = None,
    ) -> None:
        self._draw = draw
        self._reported = reported
        self._on_drop = on_drop
        self._pending: PendingTokens | None = None
        self._error: BaseException | None = None

    def __del__(self) -> None:
        if self._draw is not None and self._on_drop is not None:
            self._on_drop()

    def launch(self) -> None:
        """Launch it, unless that is done; raises its error again."""
        if self._error is not None:
            raise self._error
        if self._draw is not None:
            draw = self._draw
            self._draw = None
            try:
                self._pending = PendingTokens.send(draw(), self._reported)
            except BaseException as error:
                self._error = error
                raise

    def result(self) -> list[int]:
        """Token ids, see `PendingTokens`; launches the draw if it is not launched yet."""
        try:
            self.launch()
        except RuntimeError as error:
            raise_device_error(error)
        assert self._pending is not None
        return self._pending.result()

    @property
    def report(self) -> StepReport | None:
        return self._reported if self._pending is None else self._pending.report
