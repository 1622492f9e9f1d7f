"""Tokens per second with drafts over those without on one GPU, in the shape of Qwen3-8B.

    python bench/machines/speculation_gpu.py
    python bench/machines/speculation_gpu.py --shape tiny --requests 1 4 --output 24    a quick trial, on a CPU too

The output projection gives token t + 1 after t a wide margin; all other weights are random. A drafter knows the true
continuation without a recorded run, and bfloat16 changes no token. Each draft is right with the
probability --acceptance. One engine runs with drafts and without in turn; `nothing` is a drafter that proposes nothing,
`suffix` finds nothing, since no text repeats; `always 3` and `always 7` verify so many drafts whatever they cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from random_models import NoText, device, random_model  # beside this file

from nanovllm import LLM, SamplingParams
from nanovllm.core.option_stats import SpeculationStats
from nanovllm.model import loader
from nanovllm.speculation.build import SUFFIX_BYTES
from nanovllm.speculation.lengths import DraftLengths
from nanovllm.speculation.speculation import Speculation
from nanovllm.speculation.suffix import SuffixDrafter

WAYS = ("without", "drafts", "nothing", "suffix", "always 3", "always 7")


class Successors:
    """Proposes the numbers after the last token, each right with a probability."""

    def __init__(self, vocab_size: int, acceptance: float) -> None:
        self.vocab_size, self._acceptance = vocab_size, acceptance
        self._choice = random.Random(0)

    def propose(self, requests: Any) -> list[list[int]]:
        drafts = []
        for request in requests:
            [last] = request.tokens_from(-1)
            right = [self._choice.random() < self._acceptance for _ in range(request.max_tokens)]
            drafts.append([(last + 1 + i + 5 * (not is_right)) % self.vocab_size for i, is_right in enumerate(right)])
        return drafts


class Nothing:
    def propose(self, requests: Any) -> list[list[int]]:
        return [[] for _ in requests]


def counting_model(shape: str) -> Any:
    """A random model that draws t + 1 after t: its hidden states are close to the embedding of the last token."""
    model = random_model(shape)
    embedding = model.get_input_embeddings().weight.data
    head = torch.nn.Linear(embedding.shape[1], embedding.shape[0], bias=False, device=embedding.device)
    head.weight.data = embedding.roll(1, dims=0) * (4096 / embedding.shape[1])  # a logit of about 80 for the next one
    embedding *= 5000  # far above what the layers add
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model


@contextmanager
def engine(shape: str, drafter: Any, **options: Any) -> Iterator[LLM]:
    load = loader.load
    own = mock.patch.object(loader, "load", lambda *arguments: dataclasses.replace(load(*arguments), is_live=False))
    with own, LLM(counting_model(shape), tokenizer=NoText(), speculation=drafter, **options) as llm:
        yield llm


def run(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, int]:
    """Seconds of a run, prompts included, and the number of outputs that do not count on from their prompt."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_tokens)
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, num_wrong = time.perf_counter() - begin, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = [*range(prompt[-1] + 1, prompt[-1] + 1 + num_tokens)]
        num_wrong += output.outputs[0].token_ids != wanted
    return seconds, num_wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=192)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    limits = {"max_model_len": 1024, "max_num_seqs": 512} if device() == "cuda" else {"max_model_len": 1024}
    begin = time.perf_counter()
    drafter, choice = Successors(1, given.acceptance), random.Random(1)
    rows = []
    with engine(given.shape, drafter, **limits) as llm:
        print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
        scheduler, drafter.vocab_size = llm._engine.scheduler, llm._engine.model_runner.binding.vocab_size
        lengths = scheduler.drafting.lengths
        made: dict[str, Speculation | None] = {"without": None, "drafts": scheduler.drafting}
        for way in WAYS[2:]:
            source = {"nothing": Nothing(), "suffix": SuffixDrafter(SUFFIX_BYTES)}.get(way, drafter)
            own = DraftLengths(None, int(way[-1])) if way.startswith("always") else lengths
            parts = scheduler.config, scheduler.block_manager, source, own
            made[way] = Speculation(*parts, vocab_size=drafter.vocab_size, source=way)
            llm._engine.observers.append(made[way])

        for count in given.requests:
            prompts = [
                choice.choices(range(drafter.vocab_size - given.output - 8), k=given.prompt) for _ in range(count)
            ]
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            notes: dict[str, str] = {}
            for number in range(given.rounds + 1):
                for way in WAYS:
                    first_tokens = range(drafter.vocab_size - given.output - 8)
                    prompts = [choice.choices(first_tokens, k=given.prompt) for _ in range(count)]  # none repeats
                    scheduler.drafting = speculation = made[way]
                    before = SpeculationStats() if speculation is None else speculation.stats()
                    steps = llm.stats().num_steps
                    seconds, num_wrong = run(llm, prompts, given.output)
                    after = SpeculationStats() if speculation is None else speculation.stats()
                    steps = llm.stats().num_steps - steps
                    if number:  # after one that captures and learns
                        rates[way].append(count * given.output / seconds)
                    entries = after.num_drafts - before.num_drafts
                    drafted = after.num_draft_tokens - before.num_draft_tokens
                    accepted = after.num_accepted_tokens - before.num_accepted_tokens
                    per_entry = drafted / max(1, entries), accepted / max(1, entries)
                    notes[way] = (
                        f"{steps} steps of {1e3 * seconds / steps:.2f} ms; {per_entry[0]:.1f} drafts an entry, "
                        f"{per_entry[1]:.1f} accepted, {entries / count:.0f} entries a request"
                        + (f"; {num_wrong} OUTPUTS DO NOT COUNT" if num_wrong else "")
                    )
            for way in WAYS:
                ratios = sorted(a / b for a, b in zip(rates[way], rates["without"], strict=True))
                rows.append((count, way, statistics.median(rates[way]), ratios, notes[way]))
                print(
                    f"{count} requests, {way}: {rows[-1][2]:.0f} tokens/s, ratio {statistics.median(ratios):.3f} "
                    f"({ratios[0]:.3f} to {ratios[-1]:.3f}); {notes[way]}",
                    flush=True,
                )
        if lengths.costs is not None:
            print(f"costs: {lengths.costs.fit.cost}, error {lengths.costs.error}", flush=True)
    print("\n| requests | " + " | ".join(WAYS) + " |\n|---|" + "---|" * len(WAYS))
    for count in given.requests:
        cells = [f"{rate:.0f} ({statistics.median(ratios):.2f})" for n, _, rate, ratios, _ in rows if n == count]
        print(f"| {count} | " + " | ".join(cells) + " |")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
