"""Tokens per second with speculation over those without: texts of the default model, drafts of known quality, vLLM.

    python bench/machines/speculation.py                                    edit, extract, chat, W and idle
    python bench/machines/speculation.py edit --draft-model FOLDER          drafts of a small model instead of suffixes
    python bench/machines/speculation.py known                              drafts of known quality in Qwen3-8B's shape
    python bench/machines/speculation.py known --shape tiny --requests 1    a quick trial, on a CPU too
    python bench/machines/speculation.py heads --shape 0.6b                 drafts of a head of one layer
    python bench/machines/speculation.py peer --engine nanovllm --model FOLDER
    $VLLM_PYTHON bench/machines/speculation.py peer --engine vllm --model FOLDER

edit: a text is to be written again with a word replaced. extract: its facts as JSON of a schema. chat: questions, whose
    answers repeat little. All three one request after the other.
W: 64 requests at once, of random tokens; drafts have room once some have ended. idle: W and chat with a drafter that
    proposes nothing.
known: the output projection gives token t + 1 after t a wide margin, and all other weights are random, so a drafter
    knows the continuation and bfloat16 changes no token; each draft is right with the probability --acceptance.
    `nothing` proposes nothing; `suffix` finds nothing; `always N` verifies N drafts whatever they cost.
heads: the same model with a head of one layer, whose drafts are replaced by known ones once they are computed.
peer: edit, extract without a schema and chat, greedy, alone and all at once. vLLM drafts by n-grams on the GPU and
    cannot switch them off, so both engines are opened once for each way. Run one folder through both on one machine.

One engine runs with speculation and without in turn, with an empty prefix cache and no earlier outputs to draft from.
Ratios of texts are of processor time, which other work on the machine changes least; those of time follow, and the
share of processor time that speculation's calls take. In bfloat16 outputs may part where two tokens are nearly equal.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from harness import Figures, Option, Part, engine_of, folder_of, in_turn, random_prompts, ratios, run_parts, spread
from random_models import SHAPES, random_model  # beside this file, as is the former
from transformers.modeling_layers import MtpModel

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.admission import NoProposer, Proposer
from nanovllm.features.engine_stats import SpeculationStats
from nanovllm.features.speculation.build import SUFFIX_BYTES
from nanovllm.features.speculation.lengths import DraftLengths
from nanovllm.features.speculation.speculation import Speculation
from nanovllm.features.speculation.suffix import SuffixDrafter
from nanovllm.features.speculation_options import HEADS_OF_MODEL
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.observability.step_records import StepObservers
from nanovllm.tools.workloads import specs

WAYS = ("without", "drafts", "nothing", "suffix", "always 3", "always 7")
PEER_DRAFTS = 7
TEXT = (
    "The harbour of Lindholm lies on the northern coast. It was built in 1882 by the engineer Clara Voss, who had "
    "worked on the docks of Rotterdam before. The harbour has three piers and a lighthouse of 41 metres. In winter the "
    "ice reaches the second pier, and the ferries to the islands stop until March. Every summer the town holds a race "
    "of wooden boats, to which some 4,000 visitors come. The oldest boat, the Marianne, was launched in 1903 and still "
    "sails. Clara Voss lived in the white house beside the lighthouse until 1911. Her drawings of the harbour are kept "
    "in the town hall, where they can be seen on Sundays."
)
EDITS = ("Clara Voss with Anna Berg", "Lindholm with Westerby", "harbour with port", "boats with ships")
FACTS = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 20},
        "engineer": {"type": "string", "maxLength": 30},
        "year_built": {"type": "integer"},
        "number_of_piers": {"type": "integer"},
        "lighthouse_height_in_metres": {"type": "integer"},
        "oldest_boat": {"type": "string", "maxLength": 20},
        "year_oldest_boat_was_launched": {"type": "integer"},
        "drawings_are_kept_in": {"type": "string", "maxLength": 30},
    },
    "required": [
        "town", "engineer", "year_built", "number_of_piers", "lighthouse_height_in_metres", "oldest_boat",
        "year_oldest_boat_was_launched", "drawings_are_kept_in",
    ],
    "additionalProperties": False,
}  # fmt: skip
QUESTIONS = (
    "Why is the sky blue?", "How do I make bread at home?", "What is a black hole?", "Give me ideas for a picnic.",
)  # fmt: skip


class Nothing:
    """Proposes nothing."""

    def propose(self, requests: Any) -> list[list[int]]:
        return [[] for _ in requests]


def conversations(part: str) -> tuple[list[list[dict[str, str]]], dict[str, Any]]:
    """Conversations of a part, and the options of their requests."""
    if part == "edit":
        texts = [f"Write this text again, word for word, but replace {edit}:\n\n{TEXT}" for edit in EDITS]
        options: dict[str, Any] = {"max_tokens": 200}
    elif part == "extract":
        texts = [f"{TEXT}\n\nWrite the facts of this text as JSON.", f"Extract as JSON:\n{TEXT}"]
        options = {"max_tokens": 200, "structured_output": StructuredOutput(json_schema=FACTS)}
    else:
        texts, options = list(QUESTIONS), {"max_tokens": 128}
    return [[{"role": "user", "content": text}] for text in texts], options


# --------------------------------------------------------------------------------------- texts of the default model


class Switch:
    """An engine with speculation that can run without; an engine of its own would have other memory.

    seconds: processor time of the engine's thread in calls that an engine without speculation does not make.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.seconds = 0.0
        self._drafting = llm._engine.scheduler.proposer
        self._observers = llm._engine.observers
        for owner, name in ((self._drafting, "waits"), (self._drafting, "place"), (self._observers, "step_ended")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def set(self, *, is_on: bool) -> None:
        self.llm._engine.scheduler.proposer = self._drafting if is_on else NoProposer()
        self.llm._engine.observers = self._observers if is_on else StepObservers()

    def stats(self) -> SpeculationStats:
        return self._drafting.stats()

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


def pieces_of(text: str) -> list[tuple[Any, Any]]:
    """Return the calls of a part: (prompts or conversations, sampling parameters)."""
    if text == "W":
        requests = specs.build("W").requests
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=r.num_output_tokens) for r in requests]
        return [([request.prompt_token_ids for request in requests], params)]
    messages, options = conversations(text)
    return [([message], SamplingParams(temperature=0.0, **options)) for message in messages]


def write(switch: Switch, text: str, is_on: bool, number: int) -> dict[str, Any]:
    """Run a part once: seconds a token of processor and wall time, and the token ids of each output."""
    switch.set(is_on=is_on)
    call = switch.llm.generate if text == "W" else switch.llm.chat
    token_ids: list[list[int]] = []
    processor = time.process_time()
    wall = time.perf_counter()
    for requests, params in pieces_of(text):
        switch.llm.reset_prefix_cache()
        salt = f"{number} {is_on}"  # nothing is drafted from another run
        token_ids += [o.outputs[0].token_ids for o in call(requests, params, cache_salt=salt, use_tqdm=False)]
    count = sum(map(len, token_ids))
    processor = time.process_time() - processor
    return {
        "processor": processor / count,
        "wall": (time.perf_counter() - wall) / count,
        "seconds": processor,
        "token_ids": token_ids,
    }


def compared(switch: Switch, text: str, rounds: int) -> Figures:
    """Compare a part with speculation with the same part without."""
    before = switch.stats()
    switch.seconds = 0.0
    runs = in_turn({name: partial(write, switch, text, name == "with") for name in ("without", "with")}, rounds)
    switch.set(is_on=True)
    after = switch.stats()
    pairs = list(zip(runs["without"], runs["with"], strict=True))
    outputs = [pair for a, b in pairs for pair in zip(a["token_ids"], b["token_ids"], strict=True)]
    figures: Figures = {
        clock: spread([a[clock] / b[clock] for a, b in pairs]) for clock in ("processor", "wall")
    }  # tokens a second with over without
    return figures | {
        "tokens/s": {name: 1 / statistics.median(run["wall"] for run in each) for name, each in runs.items()},
        "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
        "drafted": after.num_draft_tokens - before.num_draft_tokens,
        "outputs equal": [sum(one == other for one, other in outputs), len(outputs)],
        "share of its calls": switch.seconds / sum(b["seconds"] for _, b in pairs),
    }


def measure_texts(options: argparse.Namespace, *texts: str, drafter: Any = None) -> Figures:
    """Run parts on one engine with suffix drafts, those of --draft-model, or those of `drafter`."""
    drafts: dict[str, Any] = {"speculation": drafter or "suffix"}
    if options.draft_model and drafter is None:
        drafts = {"speculation": "draft", "draft_model": options.draft_model}
    of_model = {"dtype": options.dtype, "quantization": options.quantization, "kv_cache_memory_bytes": 256 << 20}
    with LLM(folder_of(options.model), max_model_len=2048, **of_model, **drafts) as llm:
        switch = Switch(llm)
        return {text: compared(switch, text, options.rounds) for text in texts}


def measure_text(text: str) -> Part:
    return Part(lambda options: measure_texts(options, text))


def measure_idle(options: argparse.Namespace) -> Figures:
    return measure_texts(options, "W", "chat", drafter=Nothing())


# ----------------------------------------------------------------------------------------- drafts of known quality


class Successors:
    """Proposes the numbers after the last token, each right with a probability."""

    def __init__(self, vocab_size: int, acceptance: float) -> None:
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._choice = random.Random(0)

    def propose(self, requests: Any) -> list[list[int]]:
        return [self._after(request.tokens_from(-1)[0], request.max_tokens) for request in requests]

    def _after(self, last: int, count: int) -> list[int]:
        wrong = [5 * (self._choice.random() >= self._acceptance) for _ in range(count)]
        return [(last + 1 + number + off) % self._vocab_size for number, off in enumerate(wrong)]


class Always(DraftLengths):
    """So many drafts of each sequence in every step, whatever they cost."""

    def __init__(self, most: int) -> None:
        super().__init__(most, overlap=False)
        self._number = most

    def limit(self, num_running: int) -> int:
        return self._number


def counting_model(shape: str) -> Any:
    """Return a random model that draws t + 1 after t: hidden states are close to the last token's embedding."""
    model = random_model(shape)
    embedding = model.get_input_embeddings().weight.data
    head = torch.nn.Linear(embedding.shape[1], embedding.shape[0], bias=False, device=embedding.device)
    head.weight.data = embedding.roll(1, dims=0) * (4096 / embedding.shape[1])  # a logit of about 80 for the next one
    embedding *= 5000  # far above what the layers add
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model


def count_on(llm: LLM, speculation: Proposer, options: argparse.Namespace, count: int, way: str, number: int) -> float:
    """Return the tokens per second of new prompts; raise RuntimeError if an output does not count on."""
    llm._engine.scheduler.proposer = speculation
    vocab_size = SHAPES[options.shape]["vocab_size"] - options.output - 8
    prompts = random_prompts(count, options.prompt, vocab_size, way, count, number)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=options.output)
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.outputs[0].token_ids != [*range(prompt[-1] + 1, prompt[-1] + 1 + options.output)]:
            raise RuntimeError(f"with {way} an output does not count on from {prompt[-1]}")
    return count * options.output / seconds


def speculations(llm: LLM, drafter: Successors) -> dict[str, Proposer]:
    """Return what drafts in each way, all within the engine's lengths but `always`."""
    scheduler = llm._engine.scheduler
    made: dict[str, Proposer] = {"without": NoProposer(), "drafts": scheduler.proposer}
    for way in WAYS[2:]:
        source = {"nothing": Nothing(), "suffix": SuffixDrafter(SUFFIX_BYTES)}.get(way, drafter)
        lengths = Always(int(way[-1])) if way.startswith("always") else scheduler.proposer.lengths
        parts = scheduler.config, scheduler.block_manager, source, lengths
        vocab_size = llm._engine.model_runner.binding.vocab_size
        made[way] = Speculation(*parts, vocab_size=vocab_size, source=way)
        llm._engine.observers.append(made[way])
    return made


def measure_known(options: argparse.Namespace) -> Figures:
    drafter = Successors(SHAPES[options.shape]["vocab_size"], options.acceptance)
    figures: Figures = {}
    with engine_of(counting_model(options.shape), speculation=drafter, max_model_len=1024) as llm:
        made = speculations(llm, drafter)
        for count in options.requests:
            settings = {way: partial(count_on, llm, made[way], options, count, way) for way in WAYS}
            rates = in_turn(settings, options.rounds)
            for way in WAYS:
                ratio = spread(ratios(rates, way, "without"))
                row = figures[f"{count} requests, {way}"] = {"tokens/s": statistics.median(rates[way]), "ratio": ratio}
                print(f"  {count} requests, {way}: {row}", flush=True)
    return figures


# --------------------------------------------------------------------------------------------- heads of a checkpoint


def add_head(model: Any) -> None:
    """Give a random model a random head: one layer of its own class."""
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    shared = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    before = [weight.detach().clone() for weight in shared]
    with torch.device(model.device):
        heads = MtpModel(model, 1).to(model.dtype).eval()
    for weight, own in zip(shared, before, strict=True):  # the library draws them anew
        weight.data = own
    vars(model)[HEADS_OF_MODEL] = (heads,)


def with_answers(propose: Callable[..., Any], answers: Successors) -> Callable[..., Any]:
    """Let a head compute its drafts, and replace each by one that is right with a known probability."""

    def proposed(requests: Any) -> list[list[int]]:
        drafts = propose(requests)
        return [
            answers._after(request.tokens_from(-1)[0], len(own)) for request, own in zip(requests, drafts, strict=True)
        ]

    return proposed


def measure_heads(options: argparse.Namespace) -> Figures:
    """A head whose drafts are right with the probability --acceptance, and one that is always wrong."""
    vocab_size = SHAPES[options.shape]["vocab_size"]
    figures: Figures = {}
    model = counting_model(options.shape)
    add_head(model)
    drafter = Successors(vocab_size, options.acceptance)  # in the place of "heads", which wants a folder
    lengths = {"max_model_len": 1024, "num_speculative_tokens": options.drafts}
    with engine_of(model, speculation=drafter, **lengths) as llm:
        scheduler = llm._engine.scheduler
        speculation = scheduler.proposer
        own = speculation.drafter.propose
        proposals = {"heads": with_answers(own, drafter), "wrong": with_answers(own, Successors(vocab_size, 0.0))}

        def count_with(way: str, count: int, number: int) -> float:
            speculation.drafter.propose = proposals.get(way, own)
            return count_on(llm, speculation if way in proposals else NoProposer(), options, count, way, number)

        for count in options.requests:
            ways = ("without", *proposals)
            rates = in_turn({way: partial(count_with, way, count) for way in ways}, options.rounds)
            for way in proposals:
                ratio = spread(ratios(rates, way, "without"))
                row = figures[f"{count} requests, {way}"] = {"tokens/s": statistics.median(rates[way]), "ratio": ratio}
                print(f"  {count} requests, {way}: {row}", flush=True)
    return figures


# --------------------------------------------------------------------------------------------------------------- peer

Generate = Callable[[list[list[int]], int], list[list[int]]]  # (prompts, most tokens) -> outputs


@contextmanager
def ours(model: str, *, drafts: bool) -> Iterator[Generate]:
    options: dict[str, Any] = {"speculation": "suffix", "num_speculative_tokens": PEER_DRAFTS} if drafts else {}
    with LLM(model, max_model_len=2048, max_num_seqs=128, **options) as llm:

        def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
            llm.reset_prefix_cache()
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            salts = [f"{time.perf_counter()} {number}" for number in range(len(prompts))]  # none drafts from another
            outputs = llm.generate(prompts, params, cache_salt=salts, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        yield generate


@contextmanager
def of_vllm(model: str, *, drafts: bool) -> Iterator[Generate]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    ngrams = {"method": "ngram_gpu", "num_speculative_tokens": PEER_DRAFTS}
    options: dict[str, Any] = {}
    if drafts:
        options["speculative_config"] = ngrams | {"prompt_lookup_min": 3, "prompt_lookup_max": 8}
    llm = vllm.LLM(
        model, max_model_len=2048, max_num_seqs=128, skip_tokenizer_init=True, disable_log_stats=True,
        gpu_memory_utilization=0.4, **options,
    )  # fmt: skip
    eos = llm.llm_engine.model_config.hf_config.eos_token_id

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        llm.reset_prefix_cache()
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, stop_token_ids=[eos])
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(given, params, use_tqdm=False)]

    yield generate


def tokens_per_second(generate: Generate, batches: list[list[list[int]]], max_tokens: int) -> float:
    begin = time.perf_counter()
    count = sum(len(output) for batch in batches for output in generate(batch, max_tokens))
    return count / (time.perf_counter() - begin)


def measure_peer(options: argparse.Namespace) -> Figures:
    """Measure one engine; the other's figures come from its own environment."""
    from transformers import AutoTokenizer

    model = folder_of(options.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rates: dict[str, dict[str, float]] = {}
    for drafts in (False, True):
        opened = ours if options.engine == "nanovllm" else of_vllm
        gc.collect()  # the memory of the engine before
        with opened(model, drafts=drafts) as generate:
            for text in ("edit", "extract", "chat"):
                messages, given = conversations(text)
                texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in messages]
                prompts = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in texts]
                for case, batches in (("alone", [[each] for each in prompts]), ("at once", [prompts * options.copies])):
                    runs = [
                        tokens_per_second(generate, batches, given["max_tokens"]) for _ in range(options.rounds + 1)
                    ]  # the first captures and learns
                    row = rates.setdefault(f"{text}, {case}", {})
                    row["with" if drafts else "without"] = statistics.median(runs[1:])
    return {case: row | {"ratio": row["with"] / row["without"]} for case, row in rates.items()}


PARTS = {
    "edit": measure_text("edit"),
    "extract": measure_text("extract"),
    "chat": measure_text("chat"),
    "W": measure_text("W"),
    "idle": Part(measure_idle),
    "known": Part(measure_known, is_default=False),
    "heads": Part(measure_heads, is_default=False),
    "peer": Part(measure_peer, is_default=False),
}
OPTIONS = {
    "model": Option(DEFAULT_MODEL, "of all parts but known"),
    "draft_model": Option(None, "folder of a small model that drafts"),
    "dtype": Option("auto", "of the model"),
    "quantization": Option(None, "of the model"),
    "rounds": Option(3, "measured runs of each way"),
    "shape": Option("8b", "of known, see random_models.py"),
    "requests": Option([1, 16, 64], "at once, of known"),
    "prompt": Option(512, "tokens, of known"),
    "output": Option(192, "tokens, of known"),
    "acceptance": Option(0.7, "probability that a draft is right, of known and heads"),
    "drafts": Option(3, "most drafts of a request in a step, of heads"),
    "engine": Option("nanovllm", "of peer", ("nanovllm", "vllm")),
    "copies": Option(4, "of the prompts that run at once, of peer"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS)
