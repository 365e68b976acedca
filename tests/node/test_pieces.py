"""Slabs that several workers make together, over the real protocol: the same as of one worker."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from fetching import BODY, LENGTH, node
from PIL import Image
from raw_trainer import Batches, Node, Trainer

from dataplane.arena.memfd import Arena
from dataplane.model.errors import DataplaneError, ImageError, NotKept
from dataplane.model.records import Region
from dataplane.node.effects import KeptBlocks
from dataplane.node.fetch import BlockRead, Fetcher, Report
from dataplane.node.stored import Preambles
from dataplane.rpc import fetches, tasks
from dataplane.rpc.membership import NodeReads
from dataplane.scheduler.events import DiskEvent, DiskScanned, ScanDisk
from dataplane.transforms.images import image_specs
from dataplane.transforms.steps.registry import RandomResizedCrop

ROWS, BATCH = 240, 48
CROPS = image_specs({"jpg": [RandomResizedCrop(16)]})


def _jpeg(chance: np.random.Generator) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(chance.integers(0, 256, (48, 64, 3), np.uint8)).save(sink, "JPEG")
    return sink.getvalue()


def _write(folder: Path, jpegs: list[bytes]) -> str:
    """Write a shard of images with texts of many lengths, some of them null, and lists of
    numbers.
    """
    folder.mkdir()
    texts = [None if row % 7 == 3 else f"{row} " * (row % 50) for row in range(len(jpegs))]
    lists = [list(range(row % 9)) for row in range(len(jpegs))]
    table = pa.table({"id": range(len(jpegs)), "jpg": jpegs, "text": texts, "list": lists})
    with pa.ipc.new_file(str(folder / "0.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return str(folder)


def _batches(node: Node, url: str, **request: Any) -> Batches:
    with Trainer(node) as trainer:
        options = {"seed": 3, "shuffle": True, "transforms": CROPS, "global_batch": BATCH}
        trainer.open(url, **options | request)
        return trainer.batches()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    chance = np.random.default_rng(1)
    return _write(tmp_path_factory.mktemp("data") / "d", [_jpeg(chance) for _ in range(ROWS)])


@pytest.fixture(scope="module")
def expected(url: str, tmp_path_factory: pytest.TempPathFactory) -> Batches:
    with Node(tmp_path_factory.mktemp("alone"), worker_count=1) as node:
        return _batches(node, url)


def test_a_slab_has_the_same_rows_however_many_workers_make_it(
    tmp_path: Path, url: str, expected: Batches
) -> None:
    for sharing in ("", "g"):
        with Node(tmp_path, worker_count=5) as node:
            assert _batches(node, url, sharing=sharing) == expected


def test_copies_of_a_slab_that_several_workers_made_are_equal(
    tmp_path: Path, url: str, expected: Batches
) -> None:
    with Node(tmp_path, worker_count=5) as node, contextlib.ExitStack() as stack:
        trainers = [stack.enter_context(Trainer(node)) for _ in range(3)]
        for number, trainer in enumerate(trainers):
            trainer.open(
                url, member=f"{number}", seed=3, shuffle=True, transforms=CROPS,
                global_batch=BATCH, sharing="g",
            )  # fmt: skip
        assert [trainer.batches() for trainer in trainers] == [expected] * 3


def test_pieces_of_killed_workers_are_made_again(
    tmp_path: Path, url: str, expected: Batches
) -> None:
    with Node(tmp_path, worker_count=4) as node, Trainer(node) as trainer:
        trainer.open(url, seed=3, shuffle=True, transforms=CROPS, global_batch=BATCH)
        made: Batches = []
        for slab in trainer.slabs():
            made += trainer.values(slab)
            for worker in node.workers()[: len(made) % 4]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
        assert made == expected


def test_the_first_image_that_cannot_be_decoded_is_named_whatever_piece_fails_first(
    tmp_path: Path,
) -> None:
    chance = np.random.default_rng(2)
    jpegs = [_jpeg(chance) for _ in range(BATCH)]
    for row in (10, 37):
        jpegs[row] = jpegs[row][:300]
    url = _write(tmp_path / "d", jpegs)
    with Node(tmp_path, worker_count=4) as node:
        with pytest.raises(ImageError, match="row 10, column 'jpg'"):
            _batches(node, url, shuffle=False)
        with pytest.raises(ImageError, match="row 10, column 'jpg'"):
            _batches(node, url, shuffle=False)


# -- Blocks that fetchers read from the node's disk, and elsewhere if it does not have them


DATASET = b"0123456789abcdef"
SOURCE, INTO = Region(0, LENGTH), Region(2 * LENGTH, LENGTH)


async def test_blocks_on_disk_outlive_the_fetcher_that_wrote_them(tmp_path: Path) -> None:
    async with node(kept_folder=str(tmp_path)) as at:
        at.arena.reserve(SOURCE.offset, SOURCE.length)
        at.arena.view(SOURCE.offset, SOURCE.length)[:] = BODY[:LENGTH]
        found: list[fetches.KeptFound] = []
        assert await at.end_of(fetches.WriteKept(0, DATASET, 7, SOURCE)) is None
        os.kill(at.fetchers.pids[0], signal.SIGKILL)
        assert await at.end_of(fetches.ReadKept(0, DATASET, 7, INTO)) is None
        assert at.bytes_at(INTO.offset) == BODY[:LENGTH]
        assert await at.end_of(fetches.ScanKept(0), found.append) is None
        assert [(each.dataset, each.blocks) for each in found] == [(DATASET, (7,))]
        missing = await at.end_of(fetches.ReadKept(0, DATASET, 8, INTO))
        assert isinstance(missing, NotKept)
        assert not missing.trouble
        told = at.fetchers.statistics()
        assert (told.disk_bytes, told.read_bytes, told.neighbour_bytes) == (LENGTH, 0, 0)


class DiskBefore:
    """An origin whose disk has a block, or not: orders end at once."""

    def __init__(self, error: DataplaneError | None) -> None:
        self.orders: list[fetches.ReadBody] = []
        self._error = error

    def read(self, order: fetches.ReadBody, report: Report, _on_kept: object = None) -> None:
        self.orders.append(order)
        error = self._error if isinstance(order, fetches.ReadKept) else None
        asyncio.get_running_loop().call_soon(report, error)

    def start(self, store: str = "") -> None: ...

    def read_slab(self, _order: object, _arena_fd: int, _report: object) -> int:
        raise AssertionError

    def end_slab(self, number: int) -> None: ...

    def detach_arena(self, arena_id: int) -> None: ...

    def trouble(self, url: str) -> None: ...

    def tick(self) -> None: ...

    def statistics(self) -> NodeReads:
        return NodeReads()

    def close(self) -> None: ...


NEIGHBOUR = fetches.Neighbour(fetches.Peer("10.0.0.1:7", "j", 1, b"k", "own", "other"), DATASET, 7)
PIECES = (Region(100, 30), Region(500, 20))


@pytest.mark.parametrize("neighbour", [None, NEIGHBOUR])
@pytest.mark.parametrize("error", [None, NotKept("not on disk", trouble="")])
def test_memory_then_disk_then_neighbour_then_store(
    error: DataplaneError | None, neighbour: fetches.Neighbour | None
) -> None:
    async def play() -> tuple[list[fetches.ReadBody], list[fetches.Outcome]]:
        arena, origin = Arena.create("blocks", 1 << 20), DiskBefore(error)
        fetcher = Fetcher(origin, Preambles(4096))
        missed: list[fetches.Outcome] = []
        end: asyncio.Future[fetches.Outcome] = asyncio.Future()
        raw = tasks.RawBlockRef("url", 0, 1, PIECES[0], Region(0, 16), 1000, "tag", pieces=PIECES)
        into, of = Region(0, 66), (DATASET, 7, missed.append)
        fetcher.fetch([BlockRead(1, raw, into, end.set_result, None, neighbour, *of)])
        async with asyncio.timeout(60):
            assert await end is None
        fetcher.close()
        arena.close()
        return origin.orders, missed

    orders, missed = asyncio.run(play())
    preamble = [o for o in orders if isinstance(o, fetches.ReadRange) and not o.offset]
    assert len(preamble) == 1
    from_disk = [o for o in orders if isinstance(o, fetches.ReadKept)]
    assert [(o.dataset, o.block, o.into) for o in from_disk] == [(DATASET, 7, Region(16, 50))]
    others = [o for o in orders if o not in (*preamble, *from_disk)]
    if error is None:
        assert not missed
        assert not others
        return
    assert missed == [error]
    assert all(isinstance(o, fetches.ReadRange) for o in others)
    places = [(o.offset, o.into) for o in others if isinstance(o, fetches.ReadRange)]
    assert places == [(100, Region(16, 30)), (500, Region(46, 20))]
    asked = [o.neighbour and o.neighbour.offset for o in others if isinstance(o, fetches.ReadRange)]
    assert asked == ([None, None] if neighbour is None else [0, 30])


def test_a_scan_that_the_scheduler_wants_is_ordered_and_its_end_reported() -> None:
    async def play() -> list[DiskEvent]:
        origin, told = DiskBefore(None), list[DiskEvent]()
        fetcher = Fetcher(origin, Preambles(4096))
        ended = asyncio.Event()

        def tell(event: DiskEvent) -> None:
            told.append(event)
            ended.set()

        KeptBlocks(fetcher, tell).scan(ScanDisk())
        assert origin.orders == [fetches.ScanKept(0)]
        async with asyncio.timeout(60):
            await ended.wait()
        fetcher.close()
        return told

    assert asyncio.run(play()) == [DiskScanned()]
