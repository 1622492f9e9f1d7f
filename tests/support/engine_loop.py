"""An engine over `MockDevice`, on disk or not, and the checks of `Loop` around each of its own calls."""

import errno
import os
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import nanovllm.llm
from nanovllm import build, config
from nanovllm.batch import EMBEDDED, NON_FINITE
from nanovllm.block_manager import root_hash
from nanovllm.config import MAX_PRIORITY
from nanovllm.features.adapters.adapting import Adapting
from nanovllm.features.beams.beam_search import BeamSearching
from nanovllm.features.forks.forking import Forking
from nanovllm.features.policies.loop import Launched
from nanovllm.features.policies.mock_states import Poison, check, empty_prefix, extend_prefix
from nanovllm.features.resume.resumption import Resuming
from nanovllm.features.tiers import directory, prefix_tiers, segments
from nanovllm.models import fingerprint
from tests.support.mock_device import (
    VOCAB_SIZE,
    MockBinding,
    MockDevice,
    MockRunner,
    SteppedReads,
    prefix_of,
    resolved,
    text_of,
)
from tests.support.scheduling import Loop

SALTS = ("", "salt")


class Clock:
    """Time that passes a little at each look, by a power of two, so that sums are exact."""

    now = 0.0

    def __call__(self):
        self.now += 2.0**-20
        return self.now


class Disk:
    """Writes of segments, and a disk that may be full."""

    is_full = False

    def __init__(self):
        self._write = segments._write

    def write(self, file, data):
        if self.is_full:
            self._write(file, memoryview(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write(file, data)


class AtOnce(threading.Thread):
    """A thread that has ended when it was started."""

    def start(self):
        self.run()

    def join(self, timeout=None): ...


@contextmanager
def mocked(sizes, clock, disk, weights):
    """Everything outside of an engine in the place of the machine's: model, time, threads, disk."""
    time = SimpleNamespace(monotonic=clock)
    bindings = {"_load": lambda model, *_: model, "_build_binding": lambda _: MockBinding(sizes)}
    bindings |= {"resolve_options": lambda binding, _, options: resolved(sizes, binding, options)}
    with ExitStack() as stack:
        for place, name, value in (
            *((build, name, value) for name, value in bindings.items()),
            (build, "ModelRunner", MockRunner), (build, "_frozen", lambda engine: engine),
            (config, "BLOCK_SIZES", range(1, 64)), (fingerprint, "digest_for_files", lambda *_: str(weights.mask)),
            (prefix_tiers, "FileReads", SteppedReads), (prefix_tiers, "time", time), (directory, "time", time),
            (directory, "threading", SimpleNamespace(Thread=AtOnce)), (segments, "_write", disk.write),
            (segments.os, "fsync", lambda file: None),
        ):  # fmt: skip
            stack.enter_context(patch.object(place, name, value))
        yield


def letters():
    """A tokenizer of `VOCAB_SIZE` letters."""
    tokenizer = Tokenizer(
        models.BPE(vocab={text_of([token_id]): token_id for token_id in range(VOCAB_SIZE)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


TOKENIZER = letters()


class FuzzLLM(Adapting, Resuming, BeamSearching, Forking, nanovllm.llm.LLM):
    """The front door of an engine that is there already."""

    _build_engine = staticmethod(lambda engine, *_, **__: engine)


def open_engine(clock, faults, **options):
    """The engine of `build_engine` over a mock device's parts; within `mocked`."""
    loaded = SimpleNamespace(
        identity="mock", tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, name="Mock", has_head=True, eos_token_ids=(),
        sampling_defaults=lambda _: {}, is_live=False,
    )  # fmt: skip
    resolved_already = {"device": "cpu", "attention_backend": "sdpa", "cuda_graphs": False}
    engine = build.build_engine(loaded, None, None, resolved_already | options, clock=clock)
    engine.model_runner.faults = faults
    return engine


class EngineLoop(Loop):
    """The checks of `Loop` around the calls that an engine makes itself."""

    def __init__(self, engine, weights, faults, rng):
        self.engine = engine
        self.clock = engine.clock
        self.weights = weights
        self.rng = rng
        super().__init__(engine.scheduler)
        self.model = MockDevice(engine, weights, faults)
        self.starts = {}  # sequence -> tokens it began with, and (number of tokens, mask of the weights from there on)
        self.num_checks = 0
        self.followed = {}  # block hashes that a router knows of
        self.manager.observer = self
        tiers = engine.tiers
        self.books = getattr(tiers, "books", None)
        self.reads = getattr(tiers, "reads", None)
        self.directory = getattr(tiers, "directory", None)
        if self.reads is not None:
            self.reads.rng = rng
            self.reads.clock = self.clock
        scheduler = self.scheduler
        self._add = scheduler.add
        self._schedule = scheduler.schedule
        self._update = scheduler.update
        self._rollback = scheduler.rollback
        self._step = engine.step
        self._fork = self.manager.fork
        scheduler.add = self._note_add
        scheduler.schedule = self._note_schedule
        scheduler.update = self._note_update
        scheduler.rollback = self._note_rollback
        engine.step = self.step_engine
        self.manager.fork = self._note_fork

    @property
    def now(self):
        return self.clock.now if hasattr(self, "clock") else 0.0

    @now.setter
    def now(self, value): ...

    def let_time_pass(self):
        self.clock.now += self.rng.choice((1.0, 3.0, 10.0))

    # ------------------------------------------------------------------------- block events, as a router follows them

    def findable(self, entry, parent_hash):
        check(entry.block_hash not in self.followed, "a block becomes findable twice")
        self.followed[entry.block_hash] = None

    def forgotten(self, block_hash):
        del self.followed[block_hash]

    def all_forgotten(self):
        self.followed.clear()

    # ---------------------------------------------------------------------------------- calls of the engine itself

    def _note_add(self, sequence):
        self.sequences.append(sequence)
        self.starts[sequence] = sequence.output_token_ids, [(0, self.weights.mask)]
        self._add(sequence)

    def _note_schedule(self):
        was_running = list(self.scheduler.running)
        self.lost_slot = None
        self._gave_way.clear()
        self._lost_blocks.clear()
        batch = self._schedule()
        if batch is None:
            check(bool(self.in_flight) or not self.unfinished, "work is left, none is in flight, none is scheduled")
            return None
        self._check_step(was_running, batch)
        tables = tuple(tuple(entry.block_table) for entry in batch.entries)
        self.in_flight.append(Launched(batch, [], tables))
        if self.reads is not None:
            self.reads.finish_some()  # the thread waits for no step that is not launched
        copies = [(copy.group, copy.destination) for copy in batch.copies]
        check(len(set(copies)) == len(copies), "two copies of a step have one destination")
        self.seen["late draws"] += batch.draws_late
        return batch

    def _note_update(self, batch, token_ids, report=None):
        launched = self.in_flight.popleft()
        for entry, table in zip(batch.entries, launched.tables, strict=True):
            now = [self._at_launch(*blocks) for blocks in zip(entry.block_table, table, strict=False)]
            check(tuple(now) == table, "a launched batch's block table changed")
        drawn = self.model.drawn.pop(batch.step_id)
        expected = [
            EMBEDDED if sequence.params.embeds and token_id >= 0 else token_id
            for sequence, token_id in zip(batch.sampling, drawn, strict=True)
        ]
        alive = [sequence for sequence in dict.fromkeys(batch.sampling) if not sequence.is_finished]
        drafted = {entry.sequence for entry in batch.drafted}
        self.seen["preempted in flight"] += sum(not sequence.is_running for sequence in alive)
        advanced = self._update(batch, token_ids, report)
        check(token_ids == expected, f"drawn {token_ids}, and the prefixes give {expected}")
        again = {s for s, t in zip(batch.sampling, drawn, strict=True) if t < 0 and s in drafted}
        check(advanced == [s for s in alive if s not in again], "update returns others than those that advanced")
        for sequence, token_id in zip(batch.sampling, drawn, strict=True):
            if token_id == NON_FINITE:
                self.model.report_non_finite(sequence, self.scheduler.running)
                self.seen["non-finite"] += sequence in alive
        if advanced:
            self.num_steps_without_progress = 0
        return advanced

    def _note_rollback(self, batch, *, has_failed=True):
        while self.in_flight and self.in_flight[-1].batch.step_id >= batch.step_id:
            self.model.fail(self.in_flight.pop().batch)
        self.num_steps_without_progress = 0
        return self._rollback(batch, has_failed=has_failed)

    def _note_fork(self, *arguments):
        self.seen["forked"] += 1
        self._fork(*arguments)

    def step_engine(self):
        """A step of the engine, and every invariant after it."""
        before = sum(s.is_finished for s in self.sequences)
        start = self.clock.now
        try:
            self._step()
            overdue = [deadline for deadline, _ in self.engine._deadlines if deadline <= start]
            check(not overdue, f"requests run on behind their deadlines {overdue}")
        finally:
            if not self.engine.is_dead:
                self.check()
        if sum(s.is_finished for s in self.sequences) > before:
            self.num_steps_without_progress = 0

    # ------------------------------------------------------------------------------------------------------- moves

    def abort(self, request_id):
        request = self.engine.requests.get(request_id)
        sequences = [] if request is None else request.sequences
        self.seen["aborted in flight"] += any(sequence.num_in_flight_tokens for sequence in sequences)
        output = self.engine.abort(request_id)
        check(not any(s.block_table for s in sequences), "an aborted request holds blocks")
        self.num_steps_without_progress = 0
        self.check()
        return output

    def update_weights(self):
        """Other weights from now on; the engine drops what it computed, steps in flight too."""
        self.weights.update()
        self.seen["updates under way"] += bool(self.unfinished)
        for sequence in self.unfinished:
            self.starts[sequence][1].append((sequence.num_output_tokens, self.weights.mask))

    def check_forgotten(self):
        """Check that no content is found any more, in no tier."""
        check(self.manager.num_findable_blocks == 0 and not self.manager.entries, "a block is found after a reset")
        if self.books is not None:
            check(self.books.num_stored == 0 and not self.books.roots, "a tier has content after a reset")
            check(self.reads is None or not self.reads.is_attached, "files are read after a reset")

    # ------------------------------------------------------------------------------------------------------ checks

    def check(self):
        super().check()
        self.num_checks += 1
        if self.num_checks % 4 == 0:  # each slot: it takes long
            self.check_tiers()
        check(list(self.followed) == list(self.manager.entries), "a router knows of other blocks than are findable")
        engine = self.engine
        check(engine.observers.error is None, f"an observer failed: {engine.observers.error}")
        deadlines = [(r.deadline, r.request_id) for r in engine.requests.values() if r.deadline is not None]
        check(list(engine._deadlines) == sorted(deadlines), "deadlines of other requests than those that run")
        alive = {s for request in engine.requests.values() for s in request.sequences if not s.is_finished}
        check(alive == {*self.unfinished}, "sequences run whose requests have ended, or the other way round")
        check(len(engine._in_flight) <= 1 + engine.config.overlap, "too many steps in flight")

    def check_tiers(self):
        """Check the books of tiers, and that each slot has the content that they name."""
        if self.books is None:
            return
        self.books.check()
        roots = {root_hash(self.manager.root_seed, salt): salt for salt in SALTS}
        pending = [(root, [empty_prefix(roots[key])]) for key, root in self.books.roots.items()]
        for node, prefixes in pending:
            for tokens, child in node.children.items():
                after = prefixes[-1:]
                for token_id in memoryview(tokens).cast("i"):
                    after.append(extend_prefix(after[-1], token_id))
                pending.append((child, after))
            for group in node.slots:
                if (slot := self.manager.settled_slot(group, node)) is not None:
                    pairs = zip(self.model.host[group, slot], prefixes[-self.model.size_of(group) :], strict=True)
                    is_right = all(isinstance(found, Poison) or found == right for found, right in pairs)
                    check(is_right, f"slot {slot} of group {group} has not the content of its tokens")

    def check_outputs(self):
        """Check that every sequence ended with its tokens (or some of them), and that no block is left."""
        for sequence in self.sequences:
            if sequence.embedding is not None:
                prefix = prefix_of(sequence.cache_salt, sequence.token_ids)
                right = self.weights.logits(prefix, self.starts[sequence][1][-1][1])
                check((sequence.embedding == right).all(), f"{sequence} has another embedding")
            if sequence.priority == -MAX_PRIORITY or sequence.params.embeds:  # beams have tokens of their own
                continue
            output = sequence.output_token_ids
            expected = self.model.generate(sequence, *self.starts[sequence])
            reason = sequence.finish_reason
            if reason in ("abort", "error", "timeout"):
                expected = expected[: len(output)]
            else:
                by_token = bool(expected) and expected[-1] in sequence.stop_token_ids
                ends = text_of(expected).endswith(sequence.params.stop or "none") and not by_token
                ends &= len(expected) >= sequence.params.min_tokens
                check(reason == ("stop" if by_token or ends else "length"), f"{sequence} ended by {reason}")
                is_text = isinstance(sequence.stop_reason, str) and text_of(expected).endswith(sequence.stop_reason)
                check(
                    not by_token or is_text or sequence.stop_reason == expected[-1],
                    f"{sequence}: {sequence.stop_reason}",
                )
            check(output == expected, f"{sequence} generated {output}, alone it generates {expected}")
            self._check_logprobs(sequence)

    def check_empty(self):
        """Check that no request, block, slot or read is left."""
        for pool in self.manager.pools:
            check(len(pool.free_blocks) == pool.num_blocks - 1, "blocks leaked")
        if self.books is not None:
            check(self.manager.copies or not self.books._pins, "a slot stays pinned")
            for group, used in enumerate(self.books._used):
                reads = [] if self.reads is None else self.reads._jobs
                num_read = sum(item.group == group for job in reads for item in job.items)
                num_free = len(self.books._free[group]) + sum(of == group for of, _ in self.books._forgotten)
                check(len(used) + num_read + num_free == self.books._num_slots[group], "slots leaked")

    def _check_logprobs(self, sequence):
        """Check log-probabilities of each token, of the prompt and of the output."""
        known, masks = self.starts[sequence]
        reports = sequence.logprobs
        prompts = sequence.prompt_logprobs
        num_tokens = len(sequence.token_ids)
        num_prompt = sequence.num_prompt_tokens
        check(reports is None or len(reports) == num_tokens - num_prompt, f"{sequence} has {reports} for its tokens")
        found = dict(enumerate(reports or (), num_prompt))
        if prompts and len(masks) == 1 and sequence not in self.model.poisoned:
            found |= dict(enumerate(prompts))
        prefix = empty_prefix(sequence.cache_salt)
        for position, token_id in enumerate(sequence.token_ids):
            report = found.get(position)
            if report and not num_prompt <= position < num_prompt + len(known):
                mask = [of_weights for first, of_weights in masks if first <= max(0, position - num_prompt)][-1]
                levels = torch.from_numpy(self.weights.logits(prefix, mask)).double()
                right = levels.log_softmax(0)[token_id].item()
                is_right = token_id in report and abs(report[token_id].logprob - right) < 1e-4
                check(is_right, f"{sequence} has the log-probability {report} at {position}, not {right}")
            prefix = extend_prefix(prefix, token_id)


def damage(folder, rng):
    """Flip a bit of a file of prefixes, cut it short, or remove it."""
    files = sorted([*folder.glob("*.kv")] * 3 + [*folder.glob("*.index")])
    if not files:
        return
    path = rng.choice(files)
    how = rng.random()
    place = rng.randrange(1 + path.stat().st_size)
    if how < 0.2:
        path.unlink()
    elif how < 0.4:
        os.truncate(path, place)
    else:
        with path.open("r+b") as file:  # the writer's own file stays the same one
            data = bytearray(file.read() or b"0")
            data[place - 1] ^= 1 << rng.randrange(8)
            file.seek(0)
            file.write(data)
