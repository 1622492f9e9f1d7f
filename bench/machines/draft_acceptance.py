"""Acceptance of a draft model that is a quantised copy of its target, by temperature.

    python bench/machines/draft_acceptance.py                    the default model and copies of it in 8, 4 and 3 bits
    python bench/machines/draft_acceptance.py --bits 4 --output 32

A copy has each weight matrix of a layer rounded to 2^bits even steps in groups of 64 values. Prompts are those of
`edit` and `chat` of `speculation.py`. Every step verifies as many drafts as there are (--drafts), whatever they cost.
The columns: the share of entries whose first draft was right, all drafts, and the tokens that an entry brings.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculation import conversations  # beside this file

from nanovllm import LLM, SamplingParams
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model

GROUP = 64  # not 32: the default model has 16 even steps in each 32 already
TEMPERATURES = (0.0, 0.7, 1.0)


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A matrix [rows, columns] with 2^bits even steps between the least and the greatest of each group of a row."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low = groups.amin(-1, keepdim=True)
    step = ((groups.amax(-1, keepdim=True) - low) / (2**bits - 1)).clamp(min=1e-12)
    return (((groups - low) / step).round() * step + low).flatten(1).to(weight.dtype)


@contextmanager
def copy_of(model: Path, bits: int) -> Iterator[str]:
    """The folder of a copy with rounded weights."""
    with tempfile.TemporaryDirectory() as folder:
        for path in model.glob("*.json"):
            shutil.copy(path, folder)
        tensors = load_file(model / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and ".layers." in name:
                tensors[name] = rounded(tensor, bits)
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        yield folder


def measure(llm: LLM, part: str, temperature: float, max_tokens: int) -> str:
    """A row of the table."""
    messages, _ = conversations(part)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens)
    before = llm.stats().speculation
    llm.chat(messages, params, use_tqdm=False)
    after = llm.stats().speculation
    entries = after.num_drafts - before.num_drafts
    first = after.accepted_by_depth[0] - (before.accepted_by_depth or (0,))[0]
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return (
        f"| {part} | {temperature} | {first / entries:.3f} | {accepted} of {drafted} | {1 + accepted / entries:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 3])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--output", type=int, default=96)
    given = parser.parse_args()
    model = ensure_default_model() if given.model == DEFAULT_MODEL else Path(given.model)
    rows = []
    for bits in given.bits:
        options: dict[str, Any] = {"num_speculative_tokens": given.drafts, "kv_cache_memory_bytes": 128 << 20}
        begin = time.perf_counter()
        with copy_of(model, bits) as folder:
            llm = LLM(str(model), speculation="draft", draft_model=folder, max_model_len=1024, **options)
        with llm:
            llm._engine.scheduler.drafting.lengths.costs = None  # every draft is verified
            for part in ("edit", "chat"):
                for temperature in TEMPERATURES:
                    rows.append(f"| {bits} bits {measure(llm, part, temperature, given.output)}")
                    print(f"{rows[-1]}  {time.perf_counter() - begin:.0f} s", flush=True)
    print("\n| copy | prompts | T | first draft right | accepted | tokens an entry |\n|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
