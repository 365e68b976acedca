"""Preambles that indexing has read are remembered."""

import asyncio

from dataplane.model.records import Region
from dataplane.node.fetch import BlockRead, Fetcher, Report
from dataplane.node.stored import REMEMBERED_MAX, Preambles
from dataplane.rpc import fetches, tasks
from dataplane.rpc.membership import NodeReads

BYTES = bytes(range(16))
PLACE = Region(8, 16)


def test_so_many_preambles_are_remembered_and_no_more() -> None:
    preambles, place = Preambles(64 << 10), Region(8, 16)
    for number in range(REMEMBERED_MAX + 1):
        preambles.remember(f"shard {number}", "tag", place, BYTES)
    first, last = (
        preambles.hold(key, f"shard {number}", "tag", place)
        for key, number in enumerate((0, REMEMBERED_MAX))
    )
    assert first is not None
    assert not preambles.fill(first)
    assert last is not None
    assert preambles.fill(last)
    assert bytes(preambles.arena.view(last.region.offset, 16)) == BYTES
    preambles.close()


class Noted:
    """An origin that notes what it is to read, and reads nothing."""

    def __init__(self) -> None:
        self.orders: list[fetches.ReadBody] = []

    def read(self, order: fetches.ReadBody, report: Report) -> None:
        self.orders.append(order)
        asyncio.get_running_loop().call_soon(report, None)

    def start(self, store: str = "") -> None: ...

    def trouble(self, url: str) -> None: ...

    def tick(self) -> None: ...

    def statistics(self) -> NodeReads:
        return NodeReads()

    def close(self) -> None: ...


def test_a_preamble_that_indexing_has_read_is_not_read_again() -> None:
    origin, preambles = Noted(), Preambles(64 << 10)
    fetcher = Fetcher(origin, preambles)
    fetcher.remember_preamble("known", "tag", PLACE, BYTES)
    fetcher.remember_preamble("changed", "old tag", PLACE, BYTES)
    fetcher.remember_preamble("shorter", "tag", Region(8, 15), BYTES[:15])

    async def run() -> None:
        for key, url in enumerate(("known", "known", "changed", "shorter")):
            raw = tasks.RawBlockRef(url, 0, 1, Region(64, 10), PLACE, 100, "tag")
            ended: asyncio.Future[object] = asyncio.Future()
            read = BlockRead(key, raw, Region(32 * key, 26), ended.set_result, copied_to=None)
            fetcher.fetch([read])
            assert await asyncio.wait_for(ended, 60.0) is None
            told, _ = fetcher.for_worker(key, raw)
            if url == "known":
                place = told.kept_preamble
                assert bytes(preambles.arena.view(place.offset, place.length)) == BYTES

    try:
        asyncio.run(run())
    finally:
        fetcher.close()
    read = [o.url for o in origin.orders if isinstance(o, fetches.ReadRange) and o.offset == 8]
    assert read == ["changed", "shorter"]
