"""Runs requests: schedule, execute, update, and hand out what came of it.

With overlap, a step is read while the next one runs::

    host     schedule 1  launch 1  schedule 2  launch 2  read 1  update 1  schedule 3  launch 3  read 2  update 2  ...
    device               [====== step 1 ======][======= step 2 =========][======= step 3 =========]
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from nanovllm.batch import ScheduledBatch
from nanovllm.block_manager import BlockManager
from nanovllm.config import EngineConfig
from nanovllm.errors import DeviceError, EngineDeadError, QueueFullError, StepError
from nanovllm.model_runner import ModelRunner, PendingTokens
from nanovllm.observability.step_records import StepHook, StepRecorder, Tracer
from nanovllm.outputs import EngineStats, ErrorKind, OutputKind, RequestOutput
from nanovllm.own_process import OwnProcess
from nanovllm.requests.bad_words import Spellings
from nanovllm.requests.output_processor import OutputProcessor
from nanovllm.requests.request_checks import check_params, check_prompt, truncated
from nanovllm.requests.request_table import RequestTable
from nanovllm.requests.sample import Request
from nanovllm.requests.sample_maker import SampleMaker
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, SchedulerStats
from nanovllm.sequence import Sequence


class _LaunchedStep(NamedTuple):
    """A step that runs on the device, and the seconds that the host has spent on it."""

    batch: ScheduledBatch
    pending: PendingTokens
    start_time: float
    schedule_time: float
    launch_time: float


class Engine:
    """One model, one KV cache, many requests. Not thread-safe: one thread adds, steps and aborts.

    Args:
        model_runner: ready to execute; its config is fully resolved.
        tokenizer: decodes outputs; None leaves their text empty.
        vocab_size: prompts' token ids must lie below it.
        eos_token_ids: end a request unless it ignores them.
        model_identity: what the prefix hashes begin with.
        on_step: called after each step that was read, from within `step`.
        tracer: told of every request and step, likewise.
        clock: the time in seconds; never goes back.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        model_identity: str,
        on_step: StepHook | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config: EngineConfig = model_runner.config
        self.model_runner = model_runner
        self.tokenizer = tokenizer
        self._hash_seed = f"{model_identity}:{model_runner.binding.dtype}"
        self.vocab_size = vocab_size
        # A config may name one that embedding or head do not have; it can never be sampled.
        num_logits = model_runner.binding.vocab_size
        eos_token_ids = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < num_logits)
        self._sample_maker = SampleMaker(self.config, tokenizer, eos_token_ids)
        # What steps gave and nobody has taken yet; whoever takes one may look at it first and remove it after.
        self.outputs: deque[RequestOutput] = deque()
        self.clock = clock
        self._process = OwnProcess("Engine")
        self._recorder = StepRecorder(on_step, tracer)
        self._requests = RequestTable()
        self._failures: dict[Sequence, int] = {}  # failed steps in a row
        self._in_flight: deque[_LaunchedStep] = deque()  # launched, and not read yet
        self._ended_unseen: list[Sequence] = []  # ended in a step that was cut short before anybody heard of it
        self._is_torn = False  # True while the bookkeeping changes; found True, an interrupt cut a change short
        self._death: BaseException | None = None
        self._begin(0, SchedulerStats())

    def _begin(self, num_evictions: int, counters: SchedulerStats) -> None:
        """With an empty KV cache and an empty queue, and what was counted before."""
        block_manager = BlockManager(
            self.config.num_kv_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            hash_seed=self._hash_seed,
        )
        block_manager.num_evictions = num_evictions
        scheduler = Scheduler(self.config, block_manager)
        scheduler.stats = counters
        self.block_manager, self.scheduler = block_manager, scheduler
        self._output_processor = OutputProcessor(self._requests, self.scheduler, self._recorder)

    # ------------------------------------------------------------------------------------------------- requests

    def check_request(
        self, prompt_token_ids: list[int], params: SamplingParams, bad_words: Spellings | None = None
    ) -> Spellings:
        """The spellings of bad_words; raises ValueError or TypeError, naming value, limit and remedy, if the engine
        cannot serve this.

        Args:
            bad_words: what was returned for the same parameters with another prompt.
        """
        limits = {"vocab_size": self.vocab_size, "max_model_len": self.config.max_model_len}
        check_prompt(truncated(prompt_token_ids, params), params, **limits)
        if bad_words is not None:
            return bad_words
        binding = self.model_runner.binding
        return check_params(params, tokenizer=self.tokenizer, binding=binding)

    def check_queue(self, count: int) -> None:
        """Raise QueueFullError if there is no room for this many more sequences, each sample being one."""
        limit, places = self.config.max_queue, self.config.max_num_seqs
        if limit is None:
            return
        num_unfinished = len(self.scheduler.running) + len(self.scheduler.waiting)
        if num_unfinished + count > places + limit:
            raise QueueFullError(
                f"{num_unfinished} requests (samples of one counted singly) are unfinished; with {count} more there "
                f"would be more than max_num_seqs ({places}) to run and max_queue ({limit}) to wait. Try again later, "
                "or raise max_queue."
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        arrival_time: float | None = None,
        output_kind: OutputKind = OutputKind.FINAL,
        bad_words: Spellings | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: names it in its outputs; no request that runs may have the same.
            priority: lower runs first.
            cache_salt: requests share prefixes only with those of the same salt.
            timeout: seconds from its arrival after which a step ends it with finish_reason "timeout".
            arrival_time: on the engine's clock; None for now.
            output_kind: unless FINAL, `step` gives an output each time it advances. An interrupt from the keyboard may
                lose a DELTA or double it, so these are for threads that meet none.
            bad_words: what `check_request` returned; None to call it here.

        Raises ValueError or TypeError (see `check_request`), QueueFullError and EngineDeadError.
        """
        self.check_alive()
        self.check_queue(params.n)
        if bad_words is None:
            bad_words = self.check_request(prompt_token_ids, params)
        if request_id in self._requests:
            raise ValueError(f"a request with id {request_id!r} is running already; ids must be unique.")
        samples = self._sample_maker.make(
            request_id,
            prompt,
            prompt_token_ids,
            params,
            bad_words=bad_words,
            arrival_time=self.clock() if arrival_time is None else arrival_time,
            timeout=timeout,
            priority=priority,
            cache_salt=cache_salt,
            output_kind=output_kind,
        )
        sequences = [sample.sequence for sample in samples]
        with self._changing():
            self._recorder.note_added(sequences)
            self._sample_maker.note_queued(samples)
            self._requests.add(samples)
            for sequence in sequences:
                self.scheduler.add(sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, its blocks free at once; returns what it had got, or None if no such request runs."""
        if request_id not in self._requests:
            return None
        with self._changing():
            samples = self._requests[request_id]
            self._forget(request_id)
            self._ended_unseen = [sequence for sequence in self._ended_unseen if sequence.request_id != request_id]
            for sample in samples:
                if not sample.sequence.is_finished:
                    self.scheduler.finish(sample.sequence, "abort")
            self._discard_if_idle()
            now = self.clock()
            self._recorder.note_ended([sample.sequence for sample in samples], now)
        self._recorder.tell()
        return self._output_processor.output_of(samples, now)

    def give_up(self, failure: StepError, num_failed_steps: int) -> None:
        """End with finish_reason "error" requests of a failed step for which so many in a row have failed.

        Those that never got one are suspected first: only if there are none, the others end. See `outputs` for theirs.
        """
        with self._changing():
            requests = [self._requests[request_id] for request_id in failure.request_ids]
            hopeless = [r for r in requests if any(self._failures.get(s.sequence, 0) >= num_failed_steps for s in r)]
            suspects = [r for r in hopeless if not any(sample.sequence.num_output_tokens for sample in r)]
            self._end(suspects or hopeless, "error", str(failure))
            self._discard_if_idle()

    def _end(self, requests: Iterable[list[Request]], reason: str, error: str | None = None) -> None:
        sequences = [sample.sequence for sample in chain.from_iterable(requests)]
        ended = [sequence for sequence in sequences if not sequence.is_finished]
        for sequence in ended:
            self.scheduler.finish(sequence, reason)
            sequence.error, sequence.error_kind = error, None if error is None else ErrorKind.INTERNAL
        self._collect(self._ended_unseen + ended)

    def _end_overdue(self, now: float) -> None:
        while (samples := self._requests.first_overdue(now)) is not None:
            self._end([samples], "timeout")

    def _forget(self, request_id: str) -> None:
        for sample in self._requests.remove(request_id):
            self._failures.pop(sample.sequence, None)

    @property
    def request_ids(self) -> Iterable[str]:
        """Of the requests that run or wait."""
        return self._requests.ids

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # ----------------------------------------------------------------------------------------------------- step

    def step(self) -> None:
        """Launch a batch and read the oldest in flight; with overlap, the one just launched is left to run.

        Appends the requests that ended, and those that stream and advanced, to `outputs`. Raises StepError if a step
        failed: it is undone, with those launched after it, and its requests stay queued. After a device error the
        engine is dead.
        """
        self.check_alive()
        with self._changing():
            failure = self._step()
        if failure is not None:
            error, request_ids = failure
            if isinstance(error, DeviceError):
                self._death = error
            if isinstance(error, Exception):  # an interrupt from the keyboard stays one
                raise StepError(request_ids, error) from error
            raise error
        self._recorder.tell()

    def _step(self) -> tuple[BaseException, list[str]] | None:
        """The step itself; returns the error that undid it, if one did, and the ids of the requests concerned."""
        if self.model_runner.model_changed(was_idle=not (self.scheduler.running or self._in_flight)):
            self._drop_computed()
        start = self.clock()
        self._end_overdue(start)
        if self._ended_unseen:
            self._collect(self._ended_unseen)
            return None
        batch = self.scheduler.schedule()
        scheduled = self.clock()
        try:
            if batch is not None:
                pending = self.model_runner.execute(batch)
                self._in_flight.append(
                    _LaunchedStep(batch, pending, start, scheduled - start, self.clock() - scheduled)
                )
                self._note_first_scheduled(batch, start)
                if self.config.overlap and len(self._in_flight) == 1:
                    return None
            if not self._in_flight:
                return None
            launched = self._in_flight[0]
            waits = self.clock()
            token_ids = launched.pending.result()
            read = self.clock()
        except BaseException as error:
            # A launch that failed may have overwritten the tokens of the step before, so that one is undone too.
            first = self._in_flight[0].batch if self._in_flight else batch
            sequences = [] if first is None else self.scheduler.rollback(first)
            self._in_flight.clear()
            for sequence in sequences:
                self._failures[sequence] = self._failures.get(sequence, 0) + 1
            return error, list(dict.fromkeys(sequence.request_id for sequence in sequences))
        self._in_flight.popleft()
        if self._failures:
            for entry in launched.batch.entries:
                self._failures.pop(entry.sequence, None)
        launched.pending.report.record(launched.batch.sampling, token_ids)
        self._collect(self.scheduler.update(launched.batch, token_ids))
        now = self.clock()
        self._recorder.record(
            self.scheduler,
            launched.batch,
            now,
            launched.start_time,
            launched.schedule_time,
            launched.launch_time,
            read - waits,
            now - read,
        )
        self._discard_if_idle()
        return None

    def _note_first_scheduled(self, batch: ScheduledBatch, now: float) -> None:
        for entry in batch.prefills:
            sample = self._requests.sample_of(entry.sequence)
            if sample.scheduled_time is None:
                sample.scheduled_time = now

    def _discard_if_idle(self) -> None:
        if not self._requests:
            self._discard_in_flight()

    def _discard_in_flight(self) -> None:
        """Forget what is launched and not read. The device finishes it, and what comes after it there finds it done."""
        if self._in_flight:
            self.scheduler.discard(self._in_flight[0].batch)
            self._in_flight.clear()

    def _collect(self, advanced: list[Sequence]) -> None:
        now = self.clock()
        outputs = self._output_processor.collect(advanced, now)
        self._recorder.note_ended(advanced, now)
        self.outputs.extend(outputs)
        for output in outputs:  # only now, so that an interrupt loses none (it may double one)
            if output.finished:
                self._forget(output.request_id)
        self._ended_unseen = []

    # ---------------------------------------------------------------------------------------------------- state

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around every change of the bookkeeping: what an interrupt leaves half done is begun again at the next one."""
        self._process.check()
        if self._is_torn:
            self._start_over()
        self._is_torn = True
        yield
        self._is_torn = False

    def _start_over(self) -> None:
        """Fresh bookkeeping: every request waits again with the tokens that it has shown, and no prefix is cached."""
        self._begin(self.block_manager.num_evictions, self.scheduler.stats)
        self._in_flight.clear()
        self._failures.clear()
        self._ended_unseen = []
        self._requests.mend()
        for sample in self._requests.samples:
            sample.start_over()
            if sample.sequence.is_finished:
                self._ended_unseen.append(sample.sequence)
            else:
                self.scheduler.add(sample.sequence)

    def drop_computed(self) -> None:
        """Forget all KV (the weights changed): the prefix cache is emptied, running requests compute theirs again."""
        with self._changing():
            self.model_runner.forget_model()
            self._drop_computed()

    def _drop_computed(self) -> None:
        self._discard_in_flight()
        self.scheduler.preempt_all()
        self.block_manager.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Make every cached prefix unfindable; running requests keep their blocks."""
        with self._changing():
            self.block_manager.reset_prefix_cache()

    def stats(self) -> EngineStats:
        with self._changing():
            return self._recorder.stats(self.scheduler)

    def check_integrity(self) -> None:
        """Verify the block manager's invariants against every live sequence; RuntimeError names a broken one."""
        self.block_manager.check_integrity([*self.scheduler.running, *self.scheduler.waiting])

    def check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"this engine died of a device error: {self._death}") from self._death

    def close(self) -> None:
        """Abort every request and free the caches; a live module is its owner's again. Nothing in a forked child."""
        if self._process.is_elsewhere:
            return
        self._requests.clear()
        self.outputs.clear()
        self._start_over()
        self.model_runner.close()
