"""Reads that a neighbour is asked for before the store: real fetchers, lenders and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from awry import Awry
from fetching import BODY, LENGTH, PARTS, URL, Node, awry, etag, node
from lender import BLOCK_BYTES, LendingNode, lending_node

from dataplane.fetcher.neighbours import FAILURES_MAX
from dataplane.model.errors import DataplaneError, NeighbourGone
from dataplane.model.records import BlockForm, Region, StorePause
from dataplane.neighbours.wire import GIVEN_WHOLE, NOT_GIVEN
from dataplane.rpc import fetches, tasks
from dataplane.rpc.lending import Asked

pytestmark = pytest.mark.usefixtures("one_fork_server")

__all__ = ["awry", "etag"]

GAVE = fetches.NeighbourGave(LENGTH)


def order(etag: str, neighbour: fetches.Neighbour, at: int = 0) -> fetches.ReadRange:
    into = Region(at, LENGTH)
    return fetches.ReadRange(0, URL, 10, etag, tasks.BLOCK_ARENA, into, neighbour=neighbour)


def no_store(at: Node) -> None:
    """Nothing is asked of the store, however late a busy machine makes a neighbour."""
    at.fetchers.start()
    at.all_pauses.publish(StorePause("s3://bucket", 3, 1e6))


async def from_store(at: Node, awry: Awry, read: fetches.ReadRange) -> None:
    """The read ends with the bytes of the store."""
    awry.seen.clear()
    assert await at.end_of(read) is None
    assert at.bytes_at(read.into.offset) == BODY[10 : 10 + LENGTH]
    # More than once if the neighbour was left alone just after its read was hedged, and on a busy
    # machine, where the store's own answer may be hedged too.
    assert set(awry.seen) == {("GET", f"bytes=10-{9 + LENGTH}")}


async def test_a_neighbours_bytes_arrive_and_the_store_is_not_asked(awry: Awry, etag: str) -> None:
    async with node() as at, lending_node() as lent:
        no_store(at)
        reads = [order(etag, lent.neighbour(n, 50), n * LENGTH) for n in range(5)]
        assert await asyncio.gather(*map(at.end_of, reads)) == [GAVE] * 5
        for n in range(5):
            assert at.bytes_at(n * LENGTH) == lent.block(n, 50, LENGTH)
        assert awry.seen == []
        assert at.fetchers.statistics().neighbour_bytes == 5 * LENGTH
        assert at.fetchers.statistics().read_bytes == 0
        await lent.until(lambda: len(lent.given) == 5)


async def test_what_a_neighbour_refuses_is_read_from_the_store(awry: Awry, etag: str) -> None:
    async with node() as at, lending_node() as lent:
        lent.answer = lambda asked: lent.lending.refuse(asked.number)
        for _ in range(2 * FAILURES_MAX):  # a refusal is no failure
            await from_store(at, awry, order(etag, lent.neighbour()))
        assert len(lent.asked) == 2 * FAILURES_MAX
        assert at.fetchers.statistics().neighbour_bytes == 0
        assert at.fetchers.statistics().read_bytes == 2 * FAILURES_MAX * LENGTH


async def test_a_block_that_is_only_decoded_is_asked_for_in_that_form(
    awry: Awry, etag: str
) -> None:
    async with node() as at, lending_node() as lent:
        no_store(at)
        lent.answer = lambda asked: lent.give_decoded(asked, 4321)
        assert await at.end_of(order(etag, lent.neighbour())) == fetches.HeldDecoded(4321)
        lent.answer = lent.give
        decoded = lent.neighbour(3, form=BlockForm.DECODED)
        assert await at.end_of(order(etag, decoded)) == GAVE
        assert at.bytes_at(0) == lent.block(3, 0, LENGTH)
        assert awry.seen == []
        assert at.fetchers.statistics().read_bytes == 0
        lent.answer = lambda asked: lent.lending.refuse(asked.number)
        refused = await at.end_of(order(etag, decoded))
        assert type(refused) is NeighbourGone
        assert refused.peer == decoded.peer.node_id
        assert awry.seen == []


LENGTHS = [into.length for _, into in PARTS]
RUN_GAVE = fetches.NeighbourGave(sum(LENGTHS))


def run_order(etag: str, neighbour: fetches.Neighbour) -> fetches.ReadRange:
    first, *more = [fetches.ReadTarget(part.offset, into) for part, into in PARTS]
    return fetches.ReadRange(
        0, URL, first.offset, etag, tasks.BLOCK_ARENA, first.into, tuple(more), neighbour
    )


async def test_of_a_run_only_what_the_neighbour_gives_is_read_and_the_rest_is_told(
    awry: Awry, etag: str
) -> None:
    async with node() as at, lending_node() as lent:
        no_store(at)
        neighbour_bytes = 0
        for ends in itertools.product((GIVEN_WHOLE, NOT_GIVEN, 4321), repeat=len(PARTS)):
            for _, into in PARTS:
                at.arena.view(into.offset, into.length)[:] = bytes(into.length)

            def answer(asked: Asked, ends: tuple[int, ...] = ends) -> None:
                if all(end == NOT_GIVEN for end in ends):
                    lent.lending.refuse(asked.number)
                else:
                    lent.give_run(asked, LENGTHS, ends)

            lent.answer = answer
            found = await at.end_of(run_order(etag, lent.neighbour(2)))
            assert found == (fetches.PartlyGiven(ends) if any(ends) else RUN_GAVE)
            for number, ((_, into), end) in enumerate(zip(PARTS, ends, strict=True)):
                expected = bytes(into.length)
                if end == GIVEN_WHOLE:
                    expected = lent.block(2 + number, 0, into.length)
                    neighbour_bytes += into.length
                assert at.bytes_at(into.offset, into.length) == expected
        assert awry.seen == []
        told = at.fetchers.statistics()
        assert (told.neighbour_bytes, told.read_bytes) == (neighbour_bytes, 0)
        assert told.hedged_bytes == 0


async def test_a_run_of_a_neighbour_that_stalls_or_is_gone_is_one_read_of_the_store(
    awry: Awry, etag: str
) -> None:
    async with node() as at, lending_node() as lent:
        lent.answer = lambda asked: lent.give_run(asked, LENGTHS, (GIVEN_WHOLE,) * 3)
        assert await at.end_of(run_order(etag, lent.neighbour(2))) == RUN_GAVE
        assert awry.seen == []
        os.kill(lent.lending.pid, signal.SIGSTOP)
        for neighbour in (lent.neighbour(2), lent.neighbour(address="127.0.0.1:1")):
            awry.seen.clear()
            assert await at.end_of(run_order(etag, neighbour)) is None
            at.check_parts()
            last, _ = PARTS[-1]
            assert awry.seen == [("GET", f"bytes=10-{last.offset + last.length - 1}")]
        os.kill(lent.lending.pid, signal.SIGCONT)


@contextlib.contextmanager
def between(
    target: tuple[str, int], forward: Callable[[bytes, int], bytes | None]
) -> Iterator[str]:
    """A way to a lender that changes what it sends: `forward` gets bytes and how many came before
    on this connection; None ends the connection. Yields its address.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    open_socks: list[socket.socket] = [listener]
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, sink: socket.socket, *, changed: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                sent = forward(piece, seen) if changed else piece
                seen += len(piece)
                if sent is None:
                    break
                sink.sendall(sent)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(target)
                open_socks.extend((near, far))
                for source, sink, changed in ((near, far, False), (far, near, True)):
                    start(lambda a=source, b=sink, c=changed: pump(a, b, changed=c))

    def start(work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    start(accept)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for each in open_socks:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for each in open_socks:
            each.close()


def _through(lent: LendingNode, address: str) -> fetches.Neighbour:
    return lent.neighbour(1, address=address)


async def test_a_connection_that_ends_in_mid_payload_costs_no_byte(awry: Awry, etag: str) -> None:
    async with node() as at, lending_node() as lent:
        target = lent.listens_at
        with between(target, lambda piece, seen: piece if seen < 1 << 16 else None) as address:
            await from_store(at, awry, order(etag, _through(lent, address)))
        await lent.until(lambda: lent.given)  # its region is free


async def test_bytes_that_are_wrong_are_read_from_the_store(awry: Awry, etag: str) -> None:
    def spoil(piece: bytes, seen: int) -> bytes:
        if seen < 1000 or seen > 150_000:
            return piece
        return bytes([piece[0] ^ 1]) + piece[1:]

    async with node() as at, lending_node() as lent:
        target = lent.listens_at
        with between(target, spoil) as address:
            await from_store(at, awry, order(etag, _through(lent, address)))
        assert at.fetchers.statistics().neighbour_bytes == 0


async def test_a_neighbour_that_stalls_is_overtaken_by_the_store(awry: Awry, etag: str) -> None:
    async with node() as at, lending_node() as lent:
        assert await at.end_of(order(etag, lent.neighbour())) == GAVE
        os.kill(lent.lending.pid, signal.SIGSTOP)
        await from_store(at, awry, order(etag, lent.neighbour()))
        found = at.fetchers.statistics()
        assert (found.read_bytes, found.hedged_bytes) == (LENGTH, 0)
        assert at.fetchers.statistics().neighbour_bytes == LENGTH
        # All that waits for it is read from the store, not only a share of it.
        reads = [order(etag, lent.neighbour(n), n * LENGTH) for n in range(5)]
        assert await asyncio.gather(*map(at.end_of, reads)) == [None] * 5
        for n in range(5):
            assert at.bytes_at(n * LENGTH) == BODY[10 : 10 + LENGTH]
        # It is left alone now.
        os.kill(lent.lending.pid, signal.SIGCONT)
        asked = len(lent.asked)
        await from_store(at, awry, order(etag, lent.neighbour(7)))
        assert all(each.request.block != 7 for each in lent.asked[asked:])


async def test_a_neighbour_that_stalls_with_a_decoded_block_is_not_waited_for(
    awry: Awry, etag: str
) -> None:
    """No store has the block in this form: it is read in another one."""

    async with node() as at, lending_node() as lent:
        decoded = lent.neighbour(3, form=BlockForm.DECODED)
        assert await at.end_of(order(etag, decoded)) == GAVE
        lent.answer = lambda asked: None
        late = await at.end_of(order(etag, decoded))
        assert type(late) is NeighbourGone
        assert "did not answer in time" not in str(late)
        assert awry.seen == []


@pytest.mark.parametrize("how", ["gone", "another key", "another node"])
async def test_a_neighbour_that_cannot_be_reached_costs_no_read(
    awry: Awry, etag: str, how: str
) -> None:
    async with node() as at, lending_node() as lent:
        asked = {
            "gone": lent.neighbour(address="127.0.0.1:1"),
            "another key": lent.neighbour(key=bytes(32)),
            "another node": lent.neighbour(node_id="node-9"),
        }[how]
        for _ in range(FAILURES_MAX + 2):
            await from_store(at, awry, order(etag, asked))
        assert lent.asked == []


async def test_a_connection_that_has_died_unused_is_opened_again(awry: Awry, etag: str) -> None:
    async with node() as at, lending_node() as lent:
        no_store(at)
        for _ in range(3):
            assert await at.end_of(order(etag, lent.neighbour())) == GAVE
            os.kill(lent.lending.pid, signal.SIGKILL)
            await lent.until(lambda: not lent.lending.pid)
            await lent.until(lambda: lent.lending.pid)
        assert awry.seen == []


async def test_the_store_and_its_errors_still_count(awry: Awry, etag: str) -> None:
    async with node() as at, lending_node() as lent:
        lent.answer = lambda asked: lent.lending.refuse(asked.number)
        error: DataplaneError | None = await at.end_of(order('"another"', lent.neighbour()))
        assert error is not None
        assert error.expected == '"another"'
        assert BLOCK_BYTES > LENGTH
