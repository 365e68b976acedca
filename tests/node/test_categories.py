"""The values of a column are limited in number, and are read once for all jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.node import counts
from dataplane.node.counts import CategoryReader, DistinctValues, united
from dataplane.node.own_reads import Categories

FOUND: Categories = {"kind": pa.array([1, 2])}


def add_thousands(found: DistinctValues, count: int) -> None:
    for start in range(0, 1000 * count, 1000):
        found.add(pa.array(range(start, start + 1000)))


def test_too_many_values_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "VALUES_MAX", 20_000)
    found = DistinctValues("user", pa.int64())
    add_thousands(found, 15)
    with pytest.raises(ConfigError, match=r"column 'user' has too many.*leave it out of codes"):
        add_thousands(found, 60)
    monkeypatch.setattr(counts, "BYTES_MAX", 1000)
    found = DistinctValues("text", pa.large_binary())
    found.add(pa.array([b"x" * 2000], pa.large_binary()))
    with pytest.raises(ConfigError, match="column 'text' has too many"):
        found.in_order()


def test_values_are_sorted_whatever_they_came_in() -> None:
    found = DistinctValues("kind", pa.int64())
    for _ in range(30):
        found.add(pa.array(range(999, -1, -1)))
    assert found.in_order().to_pylist() == list(range(1000))


class Reader:
    """A reader whose passes end when a test says so."""

    def __init__(self, folder: Path) -> None:
        config: Any = SimpleNamespace(cache_dir=str(folder), has_workers=True)
        self.manifest: Any = SimpleNamespace(fingerprint="f", categories={})
        self.reader = CategoryReader(config, cast("Any", None))
        self.begun, self.given_up = 0, 0
        self.beginnings: asyncio.Queue[None] = asyncio.Queue()
        self.answer: asyncio.Future[Categories] = asyncio.get_running_loop().create_future()
        cast("Any", self.reader)._read = self.read

    async def read(self, *_: object) -> Categories:
        self.begun += 1
        self.beginnings.put_nowait(None)
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.given_up += 1
            raise

    def rank(self) -> asyncio.Task[Categories]:
        return asyncio.get_running_loop().create_task(self.reader.read(self.manifest, ["kind"]))

    async def begins(self) -> None:
        async with asyncio.timeout(60):
            await self.beginnings.get()

    async def is_waited_for_by(self, count: int) -> None:
        async with asyncio.timeout(60):
            sought = self.reader._passes._sought
            while sum(one.waiting for one in sought.values()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_ranks_share_one_pass_and_its_last_one_gives_it_up(tmp_path: Path) -> None:
    world = Reader(tmp_path)
    gone, stays = world.rank(), world.rank()
    await world.begins()
    await world.is_waited_for_by(2)
    gone.cancel()
    await asyncio.wait([gone])
    world.answer.set_result(FOUND)
    assert (await stays)["kind"].to_pylist() == [1, 2]
    assert (await world.rank())["kind"].to_pylist() == [1, 2]  # remembered
    assert (world.begun, world.given_up) == (1, 0)


async def test_an_abandoned_pass_is_closed_and_started_again(tmp_path: Path) -> None:
    world = Reader(tmp_path)
    gone = world.rank()
    await world.begins()
    gone.cancel()
    await asyncio.wait([gone])
    world.answer = asyncio.get_running_loop().create_future()
    again = world.rank()
    await world.begins()
    assert world.given_up == 1
    world.answer.set_exception(CorruptShard("the shard s is damaged", shard="s"))
    with pytest.raises(CorruptShard, match="the shard s is damaged"):
        await again


def test_sources_of_a_mixture_with_codes_of_several_kinds_are_told_apart_in_plain_words() -> None:
    values = {"a": {"t": pa.array([b"x"], pa.large_binary())}, "b": {"t": pa.array([1])}}
    with pytest.raises(ConfigError, match="'t' has text in source 'a' and int64 in 'b'"):
        united(values)
