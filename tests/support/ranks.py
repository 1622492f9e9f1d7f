"""Several ranks as threads of one process, for tests of what they compute; and engines of ranks in processes."""

import threading

import torch
import torch.distributed as dist

from nanovllm.features.ranks.ranks import Ranks


def run_on_ranks(size, function):
    """What the function returns on each rank; raises what it raises on any."""
    store = dist.HashStore()
    results = [None] * size
    errors = []

    def run(rank):
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
