"""Four steps of an engine by hand: scheduler, block manager and model runner, and what each hands to the next.

Three requests share a budget of 24 tokens a step. The second and third begin with the same 16 tokens.
"""

from itertools import pairwise

from nanovllm import SamplingParams
from nanovllm.batch import ScheduledBatch
from nanovllm.build import build_engine
from nanovllm.layout import build_layout
from nanovllm.model_runner import ModelRunner
from nanovllm.scheduler import Scheduler

BLOCK_SIZE = 16
OPTIONS = {"block_size": BLOCK_SIZE, "num_kv_blocks": 9, "max_model_len": 64, "max_num_batched_tokens": 24,
           "attention_backend": "sdpa", "enforce_eager": True, "overlap": False}  # fmt: skip
SYSTEM = "You are a helpful assistant that answers in one short sentence, and in English."
PROMPTS = {
    "a": "The sea is",
    "b": f"{SYSTEM} What is the capital of France?",
    "c": f"{SYSTEM} What is the capital of Italy?",
}


def draw(batch: ScheduledBatch) -> None:
    """Print the batch as the model runner lays it out: a line a row, a column a block of the KV cache."""
    layout = build_layout(batch.entries, BLOCK_SIZE)
    print(f"step {batch.step_id}: {layout.num_tokens} of {batch.budget} tokens")
    for entry, (first, end) in zip(layout.entries, pairwise(layout.row_starts.tolist()), strict=True):
        what = "decode" if entry.num_new_tokens == 1 else f"chunk of {entry.num_new_tokens}"
        num_hits = entry.start - entry.num_computed_before
        found = f", behind {num_hits} tokens found in the prefix cache" if num_hits else ""
        print(f"  {entry.sequence.request_id}: {what}{found}; block table {entry.block_table}")
        for row in sorted({first, end - 1}):  # the first and the last
            position, slot = int(layout.positions[row]), int(layout.slot_mapping[row])
            seen = {block: position - index * BLOCK_SIZE for index, block in enumerate(entry.block_table)}
            blocks = ["#" if seen.get(block, -1) >= BLOCK_SIZE - 1 else "/" if seen.get(block, -1) >= 0 else "."
                      for block in range(OPTIONS["num_kv_blocks"])]  # fmt: skip
            print(f"    row {row:>2}  position {position:>2} -> slot {slot:>3}   sees {' '.join(blocks)}")


def main() -> None:
    engine = build_engine("smollm2-135m-instruct", None, None, OPTIONS)
    scheduler, model_runner = engine.scheduler, engine.model_runner
    for request_id, prompt in PROMPTS.items():
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        engine.add(engine.input_processor.process_one(request_id, prompt, params))
        if request_id == "a":
            step(scheduler, model_runner)  # the others come while it decodes
    for _ in range(3):
        step(scheduler, model_runner)
    engine.close()


def step(scheduler: Scheduler, model_runner: ModelRunner) -> None:
    batch = scheduler.schedule()  # tokens within the budget, and blocks for them
    draw(batch)
    token_ids = model_runner.execute(batch).result()  # slot mapping, block masks, one forward pass, a draw
    for sequence in scheduler.update(batch, token_ids):  # appended, and checked for an end
        print(f"  -> {sequence.request_id} got token {sequence.token_ids[-1]}")


if __name__ == "__main__":
    main()
