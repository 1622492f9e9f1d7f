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

from sortedcontainers import SortedList

from nanovllm.bad_words import spellings_of
from nanovllm.batch import ScheduledBatch
from nanovllm.block_manager import BlockManager
from nanovllm.config import EngineConfig
from nanovllm.errors import DeviceError, EngineDeadError, QueueFullError, StepError
from nanovllm.model_runner import ModelRunner, PendingTokens
from nanovllm.outputs import EngineStats, OutputKind, RequestOutput
from nanovllm.request import Request, merged
from nanovllm.request_checks import check_params, check_prompt, truncated
from nanovllm.sampler import request_seed, sample_seed
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence, SequenceStatus
from nanovllm.step_records import StepHook, StepRecorder, Tracer


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
        vocab_size: token ids must lie below it.
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
        self._vocab_size = vocab_size
        # A model padded after training may name one that its embedding does not have; it can never be sampled.
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        # What steps gave and nobody has taken yet; whoever takes one may look at it first and remove it after.
        self.outputs: deque[RequestOutput] = deque()
        self.clock = clock
        self._recorder = StepRecorder(on_step, tracer)
        self._requests: dict[str, list[Request]] = {}  # one for each sample, in order of their index
        self._deadlines: SortedList = SortedList()  # (deadline, request id) of the requests that have one
        self._failures: dict[Sequence, int] = {}  # failed steps in a row
        self._num_added = self._num_sequences = 0
        self._in_flight: deque[_LaunchedStep] = deque()  # launched, and not read yet
        self._ended_unseen: list[Sequence] = []  # ended in a step that was cut short before anybody heard of it
        self._is_torn = False  # True while the bookkeeping changes; found True, an interrupt cut a change short
        self._death: BaseException | None = None
        self.block_manager = self._new_block_manager()
        self.scheduler = Scheduler(self.config, self.block_manager)

    def _new_block_manager(self) -> BlockManager:
        return BlockManager(
            self.config.num_kv_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            hash_seed=self._hash_seed,
        )

    # ------------------------------------------------------------------------------------------------- requests

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise ValueError or TypeError, naming value, limit and remedy, if the engine cannot serve this."""
        limits = {"vocab_size": self._vocab_size, "max_model_len": self.config.max_model_len}
        check_prompt(truncated(prompt_token_ids, params), params, **limits)
        binding = self.model_runner.binding
        check_params(params, vocab_size=self._vocab_size, tokenizer=self.tokenizer, binding=binding)

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
        is_checked: bool = False,
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
            is_checked: it has passed `check_request`.

        Raises ValueError or TypeError (see `check_request`), QueueFullError and EngineDeadError.
        """
        self.check_alive()
        if not is_checked:
            self.check_request(prompt_token_ids, params)
        self.check_queue(params.n)
        if request_id in self._requests:
            raise ValueError(f"a request with id {request_id!r} is running already; ids must be unique.")
        now = self.clock() if arrival_time is None else arrival_time
        deadline = None if timeout is None else now + timeout
        prompt_token_ids = list(truncated(prompt_token_ids, params))
        sequences = self._samples_of(request_id, prompt_token_ids, params, now, priority, cache_salt)
        samples = [
            Request(
                sequence,
                prompt,
                prompt_token_ids,
                self.tokenizer,
                output_kind=output_kind,
                deadline=deadline,
                record_itl=self.config.record_itl,
            )
            for sequence in sequences
        ]
        with self._changing():
            self._recorder.note_added(sequences)
            self._num_added += 1
            self._num_sequences += params.n
            self._requests[request_id] = samples
            if deadline is not None:
                self._deadlines.add((deadline, request_id))
            for sequence in sequences:
                self.scheduler.add(sequence)

    def _samples_of(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
        priority: int,
        cache_salt: str,
    ) -> list[Sequence]:
        """A new request's sequences, one for each sample."""
        bad_words = spellings_of(params.bad_words, self.tokenizer)
        seed = request_seed(self.config.seed, self._num_added) if params.seed is None else params.seed
        return [
            Sequence(
                request_id,
                prompt_token_ids,
                params,
                arrival=self._num_sequences + index,
                arrival_time=arrival_time,
                max_model_len=self.config.max_model_len,
                priority=priority,
                cache_salt=cache_salt,
                eos_token_ids=self._eos_token_ids,
                seed=sample_seed(seed, index),
                index=index,
                bad_words=bad_words,
            )
            for index in range(params.n)
        ]

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
        return self._output_of(samples, now)

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
            sequence.error = error
        self._collect(self._ended_unseen + ended)

    def _end_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            self._end([self._requests[self._deadlines[0][1]]], "timeout")

    def _forget(self, request_id: str) -> None:
        samples = self._requests.pop(request_id)
        deadline = samples[0].deadline
        for sample in samples:
            self._failures.pop(sample.sequence, None)
        if deadline is not None:
            self._deadlines.discard((deadline, request_id))

    @property
    def request_ids(self) -> Iterable[str]:
        """Of the requests that run or wait."""
        return self._requests.keys()

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
            launched.launch_time + read - waits,
            now - read,
        )
        self._discard_if_idle()
        return None

    def _note_first_scheduled(self, batch: ScheduledBatch, now: float) -> None:
        for entry in batch.prefills:
            sample = self._requests[entry.sequence.request_id][entry.sequence.index]
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
        requests: dict[str, list[Request]] = {}  # those that somebody may have to be told of
        for sequence in advanced:
            samples = self._requests[sequence.request_id]
            sample = samples[sequence.index]
            try:
                self._advance(sample, now)
            except Exception as error:
                self._give_up_text(sample, error)
            if sample.is_streamed or sequence.status is SequenceStatus.FINISHED:
                requests[sequence.request_id] = samples
        self._recorder.note_ended(advanced, now)
        outputs = [
            self._output_of(samples, now)
            for samples in requests.values()
            if samples[0].is_streamed or all(sample.sequence.is_finished for sample in samples)
        ]
        self.outputs.extend(outputs)
        for output in outputs:  # only now, so that an interrupt loses none (it may double one)
            if output.finished:
                self._forget(output.request_id)
        self._ended_unseen = []

    def _output_of(self, samples: list[Request], now: float) -> RequestOutput:
        return merged([self._output_of_sample(sample, now) for sample in samples])

    def _output_of_sample(self, sample: Request, now: float) -> RequestOutput:
        try:
            return sample.output(now)
        except Exception as error:
            self._give_up_text(sample, error)
            return sample.output(now)

    def _give_up_text(self, sample: Request, error: Exception) -> None:
        """A tokenizer that cannot decode ends the sample that it cannot decode, not its neighbours."""
        sample.give_up_text(error)
        if not sample.sequence.is_finished:
            self.scheduler.finish(sample.sequence, "error")
        sample.sequence.finish_reason = "error"

    def _advance(self, request: Request, now: float) -> None:
        """Let the request read its new token, if it got one, and end it if that completes a stop string."""
        sequence = request.sequence
        num_tokens = sequence.num_output_tokens
        if request.num_seen_tokens == num_tokens:
            return
        stop = request.advance(now)
        if num_tokens == 1:
            self._recorder.note_first_token(now - sequence.arrival_time)
        if stop is not None:
            sequence.stop_reason = stop
            if sequence.is_finished:  # its last token by length, or a stop token, completed the string
                sequence.finish_reason = "stop"
            else:
                self.scheduler.finish(sequence, "stop")
        request.num_seen_tokens = num_tokens

    # ---------------------------------------------------------------------------------------------------- state

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around every change of the bookkeeping: what an interrupt leaves half done is begun again at the next one."""
        if self._is_torn:
            self._start_over()
        self._is_torn = True
        yield
        self._is_torn = False

    def _start_over(self) -> None:
        """Fresh bookkeeping: every request waits again with the tokens that it has shown, and no prefix is cached."""
        num_evictions, counters = self.block_manager.num_evictions, self.scheduler.stats
        self.block_manager = self._new_block_manager()
        self.scheduler = Scheduler(self.config, self.block_manager)
        self.block_manager.num_evictions, self.scheduler.stats = num_evictions, counters
        self._in_flight.clear()
        self._failures.clear()
        self._ended_unseen = []
        deadlines = [(samples[0].deadline, request_id) for request_id, samples in self._requests.items()]
        self._deadlines = SortedList(entry for entry in deadlines if entry[0] is not None)
        for sample in chain.from_iterable(self._requests.values()):
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
        """Abort every request and free the caches; a live module is its owner's again."""
        self._requests.clear()
        self.outputs.clear()
        self._start_over()
        self.model_runner.close()
