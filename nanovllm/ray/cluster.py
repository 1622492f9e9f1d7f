"""Connection to a Ray cluster, with an error in seconds if none answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import grpc
import ray

START = "Start one there with `ray start --head --port=6379`, or leave the address out to start one in this process."


def connect(address: str | None = None, *, timeout: float = 10.0, **options: Any) -> None:
    """Join the Ray cluster at `address`.

    Args:
        address: host:port of the head node, "auto" for this machine's cluster, or ray://host:port. None: RAY_ADDRESS,
            else this machine's cluster, else a new one in this process.
        timeout: seconds for the head node to answer; Ray would retry for minutes.
        options: see `ray.init`.

    Raises ConnectionError if no cluster answers. Without an address, a process that is already connected stays so.
    """
    if ray.is_initialized() and address is None:
        return
    given = address or os.environ.get("RAY_ADDRESS")
    if given is not None and given not in ("auto", "local"):
        _check_answers(given, timeout)
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise ConnectionError(f"no Ray cluster answers at {given or 'this machine'!r}: {error} {START}") from error


def uses_gpu(engine_options: Mapping[str, Any]) -> bool:
    """Whether to request a GPU from Ray for an engine: Ray hides unrequested GPUs from an actor."""
    device = engine_options.get("device", "auto")
    if device == "auto":
        return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return bool(device != "cpu")


def _check_answers(address: str, timeout: float) -> None:
    """Raise ConnectionError unless the head node's gRPC server answers in time; ValueError without a port."""
    target = address.removeprefix("ray://")
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the Ray address {address!r} has no port. Give host:port, such as 10.0.0.1:6379, or 'auto'.")
    uses_tls = os.environ.get("RAY_USE_TLS", "0") not in ("0", "")
    if uses_tls:
        return  # Ray resolves it
    with grpc.insecure_channel(target) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"no Ray cluster answers at {address} within {timeout:g} s. {START}") from None
