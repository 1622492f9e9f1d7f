"""The command `nanovllm cache`: lists, verifies and clears the folder of `prefix_cache_dir`."""

from __future__ import annotations

import argparse
import time
from typing import Any

from nanovllm.cli.flags import add_verbose_flag
from nanovllm.features.tiers.inspection import clear, segments_of

DESCRIPTION = "List, verify or clear the prefixes that engines keep in a folder (--prefix-cache-dir)."
HEADINGS = ("SEGMENT", "MODEL", "BLOCKS", "TOKENS", "MB", "LAST USED")


def add_cache_command(commands: Any) -> None:
    """Register the subcommand."""
    cache = commands.add_parser("cache", help="prefixes kept in files", description=DESCRIPTION, allow_abbrev=False)
    cache.add_argument("action", choices=("list", "verify", "clear"), help="verify reads all blocks")
    cache.add_argument("folder", metavar="DIR", help="folder of --prefix-cache-dir")
    add_verbose_flag(cache)
    cache.set_defaults(run=_cache)


def _cache(options: argparse.Namespace) -> int:
    if options.action == "clear":
        print(f"{clear(options.folder)} segments removed")
        return 0
    found = list(segments_of(options.folder, verifies=options.action == "verify"))
    headings = [*HEADINGS, "DAMAGED"] if options.action == "verify" else [*HEADINGS]
    rows = [headings]
    for segment in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(segment.used))
        counts = f"{segment.num_blocks:,}", f"{segment.num_tokens:,}", f"{segment.num_bytes / 1e6:,.1f}"
        name = f"{segment.rank}/{segment.number}" if segment.rank else str(segment.number)
        row = [name, (segment.model or "damaged")[:12], *counts, used, str(segment.num_damaged)]
        rows.append(row[: len(headings)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(any(segment.num_damaged or segment.model is None for segment in found))
