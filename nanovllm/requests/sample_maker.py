"""Makes the samples of new requests: a sequence each, with its place in the order of arrival and its seed."""

from __future__ import annotations

from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.outputs import OutputKind
from nanovllm.requests.bad_words import Spellings
from nanovllm.requests.request_checks import truncated
from nanovllm.requests.sample import Request
from nanovllm.sampling.sampler import request_seed, sample_seed
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence


class SampleMaker:
    """What all requests of an engine have in common, and how many there were."""

    def __init__(self, config: EngineConfig, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._config, self._tokenizer, self._eos_token_ids = config, tokenizer, eos_token_ids
        self._num_requests = self._num_sequences = 0

    def make(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        bad_words: Spellings,
        arrival_time: float,
        timeout: float | None,
        priority: int,
        cache_salt: str,
        output_kind: OutputKind,
    ) -> list[Request]:
        """The samples of a request, which counts once it is `note_queued`."""
        config = self._config
        prompt_token_ids = list(truncated(prompt_token_ids, params))
        seed = request_seed(config.seed, self._num_requests) if params.seed is None else params.seed

        def sample(index: int) -> Request:
            sequence = Sequence(
                request_id,
                prompt_token_ids,
                params,
                arrival=self._num_sequences + index,
                arrival_time=arrival_time,
                max_model_len=config.max_model_len,
                priority=priority,
                cache_salt=cache_salt,
                eos_token_ids=self._eos_token_ids,
                seed=sample_seed(seed, index),
                index=index,
                bad_words=bad_words,
            )
            return Request(
                sequence,
                prompt,
                prompt_token_ids,
                self._tokenizer,
                output_kind=output_kind,
                deadline=None if timeout is None else arrival_time + timeout,
                record_itl=config.record_itl,
            )

        return [sample(index) for index in range(params.n)]

    def note_queued(self, samples: list[Request]) -> None:
        self._num_requests += 1
        self._num_sequences += len(samples)
