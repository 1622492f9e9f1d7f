"""A checked request, and its sequence: known tokens, computed tokens, and the blocks of its KV cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import KW_ONLY, InitVar, dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from nanovllm.outputs import ErrorKind, FinishReason, OutputKind, TokenLogprobs

SCHEDULING_KEY = attrgetter("key")  # Order of scheduling of a Sequence


class Progress(Protocol):
    """Progress of a request in an earlier engine; its tokens are recomputed."""

    def restore(self, sample: Any) -> None:
        """Restore a new `responses.Sample`: all tokens known, none computed."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A checked request, as the input processor hands it to `Engine.add`.

    prompt: text of the prompt, if it was given as text.
    prompt_token_ids: tokens to compute, at least one.
    params: SamplingParams, of the engine or a subclass with options of features.
    bad_words: token ids that spell each of the bad words.
    priority: priority level; the lowest runs first.
    cache_salt: name of a separate part of the prefix cache; requests share prefixes only under equal salts.
    client: name of a client; clients of one priority get shares of the engine by `EngineConfig.client_weights`.
    timeout: seconds from its arrival after which a step ends it with finish_reason "timeout"; None for no limit.
    arrival_time: seconds, on the engine's clock.
    resumed: progress in an earlier engine.
    matcher: matcher of params.structured_output before the first token; each sample copies it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: Any
    prompt: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    arrival_time: float = 0.0
    output_kind: OutputKind = OutputKind.FINAL
    resumed: Progress | None = None
    matcher: Any = None
    client: str = ""


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Known tokens, computed tokens and the blocks that hold them.

    ::

        token_ids    [ prompt ............ | generated ... ]            known to the host
                                                            [ in flight ]  sampled, not read yet
        computed     [=========================>                KV in the cache, or launched to be
                     | block | block | block | bl..|            block_table

    Nothing says "prefill" or "decode": a step computes some of the difference between known and computed tokens.
    A sequence that releases all its blocks gets a *new* block table, so that a batch in flight keeps the old one
    unchanged.
    """

    request: InitVar[NewRequest]
    _: KW_ONLY
    arrival: int  # number in the order of arrival, which breaks ties
    max_model_len: InitVar[int]
    eos_token_ids: InitVar[Iterable[int]] = ()
    seed: int = 0
    index: int = 0  # number of the sample in its request

    request_id: str = field(init=False)
    params: Any = field(init=False)
    priority: int = field(init=False)
    cache_salt: str = field(init=False)
    client: str = field(init=False)
    bad_words: tuple[tuple[int, ...], ...] = field(init=False)  # runs of tokens never to be completed
    arrival_time: float = field(init=False)  # seconds, on the engine's clock
    key: tuple[float, int] = field(init=False)  # the order of scheduling, smaller first; the scheduler lets it age
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)  # limit of prompt and output together
    stop_token_ids: frozenset[int] = field(init=False)
    needs_host_tokens: bool = field(init=False)  # a field, since every overlapped step reads it
    changes_logits: bool = field(init=False)  # a field for the same reason
    is_plain: bool = field(init=False)  # a step of plain sequences has no stage of sampling but the draw
    matcher: Any = field(init=False)  # state of its structured output; the sampler advances it

    token_ids: array[int] = field(init=False)  # int32: a block's tokens are hashed and compared as bytes
    num_known_tokens: int = field(init=False)  # tokens in token_ids, and tokens sampled and not read yet
    num_computed_tokens: int = 0  # tokens with KV in the cache, or launched to be written there
    block_table: list[int] = field(default_factory=list)
    group_tables: Any = None  # `GroupTables`, with several cache groups
    block_hashes: list[bytes] = field(default_factory=list)  # hash chain of the full blocks, extended when needed
    samples: SequenceABC[Sequence] = ()  # all samples of its request, if there are several
    media: Any = field(init=False)  # `Media`, the pictures of its prompt

    drafting: Any = None  # state of its drafts, which `speculation` sets
    draft: tuple[int, ...] = ()  # guesses at its tokens in flight, which the step that computes them verifies
    account: Any = field(init=False)  # its client's counter, which the queue of clients sets
    is_running: bool = False
    is_finished: bool = False  # a sequence that neither runs nor is finished waits, and holds no blocks
    placed_in_step: int = -1  # the last step that computes some of its tokens
    num_times_passed: int = 0  # admissions that overtook it because its chunk rounded down to nothing
    num_preemptions: int = 0
    num_counted_tokens: int = 0  # tokens that the statistics have counted, as computed or hit
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache instead of computed
    scheduled_time: float | None = None  # start of the first step that computes some of its tokens
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or the string that stopped it
    error: str | None = None
    error_kind: ErrorKind | None = None  # origin of `error`
    logprobs: list[TokenLogprobs] | None = None  # one entry a generated token, if requested
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one entry a prompt token so far, None for the first
    embedding: Any = None  # [hidden_size] float32 NumPy array, if requested

    def __post_init__(self, request: NewRequest, max_model_len: int, eos_token_ids: Iterable[int]) -> None:
        params = self.params = request.params
        self.request_id = request.request_id
        self.arrival_time = request.arrival_time
        self.priority = request.priority
        self.key = (request.priority, self.arrival)
        self.cache_salt = request.cache_salt
        self.client = request.client
        self.bad_words = request.bad_words
        self.token_ids = array("i", request.prompt_token_ids)
        self.media = getattr(request.prompt_token_ids, "media", None)
        self.num_prompt_tokens = self.num_known_tokens = len(self.token_ids)
        room = max_model_len - self.num_prompt_tokens
        self.max_num_tokens = self.num_prompt_tokens + min(params.max_tokens or room, room)
        self.stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.is_plain = params.is_plain
        self.needs_host_tokens = not self.is_plain and params.needs_host_tokens
        self.changes_logits = not self.is_plain and params.changes_logits
        self.matcher = None if request.matcher is None else request.matcher.copy()
        params.begin(self)

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens sampled on the device, not yet read by the host."""
        return self.num_known_tokens - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def shared_prompt(self) -> int:
        """An id of its prompt while other samples may share the prompt's KV: before the first draw. Else 0."""
        return id(self.samples) if self.samples and self.num_known_tokens == self.num_prompt_tokens else 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def history(self, first: int, end: int) -> array[int]:
        """The tokens from position `first` to before `end` that a row sees, as far as known; drafts come last."""
        tokens = self.token_ids[first:end]
        if self.draft:
            num_known = len(self.token_ids)
            tokens.extend(self.draft[max(0, first - num_known) : max(0, end - num_known)])
        return tokens

    @property
    def num_findable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache: prompt log-probabilities need rows that are computed."""
        reported = self.prompt_logprobs
        if reported is None or len(reported) >= self.num_prompt_tokens:
            return len(self.token_ids)
        return len(reported) - 1  # row p gives the log-probabilities of token p + 1

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether part of its prompt must be computed for log-probabilities, cached or not."""
        return self.num_findable_tokens < len(self.token_ids)

    def num_findable_blocks(self, block_size: int) -> int:
        """Full blocks of findable tokens, before the last known token, which is computed for its logits."""
        return min(self.num_findable_tokens, len(self.token_ids) - 1) // block_size

    def held_blocks(self) -> Iterator[tuple[int, int]]:
        """(cache group, block) of its block tables."""
        tables = [self.block_table, *(self.group_tables.further if self.group_tables else ())]
        return ((group, block) for group, table in enumerate(tables) for block in table)

    def block_tokens(self, index: int, block_size: int) -> bytes:
        """The int32 token ids of block `index`, as bytes, and then the identity of the pictures in it.

        Short if the block is not full.
        """
        first = index * block_size
        tokens = self.token_ids[first : first + block_size].tobytes()
        return tokens if self.media is None else tokens + self.media.identity(first, first + block_size)

    def cut(self, num_tokens: int) -> None:
        """Drop known tokens beyond `num_tokens`; none may be in flight."""
        del self.token_ids[num_tokens:]
        self.num_known_tokens = len(self.token_ids)
        if self.logprobs is not None:
            del self.logprobs[self.num_output_tokens :]

    def __repr__(self) -> str:
        status = "finished" if self.is_finished else "running" if self.is_running else "waiting"
        return (
            f"Sequence({self.request_id!r}, {status}, {len(self.token_ids)} known, "
            f"{self.num_computed_tokens} computed, {len(self.block_table)} blocks)"
        )
