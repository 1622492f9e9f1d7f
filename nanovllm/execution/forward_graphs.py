"""Which forward passes are captured, which of them a step runs as, and which one is captured next. No torch."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from nanovllm.execution.buckets import Buckets, GraphShape

logger = logging.getLogger("nanovllm")

MAX_GRAPHS = 192
STALE_STEPS = 4096  # after so many without it, a graph may make room for another
MIN_MISSES = 2  # steps of a shape for which a graph makes room
STEPS_TO_CAPTURE = 16  # without any graph; the last of them waits for one. Of a shape, and of a head of rare options


class ForwardGraphs:
    """The captured forward passes of one engine.

    While idle, a graph makes room only for a shape that steps missed, and only if they had no use for it for long: so
    traffic of more shapes than there is room for does not capture them in turn for ever. What start-up captures stays,
    since it holds all others.

    Args:
        may_wait: whether a step may wait for a capture: not one that several ranks take together.

    Attributes:
        graphs: by shape, the least recently used first.
        missed: steps of each shape that could be captured and is not.
        bare: those of them that no other graph served, until it is captured.
        usual: shapes worth capturing after those.
    """

    def __init__(self, buckets: Buckets, *, may_wait: bool = True) -> None:
        self._buckets, self._may_wait = buckets, may_wait
        self._kept = {*buckets.common(), *buckets.coarse()}
        self.missed: Counter[GraphShape] = Counter()
        self.bare: Counter[GraphShape] = Counter()
        self._num_steps = 0
        self.clear()

    def clear(self) -> None:
        """Drop all graphs."""
        self.bare.clear()
        self.graphs: OrderedDict[GraphShape, Any] = OrderedDict()
        self.usual = deque(self._buckets.usual())
        self._last_steps: dict[GraphShape, int] = {}  # that used each
        self._stand_ins: dict[GraphShape, GraphShape] = {}

    def shape_for_step(self, shape: GraphShape, *, at_any_cost: bool) -> GraphShape:
        """The captured shape that a step runs as; its own where none holds it. See `Buckets.stand_in`."""
        self._num_steps += 1
        if shape not in self.graphs:
            if shape not in self._stand_ins:
                stand_in = self._buckets.stand_in(shape, self.graphs, at_any_cost=at_any_cost)
                self._stand_ins[shape] = stand_in or shape
            if self._buckets.may_capture(shape):
                self.missed[shape] += 1
                self.bare[shape] += self._stand_ins[shape] == shape
            shape = self._stand_ins[shape]
        if shape in self.graphs:
            self.graphs.move_to_end(shape)
            self._last_steps[shape] = self._num_steps
        return shape

    def add(self, shape: GraphShape, graph: Any) -> None:
        self.graphs[shape] = graph
        self._last_steps[shape] = self._num_steps
        self._stand_ins.clear()
        del self.missed[shape], self.bare[shape]

    def capture_due(self, shape: GraphShape, capture: Callable[[GraphShape], None]) -> None:
        """Capture the shape of this step if it is to wait for that.

        One step is: a capture that fails is logged and not tried again, and the step runs as those before.
        """
        if self.bare[shape] != STEPS_TO_CAPTURE or self.is_full or not self._may_wait:
            return
        try:
            capture(shape)
        except Exception:  # an error of the device comes again without the graph
            logger.warning("capturing %s failed; its steps run without a CUDA graph", shape, exc_info=True)
        except BaseException:
            self.bare[shape] -= 1  # the next such step takes it up again
            raise

    @property
    def is_full(self) -> bool:
        return len(self.graphs) >= MAX_GRAPHS

    def make_room(self) -> None:
        """Drop graphs until one more may be added."""
        while self.is_full:
            victim = self._victim() or next(iter(self.graphs))
            del self.graphs[victim], self._last_steps[victim]
            self._stand_ins.clear()

    def next_ahead(self) -> GraphShape | None:
        """The next shape to capture while idle, None if no more is worth it."""
        victim = self._victim()
        is_stale = victim is not None and self._num_steps - self._last_steps[victim] >= STALE_STEPS
        for shape, num_steps in self.missed.most_common(1):
            if not self.is_full or (is_stale and num_steps >= MIN_MISSES):
                return shape
        while self.usual and not self.is_full:
            shape = self.usual.popleft()
            if shape not in self.graphs:
                return shape
        return None

    def _victim(self) -> GraphShape | None:
        """The least recently used of those that start-up does not capture."""
        return next((shape for shape in self.graphs if shape not in self._kept), None)
