"""Drafters with known answers, and schedulers and engines with them."""

from nanovllm.features.speculation.lengths import DraftLengths
from nanovllm.features.speculation.speculation import Speculation
from tests.engine.loops import VOCAB_SIZE, empty_prefix, extend_prefix


def with_drafts(scheduler, drafter, *, max_drafts=7):
    scheduler.proposer = Speculation(
        scheduler.config,
        scheduler.block_manager,
        drafter,
        DraftLengths(max_drafts, overlap=False),
        vocab_size=VOCAB_SIZE,
    )
    return scheduler


class GuessingDrafter:
    """Drafts that the mock model draws next, each with the given probability, and in that share of the steps."""

    def __init__(self, rng, *, share_right, share_of_steps=1.0):
        self._rng, self._share_right, self._share_of_steps = rng, share_right, share_of_steps

    def propose(self, requests):
        return [self._drafts(request) for request in requests]

    def token(self, request, prefix, position):
        """The token that the model draws."""
        return prefix % VOCAB_SIZE

    def _drafts(self, request):
        if self._rng.random() >= self._share_of_steps:
            return []
        prefix = empty_prefix(request.cache_salt)
        for token_id in request.token_ids:
            prefix = extend_prefix(prefix, token_id)
        drafts = []
        for _ in range(self._rng.randint(1, request.max_tokens + 2)):  # too many at times
            drafts.append(self.token(request, prefix, request.num_tokens + len(drafts)))
            prefix = extend_prefix(prefix, drafts[-1])
        return [d if self._rng.random() < self._share_right else self._rng.randrange(VOCAB_SIZE) for d in drafts]


def unchanged(request, drafts):
    return drafts


class KnownAnswers:
    """Drafts from the outputs that requests are known to have, each changed as a test wants it.

    Args:
        answers: prompt -> output tokens, of each sample.
        change: of the drafts that continue a request's tokens.
    """

    def __init__(
        self,
        answers,
        change=unchanged,
    ):
        self._answers, self._change = answers, change

    def propose(self, requests):
        return [list(self._change(request, self._continuation(request))) for request in requests]

    def _continuation(self, request):
        answer = self._answers[tuple(request.token_ids[: request.num_prompt_tokens])][request.index]
        start = request.num_tokens - request.num_prompt_tokens
        return list(answer[start : start + request.max_tokens])


def known_answers(prompts, answers, change=unchanged):
    """Drafts from one answer to each prompt."""
    return KnownAnswers({tuple(prompt): [answer] for prompt, answer in zip(prompts, answers, strict=True)}, change)
