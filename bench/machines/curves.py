"""The curves of docs/guide/tuning.md: budget, long prompts among decoding requests, shared prefixes, block size.

    python bench/machines/curves.py --output curves                       # the embedded model on this machine's CPU
    python bench/machines/curves.py --output curves --device cuda budget  # random weights in the shape of Qwen3-0.6B
    python bench/machines/curves.py --output curves budget --workload azure-conv:requests=400,scale=0.25,rate=3

Each figure is in results.json as soon as it was taken; an experiment ends with a picture. A workload is played once
without being measured, and then `--repeats` times, of which the one of median length counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("agg")
from matplotlib import pyplot

from nanovllm.tools.bench.engines import NanoVLLM
from nanovllm.tools.bench.replay import Replay, figures, replay
from nanovllm.tools.bench.worker import environment
from nanovllm.tools.workloads.specs import build
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, p1, poisson, random_requests, w, w1, whales

Row = dict[str, Any]
Rows = list[Row]


class Bench:
    """Plays workloads on engines of one device.

    workload: of `budget`; None for W on a CPU and W1 on a GPU.
    """

    def __init__(self, device: str, repeats: int, workload: Workload | None) -> None:
        self.is_gpu, self.repeats, self.workload = device == "cuda", repeats, workload
        self._model, self._fixed = "smollm2-135m-instruct", {"device": "cpu", "dtype": "bfloat16"}
        if self.is_gpu:
            from random_models import NoText, checkpoint  # beside this file

            self._model, self._fixed = str(checkpoint("0.6b")), {"dtype": "bfloat16", "tokenizer": NoText()}

    def play(self, workloads: Iterable[Workload], **options: Any) -> list[Replay]:
        """One playback of each workload, on one engine."""
        workloads = list(workloads)
        longest = max(len(r.prompt_token_ids) + r.num_output_tokens for each in workloads for r in each.requests)
        player = NanoVLLM(self._model, {**self._fixed, "max_model_len": longest, **options}, longest)
        try:
            return [self._median(player, workload) for workload in workloads]
        finally:
            player.close()

    def _median(self, player: NanoVLLM, workload: Workload) -> Replay:
        runs = []
        for is_warm_up in [True] + [False] * self.repeats:
            player.prepare(workload)
            played = replay(player, workload.hurried() if is_warm_up else workload)
            runs += [] if is_warm_up else [played]
        return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


# ------------------------------------------------------------------------------------------------------- experiments


def budget(bench: Bench) -> Iterator[Row]:
    """Throughput of a batch, and latencies of requests that arrive at two thirds of what the engine can do.

    A workload with arrivals keeps them.
    """
    batch = bench.workload or (w1() if bench.is_gpu else w())
    arriving = batch if batch.is_spread else poisson(batch.first(128), 30.0) if bench.is_gpu else poisson(batch, 5.0)
    batch = batch.hurried()
    for size in (1280, 2048, 4096, 8192) if bench.is_gpu else (128, 256, 512, 1024, 2048, 4096):
        played = bench.play([batch, arriving], max_num_batched_tokens=size)
        whole, timed = (figures(load, run) for load, run in zip((batch, arriving), played, strict=True))
        row = {"max_num_batched_tokens": size, "output_tokens_per_second": whole["output_tokens_per_second"]}
        yield row | {name: timed[name] for name in ("ttft", "itl")}


def whale(bench: Bench) -> Iterator[Row]:
    """What decoding requests see of long prompts, in chunks of several sizes and in one piece."""
    sizes = {"decoding": 64, "prompt": 512, "output": 600, "whales": 8, "whale_prompt": 8192, "delay": 0.5}
    if not bench.is_gpu:
        sizes = {"decoding": 8, "prompt": 64, "output": 160, "whales": 4, "whale_prompt": 2048, "delay": 1.0}
    workload = whales(**sizes)
    decoding = Workload("decoding", workload.requests[: sizes["decoding"]])
    rows: Rows = []
    for size in (2048, 4096, 8192) if bench.is_gpu else (128, 256, 512, 1024):
        rows.append({"chunks": "of the budget", "max_num_batched_tokens": size})
    # A whole prompt beside the decodes, and less than a block besides, for the beginning of another.
    largest = sizes["whale_prompt"] + sizes["decoding"] + sizes["whales"]
    rows.append({"chunks": "none", "max_num_batched_tokens": largest, "long_prefill_token_threshold": largest})
    for row in rows:
        options = {name: value for name, value in row.items() if name != "chunks"}
        [played] = bench.play([workload], max_num_seqs=96 if bench.is_gpu else 32, **options)
        count = len(decoding.requests)
        row["itl"] = figures(decoding, Replay(played.seconds, played.arrivals[:count], played.finished[:count]))["itl"]
        ends = zip(played.arrivals[count:], played.finished[count:], strict=True)
        row["last first token of a long prompt"] = max(ended.token_times[0] - arrival for arrival, ended in ends)
        yield row


def prefix(bench: Bench) -> Iterator[Row]:
    """Time to the first token of requests that come one after another, by how many first tokens they share."""
    lengths = (0, 512, 1024, 2048, 4096, 8192) if bench.is_gpu else (0, 256, 512, 1024, 2048)
    workloads = [one_by_one(random_requests(requests=9, prompt=n + 64, shared=n, output=2)) for n in lengths]
    for caching in (True, False):
        played = bench.play(workloads, enable_prefix_caching=caching)
        for length, workload, run in zip(lengths, workloads, played, strict=True):
            later = Workload("later", workload.requests[1:])  # the first finds nothing
            ttft = figures(later, Replay(run.seconds, run.arrivals[1:], run.finished[1:]))["ttft"]
            yield {"shared": length, "enable_prefix_caching": caching, "ttft": ttft}


def one_by_one(workload: Workload) -> Workload:
    requests = [
        TimedRequest(0.0, request.prompt_token_ids, request.num_output_tokens, after=number - 1 if number else None)
        for number, request in enumerate(workload.requests)
    ]
    return Workload(workload.name, requests)


def block(bench: Bench) -> Iterator[Row]:
    """Throughput of a batch without shared tokens, and of one with, by the size of a block."""
    plain = w1() if bench.is_gpu else w()
    shared = p1() if bench.is_gpu else p1(requests=48, prompts=4, shared=500, own=(8, 40), output=32)
    for size in (16, 32, 64, 128, 256):
        played = bench.play([plain, shared], block_size=size)
        alone, together = (figures(load, run) for load, run in zip((plain, shared), played, strict=True))
        row = {"block_size": size, "output_tokens_per_second": alone["output_tokens_per_second"]}
        row["output_tokens_per_second, shared"] = together["output_tokens_per_second"]
        yield row | {"cached share": together["cached_tokens"] / shared.num_prompt_tokens}


EXPERIMENTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "budget": budget,
    "whale": whale,
    "prefix": prefix,
    "block": block,
}


# ---------------------------------------------------------------------------------------------------------- pictures


def draw(name: str, rows: Rows, path: Path) -> None:
    lines = LINES[name](rows)
    figure, axes = pyplot.subplots(1, len(lines), figsize=(4.2 * len(lines), 3.2), layout="constrained", squeeze=False)
    for ax, (title, unit, series) in zip(axes[0], lines, strict=True):
        for label, points in series.items():
            ax.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
        highest = max(y for points in series.values() for _, y in points)
        ax.set(title=title, xlabel=X_LABELS[name], ylim=(0, 1.08 * highest))
        ax.set_ylabel(unit)
        if name != "prefix":
            ax.set_xscale("log", base=2)
            ax.set_xticks(_apart([x for x, _ in next(iter(series.values()))]))
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            ax.tick_params(axis="x", labelsize=7)
        ax.grid(alpha=0.3)
        if len(series) > 1:
            ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _apart(places: list[int]) -> list[int]:
    """Those whose labels would not stand on one another."""
    kept: list[int] = []
    for place in places:
        if not kept or place > 1.1 * kept[-1]:
            kept.append(place)
    return kept


X_LABELS = {
    "budget": "max_num_batched_tokens", "whale": "max_num_batched_tokens", "prefix": "shared tokens",
    "block": "block_size",
}  # fmt: skip


def _points(rows: Rows, x: str, y: Callable[[dict[str, Any]], float]) -> list[tuple[Any, float]]:
    return [(row[x], y(row)) for row in rows]


def _spreads(rows: Rows, x: str, name: str, parts: tuple[str, ...]) -> dict[str, list[tuple[Any, float]]]:
    return {part: _points(rows, x, lambda row, part=part: 1e3 * row[name][part]) for part in parts}


LINES: dict[str, Callable[[Rows], list[tuple[str, str, dict[str, Any]]]]] = {
    "budget": lambda rows: [
        ("a batch", "output tokens/s", {
            "": _points(rows, "max_num_batched_tokens", lambda row: row["output_tokens_per_second"]),
        }),
        ("time to the first token", "ms", _spreads(rows, "max_num_batched_tokens", "ttft", ("p50", "p99"))),
        ("time between tokens", "ms", _spreads(rows, "max_num_batched_tokens", "itl", ("p50", "p99", "max"))),
    ],
    "whale": lambda rows: [
        ("between tokens of the others", "ms", _spreads(rows, "max_num_batched_tokens", "itl", ("p50", "p99", "max"))),
        ("all long prompts have a token", "s", {
            "": _points(rows, "max_num_batched_tokens", lambda row: row["last first token of a long prompt"]),
        }),
    ],
    "prefix": lambda rows: [
        ("time to the first token", "ms", {
            f"prefix caching {'on' if caching else 'off'}": _points(
                [row for row in rows if row["enable_prefix_caching"] is caching], "shared",
                lambda row: 1e3 * row["ttft"]["p50"],
            )
            for caching in (True, False)
        }),
    ],
    "block": lambda rows: [
        ("a batch", "output tokens/s", {
            "nothing shared": _points(rows, "block_size", lambda row: row["output_tokens_per_second"]),
            "shared prompts": _points(rows, "block_size", lambda row: row["output_tokens_per_second, shared"]),
        }),
        ("share of the prompts that was cached", "", {
            "": _points(rows, "block_size", lambda row: row["cached share"]),
        }),
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)} (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, required=True, help="a folder for results.json and the pictures")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", metavar="NAME[:KEY=VALUE,...]", help="of budget, such as azure-conv")
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"there is no experiment {min(unknown)!r}; there are {', '.join(EXPERIMENTS)}")
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; use --device cpu")
    try:
        workload = None if arguments.workload is None else build(arguments.workload)
    except ValueError as error:
        parser.error(str(error))
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    bench = Bench(arguments.device, arguments.repeats, workload)
    for name in arguments.experiments or EXPERIMENTS:
        rows: Rows = []
        results[name] = {"environment": environment(), "repeats": arguments.repeats, "rows": rows}
        for row in EXPERIMENTS[name](bench):
            rows.append(row)
            path.write_text(json.dumps(results, indent=1), encoding="utf-8")
            print(name, json.dumps(row), flush=True)
        draw(name, rows, arguments.output / f"{name}.png")


if __name__ == "__main__":
    main()
