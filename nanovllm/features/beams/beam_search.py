"""`LLM.beam_search`: beams are running sequences; after each step they fork from the beams that they extend.

A beam that is extended more than once is forked into the sequences of beams that are dropped: full blocks are shared,
and the begun one is copied before the next forward pass, so that each step computes one token a beam.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanovllm.admission import NoProposer
from nanovllm.config import MAX_PRIORITY
from nanovllm.features.beams.books import BeamBooks, BeamSearchOutput, BeamSearchParams, Continuation
from nanovllm.features.intake.prompts import like
from nanovllm.features.interrupts import InterruptsHeld
from nanovllm.features.refusals import REPLICAS, refuse
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.requests import Prompt
from nanovllm.sequence import NewRequest, Sequence

if TYPE_CHECKING:
    from nanovllm.engine import Engine


class BeamSearching:
    """Mixin of `LLM`."""

    def beam_search(
        self: Any,
        prompts: Prompt | AnySequence[Prompt],
        params: BeamSearchParams,
        *,
        adapter: str | AnySequence[str | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the most probable continuations of prompts, those of `transformers` with num_beams.

        Args:
            prompts: prompts in the forms that `generate` takes.
            adapter: name of a loaded adapter, or a list of one each; None is the model alone.

        Returns one `BeamSearchOutput` per prompt, in order. Other calls wait for it. Raises as `generate`, and
        ValueError with data_parallel_size > 1, for recurrent states, and for beams that the KV cache cannot hold.
        """
        if self.config.data_parallel_size > 1:
            refuse("beam_search", REPLICAS)
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, not {params!r}.")
        processor = self._open_engine().input_processor
        eos = () if params.ignore_eos else processor.limits.eos_token_ids
        sampling = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=params.max_tokens,
            logprobs=max(2, 1 + len(eos)) * params.beam_width,
        )  # fmt: skip
        salted = self._with_salt(adapter=adapter, priority=-MAX_PRIORITY)
        requests = processor.process(prompts, sampling, request_ids=self._request_ids, **salted)
        books = [BeamBooks(params, request.prompt_token_ids, eos) for request in requests]
        with InterruptsHeld() as interrupts, self._turn() as engine:
            search = Search(engine, params, [*zip(requests, books, strict=True)], self._request_ids)
            try:
                while search.begin_more():
                    interrupts.pass_on()
                    self._step(engine, interrupts)
                    search.advance()
            finally:
                search.close()
        for of_prompt in books:
            for result in of_prompt.results:
                if self.tokenizer is not None:
                    result.text = self.tokenizer.decode(result.tokens, skip_special_tokens=True)
        return [BeamSearchOutput(of_prompt.results) for of_prompt in books]


@dataclass(eq=False, slots=True)
class Beams:
    """The running sequences of a prompt, by beam."""

    request: NewRequest
    books: BeamBooks
    sequences: list[Sequence] = field(default_factory=list)


class Search:
    """A beam search over an engine, step by step.

    Raises ValueError for beams that the KV cache or the slots cannot hold.
    """

    def __init__(
        self, engine: Engine, params: BeamSearchParams, prompts: list[tuple[NewRequest, BeamBooks]], ids: Any
    ) -> None:
        self.engine = engine
        self.width = params.beam_width
        self._ids = ids
        self._waiting = [Beams(request, books) for request, books in prompts][::-1]
        self._active: list[Beams] = []
        self._check(params)
        self._config = engine.config
        engine.restart_running()  # no step is in flight, and beams start first
        engine.config = replace(engine.config, overlap=False)
        self._proposer = engine.scheduler.proposer
        engine.scheduler.proposer = NoProposer()  # a step brings a beam one token

    def _check(self, params: BeamSearchParams) -> None:
        engine = self.engine
        config = self.engine.config
        if engine.model_runner.binding.mixers:
            raise ValueError("beam_search forks sequences, which recurrent states of this model do not allow.")
        longest = max(len(beams.request.prompt_token_ids) for beams in self._waiting) + params.max_tokens
        if longest > config.max_model_len:
            raise ValueError(
                f"a prompt with max_tokens={params.max_tokens} has {longest} tokens, but max_model_len is "
                f"{config.max_model_len}. Lower max_tokens."
            )
        needed = self.width * engine.block_manager.num_blocks_for(longest)
        num_blocks = min(pool.num_blocks for pool in engine.block_manager.pools) - 1
        if needed > num_blocks or self.width > config.max_num_seqs:
            raise ValueError(
                f"{self.width} beams of {longest} tokens take {needed} blocks and {self.width} slots, but there are "
                f"{num_blocks} blocks and {config.max_num_seqs} slots (max_num_seqs). Lower beam_width or max_tokens."
            )
        self._most = min(num_blocks // needed, config.max_num_seqs // self.width)

    def begin_more(self) -> bool:
        """Queue prompts while there is room for all their beams; False once all are done."""
        while self._waiting and len(self._active) < self._most:
            beams = self._waiting.pop()
            self._active.append(beams)
            beams.sequences = [self._add(beams.request)]
        return bool(self._active)

    def _add(self, request: NewRequest) -> Sequence:
        self.engine.add(request)
        (sequence,) = self.engine.requests[request.request_id].sequences
        return sequence

    def advance(self) -> None:
        """Advance each prompt in which all beams have a new token."""
        for beams in list(self._active):
            length = len(beams.request.prompt_token_ids) + len(beams.books.outputs[0])
            if all(len(sequence.token_ids) > length or sequence.error for sequence in beams.sequences):
                self._go_on(beams)
                if beams.books.is_done:
                    self._active.remove(beams)
                    self._end(beams)

    def _go_on(self, beams: Beams) -> None:
        logprobs = []
        for sequence in beams.sequences:
            if sequence.error or not sequence.logprobs:
                raise RuntimeError(sequence.error or f"beam {sequence.request_id} has no log-probabilities")
            logprobs.append(sequence.logprobs[-1])
            sequence.logprobs.clear()
        going_on = beams.books.advance(logprobs)
        if not beams.books.is_done:
            self._move(beams, going_on)

    def _move(self, beams: Beams, going_on: list[Continuation]) -> None:
        """Give each beam a sequence: the first extension of a beam keeps its own, others fork it."""
        manager = self.engine.block_manager
        before = beams.sequences
        placed: list[Sequence | None] = [None] * len(going_on)
        taken: set[int] = set()
        for index, each in enumerate(going_on):
            if each.parent not in taken:
                taken.add(each.parent)
                placed[index] = before[each.parent]
        dropped = [sequence for index, sequence in enumerate(before) if index not in taken]
        for sequence in dropped:
            manager.release(sequence)
        known = {parent: before[parent].token_ids[:-1] for parent in taken}
        for index, (parent, token_id, _) in enumerate(going_on):
            target = placed[index]
            if target is None:
                target = placed[index] = self._fork(before[parent], known[parent], token_id, dropped, beams)
            target.token_ids[-1] = token_id
        for sequence in dropped:  # fewer beams than before
            self.engine.abort(sequence.request_id)
        beams.sequences = [sequence for sequence in placed if sequence is not None]

    def _fork(
        self, source: Sequence, known: array[int], token_id: int, dropped: list[Sequence], beams: Beams
    ) -> Sequence:
        engine = self.engine
        num_tokens = len(known)
        while not engine.block_manager.can_fork(source, num_tokens):
            self._preempt_another()
        if dropped:
            target = dropped.pop()
            target.token_ids = array("i", known)
            target.token_ids.append(token_id)
            target.num_known_tokens = len(target.token_ids)
        else:
            target = self._start(beams.request, [*known, token_id])
        target.block_hashes = source.block_hashes[: num_tokens // engine.block_manager.block_size]
        engine.block_manager.fork(source, target, num_tokens)
        return target

    def _start(self, request: NewRequest, token_ids: list[int]) -> Sequence:
        """A new running sequence without blocks."""
        end = len(request.prompt_token_ids) + (request.params.max_tokens or 0)
        params = replace(request.params, max_tokens=end - len(token_ids))
        while len(self.engine.scheduler.running) >= self.engine.config.max_num_seqs:
            self._preempt_another()
        new = replace(
            request,
            request_id=next(self._ids),
            prompt=None,
            prompt_token_ids=like(request.prompt_token_ids, token_ids),
            params=params,
        )
        sequence = self._add(new)
        self.engine.scheduler.start(sequence)
        return sequence

    def _preempt_another(self) -> None:
        """Preempt the youngest request of others; beams come first in the order."""
        victim = self.engine.scheduler.running[-1]
        if victim.priority == -MAX_PRIORITY:
            raise RuntimeError(
                f"no blocks and slots for a beam behind {len(victim.token_ids)} tokens; please report this"
            )
        self.engine.scheduler.preempt(victim)

    def _end(self, beams: Beams) -> None:
        for sequence in beams.sequences:
            self.engine.abort(sequence.request_id)

    def close(self) -> None:
        """End the beams that still run; other requests go on."""
        if not self.engine.is_dead:
            for beams in self._active:
                self._end(beams)
        self.engine.config = self._config
        self.engine.scheduler.proposer = self._proposer
