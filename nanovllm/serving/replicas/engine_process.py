"""An engine process: builds an engine on its GPU or its cores, runs the front's requests, reports after each step.

It runs in a separate session, so that Ctrl-C in a terminal reaches only the front, and ends when the front does.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from nanovllm.batch import ScheduledBatch
from nanovllm.engine import Engine
from nanovllm.errors import EngineClosedError
from nanovllm.features.intake.intake import Intake as ClientTurns
from nanovllm.features.intake.preparation import prepare_ahead
from nanovllm.features.kv_events.block_events import BlockEvent, BlockEvents
from nanovllm.features.scoring.scores import AnswerLogits
from nanovllm.features.updates.sleeping import asleep_of
from nanovllm.observability.json_lines import JsonLines, write_json
from nanovllm.observability.step_records import Observer, StepRecord
from nanovllm.outputs import OutputKind, RequestOutput
from nanovllm.requests import InputProcessor
from nanovllm.responses import Request
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.channel import Channel, inherited
from nanovllm.serving.replicas.messages import (
    Abort,
    Add,
    Close,
    Died,
    DropAdapter,
    FromEngine,
    LoadAdapter,
    LoadFailed,
    Order,
    Ready,
    Refused,
    Report,
    ResetCache,
    SentCompletion,
    SentOutput,
    SentRequest,
    Start,
    ToEngine,
    decode_to_engine,
    encode,
    metric_values,
)
from nanovllm.serving.replicas.prefix_index import encode as encode_events
from nanovllm.serving.replicas.process_adapters import ProcessAdapters
from nanovllm.serving.replicas.process_updates import obey, pickled
from nanovllm.serving.replicas.token_columns import TokenColumns, TokenSender
from nanovllm.serving.streaming.engine_thread import EngineThread
from nanovllm.serving.streaming.engines import EngineInterface

logger = logging.getLogger("nanovllm")

# Seconds between checks that the front lives. Its end closes the channel, unless a forked child holds it open.
FRONT_CHECK_SECONDS = 1.0
# Seconds between reports of new tokens of requests with a final output only: a moved one need not sample them again.
PROGRESS_SECONDS = 0.2
# Seconds between two reports of steps without outputs.
RECORDS_SECONDS = 0.05


class Reporter(Observer):
    """Sends the outputs of an engine to the front; called in the engine's thread, as its router and its observer.

    Args:
        send: sends each `Report`, and `Died`.
        sends_records, sends_block_events: see `Start`.

    placements: placement of each unfinished request, by request id.
    adapters: adapters that requests may name.
    """

    def __init__(
        self, engine: Engine, send: Callable[[FromEngine], None], *, sends_records: bool, sends_block_events: bool
    ) -> None:
        self.placements: dict[str, int] = {}
        self.adapters = ProcessAdapters(engine)
        self._engine = engine
        self._send = send
        self._sends_records = sends_records
        self._records: list[StepRecord] = []
        self._block_events: list[BlockEvent] = []
        if sends_block_events:  # its observer precedes this one, so that events of a step are flushed first
            BlockEvents.follow(engine.block_manager, engine.observers, self._block_events.extend)
        engine.observers.append(self)
        self._num_sent: dict[str, list[int]] = {}  # tokens of each sample, for requests with a final output only
        self._unreported: set[str] = set()  # requests that report their first token, and then only their end
        self._num_prompt_logprobs: dict[str, int] = {}
        self._tokens = TokenSender()
        self._answers: dict[str, AnswerLogits] = {}  # `AnswerLogits` by request id
        self._last_report = self._last_progress = 0.0
        self._held: list[tuple[SentRequest, NewRequest]] = []  # requests that came while the engine slept

    def prepare(self, sent: Add) -> list[NewRequest]:
        """Convert the requests and compile their structured outputs; called outside of the engine's thread."""
        return [request.to_new(self._engine.input_processor) for request in sent.requests]

    def add(self, sent: Add, requests: list[NewRequest]) -> None:
        """Queue requests, and refuse any without its adapter; a sleeping engine gets them once it is awake."""
        # The front moves requests of dead replicas here, and forms compile meanwhile.
        if asleep_of(self._engine) is not None:
            self._held += zip(sent.requests, requests, strict=True)
            return
        served: list[tuple[SentRequest, NewRequest]] = []
        for request, new in zip(sent.requests, requests, strict=True):
            try:
                served.append((request, self.adapters.restored(new)))
            except ValueError as error:
                self._send(Refused(request.placement, str(error)))
        self._engine.add(*(new for _, new in served))
        for request, new in served:
            self.placements[new.request_id] = request.placement
            if (answer := AnswerLogits.find_in(new.params)) is not None:
                self._answers[new.request_id] = answer
            if new.output_kind is not OutputKind.FINAL:
                continue
            # Prompt log-probabilities come only with the final output, so such a request begins anew when moved.
            if new.params.prompt_logprobs is not None:
                self._unreported.add(new.request_id)
            else:
                counts = [0] * new.params.n
                if request.resumed is not None:
                    counts = [len(sample.token_ids) for sample in request.resumed.samples]
                self._num_sent[new.request_id] = counts

    def load_adapter(self, sent: LoadAdapter) -> None:
        self._send(self.adapters.load(sent))

    def obey(self, order: Order) -> None:
        self._send(obey(self._engine, order))
        self._report([])
        held = self._held
        self._held = []
        if held:
            self.add(Add([sent for sent, _ in held]), [new for _, new in held])

    def abort(self, sent: Abort) -> None:
        self._held = [each for each in self._held if each[0].placement != sent.placement]
        if self.placements.get(sent.request_id) == sent.placement:
            self._engine.abort(sent.request_id)
            self._forget(sent.request_id)
            self._report([])

    def reset_prefix_cache(self, engine: EngineInterface) -> None:
        engine.reset_prefix_cache()
        self._report([])

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        if self._sends_records:
            self._records.append(record)
        if not self._engine.outputs and time.monotonic() - self._last_report > RECORDS_SECONDS:
            self._report([])

    def deliver(self, outputs: list[RequestOutput]) -> list[str]:
        """Send outputs to the front, which always reads; see `OutputRouter.deliver`."""
        whole, tokens = self._tokens.split(outputs, self.placements)
        self._report([self._sent(output) for output in whole], tokens)
        return []

    def without_loop(self) -> list[str]:
        return []

    def end(self, refusal: Callable[[], Exception]) -> None:
        """Report the engine's death, and end the process; an engine that was stopped is closed next."""
        error = refusal()
        if not isinstance(error, EngineClosedError):
            self._send(Died(str(error)))
            os._exit(1)

    def _report(self, outputs: list[SentOutput], tokens: TokenColumns | None = None) -> None:
        now = time.monotonic()
        if now - self._last_progress > PROGRESS_SECONDS:
            outputs += self._progress()
            self._last_progress = now
        self._last_report = now
        self._send(Report(outputs, self._engine.stats(), self._records, encode_events(self._block_events), tokens))
        self._records = []
        self._block_events.clear()

    def _sent(self, output: RequestOutput) -> SentOutput:
        request_id = output.request_id
        sent = SentOutput.from_output(output, self.placements[request_id], self._answers.get(request_id))
        if output.prompt_logprobs is not None:
            if len(output.prompt_logprobs) == self._num_prompt_logprobs.get(request_id):
                sent.prompt_logprobs = None
            self._num_prompt_logprobs[request_id] = len(output.prompt_logprobs)
        if output.finished:
            self._forget(request_id)
        return sent

    def _progress(self) -> list[SentOutput]:
        """New tokens of the requests with a final output only."""
        requests = self._engine.requests
        found = [self._progress_of(requests[request_id], sent) for request_id, sent in self._num_sent.items()]
        begun = [request for name in self._unreported if (request := requests[name]).has_token]
        self._unreported -= {request.request_id for request in begun}
        return [output for output in found if output is not None] + [self._sent_progress(each, []) for each in begun]

    def _progress_of(self, request: Request, num_sent: list[int]) -> SentOutput | None:
        completions = []
        for sequence in request.sequences:
            first = num_sent[sequence.index]
            num_sent[sequence.index] = sequence.num_output_tokens
            token_ids = sequence.token_ids[sequence.num_prompt_tokens + first :].tolist()
            logprobs = None if sequence.logprobs is None else sequence.logprobs[first:]
            reason = sequence.finish_reason
            stop = sequence.stop_reason
            versions = None if request.weight_runs is None else request.weight_runs.of(request.samples[sequence.index])
            completions.append(SentCompletion(sequence.index, "", token_ids, reason, stop, logprobs, versions))
        if not any(completion.token_ids for completion in completions):
            return None
        return self._sent_progress(request, completions)

    def _sent_progress(self, request: Request, completions: list[SentCompletion]) -> SentOutput:
        placement = self.placements[request.request_id]
        num_cached = request.sequences[0].num_cached_tokens
        values = metric_values(request.metrics())
        return SentOutput(placement, request.request_id, completions, False, num_cached, values)

    def _forget(self, request_id: str) -> None:
        del self.placements[request_id]
        self._num_sent.pop(request_id, None)
        self._unreported.discard(request_id)
        self._num_prompt_logprobs.pop(request_id, None)
        self._tokens.forget(request_id)
        self._answers.pop(request_id, None)


def main(descriptor: int, front: int) -> None:
    """Run an engine for the process `front` at the other end of a socket, until either ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the front ends this process: it may have requests to finish
    channel = inherited(descriptor)
    threading.Thread(target=_end_with_front, args=(channel, front), daemon=True).start()
    messages = _messages(channel)
    start = next(messages)
    if not isinstance(start, Start):
        raise TypeError(f"the first message is {start!r}.")
    setup = pickle.loads(start.setup)
    logging.basicConfig(format=f"%(name)s: replica {setup['index']}: %(message)s")  # same form as the command's lines
    logging.getLogger("nanovllm").setLevel(setup["log_level"])
    match_log_format(setup)
    try:
        engine, ready = build(setup["model"], setup["tokenizer"], replica_options(setup))
        match_log_format(setup)  # again: the import of transformers changed it
    except Exception as error:
        channel.send_all(encode(LoadFailed(pickled(error), f"{type(error).__name__}: {error}")))
        os._exit(1)
    reporter = Reporter(
        engine,
        lambda message: channel.send_all(encode(message)),
        sends_records=start.sends_records,
        sends_block_events=start.sends_block_events,
    )
    thread = EngineThread(engine, reporter, prepares_when_idle=setup["prepares_when_idle"])
    channel.send_all(encode(ready))
    # The front has test-compiled each form.
    prepare = functools.partial(prepare_ahead, engine.input_processor, is_tried=True)
    threading.Thread(target=prepare, name="nanovllm-prepare", daemon=True).start()
    intake = Intake(thread, reporter, engine.input_processor)
    for message in messages:
        intake.handle(message)


def match_log_format(setup: dict[str, Any]) -> None:
    """Log JSON lines, with the replica's index, if the front does."""
    if setup["logs_json"]:
        write_json(JsonLines(replica=setup["index"]))


def replica_options(setup: dict[str, Any]) -> dict[str, Any]:
    """Engine options of this replica: the common ones, with its own ports for KV events."""
    options: dict[str, Any] = setup["options"]
    if options.get("kv_events") is None:
        return options
    return options | {"kv_events_rank": options.get("kv_events_rank", 0) + setup["index"]}


def build(model: str, tokenizer: Any, options: dict[str, Any]) -> tuple[Engine, Ready]:
    """Build the engine, and its description for the front."""
    from nanovllm.build import build_engine

    engine = build_engine(model, tokenizer, None, options)
    config = {field.name: getattr(engine.config, field.name) for field in dataclasses.fields(engine.config)}
    del config["policies"]  # the front queues by none, and keeps the objects that it was given
    if not isinstance(config["speculation"], str):
        del config["speculation"]
    runner = engine.model_runner
    worker_ids = () if runner.workers is None else runner.workers.process_ids
    hash_seed = engine.block_manager.hash_seed
    limits = engine.input_processor.limits
    stats = engine.stats()
    return engine, Ready(config, limits, hash_seed, stats, worker_ids)


class Intake:
    """Passes the front's messages to the engine's thread; requests that compile a structured output are added later.

    Invariant: placements enter `_compiling` in the message thread, and leave it in the engine's thread, when they are
    queued or aborted.
    """

    def __init__(self, thread: EngineThread, reporter: Reporter, input_processor: InputProcessor) -> None:
        self._thread = thread
        self._reporter = reporter
        self._input_processor = input_processor
        self._forms = ClientTurns()
        self._compiling: set[tuple[str, int]] = set()

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            at_once: list[SentRequest] = []
            for request in message.requests:
                if request.compiles(self._input_processor):
                    self._compiling.add((request.request_id, request.placement))
                    work = functools.partial(self._compile_and_add, request)
                    self._forms.submit(work, client=request.client, compiles=True).add_done_callback(_end_if_failed)
                else:
                    at_once.append(request)
            if at_once:
                self._add(Add(at_once))
        elif isinstance(message, Abort):
            aborted = message
            self._thread.submit(lambda _: self._abort(aborted))
        elif isinstance(message, ResetCache):
            self._thread.submit(self._reporter.reset_prefix_cache)
        elif isinstance(message, LoadAdapter):
            order = message
            self._thread.submit(lambda _: self._reporter.load_adapter(order))
        elif isinstance(message, Order):
            asked = message
            self._thread.submit(lambda _: self._reporter.obey(asked)).add_done_callback(_end_if_failed)
        elif isinstance(message, DropAdapter):
            digest = message.digest
            self._thread.submit(lambda _: self._reporter.adapters.drop(digest))
        elif isinstance(message, Close):
            self._thread.stop()
            self._thread.join()
            os._exit(0)

    def _add(self, sent: Add) -> None:
        requests = self._reporter.prepare(sent)
        self._thread.submit(lambda _: self._reporter.add(sent, requests)).add_done_callback(_end_if_failed)

    def _compile_and_add(self, request: SentRequest) -> None:
        sent = Add([request])
        placement = (request.request_id, request.placement)
        requests = self._reporter.prepare(sent)

        def add(_: EngineInterface) -> None:
            if placement in self._compiling:
                self._compiling.remove(placement)
                self._reporter.add(sent, requests)

        self._thread.submit(add).add_done_callback(_end_if_failed)

    def _abort(self, sent: Abort) -> None:
        self._compiling.discard((sent.request_id, sent.placement))
        self._reporter.abort(sent)


def _end_if_failed(future: Any) -> None:
    """End the process if a request or an update fails: a defect, since the front checks them; it would wait forever."""
    if (error := future.exception()) is not None:
        logger.error("a request or an update could not be taken", exc_info=error)
        os._exit(1)


def _messages(channel: Channel) -> Any:
    while True:
        channel.wait()
        for message in channel.receive():
            yield decode_to_engine(message)
        if channel.is_closed:
            os._exit(0)


def _end_with_front(channel: Channel, front: int) -> None:
    while channel.has_peer(FRONT_CHECK_SECONDS) and os.getppid() == front:
        pass
    os._exit(0)
