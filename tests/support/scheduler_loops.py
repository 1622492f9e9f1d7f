"""Loops of a scheduler whose queue keeps the shares of clients, and the mock model of every kind of layer."""

from tests.support.scheduling import Loop, make_scheduler


def make_loop(**limits):
    return Loop(make_scheduler(**limits))
