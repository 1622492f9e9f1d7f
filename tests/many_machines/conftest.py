"""A cluster of two nodes for these tests, which need `nanovllm[ray]`: `.ci/ray` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ray_clusters import NODE_CPUS, cluster_of


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    with cluster_of(3, NODE_CPUS) as cluster:
        yield cluster
