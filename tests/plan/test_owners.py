"""Which node owns a block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.plan.cluster import RUN_BYTES, Owners, Weighed

DATASET = bytes(range(16))
RUNS = [(shard, run * RUN_BYTES) for shard in range(40) for run in range(50)]

names = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=12, unique=True)


def owned(nodes: list[Weighed], dataset: bytes = DATASET) -> dict[tuple[int, int], str]:
    owners = Owners(nodes)
    return {run: owners.names[owners.of(dataset, *run)] for run in RUNS}


@given(names, st.randoms())
def test_the_owner_does_not_depend_on_the_order_of_the_nodes(
    names: list[str], chance: object
) -> None:
    nodes = [Weighed(name, 1 + i % 3) for i, name in enumerate(names)]
    again = sorted(nodes, key=lambda node: hash((str(chance), node)))
    first, second = Owners(nodes), Owners(again)
    for run in RUNS[::97]:
        assert first.names[first.of(DATASET, *run)] == second.names[second.of(DATASET, *run)]


def test_a_node_that_comes_takes_blocks_only_for_itself() -> None:
    nodes = [Weighed(f"node-{i}", 4 << 30) for i in range(6)]
    before, after = owned(nodes[:5]), owned(nodes)
    moved = {run for run in RUNS if before[run] != after[run]}
    assert {after[run] for run in moved} == {"node-5"}
    assert len(RUNS) / 6 * 0.8 < len(moved) < len(RUNS) / 6 * 1.2


def test_each_node_owns_as_much_as_its_memory_is_of_all() -> None:
    weights = {"small": 1 << 30, "large": 3 << 30, "other": 4 << 30}
    counts = Counter(owned([Weighed(*each) for each in weights.items()]).values())
    for name, weight in weights.items():
        share = len(RUNS) * weight / sum(weights.values())
        assert counts[name] == pytest.approx(share, rel=0.15)


def test_blocks_that_lie_side_by_side_have_one_owner() -> None:
    owners = Owners([Weighed(f"node-{i}", 1) for i in range(9)])
    for shard in range(20):
        assert len({owners.of(DATASET, shard, at) for at in range(0, RUN_BYTES, 1 << 20)}) == 1


def test_datasets_are_spread_differently() -> None:
    nodes = [Weighed(f"node-{i}", 1) for i in range(4)]
    one, other = owned(nodes), owned(nodes, bytes(16))
    assert sum(one[run] == other[run] for run in RUNS) == pytest.approx(len(RUNS) / 4, rel=0.2)


def test_an_owner_stays_what_it_was() -> None:
    """All nodes of a cluster must agree, whatever version of numpy or Python they run."""
    owners = Owners([Weighed("a", 1.0), Weighed("b", 2.0), Weighed("c", 4.0)])
    found = [owners.of(DATASET, shard, shard * 7 * RUN_BYTES) for shard in range(24)]
    assert found == [1, 1, 1, 2, 2, 0, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 0, 1, 2, 1, 2, 2, 2]
