"""An `LLM` over the tiny model: open it, make it fail, check that it is idle with every block free."""

import functools
import threading
import time

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.features.groups.block_checks import check_scheduler
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
POOLS = {
    "roomy pool": {},
    "small chunks": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "tiny pool": {"num_kv_blocks": 17, "max_model_len": 230, "max_num_batched_tokens": 80},
}
OVERLAP = pytest.mark.parametrize("overlap", [False, True])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(seed=7, max_tokens=12)


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def open_llm(model=None, **options):
    return LLM(model or tiny_model(num_layers=1), tokenizer=tiny_tokenizer(), **(OPTIONS | options))


@functools.cache
def shared_llm():
    """An engine shared by tests that leave nothing behind, except in the prefix cache."""
    return open_llm()


def generate(llm, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def mixed_requests(count):
    """Prompts with greedy and seeded sampling in turn, filtered in different ways, that end one after another."""
    kinds = [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}]
    params = [SamplingParams(seed=n, max_tokens=8 + n % 9, **kinds[n % len(kinds)]) for n in range(count)]
    return random_prompts(count, low=1, high=110, seed=1), params


def submit(engine, name, *request, **options):
    """Queue a request of this name, as a front door does."""
    engine.add(engine.input_processor.process_one(name, *request, **options))


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def script(monkeypatch, llm, text):
    """Make the model generate `text` for any prompt; returns the text's tokens."""
    says = llm.tokenizer(text)["input_ids"]

    def sample(logits, sequences, positions, latest, report):
        indices = [position - s.num_prompt_tokens for s, position in zip(sequences, positions, strict=True)]
        return torch.tensor([says[index % len(says)] for index in indices])

    monkeypatch.setattr(llm._engine.model_runner.sampler, "sample", sample)
    return says


def fail_in_step(monkeypatch, llm, number, error):
    """Raise within the `number`-th step from now, after its KV is written and before its tokens are sampled."""
    sampler, steps = llm._engine.model_runner.sampler, iter(range(1, 10_000))
    sample = sampler.sample

    def failing(*arguments):
        if next(steps) == number:
            raise error
        return sample(*arguments)

    monkeypatch.setattr(sampler, "sample", failing)


def check_engine(llm):
    """Verify the block manager's invariants against every sequence of an engine."""
    check_scheduler(llm._engine.scheduler)


def assert_idle_and_whole(llm):
    stats = llm.stats()
    assert stats.num_running == 0 and stats.num_waiting == 0 and stats.num_used_blocks == 0
    assert stats.num_free_blocks == stats.num_blocks
    check_engine(llm)


def comes_true(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def ends_within(seconds, function):
    """Whether a function ends in time; runs it in a thread, which goes on in the background if not."""

    def run():
        try:
            function()
        except Exception:  # it ended
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
