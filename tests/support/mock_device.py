"""A device without a model, under the real engine: its KV cache, states, slots and files hold hashes of prefixes.

All is the engine's own, from the scheduler to the bytes of files: `ModelRunner`, the layout, the executor, copies, the
sampler. In the place of the model's forward pass, `MockDevice` writes the hash of each row's prefix as its K, V and
state, compares every read with the prefix of the sequence that reads, and makes logits of the hash. An update of the
weights changes all of these hashes.
"""

from types import SimpleNamespace

import numpy as np
import torch

from nanovllm.attention import AttentionLayer
from nanovllm.features.groups.cache_pools import CacheGroup, CachePools
from nanovllm.features.policies.mock_model import MockModel
from nanovllm.features.policies.mock_states import Poison, check, empty_prefix, extend_prefix
from nanovllm.features.request_options import RequestOptions
from nanovllm.features.tiers.reading import MAX_WAIT_SECONDS, FileReads
from nanovllm.kv_cache import KVCaches
from nanovllm.layout import LayerTraits, Sight
from nanovllm.model import StateLayers
from nanovllm.model_runner import ModelRunner, StepPaths
from nanovllm.sampler import DrawInputs, draw

VOCAB_SIZE = 8
TORN = -1  # not a hash: K and V of different tokens
VALUES = 0x5DEECE66D  # what makes a token's V of its K
GENERATION = 0x9E3779B97F4A7C15  # what makes the hashes of other weights
STEPS_OF_LOGITS = np.arange(VOCAB_SIZE, dtype=np.float32) / 512  # no two logits are equal


class Faults:
    """The next failure of the device, at one of the `PLACES` of a step."""

    PLACES = ("copies", "forward", "written", "draw", "read")

    def __init__(self):
        self.place = ""
        self.error = RuntimeError()
        self.non_finite = set()  # requests whose rows become NaN in the next step

    def meet(self, place):
        if place == self.place:
            self.place = ""
            raise self.error


class Weights:
    """What the device's memory means: codes of poison, and the generation of the weights."""

    def __init__(self):
        self.codes = {0: None}
        self.mask = 0

    def update(self):
        self.mask = (self.mask + GENERATION) % 2**64

    def code(self, content):
        if isinstance(content, Poison):
            if not hasattr(content, "code"):
                content.code = len(self.codes)
                self.codes[content.code] = content
            return content.code
        return 0 if content is None else content ^ self.mask

    def contents(self, codes):
        """The contents of cells [parts, n], K and V or a state."""
        first, *others = codes.tolist()
        for values in others:
            first = [k if (k and k ^ VALUES) == v else TORN for k, v in zip(first, values, strict=True)]
        return [self.codes[k] if k in self.codes else k ^ self.mask for k in first]

    def logits(self, prefix, mask=None):
        """Logits [VOCAB_SIZE] behind a prefix, which are its row's hidden state too."""
        bits = np.array([prefix ^ (self.mask if mask is None else mask)], np.uint64).view(np.uint8)
        return bits.astype(np.float32) / 32 + STEPS_OF_LOGITS


class Cells:
    """Cells of a cache, with contents as `MockModel` writes and reads them."""

    def __init__(self, weights, parts):
        self._weights = weights
        self._codes = parts.numpy().reshape(len(parts), -1).view(np.uint64)

    def __getitem__(self, key):
        if isinstance(key, slice):
            return self._weights.contents(self._codes[:, key])
        return self._weights.contents(self._codes[:, key : key + 1])[0]

    def __setitem__(self, key, content):
        several = isinstance(key, slice)
        codes = [self._weights.code(c) for c in content] if several else self._weights.code(content)
        self._codes[0, key] = codes
        if len(self._codes) == 2:
            self._codes[1, key] = [k and k ^ VALUES for k in codes] if several else codes and codes ^ VALUES


class HostCells:
    """Slots of host memory, as `TieredLoop` reads them."""

    def __init__(self, weights, memory, num_parts):
        self._weights = weights
        self._memory = memory
        self._num_parts = num_parts

    def __getitem__(self, place):
        codes = np.frombuffer(self._memory.view(*place), np.uint64).reshape(self._num_parts[place[0]], -1)
        return self._weights.contents(codes)

    def spoil(self, group, slot):
        self._memory.view(group, slot)[:] = b"\xff" * len(self._memory.view(group, slot))


class MockStateLayers(StateLayers):
    """Layers that keep states; the device finds their rows in the layout."""

    def __bool__(self):
        return True


class MockWatch:
    """Sees the owner of a live module change its weights."""

    has_changed = False
    flags = ()

    def changes(self, *, with_structure):
        has_changed = self.has_changed
        self.has_changed = False
        return has_changed, with_structure and has_changed


class MockAttention:
    """Choice and backend at once: the plan of a step is its layout."""

    uses_graphs = False
    reads_whole_blocks = True

    def build(self, *_):
        return self

    def plan(self, layout):
        return layout


class MockBinding:
    """The part of `ModelBinding` that an engine uses, with real caches."""

    min_rows = 1
    is_live = False
    vocab_size = VOCAB_SIZE
    dtype = torch.int64
    ranks = None

    def __init__(self, sizes):
        self.device = torch.device("cpu")
        paged = [kind for kind in sizes.kinds if kind.record_bytes is None]
        self.layers = [
            AttentionLayer(None, LayerTraits(1, 1, 1, 1, Sight(*kind.spans)), torch.int64, 1.0) for kind in paged
        ]
        has_states = len(paged) < len(sizes.kinds)
        self.mixers = MockStateLayers() if has_states else StateLayers()
        self.caches = KVCaches(self.layers, self.device, [[((1,), torch.int64)]] if has_states else ())
        self.watch = MockWatch()
        self.rope = self
        self.passes = self
        self.model = SimpleNamespace(base_model=None)
        self.choice = "none"
        self.has_base_model = True
        self.mock = None

    def forward_step(self, step, *inputs):
        assert self.mock is not None
        return self.mock.forward(step.plan, *inputs)

    def close(self):
        self.caches.release()


class LostRead:
    """A step's tokens that do not arrive."""

    report = None

    def __init__(self, error):
        self._error = error

    def result(self):
        raise self._error


class MockRunner(ModelRunner):
    """A runner whose copies, draws and reads raise the planted error of `Faults`."""

    def launch(self, batch):
        self.faults.meet("copies")
        return super().launch(batch)

    def _draw(self, draw, report):
        self.faults.meet("draw")
        pending = super()._draw(draw, report)
        try:
            self.faults.meet("read")
        except BaseException as error:
            return LostRead(error)
        return pending


def resolved(sizes, binding, config):
    """In the place of `build.resolve_options`; the options are resolved already."""
    groups = tuple(
        CacheGroup((number,), 16 * sizes.block_size, kind)
        if kind.record_bytes is None
        else CacheGroup((), 8, kind._replace(record_bytes=8))
        for number, kind in enumerate(sizes.kinds)
    )
    paths = StepPaths()
    paths.build_stage = RequestOptions
    return config, MockAttention(), CachePools(groups, tuple(sizes.num_blocks)), paths


class MockDevice(MockModel):
    """The mock model within an engine's executor; keeps its contents in the engine's caches."""

    def __init__(self, engine, weights, faults):
        super().__init__(engine.scheduler)
        self.scheduler = engine.scheduler
        self.weights = weights
        self.faults = faults
        self.drawn = {}  # step id -> its tokens
        self._rows = None  # layout, token ids and slots of the step
        self._prefixes = []  # of each row
        self._poisoned = set()  # in the step
        self.poisoned = set()  # in any step
        self._known = {}
        caches = engine.model_runner.binding.caches
        parts = [caches.blocks_of(group, self.block_size) for group in range(len(self.kinds))]
        for number in self.slots:
            self.slots[number] = Cells(weights, *parts[number])
        for states in self.states:
            states.slots = Cells(weights, *parts[states.number])
        memory = None if engine.tiers is None else engine.tiers.memory
        self.host = HostCells(weights, memory, [len(of_group[0]) for of_group in parts])
        engine.model_runner.binding.mock = self

    # --------------------------------------------------------------------------------------------------- a step

    def forward(
        self,
        layout,
        token_ids,
        positions,
        slots,
        sample_rows,
        report,
    ):
        """Execute the step launched last; returns the logits of its sampled rows."""
        self.faults.meet("forward")
        batch = self.scheduler.in_flight[-1]
        self._rows = layout, token_ids.tolist(), slots.reshape(-1, len(token_ids)).tolist()
        self._prefixes.clear()
        self._poisoned.clear()
        non_finite = self.faults.non_finite
        self.faults.non_finite = set()
        self.drawn[batch.step_id] = self.execute(batch, non_finite)
        self._check_states(batch, layout)
        starts = [entry.start + row for entry in layout.entries for row in range(entry.num_new_tokens)]
        check(positions.tolist() == starts, "a row has another position than its token")
        self.faults.meet("written")
        states = np.stack([self.weights.logits(prefix) for prefix in self._prefixes])
        for entry, row in zip(layout.entries, layout.row_starts.tolist(), strict=False):
            if entry.sequence in self._poisoned:
                states[row : row + entry.num_new_tokens] = np.nan
        hidden = torch.from_numpy(states)
        if report is not None:
            for rows in report.prompt_rows_in_pieces(hidden.device):
                report.add_prompt(hidden[rows])
            report.take_states(hidden, sample_rows)
        return hidden[sample_rows]

    def _copy(self, batch):
        """Check each row's token and slots; the executor has copied blocks already."""
        layout, token_ids, slots = self._rows
        for entry, row in zip(layout.entries, layout.row_starts.tolist(), strict=False):
            state = self._state_of(entry.sequence)
            end = entry.start + entry.num_new_tokens
            known = [max(0, token_id) for token_id in state.token_ids[entry.start : end]]
            check(known == token_ids[row : row + entry.num_new_tokens], f"rows of {entry.sequence} have other tokens")
            for of_group, table in zip(slots, self._tables[batch.step_id, entry.sequence], strict=False):
                places = (divmod(position, self.block_size) for position in range(entry.start, end))
                expected = [table[index] * self.block_size + offset for index, offset in places]
                check(of_group[row : row + len(known)] == expected, f"rows of {entry.sequence} have other slots")
            self._prefixes += state.prefixes[entry.start : end]

    def _check_states(self, batch, layout):
        for states in self.states:
            of_group = layout.others[states.number - 1]
            written = states._written[batch.step_id]
            check(
                of_group.state_writes.tolist() == [written[entry.sequence] for entry in layout.entries]
                and of_group.state_reads.tolist() == [states._reads.get(entry.sequence, 0) for entry in layout.entries],
                "the layout has other slots of states than the sequences",
            )

    def _poison(self, batch, entry):
        self._poisoned.add(entry.sequence)
        self.poisoned.add(entry.sequence)
        super()._poison(batch, entry)

    def fail(self, batch):
        """Undo a step, whether it failed or nobody needs it; all that it wrote is undefined."""
        if self.drawn.pop(batch.step_id, None) is not None:
            super().fail(batch)
        for group, _, block in batch.copies:
            if block >= 0:
                self.set_block(group, block, [None] * self.size_of(group))
        for (group, slot), node in getattr(self.manager, "_stored_in", {}).get(batch.step_id, {}).items():
            if node.slots.get(group) == slot:  # else a read of a file has it, which began when the copy had ended
                self.host.spoil(group, slot)

    def forget(self, sequence):
        """Know a sequence by the host's tokens alone: a beam has those of another one."""
        self._on_device.pop(sequence, None)

    @property
    def manager(self):
        return self.scheduler.block_manager

    # ------------------------------------------------------------------------------------------------- the draws

    def draw(self, sequence, prefix, position, mask=None):
        """The token that a sequence draws behind a prefix, whatever else happens; see `draw` of `sampler`."""
        params = sequence.params
        mask = self.weights.mask if mask is None else mask
        is_early = position - sequence.num_prompt_tokens < params.min_tokens
        key = prefix, mask, params, sequence.seed, position, is_early
        if key not in self._known:
            logits = self.weights.logits(prefix, mask)
            for token_id, bias in params.logit_bias.items():
                logits[token_id] += bias
            if params.allowed_token_ids:
                logits[[token for token in range(VOCAB_SIZE) if token not in params.allowed_token_ids]] = -np.inf
            if is_early:
                logits[list(sequence.stop_token_ids)] = -np.inf
            is_greedy = params.temperature == 0
            self._known[key] = int(logits.argmax()) if is_greedy else drawn_alone(logits, sequence, position)
        return self._known[key]

    def generate(self, sequence, known, masks):
        """The output of a request alone, from the `known` tokens on.

        Args:
            masks: (number of output tokens, mask of the weights from then on).
        """
        prefix = prefix_of(sequence.cache_salt, [*sequence.token_ids[: sequence.num_prompt_tokens], *known])
        output = [*known]
        stops = sequence.params.stop
        while (position := sequence.num_prompt_tokens + len(output)) < sequence.max_num_tokens:
            mask = [of_weights for first, of_weights in masks if first <= len(output)][-1]
            output.append(self.draw(sequence, prefix, position, mask))
            if output[-1] in sequence.stop_token_ids:
                break
            if len(output) >= sequence.params.min_tokens and text_of(output).endswith(stops or "none"):
                break
            prefix = extend_prefix(prefix, output[-1])
        return output


def drawn_alone(logits, sequence, position):
    inputs = DrawInputs.from_sequences([sequence], [position])
    tensors = inputs.to_device(torch.device("cpu"))
    return int(draw(torch.from_numpy(logits)[None], tensors, has_filters=inputs.has_filters()))


def prefix_of(salt, token_ids):
    """The hash of a prefix."""
    prefix = empty_prefix(salt)
    for token_id in token_ids:
        prefix = extend_prefix(prefix, token_id)
    return prefix


def text_of(token_ids):
    return "".join("abcdefgh"[token_id] for token_id in token_ids)


class SteppedReads(FileReads):
    """Reads whose thread runs when the walk says so."""

    def start(self, items):
        self._thread = self
        job = super().start(items)
        self._queue.get()
        return job

    @property
    def unfinished(self):
        return [job for job in self._jobs if not job.is_done.is_set()]

    def finish(self, jobs):
        """What the thread does, for these jobs."""
        for job in jobs:
            self._queue.put(job)
        self._queue.put(None)
        self._run()

    def finish_some(self):
        self.finish([job for job in self.unfinished if self.rng.random() < 0.5])

    def join(self):
        self._queue.get()
        self.finish(self.unfinished)

    def wait(self, sequence, *, may_block):
        if may_block:  # nothing else can run: time passes until the reads end, or the deadline comes
            if self.rng.random() < 0.5:
                self.finish(self.unfinished)
            else:
                self.clock.now += MAX_WAIT_SECONDS
        super().wait(sequence, may_block=False)
