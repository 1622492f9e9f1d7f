"""Writes docs/capabilities.md: each folder that can be deleted, its size, its tests, and what it was measured to gain.

    python .ci/capabilities.py [--check]

`--check` writes nothing, and fails where a folder is missing, its size is off by a tenth, or a page of results lacks a
number. A folder whose size grows pays with a gain here, or with a fall elsewhere.
"""

from __future__ import annotations

import ast
import re
import sys

from sources import PACKAGE, ROOT, files, num_tokens, tree

PAGE = ROOT / "docs" / "capabilities.md"
SHELVES = {"features", "fast"}  # they hold folders of their own
# What a folder was measured to gain: text, whose numbers stand on a page of results; section of that page; date.
GAINS = {
    "fast.attention": (
        "W on a CPU, with fast/layers: 624 tokens/s, eager SDPA 258",
        "cpu.md#how-do-the-backends-compare",
        "2026-11-21",
    ),
    "fast.gpu": ("W1 4.90 s, vLLM 5.76; W3 0.66 ms a token, vLLM 1.66", "README.md#one-h200-141-gb", "2026-11-27"),
    "fast.kernels": (
        "8 decodes on a CPU in 0.43 of the time of vLLM's operator",
        "cpu.md#how-fast-is-attention-alone",
        "2026-11-21",
    ),
    "fast.layers": (
        "W on a CPU, with fast/attention: 624 tokens/s, compiled layers 224",
        "cpu.md#how-do-the-backends-compare",
        "2026-11-21",
    ),
    "features.adapters": ("64 decodes with one adapter 1.10 of a step without", "cpu.md#adapters", "2026-11-30"),
    "features.beams": (
        "4 beams 4.3 times as fast as `transformers`",
        "cpu.md#prefixes-of-a-former-process-and-beams",
        "2026-11-26",
    ),
    "features.goals": (
        "at 0.8 of a CPU's capacity 1.000 of the requests within limits, 0.367 without",
        "cpu.md#latency-goals-on-real-traffic",
        "2026-11-26",
    ),
    "features.kv_fp8": ("32 requests at 16,000: a step 1.31 times as fast", "gpu.md#8-bit-k-and-v", "2026-11-29"),
    "features.media": (
        "64 requests with pictures 3.41 times as fast as `transformers`",
        "gpu.md#pictures",
        "2026-11-30",
    ),
    "features.ranks": ("two GPUs: one request 1.45, W1 1.53 times as fast", "gpu.md#two-gpus", "2026-11-23"),
    "features.speculation": (
        "edits of a text 2.99 times as fast",
        "cpu.md#what-does-speculation-bring",
        "2026-11-26",
    ),
    "features.states": (
        "64 requests 9.4 times as fast as `transformers`",
        "gpu.md#models-with-recurrent-states",
        "2026-11-26",
    ),
    "features.tiers": (
        "first token behind 8,192 evicted tokens in 0.165 of the time",
        "gpu.md#prefixes-from-host-memory",
        "2026-11-26",
    ),
    "features.trainers": (
        "rollouts of a live module 16.6 times as fast as `transformers`",
        "gpu.md#trainers",
        "2026-12-01",
    ),
    "features.updates": ("an update of 1.2 GB of weights takes 5.6 ms", "gpu.md#updates-of-weights", "2026-11-30"),
    "models": (
        "16 streams of a Q4_1 file 3.3 times as fast as llama-server",
        "cpu.md#how-fast-against-llamacpp",
        "2026-11-23",
    ),
    "serving": ("30 requests a second: TTFT p99 15.9 ms, vLLM 82.3", "README.md#one-h200-141-gb", "2026-11-23"),
}
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
HEADING = """# Capabilities

Each row is a folder of the package that can be deleted, with the folders that need it: `.ci/deletions.py` tries
each, and all at once. Tokens are those of Python's tokenizer, without comments and docstrings. A folder brings an
interface, or a gain that a page of results shows: one that grows shows more, or another one shrinks.
`.ci/capabilities.py` writes this page.

"""


def folders() -> list[str]:
    """Names of the folders below the package, by what a reader may want to leave out."""
    found = []
    for path in sorted(PACKAGE.rglob("__init__.py")):
        parts = path.parent.relative_to(PACKAGE).parts
        if len(parts) == 1 + (bool(parts) and parts[0] in SHELVES):
            found.append(".".join(parts))
    return found


def purpose(name: str) -> str:
    """First line of a folder's docstring, without its full stop."""
    text = ast.get_docstring(tree(PACKAGE.joinpath(*name.split("."), "__init__.py"))) or ""
    return text.splitlines()[0].rstrip(".")


def num_test_files(name: str) -> int:
    """Files of tests that name a module of the folder."""
    module = re.compile(rf"nanovllm\.{re.escape(name)}\b")
    return sum(module.search(path.read_text(encoding="utf-8")) is not None for path in files(ROOT / "tests", {".py"}))


def size(name: str) -> int:
    return num_tokens(files(PACKAGE.joinpath(*name.split(".")), {".py"}))


def row(name: str) -> str:
    gain, section, date = GAINS.get(name, ("", "", ""))
    shown = f"[{gain}](results/{section})" if gain else ""
    return (
        f"| `{name.replace('.', '/')}` | {purpose(name)} | {size(name):,} | {num_test_files(name)} | {shown} | {date} |"
    )


def page() -> str:
    titles = ("folder", "what it brings", "tokens", "files of tests", "measured", "date")
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *map(row, folders())]
    return HEADING + "\n".join(lines) + "\n"


def differences(text: str) -> list[str]:
    """What makes a page stale: folders that it lacks or has too many, and sizes that are off by a tenth."""
    found = {cells[1].strip("` "): cells for line in text.splitlines() if len(cells := line.split("|")) > 6}
    wrong = []
    for name in folders():
        cells = found.pop(name.replace(".", "/"), None)
        if cells is None:
            wrong.append(f"{name} has no row")
        elif abs(int(cells[3].replace(",", "")) - size(name)) > size(name) / 10:
            wrong.append(f"{name} has {size(name):,} tokens, not{cells[3]}")
    wrong += [f"{name} is no folder" for name in GAINS.keys() - {*folders()}]
    for name, (gain, section, _) in GAINS.items():
        shown = (PAGE.parent / "results" / section.partition("#")[0]).read_text(encoding="utf-8")
        wrong += [f"{name}: no page of results has {number}" for number in NUMBER.findall(gain) if number not in shown]
    return wrong


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    wrong = differences(PAGE.read_text(encoding="utf-8"))
    for line in wrong:
        print(f"docs/capabilities.md: {line}; python .ci/capabilities.py")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
