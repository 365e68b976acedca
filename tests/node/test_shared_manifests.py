"""A node that gets manifests of others, and gives its own: real lenders, and a real coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lender import LendingNode, lending_node
from manifests import small
from msgspec import Struct, structs

from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.index.indexing import work_on
from dataplane.model.config import VERSION, NodeConfig
from dataplane.model.errors import AccessDenied, PeerLost, StoreError
from dataplane.model.records import View
from dataplane.node import shared_manifests
from dataplane.node.shared_manifests import LentManifests, SharedManifests, Wanted
from dataplane.plan.manifest import Manifest
from dataplane.rpc.messages import DatasetSource
from dataplane.rpc.sharing import (
    ManifestState,
    ManifestTurn,
    NodeWork,
    ShareManifestRequest,
    ShareManifestResponse,
)
from dataplane.settings import default_node_config

pytestmark = pytest.mark.usefixtures("one_fork_server")

WANTED = Wanted(DatasetSource(("s3://b/",)), View(), 0, "job", "launch")


class Made(Struct, frozen=True):
    """Return whose manifest was opened, and its bytes."""

    given: Manifest | None
    content: bytes

    @property
    def fingerprint(self) -> str:
        return small().fingerprint

    def handed_on(self) -> bytes:
        return self.content


class Listened(Coordinator):
    """Remembers what nodes say about manifests; does not answer the first `lost` calls."""

    def __init__(self) -> None:
        super().__init__(CoordinatorConfig(version=VERSION))
        self.said: list[ShareManifestRequest] = []
        self.lost = 0
        self.refusal: Exception | None = None

    async def share_manifest(self, request: ShareManifestRequest) -> ShareManifestResponse:
        self.said.append(request)
        if self.lost:
            self.lost -= 1
            raise PeerLost("nobody answers", peer="coordinator")
        if self.refusal is not None:
            raise self.refusal
        return await super().share_manifest(request)


class Node:
    """One that shares manifests."""

    def __init__(
        self, coordinator: Coordinator, config: NodeConfig, name: str, lender: LendingNode
    ) -> None:
        self.lender = lender
        self.lent = LentManifests(lender.lending, itertools.count(1))
        lender.answer = self.lent.asked
        self.shared = SharedManifests(config, coordinator, name, lender.address, self.lent)
        self.made: list[Manifest | None] = []
        self.content = small().to_bytes()
        self.fault: Exception | None = None

    async def make(self, given: Manifest | None) -> Made:
        self.made.append(given)
        if self.fault is not None:
            raise self.fault
        return Made(given, self.content)

    async def open(self, wanted: Wanted = WANTED) -> Made:
        async with asyncio.timeout(60):
            return await self.shared.opened(wanted, self.make)


@contextlib.asynccontextmanager
async def sharing(tmp_path: Path, count: int = 2, **changed: object) -> AsyncIterator[Any]:
    """A coordinator, and so many nodes of it."""
    coordinator = Listened()
    await coordinator.start()
    config = structs.replace(default_node_config(), **changed)
    try:
        async with contextlib.AsyncExitStack() as stack:
            nodes = []
            for number in range(count):
                name = f"node-{number}"
                lender = await stack.enter_async_context(lending_node(node_id=name))
                own = structs.replace(config, cache_dir=str(tmp_path / name))
                nodes.append(Node(coordinator, own, name, lender))
                stack.callback(nodes[-1].lent.close)
            yield coordinator, *nodes
    finally:
        await coordinator.close()


async def test_what_one_node_has_made_the_others_get_byte_for_byte(tmp_path: Path) -> None:
    async with sharing(tmp_path, 3) as (coordinator, first, second, third):
        assert (await first.open()).given is None
        for node in (second, third):
            found = await node.open()
            assert found.given is not None
            assert found.given.to_bytes() == small().to_bytes()
        assert first.made == [None]
        assert first.lender.lending.lent_bytes == 0, "these are no blocks"
        states = [one.state for one in coordinator.said]
        assert states.count(ManifestState.HELD) == 3
    assert [*tmp_path.glob("node-2/index/*/*.manifest")], "it is known the next time"  # noqa: ASYNC240 - nobody waits


async def test_a_node_that_waits_shows_how_far_the_other_one_is(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (_, _first, second):
        work = NodeWork("counting packs", "s3://b/", 12, 40, "blocks")
        answer = ShareManifestResponse(ManifestTurn.WAIT, "node-0", pause_s=0.05, work=work)
        pausing = asyncio.create_task(second.shared._pause(WANTED, answer))
        await asyncio.sleep(0)
        shown = work_on(WANTED.source.urls)
        assert shown == structs.replace(work, what="node node-0: counting packs")
        await pausing
        assert work_on(WANTED.source.urls) is None


async def test_what_is_no_manifest_of_these_urls_is_not_used_and_the_node_makes_its_own(
    tmp_path: Path,
) -> None:
    elsewhere = [
        structs.replace(shard, url=f"s3://secret/{n}") for n, shard in enumerate(small().shards)
    ]
    contents = (
        b"nothing of the kind" * 100,
        small().to_bytes()[:-9],
        small(urls=("s3://other/",)).to_bytes(),
        small(shards=tuple(elsewhere)).to_bytes(),
    )

    async with sharing(tmp_path) as (coordinator, first, second):
        for number, content in enumerate(contents):
            wanted = structs.replace(WANTED, job_id=f"job {number}")
            first.content = content
            await first.open(wanted)
            assert (await second.open(wanted)).given is None
            refused = [one.refused_by for one in coordinator.said if one.refused_by]
            assert refused == [coordinator.said[0].node_id] * (number + 1)
    assert not [*tmp_path.glob("node-1/index/*/*.manifest")]  # noqa: ASYNC240 - nobody waits


async def test_jobs_that_open_the_same_dataset_on_the_same_nodes_do_not_take_it_from_each_other(
    tmp_path: Path,
) -> None:
    other = structs.replace(WANTED, job_id="another job")

    async with sharing(tmp_path) as (_, first, second):
        for wanted in (WANTED, other):
            await first.open(wanted)
        for wanted in (WANTED, other):
            assert (await second.open(wanted)).given is not None


async def test_a_node_whose_cache_folder_cannot_be_used_gets_it_and_blames_nobody(
    tmp_path: Path,
) -> None:
    (tmp_path / "node-1").touch()

    async with sharing(tmp_path) as (coordinator, first, second):
        await first.open()
        assert (await second.open()).given is not None
        assert not any(one.refused_by for one in coordinator.said)


async def test_a_node_that_reaches_none_of_many_does_not_try_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_manifests, "_FETCHES_MAX", 1)

    async with sharing(tmp_path, 3) as (coordinator, first, second, third):
        for node in (first, second):
            await node.open()
        for node in (first, second):
            node.lender.lending.close()
        assert (await third.open()).given is None
        assert len([one for one in coordinator.said if one.refused_by]) == 1


async def test_bytes_that_nobody_reads_are_dropped_and_made_again_when_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_manifests, "IDLE_S", 0.7)

    async with sharing(tmp_path, 3) as (_, first, second, third):
        await first.open()
        assert (await second.open()).given is not None
        second.shared.forget(WANTED)
        (lent,) = first.lent._lent.values()
        await first.lender.until(lambda: first.lent.tick() or not lent.arena_id)
        assert (await third.open()).given is not None


async def test_a_node_that_has_closed_it_gives_it_no_more(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (_, first, second):
        await first.open()
        first.shared.forget(WANTED)
        assert (await second.open()).given is None


async def test_who_cannot_make_it_says_so_and_the_next_one_does(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (coordinator, first, second):
        first.fault = StoreError("no such bucket", shard="s3://b/")
        with pytest.raises(StoreError, match="no such bucket"):
            await first.open()
        assert (await second.open()).given is None
        assert ManifestState.FAILED in [one.state for one in coordinator.said]
        first.fault = None
        assert (await first.open()).given is not None


async def test_a_coordinator_that_is_away_is_waited_for_as_long_as_for_a_join(
    tmp_path: Path,
) -> None:
    async with sharing(tmp_path, 1, stall_timeout_s=0.1) as (coordinator, first):
        coordinator.lost = 1
        await first.open()
        assert [one.state.value for one in coordinator.said] == ["wanted", "wanted", "held"]
        coordinator.lost = 10**6
        other = structs.replace(WANTED, incarnation="another")
        assert (await first.open(other)).given is None


async def test_a_refusal_of_the_coordinator_is_the_error_of_opening(tmp_path: Path) -> None:
    async with sharing(tmp_path, 1) as (coordinator, first):
        coordinator.refusal = AccessDenied("its token does not allow s3://b/", call="ShareManifest")
        with pytest.raises(AccessDenied, match="does not allow"):
            await first.open()
        assert first.made == []


NOT_SHARED = {
    "a folder of this host": ("/data/train/",),
    "partly": ("s3://b/", "file:///data/"),
    "saved already": ("s3://b/all.manifest",),
    "signed": ("https://h/a.parquet?X-Amz-Signature=secret",),
}


async def test_what_is_not_the_same_for_all_nodes_or_cheap_to_read_is_not_asked_for(
    tmp_path: Path,
) -> None:
    async with sharing(tmp_path, 1) as (coordinator, first):
        for why, urls in NOT_SHARED.items():
            wanted = structs.replace(WANTED, source=DatasetSource(urls))
            assert (await first.open(wanted)).given is None, why
            assert coordinator.said == [], why


async def test_an_embedded_node_asks_nobody(tmp_path: Path) -> None:
    async with sharing(tmp_path, 1, embedded=True) as (coordinator, first):
        await first.open()
        assert coordinator.said == []


def test_all_that_a_manifest_depends_on_is_in_its_name() -> None:
    others = [
        structs.replace(WANTED, source=DatasetSource(("s3://b/", "s3://c/"))),
        structs.replace(WANTED, source=DatasetSource(("s3://b/",), "parquet")),
        structs.replace(WANTED, view=View(where="x > 1")),
        structs.replace(WANTED, view=View(limit=3)),
        structs.replace(WANTED, seed=1),
    ]
    assert len({one.name for one in (WANTED, *others)}) == 1 + len(others)
    assert structs.replace(WANTED).name == WANTED.name
