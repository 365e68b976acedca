"""Crops over restart indexes that others left equal crops without them, and so do their errors."""

from __future__ import annotations

import contextlib
import mmap
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import without
from numpy.typing import NDArray
from pictures import Encoded, drawn, encoded, exif, made, photographs, pillow_maker, sizes

from dataplane.model.errors import ImageError
from dataplane.transforms.pixels import render
from dataplane.transforms.pixels_library import Maker, maker
from dataplane.transforms.view import PixelView

FOUND = maker()
VIEW = PixelView(24, 32, "HWC", "uint8", None, None)
HEAD_BYTES = 8
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RGB", {"quality": 95, "subsampling": "4:4:4"}),
    ("RGB", {"quality": 90, "subsampling": "4:2:0", "optimize": True}),
    ("RGB", {"quality": 90, "subsampling": "4:2:2", "exif": exif(6)}),
    ("RGB", {"quality": 80, "subsampling": "4:2:0", "progressive": True, "exif": exif(3)}),
    ("RGB", {"quality": 80, "restart_marker_blocks": 3}),
    ("L", {"quality": 90}),
    ("CMYK", {"quality": 90}),
)
Box = tuple[float, ...]


@pytest.fixture(autouse=True, scope="module")
def _libjpeg() -> None:
    if FOUND.missing:
        without(FOUND.missing)


class Kept:
    """Restart indexes, each followed by bytes that must not be written."""

    def __init__(self, lengths: Sequence[int], fill: bytes = b"\0") -> None:
        self.memory = [np.full(length + 64, 0xA5, np.uint8) for length in lengths]
        for each, length in zip(self.memory, lengths, strict=True):
            each[:length] = np.resize(np.frombuffer(fill, np.uint8), length)
        self.lengths = lengths
        places = [(m.ctypes.data, n) for m, n in zip(self.memory, lengths, strict=True)]
        self.places = np.array(places, np.int64)

    @property
    def counts(self) -> list[int]:
        """How many marks each has."""
        return [int(each[:4].view(np.uint32)[0]) for each in self.memory]

    def check(self) -> None:
        for each, length in zip(self.memory, self.lengths, strict=True):
            assert (each[length:] == 0xA5).all()


def _boxes(image: bytes, count: int, seed: int) -> list[Box]:
    """Restart indexes of any size, for images as this one."""
    height, width = sizes([image])[0].tolist()
    numbers = random.Random(seed)
    boxes = []
    for _ in range(count):
        down, right = numbers.uniform(1, height), numbers.uniform(1, width)
        boxes.append(
            (numbers.uniform(0, height - down), numbers.uniform(0, width - right), down, right)
        )
    return boxes


def _over(
    kept: Kept, images: Sequence[bytes], boxes: Sequence[Box], view: PixelView = VIEW,
    by: Maker | None = None,
) -> NDArray[np.uint8]:  # fmt: skip
    there = Encoded.of(images)
    out = np.zeros((len(images), view.bytes), np.uint8)
    flips = np.zeros(len(images), np.uint8)
    all_boxes = np.array(boxes, np.float64)
    render(there.places, all_boxes, flips, view, out.reshape(-1), by, restart_indexes=kept.places)
    kept.check()
    return out


def _outcome(call: Any) -> bytes | str:
    """The pixels, or the error and its place."""
    try:
        return bytes(call().tobytes())
    except ImageError as error:
        return f"{error.row}: {error}"


@given(
    st.sampled_from(FORMS), st.integers(1, 200), st.integers(1, 300), st.integers(0, 400),
    st.integers(0, 1000),
)  # fmt: skip
def test_a_crop_does_not_depend_on_earlier_crops(
    form: tuple[str, dict[str, Any]], height: int, width: int, words: int, seed: int
) -> None:
    image = encoded(drawn(height, width, form[0]), **form[1])
    kept = Kept([words * 8])
    for box in _boxes(image, 4, seed):
        assert (_over(kept, [image], [box]) == made([image], [box], [0], VIEW)).all()


def test_crops_of_photographs_do_not_depend_on_each_other(data_dir: Path) -> None:
    images = photographs(data_dir / "images")
    kept = Kept([len(image) // 16 // 8 * 8 for image in images])
    view = PixelView(64, 64, "HWC", "uint8", None, None)
    for epoch in range(3):
        boxes = [_boxes(image, 1, epoch * 1000 + row)[0] for row, image in enumerate(images)]
        expected = made(images, boxes, [0] * len(images), view)
        assert (_over(kept, images, boxes, view) == expected).all()
    assert sum(count > 0 for count in kept.counts) > len(images) / 2


@given(st.integers(0, 1000), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3))
def test_a_broken_image_has_the_same_error_in_a_batch_as_by_itself(
    seed: int, wrong: list[tuple[float, int]]
) -> None:
    image = bytearray(encoded(drawn(120, 160), quality=90))
    start = image.index(b"\xff\xda") + 14
    for where, value in wrong:
        image[start + int(where * (len(image) - start - 1))] = value
    broken, fine = bytes(image), encoded(drawn(40, 40))
    kept = Kept([800, 800])
    for box in _boxes(fine, 1, seed) * 2 + _boxes(broken, 5, seed):
        images, boxes = [fine, broken], [_boxes(fine, 1, seed)[0], box]
        alone = _outcome(lambda images=images, boxes=boxes: made(images, boxes, [0, 0], VIEW))
        assert _outcome(lambda i=images, b=boxes: _over(kept, i, b)) == alone


@given(st.binary(min_size=1, max_size=1200), st.integers(0, 99), st.integers(0, 600))
def test_memory_with_other_content_harms_no_decode(fill: bytes, seed: int, count: int) -> None:
    image = encoded(drawn(120, 160), quality=90, subsampling="4:4:4")
    kept = Kept([1200], fill)
    kept.memory[0][:4] = np.frombuffer(np.uint32(count).tobytes(), np.uint8)
    with contextlib.suppress(ImageError):
        _over(kept, [image], [_boxes(image, 1, seed)[0]])


def test_restart_indexes_are_the_same_bytes_however_crops_complete_them() -> None:
    image = encoded(drawn(300, 400), quality=90)
    height, width = sizes([image])[0].tolist()
    length = len(image) // 16 // 8 * 8
    at_once, bit_by_bit = Kept([length]), Kept([length])
    _over(at_once, [image], [(0, 0, height, width)])
    for box in (*_boxes(image, 20, 0), (0, 0, height, width)):
        _over(bit_by_bit, [image], [box])
    assert at_once.counts[0] > 50
    assert (at_once.memory[0] == bit_by_bit.memory[0]).all()


def test_what_has_no_use_for_a_restart_index_leaves_none() -> None:
    picture = drawn(60, 80)
    whole = (0.0, 0.0, 60.0, 80.0)
    for image in (encoded(picture, "PNG"), encoded(picture, progressive=True),
                  encoded(picture, restart_marker_blocks=2)):  # fmt: skip
        kept = Kept([400])
        _over(kept, [image], [whole])
        assert not kept.memory[0][:400].any()
    kept = Kept([400])
    _over(kept, [encoded(picture)], [whole], by=pillow_maker())
    assert not kept.memory[0][:400].any()
    for none in (Kept([0]), Kept([HEAD_BYTES]), Kept([40])):
        _over(none, [encoded(picture)], [whole])
        assert not none.memory[0][: none.lengths[0]].any()
    with pytest.raises(ValueError, match="differ in length"):
        _over(Kept([8, 8]), [encoded(picture)], [whole])


def test_many_at_once_make_what_one_makes() -> None:
    images = [encoded(drawn(300, 400, seed=seed), quality=90) for seed in range(6)]
    crops = [[_boxes(image, 1, turn)[0] for image in images] for turn in range(24)]
    expected = [made(images, boxes, [0] * len(images), VIEW).tobytes() for boxes in crops]
    kept = Kept([len(image) // 128 * 8 for image in images])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda boxes: _over(kept, images, boxes).tobytes(), crops))
    assert found == expected


_ENDLESS = """
import mmap, sys
import numpy as np
from dataplane.transforms.pixels import render
from dataplane.transforms.view import PixelView

image = np.fromfile(sys.argv[1], np.uint8)
with open(sys.argv[2], "r+b") as file:
    shared = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
there = np.array([(image.ctypes.data, len(image))])
view = PixelView(24, 32, "HWC", "uint8", None, None)
out, flip = np.zeros(view.bytes, np.uint8), np.zeros(1, np.uint8)
noted = np.array([(shared.ctypes.data, len(shared))])
print("up", flush=True)
while True:
    shared[:4] = 0
    for bottom in range(20, 300, 20):
        box = np.array([[0.0, 0, bottom, 400]])
        render(there, box, flip, view, out, restart_indexes=noted)
"""


def test_a_restart_index_of_a_killed_process_is_usable_by_others(tmp_path: Path) -> None:
    image = encoded(drawn(300, 400), quality=90)
    photograph, restart_index = tmp_path / "image", tmp_path / "restart_index"
    photograph.write_bytes(image)
    restart_index.write_bytes(bytes(len(image) // 128 * 8))
    boxes = _boxes(image, 12, 0)
    expected = [made([image], [box], [0], VIEW).tobytes() for box in boxes]
    with restart_index.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        for _ in range(3):
            with subprocess.Popen(
                [sys.executable, "-c", _ENDLESS, photograph, restart_index], stdout=subprocess.PIPE
            ) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"up\n"
                assert _over_shared(image, boxes * 3, shared) == expected * 3
                process.kill()
            assert _over_shared(image, boxes, shared) == expected


def _over_shared(image: bytes, boxes: Sequence[Box], shared: mmap.mmap) -> list[bytes]:
    there, memory = Encoded.of([image]), np.frombuffer(shared, np.uint8)
    restart_index = np.array([(memory.ctypes.data, len(memory))])
    out, flip = np.zeros(VIEW.bytes, np.uint8), np.zeros(1, np.uint8)
    found = []
    for box in boxes:
        render(there.places, np.array([box]), flip, VIEW, out, restart_indexes=restart_index)
        found.append(out.tobytes())
    return found
