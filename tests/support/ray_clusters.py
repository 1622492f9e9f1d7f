"""Nodes of a Ray cluster as processes of this machine, on loopback, small and without a dashboard."""

import os
from contextlib import contextmanager

# Before ray is imported, and for the processes of its nodes.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
from ray.cluster_utils import Cluster

import nanovllm.ray

NODE_CPUS = 0  # of a node that is not the head: it runs an engine, and no front, reader or writer
# One engine a node: each has one of this resource.
ENGINE = {"engine": 1.0}
NODE = {"object_store_memory": 100 * 2**20, "include_dashboard": False, "resources": ENGINE}
# A head node counts a node as dead after some seconds; in tests they are few.
HEAD = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@contextmanager
def cluster_of(*nodes):
    """A cluster that this process has joined; nodes: CPUs of the head node and of the others."""
    head, *others = nodes
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": head, "_system_config": HEAD})
    try:
        for num_cpus in others:
            join(cluster, num_cpus)
        nanovllm.ray.connect(cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def join(cluster, num_cpus=NODE_CPUS):
    """Add a node; returns it."""
    return cluster.add_node(num_cpus=num_cpus, **NODE)


def die(cluster):
    """End the node that is not the head as a power cut does: its processes are killed, nothing is handed over."""
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)
