"""Makers that break the rules, stop or die, and fetchers that die: real processes and sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

import psutil
import pytest
from slab_makers import (
    SLOT_BYTES,
    SLOTS,
    false_maker,
    makers,
    reader,
)

from dataplane.model.errors import NeighbourGone
from dataplane.neighbours import wire
from dataplane.neighbours.wire import Answer, Outcome
from dataplane.rpc.lending import Request

pytestmark = pytest.mark.usefixtures("one_fork_server")


def _answers(
    length: int, note_bytes: int = 0, sent: int = 1 << 22
) -> Callable[[socket.socket, Request], None]:
    """Say that a slab of this length comes, and send so many bytes that do not fit the checksum."""

    def behave(sock: socket.socket, request: Request) -> None:
        answer = Answer(request.number, Outcome.GIVEN, length, 1, bytes(note_bytes))
        sock.sendall(wire.pack(answer) + b"x" * sent)

    return behave


@pytest.mark.parametrize(
    ("behave", "why"),
    [
        (_answers(SLOT_BYTES + 1), "an answer GIVEN of 1048577"),
        (_answers(SLOT_BYTES // 2), "an answer GIVEN of"),
        (_answers(1, wire.NOTE_BYTES_MAX + 1), f"{wire.NOTE_BYTES_MAX + 1} bytes"),
        (_answers(1000), "checksum"),
        (_answers(0, 10), "checksum"),
        pytest.param(_answers(1000, sent=999), "in time", marks=pytest.mark.slow),  # 5 s
        (lambda sock, _: sock.shutdown(socket.SHUT_RDWR), "closed the connection"),
        (lambda sock, _: sock.sendall(b"GET / HTTP/1.1" * 9), "where a frame begins"),
    ],
    ids=[
        "longer than its room",
        "longer than a smaller room",
        "a note that is too long",
        "wrong bytes",
        "a wrong note",
        "a stall",
        "an end",
        "garbage",
    ],
)
def test_a_maker_that_breaks_the_rules_writes_nothing_beyond_the_room(
    behave: Callable[[socket.socket, Request], None], why: str
) -> None:
    async def play() -> None:
        async with reader() as at, makers() as (honest,):
            at.slots.reserve(0, SLOTS * SLOT_BYTES)
            at.slots.buffer[:] = b"-" * len(at.slots.buffer)
            with false_maker(behave) as false:
                end = await at.end_of_slab(at.order(false, None, 1, SLOT_BYTES // 2 - 100))
            assert type(end.error) is NeighbourGone
            assert end.error.peer == "false"
            assert why in str(end.error)
            assert (end.length, end.note) == (0, b"")
            before, behind = SLOT_BYTES, SLOT_BYTES + SLOT_BYTES // 2 - 100
            assert at.slots.view(0, before) == b"-" * before
            rest = SLOTS * SLOT_BYTES - behind
            assert at.slots.view(behind, rest) == b"-" * rest
            assert (await at.slab(honest.maker())).error is None

    asyncio.run(play())


def test_a_maker_that_stops_is_overtaken_and_writes_nothing_after_that() -> None:
    async def play() -> None:
        async with reader() as at, makers(2) as (stopped, other):
            await at.know_how_long_slabs_take(stopped.maker())
            stopped.answer = lambda _: None
            read = asyncio.ensure_future(at.slab(stopped.maker(), other.maker(node_id="node-1")))
            asked = len(stopped.asked)
            await stopped.until(lambda: len(stopped.asked) > asked)
            stopped.give_slab(stopped.asked[-1])
            # It is stopped while it sends, or just before or after.
            os.kill(stopped.lending.pid, signal.SIGSTOP)
            end = await read
            assert end.error is None
            assert at.slot_bytes() in (bytes(stopped.made.buffer), bytes(other.made.buffer))
            reads = [at.slab(stopped.maker(), other.maker(), slot) for slot in range(SLOTS)]
            for slot, end in enumerate(await asyncio.gather(*reads)):
                assert (end.error, end.note) == (None, other.note)
                assert at.slot_bytes(slot) == bytes(other.made.buffer)
            stopped.answer = stopped.give_slab
            given = len(stopped.given)
            os.kill(stopped.lending.pid, signal.SIGCONT)
            await stopped.until(lambda: len(stopped.given) > given or not stopped.lending.pid)
            assert (await at.slab(stopped.maker(), slot=3)).note == stopped.note
            for slot in range(3):
                assert at.slot_bytes(slot) == bytes(other.made.buffer)
            assert len({read.number for read in at.reads}) == len(at.reads)

    asyncio.run(play())


def test_a_stall_in_the_middle_is_overtaken() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (honest,):
            await at.know_how_long_slabs_take(honest.maker())
            with false_maker(_answers(SLOT_BYTES, sent=SLOT_BYTES - 1)) as false:
                end = await at.slab(false, honest.maker())
            assert (end.error, end.note, end.length) == (None, honest.note, SLOT_BYTES)
            assert at.slot_bytes() == bytes(honest.made.buffer)

    asyncio.run(play())


def test_if_the_first_maker_fails_the_second_one_counts_and_if_both_fail_the_first() -> None:
    async def play() -> None:
        async with reader() as at, makers(2) as (first, second):
            await at.know_how_long_slabs_take(first.maker())
            for maker in (first, second):
                maker.answer = lambda _: None
            for is_given in (True, False):
                asked = len(second.asked)
                read = asyncio.ensure_future(at.slab(first.maker(), second.maker()))
                await second.until(lambda asked=asked: len(second.asked) > asked)
                first.lending.refuse(first.asked[-1].number)
                if is_given:
                    await second.until(lambda: first.asked)
                    second.give_slab(second.asked[-1])
                    end = await read
                    assert (end.error, end.note) == (None, second.note)
                    assert at.slot_bytes() == bytes(second.made.buffer)
                else:
                    second.lending.refuse(second.asked[-1].number)
                    end = await read
                    assert type(end.error) is NeighbourGone
                    assert "refused" in str(end.error)
                    assert first.address in str(end.error)

    asyncio.run(play())


@pytest.mark.parametrize("is_hedged", [False, True])
def test_a_slab_that_is_given_up_ends_at_once_and_is_not_written(is_hedged: bool) -> None:
    async def play() -> None:
        async with reader() as at, makers(2) as (first, second):
            await at.know_how_long_slabs_take(first.maker())
            for maker in (first, second):
                maker.answer = lambda _: None
            hedge = second.maker() if is_hedged else None
            order, asked = at.order(first.maker(), hedge), len(first.asked)
            read = asyncio.ensure_future(at.end_of_slab(order))
            await first.until(lambda: len(first.asked) > asked)
            if is_hedged:
                await second.until(lambda: second.asked)
            before = at.slot_bytes()
            at.fetchers.end_slab(at.numbers[-1])
            end = await read
            assert isinstance(end.error, NeighbourGone)
            assert end.error.peer == "node-1"
            assert "has sent no slab for" in str(end.error)
            first.give_slab(first.asked[-1])
            await first.until(lambda: len(first.given) == len(first.asked))
            assert at.slot_bytes() == before
            at.fetchers.end_slab(at.numbers[-1])  # it has ended
            first.answer = first.give_slab
            assert (await at.slab(first.maker())).error is None

    asyncio.run(play())


def test_a_slow_first_maker_may_still_win() -> None:
    async def play() -> None:
        async with reader() as at, makers(2) as (first, second):
            await at.know_how_long_slabs_take(first.maker())
            for maker in (first, second):
                maker.answer = lambda _: None
            read = asyncio.ensure_future(at.slab(first.maker(), second.maker()))
            await second.until(lambda: second.asked)
            first.give_slab(first.asked[-1])
            end = await read
            assert (end.error, end.note) == (None, first.note)
            second.give_slab(second.asked[-1])  # nobody waits for it any more
            await second.until(lambda: second.given)
            assert at.slot_bytes() == bytes(first.made.buffer)
            assert second.lending.lent_bytes == 0

    asyncio.run(play())


def test_a_killed_maker_is_told_and_the_next_one_knows_its_arenas() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            maker.answer = lambda _: None
            reads = [asyncio.ensure_future(at.slab(maker.maker(), slot=n)) for n in range(SLOTS)]
            await maker.until(lambda: len(maker.asked) == SLOTS)
            os.kill(maker.lending.pid, signal.SIGKILL)
            ends = await asyncio.gather(*reads)
            assert [type(end.error) for end in ends] == [NeighbourGone] * SLOTS
            maker.answer = maker.give_slab
            while (await at.slab(maker.maker())).error is not None:  # until it is there again
                pass
            assert at.slot_bytes() == bytes(maker.made.buffer)

    asyncio.run(play())


def test_the_slabs_of_a_killed_fetcher_are_told_and_another_one_reads_the_next() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            maker.answer = lambda _: None
            reads = [asyncio.ensure_future(at.slab(maker.maker(), slot=n)) for n in range(SLOTS)]
            await maker.until(lambda: len(maker.asked) == SLOTS)
            (pid,) = at.fetchers.pids
            os.kill(pid, signal.SIGKILL)
            ends = await asyncio.gather(*reads)
            assert [type(end.error) for end in ends] == [NeighbourGone] * SLOTS
            assert {end.error.peer for end in ends if end.error} == {""}, "no maker's fault"
            assert not psutil.pid_exists(pid)
            maker.answer = maker.give_slab
            assert (await at.slab(maker.maker())).error is None
            assert at.slot_bytes() == bytes(maker.made.buffer)
            assert at.fetchers.pids != (pid,)

    asyncio.run(play())
