"""Several ranks as threads of one process, for tests of what they compute; and engines of ranks in processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.features.ranks.ranks import Ranks


def run_on_ranks(size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    """What the function returns on each rank; raises what it raises on any."""
    store = dist.HashStore()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = function(Ranks(rank, size, torch.device("cpu"), store))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results
