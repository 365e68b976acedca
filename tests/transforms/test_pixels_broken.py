"""Invalid or truncated images are refused with row and reason, and never become grey."""

from __future__ import annotations

import contextlib
import io
import itertools
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import without
from pictures import Encoded, drawn, encoded, exif, made, pillow_maker, sizes
from PIL import Image

from dataplane.model.errors import ImageError
from dataplane.transforms import pixels_pillow
from dataplane.transforms.pixels import render
from dataplane.transforms.pixels_library import Maker, maker
from dataplane.transforms.view import PixelView

FOUND = maker()
PILLOW = pillow_maker()
MAKERS = (FOUND, PILLOW)
VIEW = PixelView(24, 32, "HWC", "uint8", None, None)
BOX = (0, 0, 40, 56)
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("JPEG", {"quality": 90}),
    ("JPEG", {"quality": 90, "progressive": True}),
    ("JPEG", {"quality": 90, "restart_marker_blocks": 2, "exif": exif(6)}),
    ("PNG", {}),
    ("WEBP", {"quality": 90}),
)


def _box(image: bytes) -> tuple[float, ...]:
    return (0, 0, 56, 40) if exif(6) in image else BOX


@pytest.mark.parametrize(("form", "options"), FORMS)
def test_an_image_that_ends_anywhere_is_refused_or_whole(
    form: str, options: dict[str, Any]
) -> None:
    for by in MAKERS:
        _check_ends(by, form, options)


def _check_ends(by: Maker, form: str, options: dict[str, Any]) -> None:
    image = encoded(drawn(40, 56), form, **options)
    box = _box(image)
    whole = made([image], [box], [0], VIEW, by)
    step = 1 if not by.missing and form == "JPEG" else 17
    refused = 0
    for end in {*range(0, len(image), step), *range(len(image) - 20, len(image))}:
        try:
            found = made([image[:end]], [box], [0], VIEW, by)
        except ImageError:
            refused += 1
        else:
            assert (found == whole).all(), end
    assert refused > len(image) // step * 0.9


@pytest.mark.parametrize("by", MAKERS, ids=str)
@given(
    junk=st.binary(max_size=200),
    start=st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF"]),
)
def test_bytes_that_are_no_image_are_refused(by: Maker, junk: bytes, start: bytes) -> None:
    places = Encoded.of([start + junk])
    for call in (
        lambda: sizes([start + junk], by),
        lambda: render(
            places.places,
            np.array([[0, 0, 1.0, 1.0]]),
            np.zeros(1, np.uint8),
            VIEW,
            np.zeros(VIEW.bytes, np.uint8),
            by,
        ),
    ):
        with pytest.raises(ImageError) as caught:
            call()
        assert caught.value.row == 0


@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=6),
    st.sampled_from(MAKERS),
)
def test_any_bytes_may_be_wrong(
    form: tuple[str, dict[str, Any]], wrong: list[tuple[float, int]], by: Maker
) -> None:
    image = bytearray(encoded(drawn(40, 56), form[0], **form[1]))
    for where, value in wrong:
        image[int(where * len(image))] = value
    with contextlib.suppress(ImageError):
        height, width = sizes([bytes(image)], by)[0].tolist()
        if height * width < 1 << 20:
            made([bytes(image)], [(0, 0, height, width)], [0], VIEW, by)


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_the_row_that_failed_is_named(by: Maker) -> None:
    good, bad = encoded(drawn(40, 56)), encoded(drawn(40, 56))[:300]
    places = Encoded.of([good, encoded(drawn(40, 56), "PNG"), bad, good])
    with pytest.raises(ImageError, match=r"(?i)truncated") as caught:
        render(
            places.places, np.array([BOX] * 4, float), np.zeros(4, np.uint8), VIEW,
            np.zeros(4 * VIEW.bytes, np.uint8), by,
        )  # fmt: skip
    assert caught.value.row == 2


BOXES_OUTSIDE = (
    (-1, 0, 4, 4), (0, -1, 4, 4), (0, 0, 41, 4), (0, 0, 4, 57), (39.5, 0, 1, 4), (0, 0, 0, 4),
    (0, 0, 4, -1), (float("nan"), 0, 4, 4), (0, 0, float("inf"), 4), (0, 0, 4, float("nan")),
)  # fmt: skip


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_a_box_outside_of_the_image_is_refused(form: str) -> None:
    image = encoded(drawn(40, 56), form)
    for box, by in itertools.product(BOXES_OUTSIDE, MAKERS):
        with pytest.raises(ImageError, match="box"):
            made([image], [box], [0], VIEW, by)


def _large_png(side: int) -> bytes:
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    framed = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + framed


def _large_jpeg(side: int) -> bytes:
    image = bytearray(encoded(drawn(8, 8)))
    at = image.index(b"\xff\xc0")
    image[at + 5 : at + 9] = struct.pack(">HH", side, side)
    return bytes(image)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    for by, image in itertools.product(MAKERS, (_large_jpeg(14000), _large_png(20000))):
        with pytest.raises(ImageError, match=r"too large|exceeds limit"):
            sizes([image], by)
        with pytest.raises(ImageError, match=r"too large|exceeds limit"):
            made([image], [(0, 0, 8, 8)], [0], VIEW, by)


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_the_size_needs_only_the_header(by: Maker) -> None:
    jpeg = encoded(drawn(40, 56))
    scan = jpeg.index(b"\xff\xda")
    assert sizes([jpeg[: scan + 14]], by).tolist() == [[40, 56]]


def test_a_file_that_lacks_only_its_end_marker_is_whole() -> None:
    image = encoded(drawn(40, 56))
    assert image.endswith(b"\xff\xd9")
    if not FOUND.missing:
        assert (made([image[:-2]], [BOX], [0], VIEW) == made([image], [BOX], [0], VIEW)).all()


def test_a_progressive_image_with_very_many_scans_is_refused() -> None:
    if FOUND.missing:
        without(FOUND.missing)
    image = encoded(drawn(40, 56), progressive=True)
    scan = image.rindex(b"\xff\xda")
    many = io.BytesIO()
    many.write(image[:scan])
    many.write(image[scan:-2] * 600)
    with pytest.raises(ImageError):
        made([many.getvalue() + b"\xff\xd9"], [BOX], [0], VIEW)


@pytest.mark.parametrize("wrong", ["boxes", "flips", "out"])
def test_arrays_of_other_lengths_are_refused(wrong: str) -> None:
    places = Encoded.of([encoded(drawn(40, 56))] * 2)
    arrays = {
        "boxes": np.array([BOX] * 2, float), "flips": np.zeros(2, np.uint8),
        "out": np.zeros(2 * VIEW.bytes, np.uint8),
    }  # fmt: skip
    arrays[wrong] = arrays[wrong][:1]
    with pytest.raises(ValueError, match="length"):
        render(places.places, arrays["boxes"], arrays["flips"], VIEW, arrays["out"])


def test_an_image_for_which_memory_ran_out_is_not_a_bad_one() -> None:
    """Otherwise a row would be replaced on one machine, and not on another."""
    sink = io.BytesIO()
    Image.new("RGB", (4, 4)).save(sink, "PNG")
    held = np.frombuffer(sink.getvalue(), np.uint8)
    images = np.array([(held.ctypes.data, len(held))], np.int64)
    said = f"{Image.core.getcodecstatus(-9)} when reading image file"
    with pytest.raises(MemoryError, match=said), pixels_pillow.opened(images, 0):
        raise OSError(said)
