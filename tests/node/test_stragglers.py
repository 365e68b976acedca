"""Reads that take much longer than others, and are asked for a second time."""

from __future__ import annotations

import asyncio

import pytest
from awry import Awry, Mood
from fetching import ARENA_BYTES, BODY, LENGTH, TIMEOUT_S, URL, awry, awry_tls, etag, node

from dataplane.fetcher.neighbours import READS_MIN
from dataplane.model.records import StorePause
from dataplane.store.connect import open_store

pytestmark = pytest.mark.usefixtures("one_fork_server")

__all__ = ["awry", "awry_tls", "etag"]


@pytest.mark.parametrize(
    ("over", "mood"), [("awry", Mood.STALL), ("awry", Mood.HANG), ("awry_tls", Mood.STALL)]
)
async def test_a_straggler_is_asked_for_again_and_the_first_answer_counts(
    request: pytest.FixtureRequest, over: str, mood: Mood
) -> None:
    awry: Awry = request.getfixturevalue(over)
    etag = open_store("s3://bucket").head(URL).etag

    # So that neither a timeout nor a retry can end the straggler.
    async with node(budget_s=4 * TIMEOUT_S, request_timeout_s=2 * TIMEOUT_S) as at:
        for _ in range(READS_MIN):
            assert await at.read(etag) is None
        at.arena.view(0, LENGTH)[:] = bytes(LENGTH)
        awry.be(mood)
        assert await at.read(etag) is None
        assert at.bytes_at(0) == BODY[10 : 10 + LENGTH]
        assert awry.seen == [("GET", f"bytes=10-{9 + LENGTH}")] * 2
        found = at.fetchers.statistics()
        assert (found.hedged_bytes, found.read_bytes) == (LENGTH, (READS_MIN + 1) * LENGTH)
        # The budget is spent: a second one is not asked for again.
        awry.be(mood)
        late = asyncio.ensure_future(at.read(etag))
        await at.until(lambda: awry.seen)
        for _ in range(10):
            assert await at.read(etag, LENGTH) is None
        assert not late.done()
        assert len(awry.seen) == 11
        late.cancel()


async def test_a_late_read_of_several_parts_is_asked_for_again_as_a_whole(
    awry: Awry, etag: str
) -> None:

    async with node(budget_s=4 * TIMEOUT_S, request_timeout_s=2 * TIMEOUT_S) as at:
        for _ in range(READS_MIN):
            assert await at.read_parts(etag) is None
        at.arena.buffer[:] = bytes(ARENA_BYTES)
        awry.be(Mood.STALL)
        assert await at.read_parts(etag) is None
        at.check_parts()
        assert awry.seen == [("GET", f"bytes=10-{9 + LENGTH}")] * 2
        assert at.fetchers.statistics().hedged_bytes == LENGTH


async def test_a_read_that_waits_for_a_pause_is_no_straggler(awry: Awry, etag: str) -> None:

    async with node() as at:
        for _ in range(READS_MIN):
            assert await at.read(etag) is None
        awry.be(Mood.SLOW_DOWN)
        assert await at.read(etag) is None
        at.all_pauses.publish(StorePause("s3://bucket", 1, 0.5))
        await asyncio.sleep(0)
        assert await at.read(etag) is None
        assert at.fetchers.statistics().hedged_bytes == 0
