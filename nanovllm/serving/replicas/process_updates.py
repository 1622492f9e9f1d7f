"""Orders of a front about an engine's weights, pauses and sleep."""

from __future__ import annotations

import pickle

from torch import Tensor

from nanovllm.engine import Engine
from nanovllm.features.updates.pausing import pause, resume
from nanovllm.features.updates.sleeping import sleep, wake
from nanovllm.features.updates.updating import check_weights, update_weights
from nanovllm.serving.replicas.messages import Obeyed, Order
from nanovllm.serving.replicas.weight_images import mapped


def obey(engine: Engine, order: Order) -> Obeyed:
    """Carry an order out; raises if weights may be written in part, which this process must not outlive."""
    if order.call == "update_weights":
        update_weights(engine, _weights(order), keep_kv=order.keep_kv, version=order.version)
        return Obeyed(order.number)
    try:
        return Obeyed(order.number, names=_call(engine, order))
    except Exception as error:  # the front raises it, and this engine goes on
        return Obeyed(order.number, pickled(error) or pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))


def _call(engine: Engine, order: Order) -> list[str]:
    match order.call:
        case "check_weights":
            return check_weights(engine, _weights(order))
        case "pause_generation":
            pause(engine)
        case "resume_generation":
            resume(engine)
        case "sleep":
            sleep(engine, order.level)
        case "wake":
            wake(engine)
    return []


def _weights(order: Order) -> list[tuple[str, Tensor]]:
    return [] if order.image is None else mapped(order.image)


def pickled(error: Exception) -> bytes:
    """An error for another process; empty if it does not pickle."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return b""
    return data
