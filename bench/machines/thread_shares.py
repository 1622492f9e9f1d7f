"""Parallel efficiency of the CPU's kernels on 1 to 64 threads, by simulating how they share their work.

    python bench/machines/thread_shares.py
    python bench/machines/thread_shares.py --threads 24 48 --tiles

It counts multiply-adds: the mean share of a thread by the largest, with loops shared as OpenMP shares them (`static`:
one behind another, `dynamic`: the next to whom is free). What memory, caches and barriers cost is not in it. The splits
are those of `csrc/products.h` and `csrc/paged_attention.cpp`, line by line: change both together. Steps are those of
the workloads: W decodes 64 requests at 200 tokens, P 64 behind 512 shared ones, `single` one at 192.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

TILE, LANES, PANEL, TILE_ROWS = 64, 16, 32, 16
ROWS_OF_TASK, MAX_SHARE, MAX_STATES, MAX_QUERIES = 384, 1024, 65536, 256


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder layer of Llama's kind, and the head behind all of them."""

    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_groups(self) -> int:
        return self.num_heads // self.num_kv_heads

    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and depth of each product of a layer."""
        heads = self.num_heads * self.head_dim
        return {
            "qkv": (heads + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "output": (self.hidden_size, heads),
            "gate, up": (2 * self.inner_size, self.hidden_size),
            "down": (self.hidden_size, self.inner_size),
        }


SHAPES = {
    "SmolLM2-135M": Shape(576, 1536, 30, 9, 3, 64, 49152),
    "4B (Qwen3)": Shape(2560, 9728, 36, 32, 8, 128, 151_936),
}


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of a step: decodes of a context each, `shared` tokens of which all have in common, or one chunk."""

    decodes: int = 0
    context: int = 0
    shared: int = 0
    chunk: int = 0

    @property
    def num_rows(self) -> int:
        return self.decodes + self.chunk


STEPS = {
    "W, 64 decodes": Step(64, 200),
    "P, 64 decodes": Step(64, 560, 512),
    "single": Step(1, 192),
    "one at 32,768": Step(1, 32_768),
    "a prompt of 512": Step(chunk=512),
    "a prompt of 2,048": Step(chunk=2048),
}


# ------------------------------------------------------------------------------------- the splits, as the kernels do


def static_shares(costs: list[float], num_threads: int) -> float:
    """The largest share of one thread where each gets as many tasks, one behind another."""
    least, more = divmod(len(costs), num_threads)
    largest, at = 0.0, 0
    for thread in range(min(num_threads, len(costs))):
        count = least + (thread < more)
        largest = max(largest, sum(costs[at : at + count]))
        at += count
    return largest


def dynamic_shares(costs: list[float], num_threads: int) -> float:
    """The end of the last thread where each that is free takes the next task."""
    ends = [0.0] * num_threads
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def num_parts(num_rows: int, num_panels: int, num_threads: int, at_once: int) -> int:
    """Parts of the rows of a product: `parts_of` of products.h."""

    def idle(parts: int) -> float:
        tasks = parts * num_panels
        return -(-tasks // num_threads) * num_threads / tasks

    most = max(1, num_rows // at_once)
    least = best = min(-(-num_rows // ROWS_OF_TASK), most)
    for parts in range(least, most + 1):
        if idle(best) <= 1 / 0.9:
            break
        if idle(parts) < idle(best):
            best = parts
    return best


def product_tasks(num_rows: int, outputs: int, depth: int, num_threads: int, at_once: int) -> list[float]:
    num_panels = outputs // PANEL
    parts = num_parts(num_rows, num_panels, num_threads, at_once)
    unit = TILE_ROWS if at_once == PANEL else 1
    num_units = -(-num_rows // unit)
    bounds = [min(num_rows, num_units * part // parts * unit) for part in range(parts + 1)]
    counts = [end - begin for begin, end in itertools.pairwise(bounds)]
    return [float(count * PANEL * depth) for count in counts for _ in range(num_panels)]


def decode_tasks(step: Step, shape: Shape, num_threads: int) -> list[float]:
    """Items of `paged_decode_attention`."""
    own = step.context - step.shared
    work = step.decodes * step.context
    share = min(max(work // (4 * num_threads), TILE), MAX_SHARE)
    each = 2.0 * shape.num_heads * shape.head_dim
    costs = []
    if step.shared:
        most = max(1, MAX_STATES // (step.decodes * shape.num_heads))
        parts = max(1, min(step.shared // TILE, min(2 * num_threads, most)))
        costs += [each * step.decodes * step.shared / parts] * parts
    parts = max(1, min(own // TILE, own // share))
    alone = [each * own / parts] * (parts * step.decodes)
    heads, few = shape.num_kv_heads, 2 * num_threads if num_threads > 1 else 0
    num_items = len(costs) + len(alone)
    if len(costs) < few:
        costs = [cost / heads for cost in costs for _ in range(heads)]
    return costs + ([cost / heads for cost in alone for _ in range(heads)] if num_items < few else alone)


def rows_of_item(num_rows: int, shape: Shape, num_threads: int) -> int:
    """Positions of an item of a chunk."""
    groups = shape.num_groups
    rows = 64 // math.gcd(64, groups)
    if rows * groups > MAX_QUERIES:
        rows = max(1, MAX_QUERIES // groups)
    elif rows * groups < 128:
        rows *= 2
    while rows > PANEL // math.gcd(PANEL, groups) and num_rows // rows * shape.num_kv_heads < 2 * num_threads:
        rows //= 2
    return rows


def chunk_tasks(step: Step, shape: Shape, num_threads: int) -> list[float]:
    """Items of `paged_chunk_attention`, the longest first."""
    rows = rows_of_item(step.chunk, shape, num_threads)
    costs = []
    for first in range(0, step.chunk, rows):
        count = min(rows, step.chunk - first)
        lanes = -(-count * shape.num_groups // PANEL) * PANEL
        costs += [2.0 * lanes * shape.head_dim * (first + count)] * shape.num_kv_heads
    return sorted(costs, reverse=True)


def efficiencies(shape: Shape, step: Step, num_threads: int, at_once: int) -> Iterator[tuple[str, float, float]]:
    """(part, multiply-adds, efficiency) of a step: the products of a layer, its attention and the head."""

    def entry(name: str, costs: list[float], largest: float, times: int) -> tuple[str, float, float]:
        return name, times * sum(costs), sum(costs) / num_threads / largest

    for name, (outputs, depth) in shape.products().items():
        costs = product_tasks(step.num_rows, outputs, depth, num_threads, at_once)
        yield entry(name, costs, static_shares(costs, num_threads), shape.num_layers)
    costs = decode_tasks(step, shape, num_threads) if step.decodes else chunk_tasks(step, shape, num_threads)
    yield entry("attention", costs, dynamic_shares(costs, num_threads), shape.num_layers)
    costs = product_tasks(max(1, step.decodes), shape.vocab_size, shape.hidden_size, num_threads, at_once)
    yield entry("head", costs, static_shares(costs, num_threads), 1)


def whole(parts: list[tuple[str, float, float]]) -> float:
    """Efficiency of all parts, one after another."""
    return sum(work for _, work, _ in parts) / sum(work / efficiency for _, work, efficiency in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--tiles", action="store_true", help="blocks of 32 rows, as with matrix tiles, instead of 12")
    options = parser.parse_args()
    for shape_name, shape in SHAPES.items():
        names = [*shape.products(), "attention", "head", "step"]
        print(f"\n| {shape_name} | threads |", *(f"{name} |" for name in names))
        print("|---|---|" + "---|" * len(names))
        for step_name, step in STEPS.items():
            for count in options.threads:
                parts = list(efficiencies(shape, step, count, PANEL if options.tiles else 12))
                figures = [efficiency for _, _, efficiency in parts] + [whole(parts)]
                print(f"| {step_name} | {count} |", *(f"{figure:.2f} |" for figure in figures))


if __name__ == "__main__":
    main()
