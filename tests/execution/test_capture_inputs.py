"""Captures read inputs of their own and leave those of steps alone, without a GPU.

A graph is a function that is called again, and each kernel of a head is a function that refuses what names no token,
row or mask; while a graph is captured it also refuses whatever a step has left. tests/gpu has the real ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm import sampler as draws
from nanovllm.fast.gpu import cuda_graphs, head_extras, mask_buffer, rehearsal
from nanovllm.fast.gpu.head_extras import HeadExtras
from nanovllm.features.costs.buckets import HeadShape
from nanovllm.features.grammar import mask_threads
from nanovllm.features.logprobs import logprobs
from nanovllm.features.penalties.penalties import LatestTokens
from nanovllm.features.token_masks import keep_bits
from nanovllm.model_runner import PendingTokens
from nanovllm.sampler import FILTERS
from tests.support.gpu_steps import CalledAgain, run_graphs_on_a_cpu
from tests.support.option_traffic import answers
from tests.support.public_options import make_sequence
from tests.support.structured import EOS
from tests.support.tiny_models import save_tiny, tiny_tokenizer

OPTIONS = {
    "max_model_len": 160, "max_num_seqs": 12, "num_kv_blocks": 100, "max_num_batched_tokens": 96, "block_size": 16,
}  # fmt: skip
LONGEST, SEEDS = 100, range(5)


class TokenMasks(NamedTuple):
    rows: Tensor
    words: Tensor


class Kernels:
    """The kernels of heads for a CPU, which read no entry before it is checked.

    found: what was wrong.
    """

    def __init__(self):
        self.is_capturing = False
        self.used = set()
        self.found = []

    def find(self, file, name):
        own = {"penalise": self.penalise, "measure": self.measure, "TokenMasks": TokenMasks}
        return own.get(name)

    def find_draw(self, file, name):
        def draw_on_gpu(*inputs, gamma, non_finite, nothing_left, **given):
            return self.draw(*inputs, **given)

        return {"draw_on_gpu": draw_on_gpu, "FILTERS": FILTERS}[name]

    def refuse_if(self, is_wrong, what):
        if bool(is_wrong):
            self.found.append(what)

    def penalise(self, logits, entries, tokens, previous):
        self._note("penalties")
        row, start, length, _, in_flight = entries[:, :5].unbind(1)
        self.refuse_if(len(entries) != len(logits), "entries of other rows")
        self.refuse_if(((row < 0) | (row >= len(logits))).any(), "a row that does not exist")
        self.refuse_if(((start < 0) | (length < 0) | (start + length > len(tokens))).any(), "tokens beyond the buffer")
        self.refuse_if((in_flight >= len(previous)).any(), "a token in flight that does not exist")
        if self.is_capturing:
            self.refuse_if(length.any() | (in_flight != -1).any(), "penalties of a step")
            self.refuse_if(previous.any(), "tokens of a step")
        if self.found:
            return
        for entry, factors in zip(
            entries.tolist(), entries[:, 5:].contiguous().view(torch.float32).tolist(), strict=True
        ):
            own = tokens[entry[1] : entry[1] + entry[2]].tolist()
            output = own[entry[3] :] + ([max(0, int(previous[entry[4]]))] if entry[4] >= 0 else [])
            for token_id in {*own, *output}:
                value, count = logits[entry[0], token_id], output.count(token_id)
                value = value / factors[0] if value > 0 else value * factors[0]
                logits[entry[0], token_id] = value - factors[1] * count - factors[2] * (count > 0)

    def measure(self, logits, token_ids, num_top):
        self._note("log-probabilities")
        measured = logprobs.Measured.from_logits(logits, token_ids, num_top)
        return measured.token_ids, measured.logprobs, measured.ranks

    def draw(self, logits, inputs, *, has_filters=True, masks=None):
        if self.is_capturing:
            self.refuse_if(any(part.any() for part in inputs), "draws of a step")
        if masks is not None:
            self._note("masks")
            logits, rows = logits.to(torch.float32, copy=True), masks.rows.tolist()
            self.refuse_if(len(rows) != len(logits) or max(rows) >= len(masks.words), "a mask that does not exist")
            self.refuse_if(self.is_capturing and max(rows) >= 0, "masks of a step")
            chosen = [row for row, own in enumerate(rows) if own >= 0]
            keep_bits(logits, chosen, masks.words.numpy()[[rows[row] for row in chosen]])
        return draws.draw(logits, inputs, has_filters=has_filters)

    def _note(self, kind):
        self.used.add(f"{kind} captured" if self.is_capturing else kind)


class Event:
    def synchronize(self): ...

    def record(self, stream): ...


def send_copies(cls, token_ids, report):
    """As to a host: a later step overwrites what a head writes."""
    return cls(token_ids.clone(), report and report.to_host(), None) if isinstance(token_ids, Tensor) else token_ids


@pytest.fixture
def kernels(monkeypatch):
    """Engines of graphs on this CPU, whose kernels these are."""
    own = Kernels()

    class CheckedPool(CalledAgain):
        def capture(self, run, **_):
            own.is_capturing = True
            try:
                return super().capture(run)
            finally:
                own.is_capturing = False

    layers = ["merge_linears", "fuse_rotary", "compile_layers", "stack_layers", "use_kernel_layers"]
    run_graphs_on_a_cpu(monkeypatch, CheckedPool, left_out=layers)
    for module in (head_extras, mask_buffer):
        monkeypatch.setattr(module, "find_kernel", own.find)
    monkeypatch.setattr("nanovllm.fast.fast_draws.find_kernel", own.find_draw)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    threads = mask_threads.MaskThreads
    monkeypatch.setattr(mask_threads, "MaskThreads", lambda: threads(2))
    monkeypatch.setattr(rehearsal, "DEVICES", {"cpu"})
    monkeypatch.setattr("nanovllm.features.speculation.lengths.PLAIN_WINDOW", 10**9)  # drafts never rest
    monkeypatch.setattr(logprobs, "to_host", lambda tensor: tensor.clone())
    monkeypatch.setattr(PendingTokens, "send", classmethod(send_copies))
    return own


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), eos_token_id=EOS, with_tokenizer=False)


def open_llm(folder, **options):
    return LLM(folder, tokenizer=tiny_tokenizer(), **(OPTIONS | options))


@pytest.fixture(scope="module")
def expected(folder):
    """By a fresh engine for each call, without graphs."""
    found = []
    for seed in SEEDS:
        with open_llm(folder, enforce_eager=True) as llm:
            found.append(answers(llm, seed, longest=LONGEST))
    return found


IDLE, WAITING, DROPPED = "idle time between calls", "captures while requests wait", "all graphs dropped between calls"


@pytest.mark.full
@pytest.mark.parametrize(
    "way, options",
    [(IDLE, {}), (IDLE, {"speculation": "suffix"}), (WAITING, {}), (DROPPED, {})],
    ids=[IDLE, "idle time between calls with drafts", WAITING, DROPPED],
)
def test_captures_between_steps_of_every_option_change_no_answer(expected, kernels, folder, monkeypatch, way, options):
    if way != IDLE:
        monkeypatch.setattr("nanovllm.fast.gpu.forward_graphs.STEPS_TO_CAPTURE", 2)
    with open_llm(folder, overlap=True, **options) as llm:
        engine = llm._engine
        assert isinstance(engine.model_runner.executor, cuda_graphs.GraphExecutor)
        for seed, answer in zip(SEEDS, expected, strict=True):
            assert answers(llm, seed, longest=LONGEST) == answer, seed
            assert not kernels.found
            if way == IDLE:
                while engine.use_idle_time(captures=True):
                    pass
            elif way == DROPPED:
                engine.model_runner.forget_model()
            assert not kernels.found, seed
    kinds = {"penalties", "log-probabilities", "masks"}
    assert kernels.used == kinds | {f"{kind} captured" for kind in kinds}


@pytest.mark.full
def test_a_head_of_any_size_reads_entries_that_exist_after_a_step_of_any_size(kernels):
    """Without a capture in between: a step's own head may be captured for more samples than the step before had."""
    chance = np.random.default_rng(0)
    extras = HeadExtras(64, torch.device("cpu"))
    for count in (64, 1, 20, 3, 40, 2):
        sequences, ends = [], []
        for number in range(count):
            ids = chance.integers(0, 500, chance.integers(1, 3000)).tolist()
            sequences.append(make_sequence(ids, repetition_penalty=1.1 if number % 3 else 1.0))
            ends.append(len(ids))
        num_samples = -(-count // 4) * 4
        latest = LatestTokens(-1 - np.arange(count), torch.arange(64))
        extras.upload(HeadShape(num_samples, True, penalises=True), sequences, ends, lambda latest=latest: latest, {})
        for size in (4, 16, 32, 64):
            extras.penalised(torch.zeros(max(size, num_samples), 500), torch.arange(64))
            assert not kernels.found, (count, size)
