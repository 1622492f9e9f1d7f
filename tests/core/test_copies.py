"""Steps that copy blocks before their forward pass; batches are built by hand, all tables of a sequence are alike."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.batch import Copy, ScheduledBatch, ScheduledSequence
from nanovllm.kv_cache import KVCaches
from nanovllm.sequence import NewRequest, Sequence
from tests.support.layer_kinds import model
from tests.support.llms import OPTIONS, generate, open_llm
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("programs_are_forked")

SIZE = 16
PROMPT = list(range(40, 65))  # a full block and a begun one
PARAMS = SamplingParams(seed=3, logprobs=0)

SETTINGS = {
    "sdpa": (None, {"attention_backend": "sdpa"}),
    "cpp": (None, {"attention_backend": "cpp", "enforce_eager": False}),
    "flex": (None, {"attention_backend": "flex", "enforce_eager": False}),
    "cache groups": ("Gemma3Text", {"attention_backend": "sdpa"}),
    "cache groups, cpp": ("Gemma3Text", {"attention_backend": "cpp", "enforce_eager": False}),
    "layers that share K and V, two head sizes": ("Gemma4Text", {"attention_backend": "sdpa"}),
    "keys wider than values": ("DeepseekV2", {"attention_backend": "sdpa"}),
}


def open_setting(setting):
    family, options = SETTINGS[setting]
    return open_llm(None if family is None else model(family), max_model_len=160, **options)


def sequence_of(name, tokens):
    return Sequence(NewRequest(name, tokens, PARAMS), arrival=0, max_model_len=512, seed=3)


def run(runner, *entries, copies=()):
    """A step of sequences from their start to their end, in these blocks; returns token and log-probability of each."""
    scheduled = [
        ScheduledSequence(sequence, start, len(sequence.token_ids) - start, 1, table, start)
        for sequence, start, table in entries
    ]
    step = runner.execute(ScheduledBatch(0, tuple(scheduled), copies=copies))
    token_ids = step.result()
    step.report.record([sequence for sequence, *_ in entries], token_ids)
    return [
        (token_id, sequence.logprobs[-1][token_id].logprob)
        for token_id, (sequence, *_) in zip(token_ids, entries, strict=True)
    ]


def drawn_behind_a_copy(runner, num_groups, *, reused):
    """What a sequence draws in its own blocks, and what it draws where the begun one was copied to.

    The step that copies gives block `reused` to another sequence.
    """
    run(runner, (sequence_of("prompt", PROMPT), 0, [5, 6]))
    longer = [*PROMPT, 7]
    (own,) = run(runner, (sequence_of("own", longer), len(PROMPT), [5, 6]))
    copies = tuple(Copy(group, 6, 9) for group in range(num_groups))
    (copied, _) = run(
        runner,
        (sequence_of("copied", longer), len(PROMPT), [5, 9]),
        (sequence_of("next owner", [1, 2, 3]), 0, [reused]),
        copies=copies,
    )
    return own, copied


@pytest.mark.costly
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copied_block_has_the_keys_and_values_of_its_source_in_every_layer(setting):
    with open_setting(setting) as llm:
        runner = llm._engine.model_runner
        num_groups, caches = len(runner.pools.groups), runner.binding.caches
        run(runner, (sequence_of("prompt", PROMPT), 0, [5, 6]))

        def contents():
            return [part.view(-1, SIZE, *part.shape[1:]).clone() for layer in caches.of_layers for part in layer]

        before = contents()
        copies = tuple(Copy(group, 6, block) for group in range(num_groups) for block in (9, 10))
        run(runner, (sequence_of("other", [1, 2, 3]), 0, [3]), copies=copies)
        for was, now in zip(before, contents(), strict=True):
            assert was[6].abs().sum() > 0 and torch.equal(was[6], now[6])
            assert torch.equal(now[9], was[6]) and torch.equal(now[10], was[6])
            assert torch.equal(now[11:], was[11:]) and torch.equal(now[4:9], was[4:9])


@pytest.mark.full
@pytest.mark.parametrize("reused", [8, 6], ids=["another block", "the source"])
@pytest.mark.parametrize("setting", ["sdpa", "cpp", "flex", "cache groups"])
def test_a_step_reads_what_it_copied_though_the_source_has_a_next_owner(setting, reused):
    with open_setting(setting) as llm:
        runner = llm._engine.model_runner
        own, copied = drawn_behind_a_copy(runner, len(runner.pools.groups), reused=reused)
    assert copied[0] == own[0] and copied[1] == pytest.approx(own[1], abs=1e-5)


def test_every_rank_copies_its_part(tmp_path):
    with LLM(save_tiny(tmp_path, "llama"), **(OPTIONS | {"tensor_parallel_size": 2})) as llm:
        own, copied = drawn_behind_a_copy(llm._engine.model_runner, 1, reused=6)
    assert copied[0] == own[0] and copied[1] == pytest.approx(own[1], abs=1e-5)


def test_a_step_without_copies_does_not_ask_for_any(monkeypatch):
    def refuse(*_):
        raise AssertionError("a step without copies asks for some")

    monkeypatch.setattr(KVCaches, "copy_blocks", refuse)
    with open_llm() as llm:
        assert generate(llm, [PROMPT, PROMPT[:5]], SamplingParams(max_tokens=20, seed=1))
