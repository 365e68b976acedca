"""Askers may do anything, in any order, to a node that makes slabs for them."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from making_node import JOB, REFUSED, SLOT_BYTES, MakerNode, Pieces, maker_node, of, play
from msgspec.structs import replace

from dataplane.model.errors import StoreDenied
from dataplane.model.records import ColumnOptions, Stream, View
from dataplane.node.making import TRY_AGAIN_S
from dataplane.node.remote_slabs import HELD_S, PATIENCE_S, STREAM_IDLE_S
from dataplane.rpc.lending import MakeSlab, StepRange

pytestmark = pytest.mark.usefixtures("importing_fork_server")


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"digest": "0" * 32}, "of digest 00000000"),
        ({"software": "another decoder"}, "another decoder on the node"),
        ({"slot_bytes": 0}, "not whole pages"),
        ({"slot_bytes": 4097}, "not whole pages"),
        ({"slot_bytes": 1 << 50}, "lower slab_bytes"),
        ({"steps": StepRange(0, 10_000)}, "there are no steps"),
        ({"steps": StepRange(1 << 40, 1)}, "there are no steps"),
        ({"step_stride": 0}, "choose 0 steps or more"),
        ({"dp_rank": 3}, "dp_rank 3 is not in"),
        ({"dp_size": 1 << 40}, "dp_size is"),
        ({"cursor": 1 << 50}, "outside of an epoch"),
        ({"epoch": 1 << 63}, ""),
    ],
)
def test_what_cannot_be_made_is_refused_and_logged_once(
    parquet: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    others: dict[str, Any],
    why: str,
) -> None:
    async def scene(node: MakerNode) -> None:
        of_stream = {name: others[name] for name in others.keys() & {*Stream.__struct_fields__}}
        of_slab = {name: others[name] for name in others.keys() - of_stream.keys()}
        odd = replace(node.wanted(0, **of_stream), **of_slab)
        before = len(node.engine._deliveries)
        for _ in range(3):
            found = await node.answer(node.ask(odd))
            assert found == REFUSED or "epoch" in others
            await asyncio.sleep(0)
        await node.until(lambda: "epoch" in others or why in caplog.text)
        assert len(node.engine._deliveries) == before
        assert len(of(await node.slab(node.wanted(3))).batches) == 1

    play(scene, parquet, tmp_path)
    assert caplog.text.count("is not made") + caplog.text.count("no slabs of") <= 1


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("view", "columns"),
    [
        (View(collate="user_functions:noisy_x"), ColumnOptions(columns=("x",))),
        (View(map="user_functions:same"), ColumnOptions()),
    ],
    ids=["collate", "map"],
)
def test_a_node_whose_function_has_other_code_makes_nothing(
    parquet: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    view: View,
    columns: ColumnOptions,
) -> None:
    async def scene(node: MakerNode) -> None:
        code = node.software
        assert len(code) == 16
        other = node.wanted(0, software="0" * 16)
        assert await node.answer(node.ask(other)) == REFUSED
        assert f"made by {code} here, and by {'0' * 16} on the node that asks" in caplog.text
        assert len(of(await node.slab(node.wanted(0))).batches) == 1

    play(scene, parquet, tmp_path, view=view, column_options=columns)


@pytest.mark.timeout(100)
def test_a_job_that_cannot_be_opened_is_tried_again_after_a_while(
    parquet: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with maker_node(parquet, tmp_path) as node:
            await node.start()
            node.opened.clear()
            node.opener.forget_manifests(JOB)
            node.refusal = StoreDenied("this node may not read it")
            wanted = node.wanted(0)
            for tries in (1, 2):
                assert await node.answer(node.ask(wanted)) == REFUSED
                await node.until(lambda tries=tries: len(node.opened) == tries)
                await node.until(lambda: not node.making._tasks)
                for _ in range(3):
                    assert await node.answer(node.ask(wanted)) == REFUSED
                assert len(node.opened) == tries
                node.passes(TRY_AGAIN_S)
            node.refusal = None
            assert len(of(await node.slab(wanted)).batches) == 1

    asyncio.run(scene())
    assert caplog.text.count("this node may not read it") == 1


class Askers:
    """Some nodes that ask in any order, again, too early or too late, and that may vanish."""

    def __init__(self, node: MakerNode, chance: random.Random) -> None:
        self.node, self.chance = node, chance
        self.wanted: dict[int, tuple[MakeSlab, int, float]] = {}
        """What was asked for by number: with how much room, and when."""
        self.expected: dict[tuple[int, int], dict[int, Pieces]] = {}
        """By epoch and dp_rank."""
        self.made_count = 0

    async def prepare(self) -> None:
        for epoch, rank in itertools.product((0, 1), (0, 1)):
            self.expected[epoch, rank] = await self.node.steps(Stream(epoch, 0, rank, 2, 0, 1))

    def ask(self) -> None:
        """For steps near the last ones, or for any others, or once more for the same."""
        chance, node = self.chance, self.node
        name, room = chance.choice(("one", "other", "third")), SLOT_BYTES
        if self.wanted and chance.random() < 0.25:
            wanted, room, _ = chance.choice([*self.wanted.values()])
        else:
            epoch, rank = chance.choice(((0, 0), (0, 0), (0, 1), (1, 0)))
            end = len(self.expected[epoch, rank])
            first = chance.randrange(end)
            ranges = []
            for _ in range(chance.choice((1, 1, 2, 4))):
                if first < end:
                    ranges.append(StepRange(first, min(chance.choice((1, 3, 3)), end - first)))
                    first += ranges[-1].count * chance.choice((1, 1, 2))
            own, *coming = ranges
            room = chance.choice((SLOT_BYTES, SLOT_BYTES, 300))
            wanted = node.wanted(
                own.first, own.count, coming=tuple(coming), epoch=epoch, dp_rank=rank, dp_size=2
            )
        number = node.ask(wanted, node_id=name, room=room)
        self.wanted[number] = wanted, room, node.now

    def read(self) -> None:
        """Somebody has got a slab, or is gone."""
        if self.node.lender.read:
            self.node.given(self.chance.choice(sorted(self.node.lender.read)))

    def wait(self) -> None:
        """Time passes."""
        self.node.passes(self.chance.choice((0.1, 0.1, HELD_S, PATIENCE_S, STREAM_IDLE_S + 1)))

    def check(self) -> None:
        """Every ask was answered once, with what a trainer of the node would get."""
        assert self.wanted.keys() == self.node.lender.answers.keys()
        for number, (wanted, room, _) in self.wanted.items():
            answer = self.node.lender.answers[number]
            if isinstance(answer, str):
                continue
            assert len(answer.content) <= room
            if of(answer).bytes_used > room:
                assert not answer.content
            else:
                self.node.check(
                    wanted, answer, self.expected[wanted.stream.epoch, wanted.stream.dp_rank]
                )
                self.made_count += 1


@pytest.mark.timeout(100)
@pytest.mark.parametrize("seed", range(4))
def test_every_ask_is_answered_once_and_rightly_whatever_askers_do(
    parquet: str, tmp_path: Path, seed: int
) -> None:
    async def scene(node: MakerNode) -> None:
        chance = random.Random(seed)
        node.lender.answers.clear()
        askers = Askers(node, chance)
        await askers.prepare()
        acts = [askers.ask] * 6 + [askers.read] * 4 + [askers.wait]
        for _ in range(250):
            chance.choice(acts)()
            for _ in range(chance.choice((0, 0, 1, 5))):
                await asyncio.sleep(0.0005)
        answers = node.lender.answers
        async with asyncio.timeout(20):
            while node.lender.read or len(answers) < len(askers.wanted):
                askers.read()
                node.passes(0.01)  # slabs that nobody takes hold slots for a while
                await asyncio.sleep(0.001)
        askers.check()
        assert askers.made_count > 30
        node.passes(STREAM_IDLE_S + 1)
        assert node.lent_count() == 0

    play(scene, parquet, tmp_path)
