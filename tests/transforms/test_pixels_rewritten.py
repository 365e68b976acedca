"""A JPEG with an index is the same JPEG, of which less is decoded; an index is never believed."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import without
from pictures import drawn, encoded, exif, made, photographs, seen, sizes
from PIL import Image

from dataplane.errors import ImageError
from dataplane.transforms.pixels import PixelView, rewritten
from dataplane.transforms.pixels_library import PILLOW, maker

FOUND = maker()
NAME = b"dataplane\0"
VIEW = PixelView(24, 32, "HWC", "uint8", None, None)
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RGB", {"quality": 95, "subsampling": "4:4:4"}),
    ("RGB", {"quality": 90, "subsampling": "4:2:0", "optimize": True}),
    ("RGB", {"quality": 90, "subsampling": "4:2:2", "exif": exif(6)}),
    ("RGB", {"quality": 80, "subsampling": "4:2:0", "progressive": True, "exif": exif(3)}),
    ("L", {"quality": 90}),
    ("L", {"quality": 90, "progressive": True}),
    ("CMYK", {"quality": 90}),
)


@pytest.fixture(autouse=True, scope="module")
def _libjpeg() -> None:
    if not FOUND.has_jpeg:
        without(FOUND.missing)


def _crops(image: bytes, count: int, seed: int) -> tuple[list[tuple[float, ...]], list[int]]:
    """Boxes of any size, for images as this one."""
    height, width = sizes([image])[0].tolist()
    numbers = random.Random(seed)
    boxes = []
    for _ in range(count):
        down, right = numbers.uniform(1, height), numbers.uniform(1, width)
        boxes.append(
            (numbers.uniform(0, height - down), numbers.uniform(0, width - right), down, right)
        )
    return boxes, [numbers.randrange(2) for _ in range(count)]


@pytest.mark.parametrize(("mode", "options"), FORMS)
def test_it_is_the_same_jpeg_to_everybody(mode: str, options: dict[str, Any]) -> None:
    image = encoded(drawn(190, 270, mode), **options)
    again = rewritten(image)
    assert NAME in again
    assert rewritten(again) == again
    assert seen(again).tobytes() == seen(image).tobytes()
    with Image.open(io.BytesIO(image)) as before, Image.open(io.BytesIO(again)) as after:
        assert after.getexif().get(0x0112) == before.getexif().get(0x0112)
        assert not after.info.get("progressive")
        assert after.info.get("dpi") == before.info.get("dpi")
    assert (
        made([again], [(1, 2, 30, 40)], [0], VIEW, PILLOW).tolist()
        == made([image], [(1, 2, 30, 40)], [0], VIEW, PILLOW).tolist()
    )


@given(st.sampled_from(FORMS), st.integers(1, 200), st.integers(1, 300), st.integers(0, 1000))
def test_any_crop_of_it_is_that_of_the_original(
    form: tuple[str, dict[str, Any]], height: int, width: int, seed: int
) -> None:
    image = encoded(drawn(height, width, form[0]), **form[1])
    boxes, flips = _crops(image, 4, seed)
    again = rewritten(image)
    assert (made([again] * 4, boxes, flips, VIEW) == made([image] * 4, boxes, flips, VIEW)).all()


def test_crops_of_photographs_are_those_of_the_originals(data_dir: Path) -> None:
    images = photographs(data_dir / "images")
    again = [rewritten(image) for image in images]
    assert 1 < sum(map(len, again)) / sum(map(len, images)) < 1.08
    assert sizes(again).tolist() == sizes(images).tolist()
    view = PixelView(64, 64, "HWC", "uint8", None, None)
    crops = [_crops(image, 1, row) for row, image in enumerate(images)]
    boxes, flips = [box for box, _ in crops], [flip for _, flip in crops]
    boxes, flips = [box[0] for box in boxes], [flip[0] for flip in flips]
    assert (made(again, boxes, flips, view) == made(images, boxes, flips, view)).all()


def test_what_would_gain_nothing_stays_as_it_is() -> None:
    picture = drawn(60, 80)
    for image in (
        encoded(picture, "PNG"),
        encoded(picture, restart_marker_blocks=2),
        encoded(picture)[:500],
        b"\xff\xd8\xff",
        b"something else",
        b"",
    ):
        assert rewritten(image) == image
        assert rewritten(memoryview(image)) == image
    assert rewritten(encoded(picture), PILLOW) == encoded(picture)


def test_an_index_of_another_image_is_not_used() -> None:
    one, other = (encoded(drawn(120, 160, seed=seed), quality=90) for seed in (1, 2))
    indexed = rewritten(one)
    start = indexed.index(NAME) - 4
    segment = indexed[start : start + len(indexed) - len(one)]
    at = other.index(b"\xff\xc0")
    mixed = other[:at] + segment + other[at:]
    boxes, flips = _crops(other, 8, 0)
    assert (made([mixed] * 8, boxes, flips, VIEW) == made([other] * 8, boxes, flips, VIEW)).all()


@given(st.lists(st.tuples(st.integers(10, 2000), st.integers(0, 255)), min_size=1, max_size=4))
def test_an_index_that_is_wrong_is_not_used(wrong: list[tuple[int, int]]) -> None:
    image = encoded(drawn(120, 160), quality=90, subsampling="4:4:4")
    indexed = bytearray(rewritten(image))
    start, length = indexed.index(NAME), len(indexed) - len(image) - 4
    for where, value in wrong:
        indexed[start + 10 + where % (length - 10)] = value
    boxes, flips = _crops(image, 3, 0)
    assert (
        made([bytes(indexed)] * 3, boxes, flips, VIEW) == made([image] * 3, boxes, flips, VIEW)
    ).all()


@given(st.floats(0, 1), st.integers(0, 1000))
def test_a_part_of_it_is_refused_or_right(share: float, seed: int) -> None:
    indexed = rewritten(encoded(drawn(120, 160), quality=90))
    boxes, flips = _crops(indexed, 1, seed)
    whole = made([indexed], boxes, flips, VIEW)
    with contextlib.suppress(ImageError):
        part = made([indexed[: int(share * len(indexed))]], boxes, flips, VIEW)
        assert np.array_equal(part, whole)
