"""Whom a node asks for a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from dataplane.node.neighbours import KnownNeighbours
from dataplane.rpc.membership import JobNodes, NeighbourNode

BLOCKS = 64


def asked(own_id: str, nodes: JobNodes | None) -> set[str]:
    """The nodes that this one asks for some block; itself for those that it owns."""
    manifest = SimpleNamespace(
        block_shard=np.arange(BLOCKS), block_offset=np.zeros(BLOCKS, np.int64)
    )
    dataset: Any = SimpleNamespace(manifest=manifest, digest=b"d" * 16)
    neighbours = KnownNeighbours(own_id, None)
    if nodes is not None:
        neighbours.learn(nodes)
    found = [neighbours.owner_of(dataset, block, ["j"]) for block in range(BLOCKS)]
    assert all(one is None or (one.peer.job_id, one.peer.key) == ("j", b"k") for one in found)
    return {own_id if one is None else one.peer.node_id for one in found}


def node(name: str, arena_bytes: int, worker_count: int = 0) -> NeighbourNode:
    return NeighbourNode(name, f"{name}:7078", arena_bytes, worker_count)


def told(*nodes: NeighbourNode) -> JobNodes:
    return JobNodes("j", 1, 1, b"k", nodes)


def test_blocks_are_owned_by_all_nodes_with_memory_for_them_makers_included():
    nodes = told(node("a", 100), node("short", 0), node("maker", 100, 8))
    assert asked("a", nodes) == asked("maker", nodes) == {"a", "maker"}


def test_a_node_that_owns_none_asks_those_that_do():
    nodes = told(node("a", 100), node("maker", 100, 8), node("short", 0))
    assert asked("short", nodes) == {"a", "maker"}


def test_the_only_node_with_memory_reads_all_blocks_itself():
    for nodes in (None, told(), told(node("a", 0)), told(node("maker", 100, 8), node("a", 0))):
        assert asked("maker", nodes) == {"maker"}


def owned_by(nodes: JobNodes) -> list[str]:
    """The address of the owner of each block, as a node without blocks sees it."""
    manifest = SimpleNamespace(
        block_shard=np.arange(BLOCKS), block_offset=np.zeros(BLOCKS, np.int64)
    )
    dataset: Any = SimpleNamespace(manifest=manifest, digest=b"d" * 16)
    neighbours = KnownNeighbours("asks", None)
    neighbours.learn(nodes)
    found = [neighbours.owner_of(dataset, block, ["j"]) for block in range(BLOCKS)]
    return [one.peer.address for one in found if one is not None]


def test_blocks_on_disk_stay_with_their_node_when_it_is_started_again():
    def with_disks(*names: str, disks: str) -> JobNodes:
        nodes = [
            NeighbourNode(name, address, 100, disk_id=disk)
            for name, address, disk in zip(names, "xyz", disks, strict=True)
        ]
        return told(*sorted(nodes, key=lambda one: one.node_id))

    before = owned_by(with_disks("a-1", "b-2", "c-3", disks="pqr"))
    assert {*before} == {*"xyz"}
    assert owned_by(with_disks("c-7", "b-8", "a-9", disks="pqr")) == before
    # A folder that was copied to another host names two: then nodes go by their own ids.
    copied = [with_disks(*names, disks="ppr") for names in (("a", "b", "c"), ("c", "b", "a"))]
    assert {*owned_by(copied[0])} == {*"xyz"}
    assert owned_by(copied[0]) != owned_by(copied[1])
