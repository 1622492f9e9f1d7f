"""The Serve application: fronts take HTTP requests, replicas answer them; Serve sets the number of replicas."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from nanovllm.config import integer, one_of
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.refusals import RAY, check_options
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.ray.cluster import uses_gpu
from nanovllm.ray.front import Front
from nanovllm.ray.replica import Replica
from nanovllm.ray.router import STATS_SECONDS
from nanovllm.serving.replicas.routing import POLICIES
from nanovllm.serving.server.settings import ServerSettings, with_defaults

# Server options that are refused on Ray -> reason.
NOT_ON_RAY = {
    **dict.fromkeys(("host", "port"), "`serve.start(http_options=...)`, or `http_options` of the config file, sets it"),
    **dict.fromkeys(
        ("max_connections", "max_header_bytes", "max_headers", "header_timeout", "body_timeout", "access_log"),
        "Serve's proxy takes the connections",
    ),
    **dict.fromkeys(("record", "record_max_bytes"), "each replica would write a file of its own on its machine"),
    **dict.fromkeys(("adapter", "adapter_folder"), "a front loads nothing into the engines of other machines"),
    **dict.fromkeys(
        ("allow_weight_updates", "weights_folder"), "engines of other machines are neither paused nor updated"
    ),
    "log_format": "Ray's processes have logs of their own",
    "otlp_traces_endpoint": "Serve has spans of its own",
    "ui": "the live view shows one engine, and a page's requests would go to several",
}
# Autoscaling's target for the requests of a replica. Serve's default of 2 would leave an engine's batches empty.
TARGET_ONGOING = 64
MAX_NUM_SEQS = 256  # default of an engine
MAX_FORWARDED = 65536  # concurrent answers of a front; its queue limits them first
HEALTH_SECONDS = 5.0  # seconds between two health checks of a front, and of a replica


def app(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    tokenizer: str | None = None,
    num_replicas: int | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    num_fronts: int = 1,
    routing: str = "prefix-aware",
    server: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> Application:
    """Build the application of a model, for `serve.run`; nothing is loaded in this process.

    Args:
        model: a folder that every machine can read, a hub id, or "smollm2-135m-instruct".
        tokenizer: folder or hub id of a tokenizer; None uses the model's.
        num_replicas: number of engines, one by default; not together with autoscaling_config.
        autoscaling_config: Serve's options, such as {"min_replicas": 1, "max_replicas": 8}; target_ongoing_requests
            is 64 by default.
        num_fronts: processes that take HTTP requests, read their prompts and write their answers.
        routing: "prefix-aware", "least-loaded" or "round-robin".
        server: options of `ServerSettings` by name, without the listener's, which Serve replaces.
        ray_actor_options: resources of a replica; {"num_gpus": 1} by default if the cluster has GPUs and `device` is
            not "cpu".
        engine_options: see `AsyncLLM`; max_queue is 1024 by default, and itl_goal "auto" where no
            max_num_batched_tokens is set.

    Raises TypeError and ValueError for bad options, before anything is started.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model must be a folder or a hub id, which every machine loads itself, not {model!r}.")
    one_of("routing", routing, POLICIES)
    settings = _settings(server or {})
    options: dict[str, Any] = with_defaults(engine_options)
    check_options(EngineConfig.from_options(**options), RAY)
    counts = _replica_counts(num_replicas, autoscaling_config)
    replicas = _replicas(routing, options, dict(ray_actor_options or {})).options(
        graceful_shutdown_timeout_s=settings.drain_timeout, **counts
    )
    # The fronts bound the queue: they refuse excess requests before sending them.
    of_replica = {name: value for name, value in options.items() if name != "max_queue"}
    setup = os.fspath(model), tokenizer, of_replica
    bound = replicas.bind(*setup, stall_timeout=settings.stall_timeout)
    return _fronts(num_fronts, settings).bind(
        bound, setup, settings, max_queue=options["max_queue"], max_replicas=_max_replicas(counts)
    )


def _fronts(number: int, settings: ServerSettings) -> Deployment:
    return serve.deployment(serve.ingress()(Front)).options(
        name="Front",
        num_replicas=integer("num_fronts", number, 1),
        max_ongoing_requests=MAX_FORWARDED,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        health_check_period_s=HEALTH_SECONDS,
    )


def _replicas(routing: str, options: dict[str, Any], actor_options: dict[str, Any]) -> Deployment:
    """Deployment of the replicas; the caller sets their number."""
    if "num_gpus" not in actor_options and uses_gpu(options):
        actor_options["num_gpus"] = options.get("tensor_parallel_size", 1)
    return serve.deployment(Replica).options(
        name="Replica",
        max_ongoing_requests=_max_requests(options),
        ray_actor_options=actor_options,
        health_check_period_s=HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class="nanovllm.ray.router:PolicyRouter",
            request_router_kwargs={"policy": routing},
            request_routing_stats_period_s=STATS_SECONDS,
        ),
    )


def build(arguments: dict[str, Any]) -> Application:
    """`app` for `serve run nanovllm.ray:build model=... num_replicas=2` and the `args` of a config file.

    Strings that hold JSON are parsed: the command line gives all values as strings.
    """
    return app(**{name: _from_text(value) for name, value in arguments.items()})


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _settings(given: Mapping[str, Any]) -> ServerSettings:
    """Build the server's settings; raises ValueError for an option that Serve decides, TypeError for an unknown one."""
    names = {field.name for field in dataclasses.fields(ServerSettings)}
    for name in given:
        if name in NOT_ON_RAY:
            raise ValueError(f"{name} cannot be set for an application on Ray: {NOT_ON_RAY[name]}.")
        if name not in names:
            raise TypeError(f"{name!r} is not an option of the server; see ServerSettings.")
    options: dict[str, Any] = {"ui": False, "access_log": False}
    options |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return ServerSettings(**options)


def _replica_counts(num_replicas: int | None, autoscaling: Mapping[str, Any] | None) -> dict[str, Any]:
    if autoscaling is None:
        return {"num_replicas": integer("num_replicas", 1 if num_replicas is None else num_replicas, 1)}
    if num_replicas is not None:
        raise ValueError(f"num_replicas is {num_replicas}, and autoscaling_config is given too. Give one of them.")
    return {"autoscaling_config": {"target_ongoing_requests": TARGET_ONGOING} | dict(autoscaling)}


def _max_replicas(counts: Mapping[str, Any]) -> int:
    autoscaling = counts.get("autoscaling_config")
    return int(counts["num_replicas"] if autoscaling is None else autoscaling.get("max_replicas", 1))  # Serve's default


def _max_requests(options: Mapping[str, Any]) -> int:
    """Maximum number of requests in an engine, running and queued; more wait in the front, for any replica."""
    max_queue = options["max_queue"]
    return MAX_FORWARDED if max_queue is None else (options.get("max_num_seqs") or MAX_NUM_SEQS) + max_queue
