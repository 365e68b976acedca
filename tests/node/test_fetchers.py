"""Fetchers as processes: what they read, what they report, and their ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest
from awry import Awry, Mood
from fetching import ARENA_BYTES, BODY, LENGTH, PARTS, TIMEOUT_S, URL, awry, etag, node
from servers import S3Server, reach

from dataplane.arena.memfd import Arena
from dataplane.fetcher.process import Reads
from dataplane.model.errors import (
    DataplaneError,
    DatasetChangedError,
    ShardNotFound,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from dataplane.model.records import Region, StorePause
from dataplane.rpc import fetches, local, tasks
from dataplane.rpc.fetches import READS_MAX
from dataplane.store.connect import Stores, open_store

pytestmark = pytest.mark.usefixtures("one_fork_server")

__all__ = ["awry", "etag"]


async def test_ranges_of_a_real_store_arrive_and_its_errors_keep_their_types(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(s3_server, monkeypatch)
    bucket = s3_server.bucket()
    s3_server.put(bucket, {"shard.bin": BODY})
    url = f"s3://{bucket}/shard.bin"
    etag = open_store(f"s3://{bucket}").head(url).etag

    async with node() as at:
        reads = [at.read(etag, place * LENGTH, url=url) for place in range(4)]
        assert await asyncio.gather(*reads) == [None] * 4
        for place in range(4):
            assert at.bytes_at(place * LENGTH) == BODY[10 : 10 + LENGTH]
        assert 4 * LENGTH <= os.fstat(at.arena.fd).st_blocks * 512 <= 4 * LENGTH + (64 << 10)
        changed = await at.read('"another"', url=url)
        assert isinstance(changed, DatasetChangedError)
        assert (changed.expected, changed.found) == ('"another"', etag)
        missing = await at.read(etag, url=f"s3://{bucket}/nothing")
        assert isinstance(missing, ShardNotFound)
        assert "it was there when the dataset was indexed" in str(missing)
        assert missing.shard == f"s3://{bucket}/nothing"
        assert len(at.fetchers.pids) == 1


async def test_requests_are_counted_with_their_errors_and_retries(awry: Awry, etag: str) -> None:

    async with node(1) as at:
        awry.moods.extend([Mood.WELL, Mood.SLOW_DOWN, Mood.SLOW_DOWN, Mood.INTERNAL])
        before = len(awry.seen)
        for _ in range(3):
            assert await at.read(etag) is None
        meters, count = at.fetchers.stores.by_store, len(awry.seen) - before
        async with asyncio.timeout(TIMEOUT_S):
            while (  # noqa: ASYNC110 - counts are reported without an event
                sum(sum(store.took.counts) for store in meters.values()) < count
            ):
                await asyncio.sleep(0.01)
        counts = meters["s3://bucket"]
        assert counts.errors == {"StoreThrottled": 2, "StoreUnavailable": 1}
        assert (counts.retries, sum(counts.took.counts)) == (3, 6)
        assert 0 < counts.took.sum_s < TIMEOUT_S
        assert (at.fetchers.start_count, at.fetchers.death_count) == (1, 0)


async def test_the_reads_of_a_killed_fetcher_are_read_by_another(awry: Awry, etag: str) -> None:

    async with node() as at:
        awry.be(then=Mood.STALL)
        reads = [asyncio.ensure_future(at.read(etag, n * LENGTH)) for n in (3, 4)]
        reads.append(asyncio.ensure_future(at.read_parts(etag)))
        await at.until(lambda: len(awry.seen) == 3)
        (pid,) = at.fetchers.pids
        awry.be()
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*reads) == [None] * 3
        for n in (3, 4):
            assert at.bytes_at(n * LENGTH) == BODY[10 : 10 + LENGTH]
        at.check_parts()
        assert set(awry.seen) == {("GET", f"bytes=10-{9 + LENGTH}")}
        assert len(at.fetchers.pids) == 1
        assert at.fetchers.pids != (pid,)


async def test_the_reads_of_a_stopped_fetcher_are_read_by_another(
    awry: Awry, etag: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that it is given while nobody knows yet that it hangs."""
    monkeypatch.setattr("dataplane.node.fetchers.HUNG_S", 0.2)

    async with node() as at:
        awry.be(then=Mood.STALL)
        reads = [asyncio.ensure_future(at.read(etag, n * LENGTH)) for n in range(4)]
        await at.until(lambda: len(awry.seen) == 4)
        (pid,) = at.fetchers.pids
        awry.be()
        os.kill(pid, signal.SIGSTOP)
        reads.append(asyncio.ensure_future(at.read(etag, 4 * LENGTH)))
        await at.until(lambda: at.fetchers.tick() or pid not in at.fetchers.pids)
        assert await asyncio.gather(*reads) == [None] * 5
        for n in range(5):
            assert at.bytes_at(n * LENGTH) == BODY[10 : 10 + LENGTH]
        (another,) = at.fetchers.pids
        # An idle one hangs unnoticed, until it gets something to do.
        os.kill(another, signal.SIGSTOP)
        at.fetchers.tick()
        read = asyncio.ensure_future(at.read(etag))
        await at.until(lambda: at.fetchers.tick() or another not in at.fetchers.pids)
        assert await read is None
    assert caplog.text.count("fetcher hung") == 2


async def test_parts_of_one_read_go_to_their_places_and_what_lies_between_nowhere(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(s3_server, monkeypatch)
    bucket = s3_server.bucket()
    s3_server.put(bucket, {"shard.bin": BODY})
    monkeypatch.setattr("fetching.URL", f"s3://{bucket}/shard.bin")
    etag = open_store(f"s3://{bucket}").head(f"s3://{bucket}/shard.bin").etag

    async with node() as at:
        at.arena.reserve(0, ARENA_BYTES)
        at.arena.buffer[:] = b"x" * ARENA_BYTES
        assert await at.read_parts(etag) is None
        at.check_parts()
        written = sum(part.length for part, _ in PARTS)
        assert bytes(at.arena.buffer).count(b"x") >= ARENA_BYTES - written
        for _, into in PARTS:
            assert at.bytes_at(into.offset + into.length, 1) == b"x"
        assert at.fetchers.statistics().read_bytes == LENGTH
        changed = await at.read_parts('"another"')
        assert isinstance(changed, DatasetChangedError)


async def test_a_read_that_ends_every_fetcher_fails_and_names_its_shard(
    awry: Awry, etag: str
) -> None:

    async with node() as at:
        awry.be(then=Mood.STALL)
        read = asyncio.ensure_future(at.read(etag))
        for count in range(1, 4):
            await at.until(lambda count=count: len(awry.seen) == count)
            os.kill(at.fetchers.pids[0], signal.SIGKILL)
        error = await read
        assert type(error) is StoreError
        assert error.shard == URL
        assert "status -9" in str(error)
        awry.be()
        assert await at.read(etag) is None


async def test_reads_that_wait_for_a_thread_get_another_fetcher_up_to_the_bound(
    awry: Awry, etag: str
) -> None:

    async with node(count=2) as at:
        awry.be(then=Mood.HANG)
        reads = [asyncio.ensure_future(at.read(etag)) for _ in range(READS_MAX + 3)]
        await at.until(lambda: len(awry.seen) == READS_MAX)
        assert len(at.fetchers.pids) == 1
        at.fetchers.tick()
        assert len(at.fetchers.pids) == 2
        await at.until(lambda: len(awry.seen) == READS_MAX + 3)
        for read in reads:
            read.cancel()


async def test_a_pause_that_one_process_was_asked_for_is_kept_by_all(awry: Awry, etag: str) -> None:

    async with node(budget_s=0.2) as at:
        assert await at.read(etag) is None
        awry.be(Mood.SLOW_DOWN)
        await at.read(etag)
        await at.until(lambda: at.pauses)
        assert (at.pauses[0].store, at.pauses[0].level) == ("s3://bucket", 1)

        awry.be()
        at.all_pauses.publish(StorePause("s3://bucket", 3, 1e6))  # the node's own calls were asked
        await asyncio.sleep(0)
        for _ in range(2):
            error = await at.read(etag)
            assert isinstance(error, StoreThrottled)
            os.kill(at.fetchers.pids[0], signal.SIGKILL)  # the next one knows it from the start
        assert awry.seen == []


async def test_an_outage_and_why_a_read_waits_are_told_until_it_is_over(
    awry: Awry, etag: str
) -> None:

    async with node() as at:
        awry.be(then=Mood.RESET)
        read = asyncio.ensure_future(at.read(etag))
        await at.until(lambda: at.fetchers.trouble(URL))
        assert isinstance(at.fetchers.trouble(URL), StoreUnavailable)
        assert [outage.is_over for outage in at.outages] == [False]
        awry.be()
        assert await read is None
        await at.until(lambda: len(at.outages) == 2 and not at.fetchers.trouble(URL))
        assert at.outages[1].is_over


async def test_what_a_killed_fetcher_alone_saw_is_over_with_it(awry: Awry, etag: str) -> None:

    async with node() as at:
        awry.be(then=Mood.RESET)
        read = asyncio.ensure_future(at.read(etag))
        await at.until(lambda: at.outages)
        awry.be()
        os.kill(at.fetchers.pids[0], signal.SIGKILL)
        assert await read is None
        assert [outage.is_over for outage in at.outages[:2]] == [False, True]
        assert at.fetchers.trouble(URL) is None


class Panic(BaseException):
    """The exception that libraries in Rust raise."""


@pytest.mark.parametrize("failure", [ZeroDivisionError("by zero"), Panic("index out of bounds")])
def test_whatever_a_store_raises_is_reported(failure: BaseException) -> None:
    """Any error is reported as a StoreError, which nobody tries again: it is a bug."""

    class Broken(Stores):
        def connect(self, url: str) -> Any:
            raise failure

    arena, broken = Arena.create("blocks", ARENA_BYTES), Broken()
    ours, theirs = local.pair()
    made: Any = broken
    reads = Reads(theirs, {tasks.BLOCK_ARENA: arena}, lambda _: made)

    def serve() -> None:
        with pytest.raises(DataplaneError):
            reads.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    order = fetches.ReadRange(7, URL, 0, "", tasks.BLOCK_ARENA, Region(0, 10))
    local.send(ours, fetches.ToFetcher(order))
    (body,) = [local.receive(ours, fetches.FromFetcher)[0].body]
    ours.close()
    thread.join(TIMEOUT_S)
    theirs.close()
    reads.close()
    arena.close()
    assert isinstance(body, fetches.ReadEnded)
    assert body.number == 7
    assert type(body.error) is StoreError
    assert f"{type(failure).__name__}: {failure}" in str(body.error)
