"""Tokens per second with speculation over those without, in turn, on the default model.

    python bench/machines/speculation.py                                    all parts with suffix drafts
    python bench/machines/speculation.py --parts edit chat --rounds 5
    python bench/machines/speculation.py --parts edit --draft-model FOLDER  drafts of a small model instead

edit: a text is to be written again with a word replaced. extract: its facts as JSON of a schema. chat: questions, whose
    answers repeat little. All three one request after the other.
W: 64 requests at once, of random tokens: hardly a draft is found, and none pays. idle: W and chat with a drafter that
    proposes nothing.
The engines are of one process and run each part in turn, request by request in the first three, each with an empty
prefix cache and no outputs to draft from. Ratios are of processor time, which other work on the machine changes least;
those of time follow. Outputs are compared: in bfloat16 they may part where two tokens are nearly equal.
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


class Rates:
    """Tokens, and processor and wall seconds, of one engine and part."""

    def __init__(self) -> None:
        self.num_tokens, self.processor, self.wall = 0, 0.0, 0.0
        self.token_ids: list[list[int]] = []

    def generate(self, llm: LLM, requests: list[Any], params: Any, *, chats: bool) -> None:
        llm.reset_prefix_cache()
        begin = time.process_time(), time.perf_counter()
        if chats:
            salt = str(begin)  # no output is drafted from another
            outputs = llm.chat(requests, params, cache_salt=salt, use_tqdm=False)
        else:
            outputs = llm.generate(requests, params, use_tqdm=False)
        self.processor += time.process_time() - begin[0]
        self.wall += time.perf_counter() - begin[1]
        self.token_ids += [output.outputs[0].token_ids for output in outputs]
        self.num_tokens = sum(map(len, self.token_ids))


def run(llms: list[LLM], part: str) -> list[Rates]:
    """A part, by each engine in turn."""
    rates = [Rates() for _ in llms]
    pieces: list[tuple[list[Any], Any]]
    if part == "W":
        requests = specs.build("W").requests
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=r.num_output_tokens) for r in requests]
        pieces = [([r.prompt_token_ids for r in requests], params)]
    else:
        messages, options = conversations(part)
        pieces = [([message], SamplingParams(temperature=0.0, **options)) for message in messages]
    for requests, params in pieces:
        for own, llm in zip(rates, llms, strict=True):
            own.generate(llm, requests, params, chats=part != "W")
    return rates


def compare(llms: list[LLM], part: str, rounds: int, name: str) -> None:
    """Print the ratio of a part, the second engine's over the first's."""
    run(llms, part)  # to warm up
    before = llms[1].stats().speculation
    results = [run(llms, part) for _ in range(rounds)]
    after = llms[1].stats().speculation
    assert before is not None and after is not None
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    each = [[own.num_tokens / own.wall for own in column] for column in zip(*results, strict=True)]
    processor = sorted(b.num_tokens / b.processor * a.processor / a.num_tokens for a, b in results)
    wall = sorted(b.num_tokens / b.wall * a.wall / a.num_tokens for a, b in results)
    pairs = [(one, other) for a, b in results for one, other in zip(a.token_ids, b.token_ids, strict=True)]
    print(
        f"{name}: ratio {statistics.median(processor):.3f} ({processor[0]:.3f} to {processor[-1]:.3f}); of time "
        f"{statistics.median(wall):.3f} ({wall[0]:.3f} to {wall[-1]:.3f}), {statistics.median(each[0]):.0f} and "
        f"{statistics.median(each[1]):.0f} tokens/s; {accepted} of {drafted} drafts accepted; "
        f"{sum(one == other for one, other in pairs)} of {len(pairs)} outputs equal",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model = str(ensure_default_model()) if given.model == DEFAULT_MODEL else given.model
    options: dict[str, Any] = {"dtype": given.dtype, "quantization": given.quantization, "max_model_len": 2048}
    options["kv_cache_memory_bytes"] = 256 << 20
    drafts: dict[str, Any] = {"speculation": "suffix"}
    if given.draft_model:
        drafts = {"speculation": "draft", "draft_model": given.draft_model}
    with LLM(model, **options) as without:
        if found := [part for part in given.parts if part != "idle"]:
            with LLM(model, **options, **drafts) as llm:
                for part in found:
                    compare([without, llm], part, given.rounds, part)
        if "idle" in given.parts:
            with LLM(model, **options, speculation=Nothing()) as llm:
                for part in ("W", "chat"):
                    compare([without, llm], part, given.rounds, f"idle, {part}")


if __name__ == "__main__":
    main()
