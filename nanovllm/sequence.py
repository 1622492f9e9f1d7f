"""A request's sequence: known tokens, computed tokens, and the blocks of its KV cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from nanovllm.outputs import ErrorKind, OutputKind, TokenLogprobs
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A checked request, as the input processor hands it to `Engine.add`.

    prompt: the prompt as text, if it was given as text.
    prompt_token_ids: what is to be computed of the prompt, at least one token.
    bad_words: the token ids that spell each of the bad words.
    priority: lower runs first.
    cache_salt: requests share cached prefixes only within one salt.
    timeout: seconds from its arrival after which a step ends it with finish_reason "timeout"; None for no limit.
    arrival_time: seconds, on the engine's clock.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    arrival_time: float = 0.0
    output_kind: OutputKind = OutputKind.FINAL


class SequenceStatus(IntEnum):
    WAITING = 0  # holds no blocks
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """Known tokens, computed tokens and the blocks that hold them.

    ::

        token_ids    [ prompt ............ | generated ... ]            known to the host
                                                            [ in flight ]  sampled, not read yet
        computed     [=========================>                KV in the cache, or launched to be
                     | block | block | block | bl..|            block_table

    Nothing says "prefill" or "decode": a step computes some of the difference between known and computed tokens.
    When a sequence gives all its blocks back it gets a *new* block table, so that a batch that still refers to the old
    one stays what it was.
    """

    __slots__ = (
        "arrival",
        "arrival_time",
        "bad_words",
        "block_hashes",
        "block_table",
        "cache_salt",
        "error",
        "error_kind",
        "finish_reason",
        "index",
        "key",
        "logprobs",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_times_passed",
        "params",
        "placed_in_step",
        "priority",
        "prompt_logprobs",
        "request_id",
        "scheduled_time",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: NewRequest,
        *,
        arrival: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        index: int = 0,
    ) -> None:
        params = request.params
        self.request_id = request.request_id
        self.index = index  # which of the request's samples
        self.params = params
        self.priority = request.priority
        self.arrival = arrival  # a counter, so that no two sequences are equally old
        self.arrival_time = request.arrival_time  # seconds, on the engine's clock
        self.scheduled_time: float | None = None  # when the first step that computes some of it began
        # The order of scheduling: smaller first. The scheduler sets it anew if priorities age.
        self.key: tuple[float, int] = (request.priority, arrival)
        self.cache_salt = request.cache_salt
        self.seed = seed
        self.bad_words = request.bad_words  # token ids that must never follow one another

        self.token_ids = array(
            "i", request.prompt_token_ids
        )  # int32: a block's tokens are hashed and compared as bytes
        self.num_prompt_tokens = len(self.token_ids)
        room = max_model_len - self.num_prompt_tokens
        self.max_num_tokens = self.num_prompt_tokens + min(params.max_tokens or room, room)
        self.stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)

        self.num_computed_tokens = 0  # with KV in the cache, or launched to be written there
        self.num_in_flight_tokens = 0  # sampled on the device, not yet read by the host
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []  # hash chain of the full blocks, extended as they are needed

        self.status = SequenceStatus.WAITING
        self.placed_in_step = -1  # the last step that computes some of it
        self.num_times_passed = 0  # admissions that overtook it because its chunk rounded down to nothing
        self.num_preemptions = 0
        self.num_counted_tokens = 0  # computed or found at least once, so counted in the statistics
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache instead of computed
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the token id or the string that stopped it
        self.error: str | None = None
        self.error_kind: ErrorKind | None = None  # of a sequence that ended with an error
        # One for each generated token, and for each prompt token behind the first (None) as far as they are read. The
        # prompt is the same for all samples, so the first reports on it.
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        reports_prompt = params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if reports_prompt else None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Tokens with a position: those the host knows and those sampled but not read yet."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether part of its prompt must be computed for log-probabilities, cached or not."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def block_tokens(self, index: int, block_size: int) -> bytes:
        """The int32 token ids of block `index`, as bytes; short if the block is not full."""
        return self.token_ids[index * block_size : (index + 1) * block_size].tobytes()

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, {self.num_tokens} known, "
            f"{self.num_computed_tokens} computed, {len(self.block_table)} blocks)"
        )
