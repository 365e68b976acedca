"""Slabs that several workers make together, over the real protocol: the same as of one worker."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from PIL import Image
from raw_trainer import Batches, Node, Trainer

from dataplane.model.errors import ImageError
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
