"""Jobs of one group over the real protocol: slabs made for one job are copied for the others.

Once a job has read its epoch, the shard is replaced, so that no more slabs can be made from it:
jobs that still receive its batches receive copies.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from raw_trainer import Batches, Node, Trainer

from dataplane.arena.slots import AHEAD_SLOTS_MIN
from dataplane.model.errors import DatasetChangedError
from dataplane.rpc import messages
from dataplane.transforms.images import image_specs
from dataplane.transforms.steps.registry import CenterCrop, RandomResizedCrop

ROWS = 80
CROPS = image_specs({"jpg": [RandomResizedCrop(8)]})


@pytest.fixture
def url(tmp_path: Path) -> str:
    """One mapped shard of small pictures."""
    chance, jpegs = np.random.default_rng(1), []
    for _ in range(ROWS):
        sink = io.BytesIO()
        Image.fromarray(chance.integers(0, 256, (24, 32, 3), np.uint8)).save(sink, "JPEG")
        jpegs.append(sink.getvalue())
    folder = tmp_path / "d"
    folder.mkdir()
    table = pa.table({"id": range(ROWS), "jpg": pa.array(jpegs, pa.large_binary())})
    with pa.ipc.new_file(str(folder / "0.arrow"), table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return str(folder)


def spoil(url: str) -> None:
    """Replace the shard, so that it differs from the indexed one."""
    os.utime(Path(url) / "0.arrow", ns=(1, 1))


def opened(trainer: Trainer, url: str, **request: Any) -> Trainer:
    request = {"seed": 3, "shuffle": True, "transforms": CROPS, "sharing": "g"} | request
    trainer.open(url, **request)
    return trainer


def alone(folder: Path, url: str, **request: Any) -> Batches:
    with Node(folder, worker_count=1) as node, Trainer(node) as trainer:
        return opened(trainer, url, sharing="", **request).batches()


def overwriting(trainer: Trainer) -> Batches:
    """Like trainer.batches(), for a trainer that overwrites every batch."""
    found = []
    for slab in trainer.slabs():
        found += trainer.values(slab)
        trainer.arenas["j"].view(slab.region.offset, slab.region.length)[:] = bytes(
            slab.region.length
        )
    return found


def test_each_job_of_a_group_gets_its_own_copy_of_a_slab_that_one_of_them_made(
    tmp_path: Path, url: str
) -> None:
    expected = alone(tmp_path, url)
    with Node(tmp_path, slab_bytes="1KiB") as node, contextlib.ExitStack() as stack:
        first, *others, another = [stack.enter_context(Trainer(node)) for _ in range(5)]
        for number, trainer in enumerate((first, *others)):
            opened(trainer, url, member=f"{number}")
        opened(another, url, job="of another name")
        behind = others[0].call(messages.OpenStream("j", 0, 0)).stream_id
        assert overwriting(first) == expected
        spoil(url)
        assert [overwriting(trainer) for trainer in others] == [expected] * 3
        assert another.batches("of another name") == expected
        assert others[1].batches(cursor=24) == expected[6:]
        others[0].tell(messages.CloseStream(behind))


def test_if_memory_is_short_the_blocks_that_a_lagging_job_needs_first_are_kept(
    tmp_path: Path, url: str
) -> None:
    large = image_specs({"jpg": [RandomResizedCrop(64)]})
    expected = alone(tmp_path, url, transforms=large)
    # Of twenty slabs eleven are kept: those that workers write or read just now stay in any case,
    # and at most six when the first slab is made that the lagging job does not have yet.
    budgets = {"block_arena_bytes": "1152KiB", "delivery_bytes_per_rank": "64KiB"}
    with (
        Node(tmp_path, slab_bytes="16KiB", **budgets) as node,
        Trainer(node) as leader,
        Trainer(node) as lagging,
    ):
        opened(leader, url, job="a", transforms=large)
        opened(lagging, url, job="b", transforms=large)
        stream = lagging.call(messages.OpenStream("b", 0, 0)).stream_id
        found = lagging.values(lagging.call(messages.NextSlab(stream)), "b")
        assert leader.batches("a") == expected
        spoil(url)
        # First the slabs made ahead for it, then the kept ones; after that no slab can be made.
        with contextlib.suppress(DatasetChangedError):
            while len(found) < len(expected):
                slab = lagging.call(messages.NextSlab(stream))
                found += lagging.values(slab, "b")
                lagging.tell(messages.Release("b", (slab.slab_id,)))
        assert found == expected[: len(found)]
        assert 1 + 2 * AHEAD_SLOTS_MIN < len(found) < len(expected)


def test_jobs_that_are_not_equal_share_nothing(tmp_path: Path, url: str) -> None:
    differing: tuple[dict[str, Any], ...] = (
        {"seed": 4},
        {"transforms": image_specs({"jpg": [CenterCrop(8)]})},
        {"sharing": "h"},
        {"sharing": ""},
        {"global_batch": 5},
        {"dp_size": 2},
    )
    with Node(tmp_path) as node, Trainer(node) as trainer:
        opened(trainer, url)
        for number, request in enumerate(differing):
            opened(trainer, url, job=f"{number}", **request)
        trainer.batches()
        spoil(url)
        for number in range(len(differing)):
            with pytest.raises(DatasetChangedError):
                trainer.batches(f"{number}")
        trainer.batches()


def test_peers_of_one_rank_get_the_slabs_of_separate_jobs(tmp_path: Path, url: str) -> None:
    expected = alone(tmp_path, url)
    with Node(tmp_path, slab_bytes="4KiB") as node, Trainer(node) as one, Trainer(node) as two:
        opened(one, url, member="a", sharing=""), opened(two, url, member="b", sharing="")
        stream = two.call(messages.OpenStream("j", 0, 0)).stream_id
        assert overwriting(one) == expected
        found = []
        while isinstance(slab := two.call(messages.NextSlab(stream)), messages.Slab):
            found += two.values(slab)
            two.tell(messages.Release("j", (slab.slab_id,)))
        assert found == expected
