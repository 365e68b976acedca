"""Which hosts read which blocks, beside what each host and each block say alone."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.plan import shuffled
from dataplane.plan.cluster import Cluster
from dataplane.plan.order import Order
from dataplane.plan.shuffled import BlockHosts


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30).map(np.array),
    st.integers(1, 140),
    st.integers(1, 24),
    st.integers(1, 9),
)
def test_hosts_of_blocks_are_those_of_their_lanes(rows, lanes, dp_size, ranks_per_host):
    order, cluster = Order(rows, 5, True, lanes, 4, 0), Cluster(dp_size, ranks_per_host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffled, "_PIECE", 7)
        found = BlockHosts.of(order)
    first, last = order.block_lanes(np.arange(len(rows)))
    hosts = [cluster.hosts_of(int(a), int(b - a), lanes) for a, b in zip(first, last, strict=True)]
    counts = np.minimum(hosts, rows)
    assert found.counts(cluster, rows).tolist() == counts.tolist()
    sizes = rows * 1000 + np.arange(len(rows))
    assert found.read_bytes(cluster, rows, sizes) == counts @ sizes
    reads = [cluster.reads(host, first, last, lanes) for host in range(cluster.host_count)]
    for host, read in enumerate(reads):
        assert found.are_read(cluster, host).tolist() == read.tolist()
