"""Which graphs an executor captures, drops and keeps, with a pool that captures nothing: no GPU is needed."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanovllm.fast.attention.step_tables import TableInputs
from nanovllm.fast.gpu import cuda_graphs, forward_graphs
from nanovllm.fast.gpu.cuda_graphs import GraphExecutor
from nanovllm.fast.gpu.forward_graphs import STALE_STEPS, ForwardGraphs, HeadGraphs
from nanovllm.features.costs.buckets import Buckets, GraphShape, HeadShape
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CacheGroup, CachePools

CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, block_size=16, max_model_len=100, num_kv_blocks=50)
POOLS = CachePools((CacheGroup((0,), 1),), (50,))
ODD = GraphShape(8, 256, 32)  # of many short chunks: neither captured at start-up nor usual


class Binding:
    """What an executor asks of a model; its head is where `head_is_apart` says."""

    def __init__(self, *, is_live):
        self.is_live = is_live
        self.ranks = None
        self.device = torch.device("cpu")
        self.layers = [None]
        self.addresses = [1, 2]
        self.head_is_apart = True
        self.hidden = torch.zeros(8, 4)
        self.is_stacked, self.stacked = True, None
        self.passes = SimpleNamespace(hidden_states=None)

    def unstack_layers(self):
        self.is_stacked = False

    def weight_addresses(self):
        return list(self.addresses)

    def splits_head(self):
        return self.head_is_apart

    def compute_step(self, *_):
        return self.hidden

    def forward_step(self, *_):
        return self.hidden + 1

    def head_step(self, states):
        return states


class Pool:
    """Counts captures, runs their trials, and raises `error` instead of the one with the number `raises_at`."""

    def __init__(self, device):
        self.num_captures, self.raises_at = 0, None

    def fail_in(self, number, error=None):
        """Raise instead of the `number`-th capture from now."""
        self.raises_at, self.error = self.num_captures + number, error or KeyboardInterrupt()

    def capture(self, run, *, frees_trial=False):
        self.num_captures += 1
        if self.num_captures == self.raises_at:
            raise self.error
        run()
        return object()

    def synchronize(self): ...

    def reset(self): ...


@pytest.fixture
def make(monkeypatch):
    """Returns an executor that has not captured anything yet."""
    monkeypatch.setattr(cuda_graphs, "GraphPool", Pool)
    monkeypatch.setattr(cuda_graphs, "use_write_kernel", lambda: None)
    for name in ("unstack_layers", "weight_addresses", "splits_head", "head_step"):
        monkeypatch.setattr(cuda_graphs, name, getattr(Binding, name))
    backend = SimpleNamespace(compiles_each_size=False, inputs=TableInputs(CONFIG.block_size))
    monkeypatch.setattr(cuda_graphs, "build_gpu_attention", lambda *_, **__: backend)

    def make(*, is_live=False, cuda_graphs=True):
        config = replace(CONFIG, cuda_graphs=cuda_graphs)
        sampler = SimpleNamespace(draw=lambda logits, *_, **__: torch.zeros(len(logits), dtype=torch.int64))
        executor = GraphExecutor(Binding(is_live=is_live), config, sampler, POOLS)  # type: ignore[arg-type]
        executor._attention_step = lambda shape: ()
        executor._extras.penalised = lambda logits, _: logits
        return executor

    return make


def started(make):
    executor = make()
    executor.warm_up()
    return executor


def captured(executor):
    return set(executor._forwards.graphs), set(executor._heads.graphs)


@pytest.mark.parametrize("comes_next", ["a step", "idle time", "another interrupt"])
def test_captures_that_an_interrupt_ended_are_taken_up_again(make, comes_next):
    whole = started(make)
    executor = started(make)
    executor.model_changed(in_place=False)
    executor._pool.fail_in(3)
    with pytest.raises(KeyboardInterrupt):
        executor._captured_shape(GraphShape(4, 4, 0))
    assert len(executor._forwards.graphs) == 2
    if comes_next == "another interrupt":  # among the heads
        executor._pool.fail_in(len(captured(whole)[0]))
        with pytest.raises(KeyboardInterrupt):
            executor._captured_shape(GraphShape(4, 4, 0))
    if comes_next == "idle time":
        assert executor.capture_ahead()
    else:
        executor._captured_shape(GraphShape(4, 4, 0))
    assert captured(executor) == captured(whole)


def test_a_capture_that_fails_does_not_fail_every_later_step(make):
    executor = started(make)
    executor.model_changed(in_place=False)
    executor._pool.fail_in(3, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        executor._captured_shape(GraphShape(4, 4, 0))
    executor._captured_shape(GraphShape(4, 4, 0))
    while executor.capture_ahead():
        pass
    assert set(Buckets(CONFIG).usual()) <= set(executor._forwards.graphs)


def test_heads_with_rare_options_are_captured_once_a_step_had_them(make):
    executor = started(make)
    rare, heads = HeadShape(4, True, penalises=True), executor._heads
    assert not executor.capture_seen_head()
    assert not heads.is_due(rare)  # the step runs without a graph
    heads.add_step(rare)
    assert executor.capture_seen_head() and rare in heads.graphs
    assert not executor.capture_seen_head()
    heads.drop_penalising()
    assert rare not in heads.graphs and {head.is_rare for head in heads.graphs} == {False}


def test_the_step_with_number_sixteen_waits_for_the_capture_of_its_rare_head():
    heads, rare = HeadGraphs(), HeadShape(4, True, num_top=5)
    assert heads.is_due(HeadShape(4, True))
    for _ in range(15):
        assert not heads.is_due(rare)
        heads.add_step(rare)
    assert heads.is_due(rare)
    heads.graphs[rare] = None
    assert not heads.is_due(rare)


def test_no_head_is_captured_before_what_it_reads_is_there(make):
    """After a capture that failed, or before the first forward pass of a live module."""
    executor = make()
    executor._heads.add_step(HeadShape(4, True, penalises=True))
    assert not executor.capture_seen_head()
    executor.warm_up()
    assert executor.capture_seen_head()


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_capture_leaves_the_tokens_of_the_step_before(make, error):
    executor = started(make)
    executor._sampled.copy_(torch.arange(5, 13))
    executor._heads.graphs.clear()
    for number, capture in enumerate((executor._capture_forward, executor._capture_head)):
        if error is not None:
            executor._pool.fail_in(1, error)
        with nullcontext() if error is None else pytest.raises(type(error)):
            capture([ODD, HeadShape(8, True)][number])
        assert executor._sampled.tolist() == list(range(5, 13))


def test_a_live_module_gets_no_graphs_while_it_is_its_owners(make):
    executor = make(is_live=True)
    executor.warm_up()
    executor.model_changed(in_place=False)
    assert not executor._lacking
    executor._captured_shape(ODD)
    assert set(executor._forwards.graphs) == {ODD}


@pytest.mark.parametrize("captures", [True, False])
def test_a_changed_model_leaves_no_tensors_of_the_old_sizes(make, captures):
    """Also without a graph that would have to be dropped."""
    executor = make(is_live=True, cuda_graphs=captures)
    executor._forward(GraphShape(4, 4, 0))
    assert executor._states.dtype == torch.float32
    executor._binding.hidden = torch.zeros(8, 6, dtype=torch.float64)
    executor.model_changed(in_place=False)
    executor._forward(GraphShape(4, 4, 0))
    assert (executor._states.shape, executor._states.dtype) == ((8, 6), torch.float64)


def test_weights_written_in_place_leave_everything(make):
    executor = make(is_live=True)
    executor._captured_shape(ODD)
    executor._forward(ODD)
    states = executor._states
    executor.model_changed(in_place=True)
    assert executor._states is states and ODD in executor._forwards.graphs and executor._binding.is_stacked
    executor._binding.addresses = [1, 3]
    executor.model_changed(in_place=True)
    assert not executor._forwards.graphs and not executor._binding.is_stacked


def test_whether_the_head_is_apart_is_found_again_once_the_model_was_changed(make):
    executor = make(is_live=True)
    executor._forward(ODD)
    assert executor._states.max() == 0
    executor._binding.head_is_apart = False
    executor.model_changed(in_place=False)
    executor._forward(ODD)
    assert executor._states.min() == 1


# ---------------------------------------------------------------------------------------------------- room for graphs


def shapes_beyond(count):
    return [GraphShape(5, 100 + number, 24) for number in range(count)]


@pytest.fixture
def full(monkeypatch):
    """As many graphs as are kept: those of start-up, and ten others."""
    graphs = ForwardGraphs(Buckets(CONFIG))
    graphs.usual.clear()
    for shape in [*sorted(graphs._kept), *shapes_beyond(10)]:
        graphs.add(shape, None)
    monkeypatch.setattr(forward_graphs, "MAX_GRAPHS", len(graphs.graphs))
    return graphs


def run_steps(graphs, shape, count):
    for _ in range(count):
        graphs.shape_for_step(shape, at_any_cost=False)


def capture_ahead(graphs):
    found = []
    while (shape := graphs.next_ahead()) is not None:
        graphs.make_room()
        graphs.add(shape, None)
        found.append(shape)
    return found


def test_a_shape_that_steps_miss_takes_the_place_of_one_that_they_no_longer_use(full):
    stale, *others = shapes_beyond(10)
    missed = GraphShape(5, 200, 24)
    for step in range(STALE_STEPS):
        run_steps(full, missed if step % 2 else others[step // 2 % 9], 1)
    assert capture_ahead(full) == [missed]
    assert stale not in full.graphs and full._kept | set(others) <= set(full.graphs)
    assert full.shape_for_step(missed, at_any_cost=False) == missed


def test_usual_shapes_and_those_that_came_once_drop_no_graph(full):
    run_steps(full, next(iter(full._kept)), STALE_STEPS)
    run_steps(full, GraphShape(5, 200, 24), 1)
    full.usual.extend(shapes_beyond(20)[10:])
    assert capture_ahead(full) == []


def test_more_shapes_in_turn_than_there_is_room_for_are_not_captured_in_turn(full):
    num_captures = 0
    for step in range(3 * STALE_STEPS):
        run_steps(full, shapes_beyond(15)[step % 15], 1)
        num_captures += len(capture_ahead(full))
    assert num_captures == 0


def test_steps_of_more_tiles_than_the_graphs_memory_holds_are_not_captured(make):
    executor = make(is_live=True)
    many = GraphShape(8, 256, executor._buckets.max_captured_tiles + 4)
    assert executor._captured_shape(many) == many
    assert not executor._forwards.graphs and not executor._forwards.missed


def test_a_shape_that_no_graph_serves_is_captured_at_its_sixteenth_step(make):
    executor = started(make)
    nearby = GraphShape(0, 250, 8)
    for step in range(1, 41):
        assert executor._captured_shape(nearby) in executor._forwards.graphs
        assert executor._captured_shape(ODD) == ODD
        assert (ODD in executor._forwards.graphs) == (step >= 16), step
    assert nearby not in executor._forwards.graphs  # another stands in for it


def test_a_capture_that_fails_while_requests_wait_is_not_tried_again(make, caplog):
    executor = started(make)
    executor._pool.fail_in(1, RuntimeError("out of memory"))
    for _ in range(40):
        assert executor._captured_shape(ODD) == ODD
    assert executor._pool.num_captures == executor._pool.raises_at
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert ODD not in executor._forwards.graphs
    executor.model_changed(in_place=False)  # all graphs are captured anew
    for _ in range(16):
        executor._captured_shape(ODD)
    assert ODD in executor._forwards.graphs


def test_an_interrupted_capture_of_a_step_is_taken_up_by_the_next(make):
    executor = make()
    executor._pool.fail_in(1)
    for _ in range(15):
        executor._captured_shape(ODD)
    with pytest.raises(KeyboardInterrupt):
        executor._captured_shape(ODD)
    executor._captured_shape(ODD)
    assert ODD in executor._forwards.graphs


def test_steps_of_several_ranks_wait_for_no_capture(make, monkeypatch):
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, tensor_parallel_size=2))
    executor = make()
    for _ in range(40):
        assert executor._captured_shape(ODD) == ODD
    assert executor._pool.num_captures == 0 and executor._forwards.missed[ODD] == 40


def test_no_graph_makes_room_while_requests_wait(full):
    for _ in range(40):
        assert full.shape_for_step(ODD, at_any_cost=False) == ODD
        full.capture_due(ODD, lambda shape: pytest.fail("there is no room"))


def test_a_graph_that_stands_in_for_others_counts_as_used(full):
    in_use = shapes_beyond(1)[0]
    nearby = GraphShape(5, 99, 24)
    assert full.shape_for_step(nearby, at_any_cost=False) == in_use
    assert next(reversed(full.graphs)) == in_use
