"""A node's lender as a process: what it sends, what the node hears of it, and its ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket

import pytest
from lender import BLOCK_BYTES, DATASET, GENERATION, JOB, free, lending_node

from dataplane.model.errors import NeighbourGone
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours.wire import GIVEN_WHOLE, NOT_GIVEN
from dataplane.rpc.lending import Asked, Request

pytestmark = pytest.mark.usefixtures("one_fork_server")


async def test_bytes_of_blocks_arrive_and_each_region_is_free_once() -> None:
    async with lending_node() as node:
        assert await node.ask(node.neighbour(1)) == node.block(1)
        part = await node.ask(node.neighbour(2, 100), 5)
        assert part == node.block(2, 100, 5)
        asked = node.asked[1]
        request = Request(asked.request.number, DATASET, 2, 100, 5, BlockForm.RAW)
        assert asked == Asked(asked.number, JOB, "node-2", request)
        many = [node.ask(node.neighbour(n % 8, form=BlockForm.DECODED)) for n in range(16)]
        assert await asyncio.gather(*many) == [node.block(n % 8) for n in range(16)]
        await node.until(lambda: len(node.given) == 18)
        assert sorted(node.given) == [asked.number for asked in node.asked]
        assert node.lending.lent_bytes == 17 * BLOCK_BYTES + 5


async def test_a_run_arrives_as_far_as_it_is_given_and_is_free_once() -> None:
    lengths = [7, 70_000, 1, BLOCK_BYTES]

    async with lending_node() as node:
        before = 0
        for ends in itertools.product((GIVEN_WHOLE, NOT_GIVEN, 12345), repeat=len(lengths)):
            into = [memoryview(bytearray(n)) for n in lengths]
            node.answer = lambda asked, e=ends: node.give_run(asked, lengths, e)
            answer = await asyncio.to_thread(node.lines.read, node.neighbour(2), into, free, bool)
            assert answer.ends == ends
            for number, (n, end) in enumerate(zip(lengths, ends, strict=True)):
                is_given = end == GIVEN_WHOLE
                assert into[number] == (node.block(2 + number, 0, n) if is_given else bytes(n))
            asked = node.asked[-1]
            request = asked.request
            assert (request.block, request.count, request.length) == (2, 4, sum(lengths))
            assert asked.number > before  # each of the blocks before has a number of its own
            before = asked.number + 3
            await node.until(lambda: len(node.given) == len(node.asked))
        assert node.given == [asked.number for asked in node.asked]
        given = 3 ** (len(lengths) - 1) * sum(lengths)
        assert node.lending.lent_bytes == given
        node.answer = node.give
        assert await node.ask(node.neighbour(1)) == node.block(1)  # the same connection


async def test_a_run_that_is_not_as_its_note_says_is_none() -> None:
    lengths, all_given = [7, 8], (GIVEN_WHOLE, GIVEN_WHOLE)

    async with lending_node() as node:
        into = [memoryview(bytearray(n)) for n in lengths]

        async def read() -> str:
            asked = node.neighbour(0), into, free, claims.append
            return (await asyncio.to_thread(node.lines.read, *asked)).outcome.name

        claims: list[None] = []
        node.answer = lambda asked: node.give_run(asked, lengths[:1], all_given[:1])
        assert await read() == "REFUSED"  # by the lender: the note is of another run
        node.answer = lambda asked: node.give_run(asked, [7, 9], all_given)
        assert await read() == "REFUSED"  # too long
        node.answer = lambda asked: node.give_run(asked, [7, 7], all_given)
        assert await read() == "REFUSED"  # too short
        node.answer = lambda asked: node.give_run(asked, [6, 8], (GIVEN_WHOLE, NOT_GIVEN))
        with pytest.raises(NeighbourGone, match="6 bytes for 1 of the blocks"):
            await read()
        await node.until(lambda: len(node.given) == 4)
        assert claims == []


async def test_the_node_hears_for_which_urls_the_key_of_a_connection_is() -> None:
    """Of the key with which it was opened, also when the job has another one by then."""

    async with lending_node() as node:
        whole, train = node.key, ("s3://b/train",)
        await node.ask(node.neighbour(1))
        node.key = os.urandom(32)
        node.lending.keys(JOB, GENERATION, node.key, train)
        await node.ask(node.neighbour(2, key=whole))  # the same connection
        node.lines.cut_off(node.address)
        await node.ask(node.neighbour(3))
        node.lending.keys(JOB, GENERATION, whole)
        await node.ask(node.neighbour(4))
        told = [(asked.request.block, asked.only_under) for asked in node.asked]
        assert told == [(1, ()), (2, ()), (3, train), (4, train)]


async def test_what_is_refused_or_only_decoded_is_told() -> None:
    async with lending_node() as node:
        node.answer = lambda asked: node.lending.refuse(asked.number)
        assert await node.ask(node.neighbour()) == b""
        node.answer = lambda asked: node.give_decoded(asked, 12345)
        into = memoryview(bytearray(7))
        answer = await asyncio.to_thread(node.lines.read, node.neighbour(), [into], free, bool)
        assert (answer.length, answer.ends) == (0, (12345,))
        await node.until(lambda: node.given == [node.asked[-1].number])


async def test_a_killed_lender_frees_its_regions_and_another_one_lends() -> None:
    async with lending_node() as node:
        node.answer = lambda _: None
        reads = [asyncio.ensure_future(node.ask(node.neighbour(n), 1000)) for n in range(3)]
        await node.until(lambda: len(node.asked) == 3)
        early, given, late = node.asked
        os.kill(node.lending.pid, signal.SIGSTOP)  # it cannot send what it is given
        node.give(given)
        assert node.given == []
        os.kill(node.lending.pid, signal.SIGKILL)
        await node.until(lambda: node.given)
        assert node.given == [given.number]
        node.lending.refuse(early.number)  # nobody waits for these
        node.give(late)
        await node.until(lambda: len(node.given) == 2)
        assert node.given == [given.number, late.number]
        ends = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(end) for end in ends] == [NeighbourGone] * 3
        node.answer = node.give
        assert await node.ask(node.neighbour(5)) == node.block(5)
        assert node.asked[-1].number > late.number


async def test_a_stopped_lender_frees_its_regions_and_another_one_lends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dataplane.node.neighbours.HUNG_S", 0.2)

    async with lending_node() as node:
        node.answer = lambda _: None
        read = asyncio.ensure_future(node.ask(node.neighbour(1), 1000))
        await node.until(lambda: node.asked)
        (asked,) = node.asked
        pid = node.lending.pid
        os.kill(pid, signal.SIGSTOP)
        node.give(asked)
        await node.until(lambda: node.lending.tick() or node.given)
        assert node.given == [asked.number]
        assert node.lending.pid != pid
        with pytest.raises(NeighbourGone):
            await read
        node.answer = node.give
        assert await node.ask(node.neighbour(5)) == node.block(5)


async def test_keys_follow_generations_and_leave_with_their_job() -> None:
    async with lending_node() as node:
        assert await node.ask(node.neighbour(1)) == node.block(1)
        old, node.key = node.key, os.urandom(32)
        node.lending.keys(JOB, GENERATION + 1, node.key)
        for stale in (node.neighbour(key=old), node.neighbour()):
            with pytest.raises(NeighbourGone):
                await node.ask(stale)
        newer = node.neighbour(4, generation=GENERATION + 1)
        assert await node.ask(newer) == node.block(4)
        os.kill(node.lending.pid, signal.SIGKILL)  # the next one is told the key
        await node.until(lambda: not node.lending.pid)
        assert await node.ask(newer) == node.block(4)
        node.lending.keys(JOB, 0, b"")
        with pytest.raises(NeighbourGone):
            await node.ask(newer)


async def test_a_region_of_another_length_is_not_sent() -> None:
    async with lending_node() as node:
        node.answer = lambda asked: node.lending.give(asked.number, Region(0, 5))
        assert await node.ask(node.neighbour(1)) == b""
        await node.until(lambda: node.given)


async def test_ipv6_works_as_well() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")

    async with lending_node("::1") as node:
        assert node.address.startswith("[::1]:")
        assert await node.ask(node.neighbour(1)) == node.block(1)
