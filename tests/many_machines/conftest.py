"""A cluster of two nodes for these tests, which need `nanovllm[ray]`: `.ci/ray` runs them."""

import pytest

from tests.support.ray_clusters import NODE_CPUS, cluster_of


@pytest.fixture(scope="session")
def cluster():
    with cluster_of(3, NODE_CPUS) as cluster:
        yield cluster
