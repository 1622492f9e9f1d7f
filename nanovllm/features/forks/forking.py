"""`LLM.fork`: a request continues from any token of another and shares its KV."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.config import integer
from nanovllm.features.intake.prompts import like
from nanovllm.features.refusals import REPLICAS, refuse
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.outputs import OutputKind, RequestOutput
from nanovllm.sequence import NewRequest, Sequence

if TYPE_CHECKING:
    from nanovllm.engine import Engine
    from nanovllm.scheduler import Scheduler


class Forking:
    """Mixin of `LLM`."""

    def fork(
        self: Any,
        request_id: str | RequestOutput,
        at: int | None = None,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """Continue a request from one of its tokens, with other parameters; yields the output so far after each token.

        The fork shares the KV before that token: all of it if the request runs; if it has ended, the full blocks that
        are still in the prefix cache.

        Args:
            request_id: id of a running request, or any output of a request; with n > 1 the first sample is forked.
            at: number of its tokens, prompt and output, that the fork's prompt takes; None takes all.
            params, **options: as in `stream`; give cache_salt and adapter of a request that has ended.

        Raises ValueError for an unknown id, an `at` beyond its tokens, and with data_parallel_size > 1.
        """
        if self.config.data_parallel_size > 1:
            refuse("fork", REPLICAS)
        name = request_id.request_id if isinstance(request_id, RequestOutput) else request_id
        with self._turn() as engine:
            running = engine.requests.get(name)
            if running is not None:
                source = running.samples[0].request.prompt_token_ids
                token_ids = [*running.sequences[0].token_ids]
                salt = running.sequences[0].cache_salt
            elif isinstance(request_id, RequestOutput):
                source = request_id.prompt_token_ids
                token_ids = [*source, *request_id.outputs[0].token_ids]
                salt = ""
            else:
                raise ValueError(f"no request {name!r} runs. Give the RequestOutput of one that has ended.")
        at = len(token_ids) if at is None else integer("at", at, 1, len(token_ids))
        options = self._with_salt(**{"cache_salt": salt} | options)
        request = engine.input_processor.process_one(
            next(self._request_ids), like(source, token_ids[:at]), params, output_kind=OutputKind.CUMULATIVE, **options
        )
        outputs: Iterator[RequestOutput] = self._stream(request, partial(add_fork, engine, name))
        return outputs


def add_fork(engine: Engine, source_id: str, request: NewRequest) -> None:
    """Queue a fork; it starts at once on the KV of its source if that runs and lacks at most its last token."""
    engine.add(request)
    source_request = engine.requests.get(source_id)
    if source_request is not None and request.params.n == 1:
        (target,) = engine.requests[request.request_id].sequences
        go_on_from(engine.scheduler, source_request.sequences[0], target)


def go_on_from(scheduler: Scheduler, source: Sequence, target: Sequence) -> None:
    """Start a waiting sequence with the KV of a running one, if that has computed all but its last token.

    Steps in flight do not count: a failed one takes back its KV.
    """
    manager = scheduler.block_manager
    num_tokens = len(target.token_ids) - 1
    launched = (entry for batch in scheduler.in_flight for entry in batch.entries if entry.sequence is source)
    starts = (entry.num_computed_before for entry in launched if entry.block_table is source.block_table)
    if (
        source.is_running
        and (scheduler.waiting.first is target or scheduler.waiting.num_clients <= 1)
        and 0 < num_tokens <= next(starts, source.num_computed_tokens)
        and source.token_ids[:num_tokens] == target.token_ids[:num_tokens]
        and _pictures(source, num_tokens) == _pictures(target, num_tokens)
        and source.cache_salt == target.cache_salt
        and not target.lacks_prompt_logprobs
        and not manager.cuts_chunks  # recurrent states are not copied
        and len(scheduler.running) < scheduler.config.max_num_seqs
        and manager.can_fork(source, num_tokens)
    ):
        scheduler.start(target)
        manager.fork(source, target, num_tokens)
        target.num_cached_tokens = num_tokens


def _pictures(sequence: Sequence, end: int) -> bytes:
    """The identity of the pictures of a sequence before a position."""
    return b"" if sequence.media is None else sequence.media.identity(0, end)
