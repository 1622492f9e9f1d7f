"""Loops of a scheduler whose queue keeps the shares of clients, and the mock model of every kind of layer."""

from tests.support.scheduling import Loop, make_scheduler


def make_loop(**limits):
    return Loop(make_scheduler(**limits))


def tokens(count, first=0):
    return [(first + position * position) % 7 for position in range(count)]


def hits(loop, prompt, **params):
    """Tokens of a new request that come from the cache; it is run to its end."""
    before = loop.scheduler.stats.prefix_cache_hits
    loop.add(prompt, **({"max_tokens": 1} | params))
    loop.drain()
    return loop.scheduler.stats.prefix_cache_hits - before
