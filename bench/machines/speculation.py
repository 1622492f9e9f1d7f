"""Tokens per second with speculation over those without, in turn, on the default model.

    python bench/machines/speculation.py                                    all parts with suffix drafts
    python bench/machines/speculation.py --parts edit chat --rounds 5
    python bench/machines/speculation.py --parts edit --draft-model FOLDER  drafts of a small model instead

edit: a text is to be written again with a word replaced. extract: its facts as JSON of a schema. chat: questions, whose
    answers repeat little. All three one request after the other.
W: 64 requests at once, of random tokens; drafts have room once some have ended. idle: W and chat with a drafter that
    proposes nothing.
One engine runs each part with speculation and without in turn, which of them first changing with each round, request by
request in the first three, with an empty prefix cache and no outputs of earlier runs to draft from. Ratios are of
processor time, which other work on the machine changes least; those of time follow, and the share of the calls that
speculation adds to a step. Outputs are compared: in bfloat16 they may part where two tokens are nearly equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.observability.step_records import StepObservers
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
        answer = llm.chat if chats else llm.generate
        outputs = answer(requests, params, cache_salt=str(begin), use_tqdm=False)  # none is drafted from another run
        self.processor += time.process_time() - begin[0]
        self.wall += time.perf_counter() - begin[1]
        self.token_ids += [output.outputs[0].token_ids for output in outputs]
        self.num_tokens = sum(map(len, self.token_ids))


class Switch:
    """An engine with speculation, and the same one as without: an engine of its own has other memory.

    seconds: processor time of the engine's thread in calls that an engine without speculation does not make.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.seconds = llm, 0.0
        engine = llm._engine
        self._drafting, self._observers = engine.scheduler.drafting, engine.observers
        for owner, name in ((self._drafting, "waits"), (self._drafting, "place"), (self._observers, "step_ended")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def set(self, *, is_on: bool) -> None:
        self.llm._engine.scheduler.drafting = self._drafting if is_on else None
        self.llm._engine.observers = self._observers if is_on else StepObservers()

    def counts(self) -> tuple[int, int]:
        stats = self._drafting.stats()
        return stats.num_draft_tokens, stats.num_accepted_tokens

    def _timed(self, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


def run(switch: Switch, part: str, *, drafts_first: bool = False) -> list[Rates]:
    """A part without and with speculation, in turn for each piece of it."""
    rates = [Rates(), Rates()]
    pieces: list[tuple[list[Any], Any]]
    if part == "W":
        requests = specs.build("W").requests
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=r.num_output_tokens) for r in requests]
        pieces = [([r.prompt_token_ids for r in requests], params)]
    else:
        messages, options = conversations(part)
        pieces = [([message], SamplingParams(temperature=0.0, **options)) for message in messages]
    for requests, params in pieces:
        for is_on in (drafts_first, not drafts_first):
            switch.set(is_on=is_on)
            rates[is_on].generate(switch.llm, requests, params, chats=part != "W")
    return rates


def compare(switch: Switch, part: str, rounds: int, name: str) -> None:
    """Print the ratio of a part with speculation over that without."""
    run(switch, part)  # to warm up
    before, switch.seconds = switch.counts(), 0.0
    results = [run(switch, part, drafts_first=number % 2 == 1) for number in range(rounds)]
    drafted, accepted = (after - first for after, first in zip(switch.counts(), before, strict=True))
    switch.set(is_on=True)
    each = [[own.num_tokens / own.wall for own in column] for column in zip(*results, strict=True)]
    processor = sorted(b.num_tokens / b.processor * a.processor / a.num_tokens for a, b in results)
    wall = sorted(b.num_tokens / b.wall * a.wall / a.num_tokens for a, b in results)
    pairs = [(one, other) for a, b in results for one, other in zip(a.token_ids, b.token_ids, strict=True)]
    print(
        f"{name}: ratio {statistics.median(processor):.3f} ({processor[0]:.3f} to {processor[-1]:.3f}); of time "
        f"{statistics.median(wall):.3f} ({wall[0]:.3f} to {wall[-1]:.3f}), {statistics.median(each[0]):.0f} and "
        f"{statistics.median(each[1]):.0f} tokens/s; {accepted} of {drafted} drafts accepted; "
        f"{sum(one == other for one, other in pairs)} of {len(pairs)} outputs equal; its calls take "
        f"{switch.seconds / sum(b.processor for _, b in results):.2%}",
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
    if found := [part for part in given.parts if part != "idle"]:
        with LLM(model, **options, **drafts) as llm:
            switch = Switch(llm)
            for part in found:
                compare(switch, part, given.rounds, part)
    if "idle" in given.parts:
        with LLM(model, **options, speculation=Nothing()) as llm:
            switch = Switch(llm)
            for part in ("W", "chat"):
                compare(switch, part, given.rounds, f"idle, {part}")


if __name__ == "__main__":
    main()
