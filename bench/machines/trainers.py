"""Rollouts through the slot of a trainer's module, and the memory that an engine lends its trainer.

    python bench/machines/trainers.py           # GRPO of the default model in float32, on a CPU
    python bench/machines/trainers.py live wake # on a GPU: rollouts of a live module; from wake to the first token

The loop of `grpo` runs twice from the same weights: rollouts of the slot, and of `generate` with the engine's noise."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import eq
from typing import Any, NamedTuple

import psutil
import torch
from harness import Figures, Option, Part, engine_of, folder_of, note, random_prompts, run_parts, spread
from random_models import SHAPES, random_model, token_bytes
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
)

from nanovllm import LLM, SamplingParams
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.sampler import gumbel_noise, noise_keys, token_counters
from nanovllm.sampling_params import sample_seeds
from nanovllm.trainers import RolloutParams, install, uninstall

QUESTIONS = (
    "When did people first land on the moon?",
    "How many days are in each month?",
    "Tell me about the history of the telephone.",
    "What is a good recipe for bread?",
)
Rollouts = list[tuple[list[int], list[float]]]  # tokens and log-probabilities of each answer


class Step(NamedTuple):
    """Figures of a step of training; difference is the largest of log-probabilities."""

    tokens: Any
    reward: Any
    difference: Any
    rollout_seconds: Any
    seconds: Any


class Noise(LogitsProcessor):
    """Adds the engine's noise of these seeds, so that the best token is its draw at temperature 1."""

    def __init__(self, seeds: list[int], prompts: list[list[int]]) -> None:
        self.seeds = seeds
        self.lengths = list(map(len, prompts))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        padded = input_ids.shape[1] - max(self.lengths)
        keys = noise_keys(self.seeds, [length + padded for length in self.lengths])
        return scores + gumbel_noise(torch.from_numpy(keys), token_counters(scores.shape[1], scores.device))


def of_slot(model: Any, prompts: list[list[int]], seed: int, config: GenerationConfig) -> Rollouts:
    results = model.generate_batch(prompts, generation_config=config, seed=seed).values()
    return [(result.generated_tokens, result.logprobs) for result in results]


def of_generate(model: Any, prompts: list[list[int]], seed: int, config: GenerationConfig) -> Rollouts:
    """Answers to prompts, padded to one batch."""
    each = [prompt for prompt in prompts for _ in range(config.num_return_sequences)]
    seeds = sample_seeds(seed, len(each), engine_seed=0, request_number=0)
    longest = max(map(len, each))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in each])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in each])
    found = model.generate(
        ids,
        attention_mask=mask,
        generation_config=GenerationConfig(
            max_new_tokens=config.max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        ),
        logits_processor=[Noise(seeds, each)],
    )
    answers = found.sequences[:, longest:]
    logprobs = torch.stack(found.logits, dim=1).log_softmax(dim=-1).gather(2, answers[:, :, None])[:, :, 0]
    return list(zip(answers.tolist(), logprobs.tolist(), strict=True))


def own_logprobs(model: Any, prompt: list[int], answers: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [answers, tokens] of the trainer's forward pass."""
    ids = torch.cat([torch.tensor([prompt]).expand(len(answers), -1), answers], dim=1)
    logits = model(ids).logits[:, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(2, answers[:, :, None])[:, :, 0]


def steps_of(given: argparse.Namespace, rollouts: Callable[..., Rollouts]) -> Iterator[Step]:
    """The steps of GRPO, rewards being the shares of digits among the tokens."""
    folder = folder_of(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # answers have equal lengths
    tokenizer = AutoTokenizer.from_pretrained(folder)
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] for turn in turns]
    config = GenerationConfig(
        max_new_tokens=given.tokens, do_sample=True, num_return_sequences=given.answers, eos_token_id=-1
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    install(
        model,
        max_num_seqs=len(prompts) * given.answers,
        max_model_len=max(map(len, prompts)) + given.tokens,
        kv_cache_memory_bytes=2**28,
    )
    for seed in range(given.steps):
        begin = time.perf_counter()
        found = rollouts(model, prompts, seed, config)
        rollout_seconds = time.perf_counter() - begin
        tokens = torch.tensor([tokens for tokens, _ in found])
        reported = torch.tensor([logprobs for _, logprobs in found]).split(given.answers)
        rewards = torch.isin(tokens, digits).float().mean(1).view(len(prompts), -1)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        difference = 0.0
        for number, answers in enumerate(tokens.split(given.answers)):
            own = own_logprobs(model, prompts[number], answers)
            difference = max(difference, (own.detach() - reported[number]).abs().max().item())
            ratio = (own - own.detach()).exp()  # as TRL does where each rollout trains once
            loss = -(advantages[number][:, None] * ratio).mean() / len(prompts)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        yield Step(tokens.tolist(), rewards.mean().item(), difference, rollout_seconds, seconds)
    uninstall(model)


def grpo(given: argparse.Namespace) -> Figures:
    """Rewards, log-probabilities and seconds of two loops that differ in their rollouts alone."""
    steps = []
    for ours, theirs in zip(steps_of(given, of_slot), steps_of(given, of_generate), strict=True):
        steps.append((ours, theirs))
        print(*(step[1:] for step in steps[-1]), ours.tokens == theirs.tokens, flush=True)
    by_field = [Step(*zip(*curve, strict=True)) for curve in zip(*steps, strict=True)]
    (ours, theirs), names = by_field, ("slot", "generate")
    note("log-probabilities of rollouts off those of the trainer", max(ours.difference), "", "1e-05")
    note("the same of generate", max(theirs.difference))
    note("steps with equal tokens", sum(map(eq, ours.tokens, theirs.tokens)), f"of {given.steps}", f"{given.steps}")
    for name in ("rollout_seconds", "seconds"):
        found = [list(getattr(curve, name)[1:]) or list(getattr(curve, name)) for curve in by_field]
        note(f"{name}, generate / slot", sum(found[1]) / sum(found[0]), "x")
    return {
        "curves_are_equal": ours.reward == theirs.reward,
        **{name: curve._replace(tokens=[])._asdict() for name, curve in zip(names, by_field, strict=True)},
    }


# ---------------------------------------------------------------------------------------------------- a live module


def live(given: argparse.Namespace) -> Figures:
    """Tokens a second of rollouts: by transformers, by the slot on the live module, by an engine that owns it."""
    shape = given.shape or "4b"
    model = random_model(shape)
    model.generation_config = GenerationConfig(eos_token_id=-1)
    config = GenerationConfig(max_new_tokens=given.tokens, do_sample=True, top_k=None, eos_token_id=-1, pad_token_id=0)
    options = {"max_num_seqs": given.requests, "max_model_len": given.prompt + given.tokens}
    options["kv_cache_memory_bytes"] = 2 * given.requests * (256 + options["max_model_len"]) * token_bytes(shape)
    figures: Figures = {}

    def measure(name: str, answers: Callable[[list[list[int]], int], Any]) -> None:
        rates = []
        for number in range(given.rounds + 1):
            prompts = random_prompts(given.requests, given.prompt, SHAPES[shape]["vocab_size"], name, number)
            begin = time.perf_counter()
            found = answers(prompts, number)
            rates.append(given.requests * given.tokens / (time.perf_counter() - begin))
            lengths = list(map(len, found))
            if lengths != [given.tokens] * given.requests:
                raise RuntimeError(f"answers have lengths {lengths}")
        figures[name] = {"first": rates[0]} | spread(rates[1:])
        print(name, figures[name], flush=True)

    def batch(prompts: list[list[int]], number: int, **more: Any) -> list[list[int]]:
        torch.manual_seed(number)
        results = model.generate_batch(prompts, generation_config=config, **more)
        return [result.generated_tokens for result in results.values()]

    def of(llm: LLM, params: type[SamplingParams]) -> Callable[[list[list[int]], int], Any]:
        def answers(prompts: list[list[int]], number: int) -> list[list[int]]:
            seeds = sample_seeds(number, len(prompts), engine_seed=0, request_number=0)
            each = [params(max_tokens=given.tokens, ignore_eos=True, temperature=1.0, seed=seed) for seed in seeds]
            return [output.outputs[0].token_ids for output in llm.generate(prompts, each, use_tqdm=False)]

        return answers

    install(model, **options)
    measure("slot", batch)
    uninstall(model)
    with engine_of(random_model(shape), **options) as llm:
        measure("own", of(llm, SamplingParams))
        measure("own, log-probabilities of draws", of(llm, RolloutParams))
    cache = ContinuousBatchingConfig(num_blocks=2 * given.requests * -(-options["max_model_len"] // 256))
    for name, kept in (("transformers", False), ("transformers, manager kept", True)):
        theirs = partial(batch, continuous_batching_config=cache, persistent_manager=kept)
        try:
            measure(name, theirs)
        except Exception as error:  # its own, which hides no figure of the engine
            print(f"{name}: {error!r}", flush=True)
    targets = {"own": "0.8", "transformers": "10", "transformers, manager kept": "10"}
    for name in list(figures)[1:]:
        note(f"slot over {name}", figures["slot"]["median"] / figures[name]["median"], "x", targets.get(name, ""))
    return figures


# ------------------------------------------------------------------------------------------------- sleep and wake


def used_bytes() -> int:
    """Bytes in use of the engine's memory: the GPU's, or the process's."""
    if torch.cuda.is_available():
        free, all_bytes = torch.cuda.mem_get_info()
        return all_bytes - free
    return int(psutil.Process(os.getpid()).memory_info().rss)


def wake(given: argparse.Namespace) -> Figures:
    """Seconds of sleep, of wake, and from the call of wake to the first token; memory given back."""
    shape = given.shape or "0.6b"
    options: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": given.prompt + given.tokens}
    if given.kv_bytes:
        options["kv_cache_memory_bytes"] = given.kv_bytes
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=given.tokens)
    figures: Figures = {}
    with engine_of(random_model(shape), **options) as llm:
        kv_bytes = llm.config.num_kv_blocks * llm.config.block_size * token_bytes(shape)
        llm.generate(random_prompts(64, given.prompt, 500, "before"), params, use_tqdm=False)
        for level in (1, 2):
            rounds: dict[str, list[float]] = {name: [] for name in ("sleep", "wake", "token", "given_back")}
            for number in range(given.rounds + 1):
                (prompt,) = random_prompts(1, given.prompt, 500, level, number)
                used = used_bytes()
                begin = time.perf_counter()
                llm.sleep(level)
                rounds["sleep"].append(time.perf_counter() - begin)
                rounds["given_back"].append((used - used_bytes()) / kv_bytes)
                begin = time.perf_counter()
                llm.wake()
                rounds["wake"].append(time.perf_counter() - begin)
                for _ in llm.stream(prompt, params):
                    break
                rounds["token"].append(time.perf_counter() - begin)
                llm.generate(random_prompts(8, given.prompt, 500, level, number), params, use_tqdm=False)
            figures[f"level {level}"] = {
                name: {"first": values[0]} | spread(values[1:]) for name, values in rounds.items()
            }
            print(level, figures[f"level {level}"], flush=True)
            note(f"sleep({level}): wake to first token", statistics.median(rounds["token"][1:]), "s", "2")
            note(f"sleep({level}): bytes given back / KV bytes", min(rounds["given_back"]), "", "0.95")
    return figures | {"kv_bytes": kv_bytes}


if __name__ == "__main__":
    run_parts(
        __doc__,
        {"grpo": Part(grpo), "live": Part(live, is_default=False), "wake": Part(wake, is_default=False)},
        {
            "shape": Option(None, "shape of random weights: 4b for live, 0.6b for wake", tuple(SHAPES)),
            "requests": Option(64, "prompts of live"),
            "prompt": Option(128, "tokens of a prompt of live and wake"),
            "tokens": Option(24, "tokens of an answer"),
            "answers": Option(4, "answers to each prompt of grpo"),
            "steps": Option(20, "steps of grpo"),
            "rate": Option(2e-5, "learning rate of grpo"),
            "kv_bytes": Option(0, "bytes of the KV memory of wake; 0 takes what its requests need"),
            "rounds": Option(3, "rounds of live and wake"),
        },
    )
