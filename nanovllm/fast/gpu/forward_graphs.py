"""Captured forward passes and heads: lookup for a step, eviction, and the next shape to capture. No torch."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from nanovllm.features.costs.buckets import Buckets, GraphShape, HeadShape

logger = logging.getLogger("nanovllm")

MAX_GRAPHS = 192
STALE_STEPS = 4096  # number of steps without use after which a graph may be evicted while idle
MIN_MISSES = 2  # steps of a shape before another graph is evicted for it
STEPS_TO_CAPTURE = 16  # steps without a graph, of a shape or a head with rare options; the last one waits for a capture


class ForwardGraphs:
    """The captured forward passes of one engine.

    While idle, only a stale graph is evicted, and only for a shape that steps missed: traffic with more shapes than
    MAX_GRAPHS does not recapture them in turn for ever. Graphs from start-up stay, since they hold all other shapes.

    Args:
        may_wait: True if a step may wait for a capture; False where several ranks take it together.

    Attributes:
        graphs: graph of each shape, least recently used first.
        missed: number of steps by shape that may be captured and is not.
        bare: the part of `missed` that ran without any graph, or with wide groups in a graph without wide programs.
        usual: shapes to capture after the missed ones.
    """

    def __init__(self, buckets: Buckets, *, may_wait: bool = True) -> None:
        self._buckets = buckets
        self._may_wait = may_wait
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
        self._last_steps: dict[GraphShape, int] = {}  # number of the last step that used each graph
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
                stand_in = self._stand_ins[shape]
                self.bare[shape] += stand_in == shape or stand_in.is_wide < shape.is_wide
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
        """Capture the shape of this step if STEPS_TO_CAPTURE steps ran without a graph of their kind.

        A failed capture is logged and not tried again; the step then runs without a graph.
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
        """The next shape to capture while idle; None if none is worth it."""
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
        """The least recently used graph, start-up's excepted."""
        return next((shape for shape in self.graphs if shape not in self._kept), None)


class HeadGraphs:
    """The captured heads of one engine.

    graphs: graph of each shape.
    """

    def __init__(self) -> None:
        self.graphs: dict[HeadShape, Any] = {}
        self._num_steps: Counter[HeadShape] = Counter()  # steps of heads with rare options

    def add_step(self, head: HeadShape) -> None:
        """Count a step after its inputs were sent: the buffers of its options exist."""
        if head.is_rare:
            self._num_steps[head] += 1

    def is_due(self, head: HeadShape) -> bool:
        """Whether the coming step waits for a capture: with rare options, the one with number STEPS_TO_CAPTURE."""
        return head not in self.graphs and (not head.is_rare or self._num_steps[head] + 1 >= STEPS_TO_CAPTURE)

    def next_seen(self) -> HeadShape | None:
        """A head with rare options that a step had and that is not captured; None if there is none."""
        return next((head for head in self._num_steps if head not in self.graphs), None)

    def drop_penalising(self) -> None:
        """Drop the graphs that read the penalties' buffer, which has moved."""
        self.graphs = {head: graph for head, graph in self.graphs.items() if not head.penalises}
