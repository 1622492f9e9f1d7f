"""Token rate of a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable

from tqdm import tqdm

REFRESH_S = 0.25


def rate_display(bar: tqdm, num_output_tokens: Callable[[], int]) -> Callable[[], None]:
    """A function to call after each step, which shows the bar's tokens/s since now."""
    start = shown = time.monotonic()
    num_before = num_output_tokens()

    def after_step() -> None:
        nonlocal shown
        now = time.monotonic()
        is_due = now - shown > REFRESH_S
        rate = (num_output_tokens() - num_before) / (now - start)
        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=is_due)
        shown = now if is_due else shown

    return after_step
