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
                end = await at.end_of_slab(at.order(false, 1, SLOT_BYTES // 2 - 100))
            assert type(end.error) is NeighbourGone
            assert end.error.peer == "false"
            assert why in str(end.error)
            assert (end.neighbour_bytes, end.note) == (0, b"")
            before, behind = SLOT_BYTES, SLOT_BYTES + SLOT_BYTES // 2 - 100
            assert at.slots.view(0, before) == b"-" * before
            rest = SLOTS * SLOT_BYTES - behind
            assert at.slots.view(behind, rest) == b"-" * rest
            assert (await at.slab(honest.maker())).error is None

    asyncio.run(play())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_slab_that_is_given_up_ends_at_once_and_is_not_written(is_stopped: bool) -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            assert (await at.slab(maker.maker())).error is None
            maker.answer = lambda _: None
            asked = len(maker.asked)
            read = asyncio.ensure_future(at.end_of_slab(at.order(maker.maker())))
            await maker.until(lambda: len(maker.asked) > asked)
            if is_stopped:
                os.kill(maker.lending.pid, signal.SIGSTOP)
            before = at.slot_bytes()
            at.fetchers.end_slab(at.numbers[-1])
            end = await read
            assert isinstance(end.error, NeighbourGone)
            assert end.error.peer == "node-1"
            assert "has sent no slab for" in str(end.error)
            maker.give_slab(maker.asked[-1])
            if is_stopped:
                os.kill(maker.lending.pid, signal.SIGCONT)
            await maker.until(lambda: len(maker.given) == len(maker.asked))
            assert at.slot_bytes() == before
            at.fetchers.end_slab(at.numbers[-1])  # it has ended
            maker.answer = maker.give_slab
            assert (await at.slab(maker.maker())).error is None

    asyncio.run(play())


def test_a_slab_is_given_up_in_the_middle_of_its_bytes() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (honest,):
            assert (await at.slab(honest.maker())).error is None
            at.slots.buffer[:SLOT_BYTES] = b"-" * SLOT_BYTES
            with false_maker(_answers(SLOT_BYTES, sent=SLOT_BYTES - 1)) as false:
                read = asyncio.ensure_future(at.end_of_slab(at.order(false)))
                await at.until(lambda: at.slot_bytes()[SLOT_BYTES // 2] == ord("x"))
                at.fetchers.end_slab(at.numbers[-1])
                assert isinstance((await read).error, NeighbourGone)

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
