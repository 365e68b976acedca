"""A node makes the slabs that other nodes ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making_node import JOB, REFUSED, SLOT_BYTES, Given, MakerNode, maker_node, of, play
from msgspec import Raw
from msgspec.structs import replace

from dataplane.model.config import Stage
from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.records import ColumnOptions, Exhausted, MixHistory, ShareChange, Stream, View
from dataplane.node.making import JOB_IDLE_S, TRY_AGAIN_S
from dataplane.node.remote_slabs import HELD_S, PATIENCE_S, STREAM_IDLE_S
from dataplane.plan.views import identity_of_samples
from dataplane.rpc.codec import decode, encode
from dataplane.rpc.lending import StepRange
from dataplane.rpc.messages import (
    DatasetSource,
    Layout,
    MixtureAsked,
    OpenJob,
    Slab,
    SourceAsked,
    Working,
)

pytestmark = pytest.mark.usefixtures("importing_fork_server")


@pytest.mark.timeout(100)
def test_asked_slabs_are_those_of_a_trainer_of_this_node(parquet: str, tmp_path: Path) -> None:
    async def play() -> None:
        async with maker_node(parquet, tmp_path) as node:
            await node.start()
            at = Stream(1, 8, 1, 2, 0, 1)
            local = await node.local(at)
            assert len(local) > 2
            expected = await node.steps(at)
            place = {"epoch": 1, "cursor": 8, "dp_rank": 1, "dp_size": 2}
            for slab, _, _ in local:
                wanted = node.wanted(slab.batches[0].step, len(slab.batches), **place)
                given = await node.slab(wanted)
                assert node.check(wanted, given, expected) == len(slab.batches)
                assert given.result.layout == slab.layout

    asyncio.run(play())


@pytest.mark.timeout(100)
def test_batches_of_a_function_are_made_as_for_a_trainer(parquet: str, tmp_path: Path) -> None:
    async def scene(node: MakerNode) -> None:
        assert node.collated is not None
        at = Stream(1, 8, 1, 2, 0, 1)
        expected = await node.steps(at)
        place = {"epoch": 1, "cursor": 8, "dp_rank": 1, "dp_size": 2}
        for first, count in ((0, 1), (3, 4)):
            wanted = node.wanted(first, count, **place)
            assert node.check(wanted, await node.slab(wanted), expected) == count
        refused = replace(
            node.request, spec=replace(node.request.spec, view=View(collate="mine:f"))
        )
        with pytest.raises(ConfigError, match="collate='mine:f': this node runs only those that"):
            await node.opener.job(refused)

    view, columns = View(collate="user_functions:noisy_x"), ColumnOptions(columns=("x",))
    play(scene, parquet, tmp_path, view=view, column_options=columns)


@pytest.mark.timeout(100)
def test_slabs_of_a_mixture_are_those_of_the_weights_that_the_asker_names(
    parquet: str, tmp_path: Path
) -> None:
    urls = [f"{parquet[:-9]}/{name}.parquet" for name in "01"]

    def weighted(request: OpenJob, *weights: float) -> OpenJob:
        sources = tuple(
            SourceAsked(url, DatasetSource((url,)), weight)
            for url, weight in zip(urls, weights, strict=True)
        )
        return replace(request, mixture=MixtureAsked(sources, exhausted=Exhausted.CYCLE))

    async def rows(node: MakerNode, **wanted: Any) -> list[list[int]]:
        given = await node.slab(node.wanted(0, 2, **wanted))
        assert isinstance(given.result, Slab)
        column, count = (
            decode(Layout, given.result.layout).columns[0],
            node.request.spec.global_batch,
        )
        ids = [np.frombuffer(given.content, np.int32, count, at) for at in column.values]
        return [batch.tolist() for batch in ids]

    async def scene(node: MakerNode) -> None:
        first, second = weighted(node.request, 1, 1), weighted(node.request, 2, 1)
        specs = []
        for request in (first, second):
            opened = await node.opener.job(request)
            specs.append(opened.spec)
            for dataset in opened.datasets:
                node.opener.forget_unread(dataset)
        node.spec, node.request = specs[0], first
        assert specs[0].digest() == specs[1].digest()
        assert specs[0].mixture is not None
        assert specs[1].mixture is not None
        histories = [specs[0].mixture.history, specs[1].mixture.history]
        # The job is known with the first weights; each asker says with which its streams are read.
        own = await rows(node)
        assert await rows(node, mix=histories[0]) == own
        assert await rows(node, mix=histories[1]) != own
        changed = MixHistory((*histories[0].changes, ShareChange(1, 0, (1 << 31, 1))))
        assert await rows(node, mix=changed) == own
        assert await rows(node, mix=changed, epoch=1) != await rows(node, epoch=1)
        wrong = MixHistory((ShareChange(0, 0, (1, 2, 3)),))
        assert await node.answer(node.ask(node.wanted(0, mix=wrong))) == REFUSED

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_a_job_that_goes_back_to_what_was_unread_is_opened_again(
    parquet: str, tmp_path: Path
) -> None:
    async def play() -> None:
        async with maker_node(parquet, tmp_path) as node:
            await node.start()
            former = replace(node.spec, fingerprint="")
            content = node.dataset.manifest
            ended = Stage(
                node.spec.digest(), 0, 8, content.sample_count, identity_of_samples(content),
                unread=True, spec=former, global_batch=4,
            )  # fmt: skip
            spec = replace(node.request.spec, seed=4, stages=(ended,))
            node.request = replace(node.request, spec=spec, epoch=2)
            await node.start()
            of(await node.slab(node.wanted(0, epoch=2)))
            node.request = replace(node.request, epoch=1)
            back = node.wanted(0, epoch=1)
            assert await node.answer(node.ask(back)) == REFUSED
            node.passes(TRY_AGAIN_S)
            of(await node.slab(back))
            of(await node.slab(node.wanted(0, epoch=2)))

    asyncio.run(play())


@pytest.mark.timeout(100)
def test_a_job_is_opened_at_its_first_request(parquet: str, tmp_path: Path) -> None:
    async def play() -> None:
        async with maker_node(parquet, tmp_path) as node:
            await node.start()
            wanted = node.wanted(0)
            other = replace(wanted, opening=Raw(encode(replace(node.request, job_id="another"))))
            for wrong in (other, replace(wanted, opening=Raw(encode(7)))):
                assert await node.answer(node.ask(wrong)) == REFUSED
            assert await node.answer(node.ask(wanted)) == REFUSED
            assert await node.answer(node.ask(wanted)) == REFUSED
            assert isinstance(await node.slab(wanted), Given)
            assert [job for job, _ in node.engine.open_datasets()] == [JOB]
            assert len(node.opened) == 1

    asyncio.run(play())


@pytest.mark.timeout(100)
def test_what_will_be_asked_for_is_made_before(parquet: str, tmp_path: Path) -> None:
    async def scene(node: MakerNode) -> None:
        expected = await node.steps(Stream(0, 0, 0, 1, 0, 1))
        coming = tuple(StepRange(first, 3) for first in (6, 9, 12))
        wanted = node.wanted(3, 3, coming=coming)
        node.check(wanted, await node.slab(wanted), expected)
        await node.until(lambda: [task.phase.name for task in node.tasks()] == ["READY"] * 3)
        tasks_before = node.tasks()
        for each in coming:
            wanted = node.wanted(each.first, each.count)
            assert node.check(wanted, await node.slab(wanted), expected) == 3
        assert all(task.phase.name == "GONE" for task in tasks_before), "they were made again"

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_steps_that_are_not_coming_any_more_are_given_up(parquet: str, tmp_path: Path) -> None:
    async def scene(node: MakerNode) -> None:
        announced = tuple(StepRange(i, 1) for i in range(2, 20))
        numbers = [node.ask(node.wanted(1, coming=announced))]
        node.passes(STREAM_IDLE_S / 2)
        numbers.append(node.ask(node.wanted(20, coming=(StepRange(21, 1), StepRange(90, 1)))))
        for number in numbers:
            given = await node.answer(number)
            if isinstance(given, Given):
                node.given(number)
        node.passes(STREAM_IDLE_S / 2 + 1)
        firsts = [each.walk.stream.first_step for each in node.engine.scheduler._streams]
        assert firsts == [21]

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_consumers_that_share_the_steps_of_a_rank_keep_what_each_announced(
    parquet: str, tmp_path: Path
) -> None:
    async def scene(node: MakerNode) -> None:
        for first in (0, 1):
            coming = tuple(StepRange(first + i, 1) for i in (2, 4))
            await node.slab(node.wanted(first, step_stride=2, coming=coming))
        await node.until(lambda: [task.phase.name for task in node.tasks()] == ["READY"] * 4)
        before = node.tasks()
        for first in (2, 3, 4, 5):
            of(await node.slab(node.wanted(first, step_stride=2)))
        assert all(task.phase.name == "GONE" for task in before), "they were made again"

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_a_slab_may_be_asked_for_again_while_it_is_sent_and_afterwards(
    parquet: str, tmp_path: Path
) -> None:
    async def scene(node: MakerNode) -> None:
        wanted = node.wanted(5, 2)
        numbers = [node.ask(wanted), node.ask(wanted)]
        given = [await node.answer(number) for number in numbers]
        numbers.append(node.ask(wanted))
        given.append(await node.answer(numbers[2]))
        assert len({each.region for each in given if isinstance(each, Given)}) == 1, "made once"
        for number in numbers[:2]:
            node.given(number)
            assert node.lent_count() == 1, "it was released while it was sent"
        assert node.making.slab_count == 1 + len(numbers)
        assert node.making.slab_bytes > 3 * len(of_content(given[0]))
        node.given(numbers[2])
        assert node.lent_count() == 0
        again = await node.slab(wanted)
        assert again.content == of_content(given[0])
        assert node.lent_count() == 0

    play(scene, parquet, tmp_path)


def of_content(given: Given | str) -> bytes:
    assert isinstance(given, Given)
    return given.content


@pytest.fixture
def wide(tmp_path: Path) -> str:
    """40 rows with texts of up to 3 KiB."""
    rows = range(40)
    texts = [f"{i % 10}" * (500 if i % 8 else 3000) for i in rows]
    table = pa.table({"x": pa.array(rows, pa.int32()), "s": texts})
    pq.write_table(table, tmp_path / "wide.parquet", row_group_size=10)
    return str(tmp_path / "wide.parquet")


@pytest.mark.timeout(100)
def test_a_slab_that_is_cut_says_so_and_the_rest_waits_for_its_ask(
    wide: str, tmp_path: Path
) -> None:
    async def scene(node: MakerNode) -> None:
        expected = await node.steps(Stream(0, 0, 0, 1, 0, 1))
        step, counts = 0, []
        while step < len(expected):
            wanted = node.wanted(step, min(4, len(expected) - step), slot_bytes=4096)
            counts.append(node.check(wanted, await node.slab(wanted, room=4096), expected))
            step += counts[-1]
        assert min(counts) < 4
        assert step == len(expected)

    play(scene, wide, tmp_path, global_batch=2, shuffle=False)


@pytest.mark.timeout(100)
def test_a_batch_without_room_is_kept_until_it_is_asked_for_with_room(
    wide: str, tmp_path: Path
) -> None:
    async def scene(node: MakerNode) -> None:
        expected = await node.steps(Stream(0, 0, 0, 1, 0, 1))
        wanted = node.wanted(1, 2, slot_bytes=4096)
        refused = await node.slab(wanted, room=4096)
        need = of(refused).bytes_used
        assert (len(of(refused).batches), refused.content) == (1, b"")
        assert need > 4096
        assert node.lent_count() == 1
        given = await node.slab(node.wanted(1, 1, slot_bytes=4096), room=need)
        assert node.check(wanted, given, expected) == 1
        assert len(given.content) == need
        assert node.lent_count() == 0
        # Another asker has room for it at once; nobody asks for it again, and it is released.
        of(await node.slab(wanted, room=need, node_id="other"))
        of(await node.slab(wanted, room=4096, node_id="third"))
        assert node.lent_count() == 1
        node.passes(HELD_S + 1)
        await node.until(lambda: not node.lent_count())

    play(scene, wide, tmp_path, global_batch=8, shuffle=False)


@pytest.mark.timeout(100)
def test_slabs_that_nobody_asks_for_any_more_are_released(parquet: str, tmp_path: Path) -> None:
    async def scene(node: MakerNode) -> None:
        many = tuple(StepRange(i, 1) for i in range(2, 12))
        of(await node.slab(node.wanted(1, coming=many)))
        await node.until(lambda: len(node.tasks()) == len(many))
        given = await node.slab(node.wanted(20))
        assert len(of(given).batches) == 1
        node.passes(STREAM_IDLE_S + 1)
        assert node.tasks() == [], "nobody asks for them any more"
        (job,) = node.making._jobs.values()
        assert not any(place.streams for place in job.places.values())
        assert list(node.engine.open_datasets()), "the job stays open"

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_an_asker_that_vanishes_holds_nothing_once_its_slab_was_not_taken(
    parquet: str, tmp_path: Path
) -> None:
    async def scene(node: MakerNode) -> None:
        number = node.ask(node.wanted(1, coming=(StepRange(2, 1),)), node_id="vanishes")
        of(await node.answer(number))
        node.passes(STREAM_IDLE_S + 1)
        assert node.lent_count() == 1, "it is still being sent"
        node.given(number)
        assert node.lent_count() == 0
        node.passes(STREAM_IDLE_S + 1)
        assert not list(node.engine.scheduler._streams)

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_an_ask_that_takes_too_long_is_refused_once(parquet: str, tmp_path: Path) -> None:
    async def scene(node: MakerNode) -> None:
        late = node.ask(node.wanted(7, epoch=2)), node.ask(node.wanted(7))
        node.passes(PATIENCE_S - 1)
        assert not any(number in node.lender.answers for number in late)
        node.passes(2)
        assert [node.lender.answers[number] for number in late] == [REFUSED, REFUSED]
        # It is made nevertheless, for the next ask.
        assert len(of(await node.slab(node.wanted(7))).batches) == 1
        assert len(of(await node.slab(node.wanted(7, epoch=2))).batches) == 1

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_an_ask_for_which_something_is_done_is_answered_so_that_it_is_repeated(
    parquet: str, tmp_path: Path
) -> None:
    async def scene(node: MakerNode) -> None:
        await node.open()
        late = node.ask(node.wanted(7))
        (stream,) = node.engine._streams.values()
        node.passes(PATIENCE_S - 1)
        stream.send(1, Working("calling map='m:f' over blocks", 12, 40))
        node.passes(2)
        given = node.lender.answers[late]
        assert isinstance(given, Given)
        assert isinstance(given.result, Working)
        assert len(of(await node.slab(node.wanted(7))).batches) == 1

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_errors_of_the_data_go_to_the_asker_and_spoil_no_other_slab(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "broken.parquet"
    values = pa.array(np.arange(40_000), pa.int32())
    pq.write_table(
        pa.table({"x": values}), path, row_group_size=4000, compression="zstd", use_dictionary=False
    )
    group = pq.read_metadata(path).row_group(3).column(0)
    content = bytearray(path.read_bytes())
    at = group.data_page_offset + 40
    content[at : at + 400] = bytes(400)
    path.write_bytes(content)

    async def scene(node: MakerNode) -> None:
        coming = tuple(StepRange(first, 1) for first in (3, 4, 5, 6))
        numbers = [node.ask(node.wanted(2, coming=coming))]
        numbers += [node.ask(node.wanted(first, coming=coming)) for first in (3, 4, 3)]
        given = [await node.answer(number) for number in numbers]
        results = [each.result for each in given if isinstance(each, Given)]
        kinds = [type(each) for each in results]
        assert kinds == [Slab, CorruptShard, Slab, CorruptShard]
        assert "broken.parquet" in str(results[1])
        for number in numbers:
            node.given(number)
        assert isinstance((await node.slab(node.wanted(3))).result, CorruptShard)
        assert len(of(await node.slab(node.wanted(5))).batches) == 1

    play(scene, str(path), tmp_path, global_batch=4000, shuffle=False)
    assert len([line for line in caplog.messages if "a slab is not made" in line]) == 1


@pytest.mark.timeout(100)
def test_a_job_is_closed_when_the_coordinator_says_so(parquet: str, tmp_path: Path) -> None:
    async def scene(node: MakerNode) -> None:
        sent = node.ask(node.wanted(3))
        of(await node.answer(sent))
        waiting = node.ask(node.wanted(9, coming=(StepRange(10, 1),)))
        node.making.close_job("another job")
        assert waiting not in node.lender.answers
        node.making.close_job(JOB)
        assert node.lender.answers[waiting] == REFUSED
        assert node.lender.arenas, "something is still being sent"
        assert await node.answer(node.ask(node.wanted(4))) == REFUSED
        node.given(sent)
        await node.until_closed()
        assert len(of(await node.slab(node.wanted(4))).batches) == 1

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_a_job_that_nobody_asks_for_is_closed(parquet: str, tmp_path: Path) -> None:
    async def scene(node: MakerNode) -> None:
        node.passes(JOB_IDLE_S)
        assert list(node.engine.open_datasets())
        node.passes(2)
        await node.until_closed()
        assert await node.answer(node.ask(node.wanted(4))) == REFUSED

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(100)
def test_askers_with_slots_of_one_size_share_an_arena(parquet: str, tmp_path: Path) -> None:
    async def scene(node: MakerNode) -> None:
        place = {"dp_size": 2}
        for rank in (0, 1):
            expected = await node.steps(Stream(0, 0, rank, 2, 0, 1))
            for name in ("one", "other"):
                wanted = node.wanted(2, 2, dp_rank=rank, **place)
                node.check(wanted, await node.slab(wanted, node_id=name), expected)
        assert node.lender.lent_count == 2  # the first was that of dp_size 1
        for size in (2, 3):
            of(await node.slab(node.wanted(2, slot_bytes=size * SLOT_BYTES)))
        assert node.lender.lent_count == 4
        # There are four. The stream of one of them ends, and it makes way.
        too_many = node.wanted(2, slot_bytes=4 * SLOT_BYTES)
        assert await node.answer(node.ask(too_many)) == REFUSED
        node.passes(STREAM_IDLE_S + 1)
        of(await node.slab(too_many))
        assert len(node.lender.arenas) == 4

    play(scene, parquet, tmp_path)
