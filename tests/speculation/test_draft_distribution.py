"""Tokens with drafts follow the model's distribution exactly, whatever the drafts know of the noise."""

import functools
from collections import Counter

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from nanovllm.fast.fast_draws import fast_sampler
from nanovllm.fast.row_kernels import load_row_kernels
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.layout import build_layout
from nanovllm.sequence import NewRequest, Sequence
from tests.engine.loops import VOCAB_SIZE
from tests.support.chi_squared import SIGNIFICANCE, p_value
from tests.support.mock_drafts import with_drafts
from tests.support.scheduling import make_scheduler

NUM_REQUESTS, AT_ONCE, MAX_TOKENS = 20_000, 1000, 5  # 10^5 draws
MODEL = 1.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))  # logits after each token
OTHER = MODEL + torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))


@functools.cache
def sampler():
    return fast_sampler(row_kernels=load_row_kernels())


def drawn_from(logits, sequences, positions):
    return sampler().sample(logits, sequences, positions)


class SharedNoise:
    """Drafts that a model similar to the target draws with the target's noise: the most that drafts can know of it."""

    def propose(self, requests):
        drafts = [[] for _ in requests]
        for depth in range(max(request.max_tokens for request in requests)):
            last = [(own or request.tokens_from(-1))[-1] for own, request in zip(drafts, requests, strict=True)]
            positions = [request.num_tokens + depth for request in requests]
            drawn = drawn_from(OTHER[last], [request.sequence for request in requests], positions)
            for own, token_id in zip(drafts, drawn.tolist(), strict=True):
                own.append(token_id)
        return drafts


class Likeliest:
    """Drafts of the likeliest tokens, which know nothing of the noise."""

    def propose(self, requests):
        drafts = []
        for request in requests:
            own = [request.tokens_from(-1)[0]]
            for _ in range(request.max_tokens):
                own.append(int(MODEL[own[-1]].argmax()))
            drafts.append(own[1:])
        return drafts


def outputs(drafter, params):
    """Tokens [NUM_REQUESTS, MAX_TOKENS] of requests that begin with each token in turn; and the counts of drafts."""
    limits = {"max_num_seqs": 4 * AT_ONCE, "max_num_batched_tokens": 4 * AT_ONCE, "num_kv_blocks": 4 * AT_ONCE}
    scheduler = with_drafts(make_scheduler(enable_prefix_caching=False, **limits), drafter, max_drafts=3)
    sequences = []
    while batch := scheduler.schedule() or len(sequences) < NUM_REQUESTS:
        if batch is True:  # all have ended
            for seed in range(len(sequences), len(sequences) + AT_ONCE):
                given = SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **params)
                new = NewRequest(str(seed), [seed % VOCAB_SIZE], given)
                sequences.append(Sequence(new, arrival=seed, max_model_len=64, seed=seed))
                scheduler.add(sequences[-1])
            continue
        layout = build_layout(batch.entries, 4)
        rows = torch.from_numpy(layout.token_ids[layout.sample_rows])
        drawn = drawn_from(MODEL[rows], batch.sampling, layout.sampled_positions.tolist())
        scheduler.update(batch, drawn.tolist())
    return torch.tensor([sequence.output_token_ids for sequence in sequences]), scheduler.proposer.counts


def distribution(params):
    """Probabilities [VOCAB_SIZE, VOCAB_SIZE] of the next token after each, by the library's own warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params["temperature"]), TopPLogitsWarper(params["top_p"])])
    return warpers(None, MODEL.clone()).softmax(dim=-1)


@pytest.mark.costly
@pytest.mark.parametrize(
    "drafter, temperature",
    [(SharedNoise, 0.7), (SharedNoise, 1.0), (Likeliest, 1.0)],
)
def test_draws_with_drafts_follow_the_models_distribution_at_every_place(drafter, temperature):
    params = {"temperature": temperature, "top_p": 0.9}
    tokens, counts = outputs(drafter(), params)
    drafted, accepted = sum(counts.drafted), sum(counts.accepted)
    assert min(accepted, drafted - accepted) > NUM_REQUESTS / 10, (
        "tokens come from accepted drafts and from rejected ones"
    )
    prompts = torch.arange(NUM_REQUESTS)[:, None] % VOCAB_SIZE
    before, wanted = torch.cat([prompts, tokens[:, :-1]], dim=1), distribution(params)
    assert tokens.numel() == 10**5 and (wanted[before, tokens] > 0).all()
    for place in range(MAX_TOKENS):
        for token_id in range(VOCAB_SIZE):
            after = Counter(tokens[before[:, place] == token_id, place].tolist())
            possible = [next_id for next_id in range(VOCAB_SIZE) if wanted[token_id, next_id] > 0]
            if len(possible) > 1 and after.total() > 200:
                found = torch.tensor([after[next_id] for next_id in possible])
                assert p_value(found, wanted[token_id, possible]) > SIGNIFICANCE, (place, token_id)
