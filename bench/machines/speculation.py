"""Tokens per second with speculation over those without, in turn, on the default model.

    python bench/machines/speculation.py                                    edit, extract, chat and W with suffix drafts
    python bench/machines/speculation.py --parts edit chat --rounds 5
    python bench/machines/speculation.py --parts edit --draft-model FOLDER  drafts of a small model instead

edit: a text is to be written again with a word replaced. extract: its facts as JSON of a schema. chat: questions, whose
    answers repeat little. All three one request after the other.
W: 64 requests at once, of random tokens: hardly a draft is found, and none pays. idle: the same with a drafter that
    proposes nothing.
Both engines are of one process and run each part in turn, each request with an empty prefix cache and no outputs to
draft from. Outputs are compared: in bfloat16 they may part where two tokens are nearly equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.tools.workloads import specs

PARTS = ("edit", "extract", "chat", "W", "idle")
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


def run(llm: LLM, part: str) -> tuple[float, list[list[int]]]:
    """Tokens per second of a part, and its outputs."""
    outputs = []
    if part in ("W", "idle"):
        requests = specs.build("W").requests
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=r.num_output_tokens) for r in requests]
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate([r.prompt_token_ids for r in requests], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
    else:
        seconds = 0.0
        messages, options = conversations(part)
        for number, conversation in enumerate(messages):
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            salt = f"{part} {number} {begin}"  # no output is drafted from another
            params = SamplingParams(temperature=0.0, **options)
            outputs += llm.chat(conversation, params, cache_salt=salt, use_tqdm=False)
            seconds += time.perf_counter() - begin
    token_ids = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, token_ids)) / seconds, token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:4])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model = str(ensure_default_model()) if given.model == DEFAULT_MODEL else given.model
    options: dict[str, Any] = {"dtype": given.dtype, "quantization": given.quantization, "max_model_len": 2048}
    options["kv_cache_memory_bytes"] = 256 << 20
    drafts: dict[str, Any] = {"speculation": "suffix"}
    if given.draft_model:
        drafts = {"speculation": "draft", "draft_model": given.draft_model}
    if given.parts == ["idle"]:
        drafts = {"speculation": Nothing()}
    with LLM(model, **options) as without, LLM(model, **options, **drafts) as with_drafts:
        for part in given.parts:
            rates: list[list[float]] = [[], []]
            before = with_drafts.stats().speculation
            for number in range(given.rounds + 1):
                answers = []
                for own, llm in zip(rates, (without, with_drafts), strict=True):
                    rate, token_ids = run(llm, part)
                    answers.append(token_ids)
                    if number:  # after one to warm up
                        own.append(rate)
            same = sum(a == b for a, b in zip(*answers, strict=True))
            after = with_drafts.stats().speculation
            assert before is not None and after is not None
            drafted = after.num_draft_tokens - before.num_draft_tokens
            accepted = after.num_accepted_tokens - before.num_accepted_tokens
            medians = [statistics.median(own) for own in rates]
            ratios = sorted(b / a for a, b in zip(*rates, strict=True))
            print(
                f"{part}: {medians[0]:.0f} tokens/s without, {medians[1]:.0f} with, ratio "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); {accepted} of {drafted} "
                f"drafts accepted; {same} of {len(answers[0])} outputs equal",
                flush=True,
            )


if __name__ == "__main__":
    main()
