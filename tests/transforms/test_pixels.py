"""All implementations make the pixels that Pillow makes, even if they decode only a part."""

from __future__ import annotations

import io
import itertools
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import pixels as oracle
from pictures import (
    Encoded,
    drawn,
    encoded,
    exif,
    expected,
    made,
    photographs,
    pillow_maker,
    seen,
    sizes,
)
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dataplane.model.errors import ConfigError, ImageError
from dataplane.transforms.pixels import TOLERANCE
from dataplane.transforms.pixels_library import Maker, maker
from dataplane.transforms.view import DTYPES, PixelView

FOUND = maker()
PILLOW = pillow_maker()
MAKERS = (FOUND, PILLOW)
VIEW = PixelView(24, 32, "HWC", "uint8", None, None)
FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("RGB", "JPEG", {"quality": 95, "subsampling": "4:4:4"}),
    ("RGB", "JPEG", {"quality": 90, "subsampling": "4:2:0", "optimize": True}),
    ("RGB", "JPEG", {"quality": 80, "subsampling": "4:2:2", "progressive": True}),
    ("RGB", "JPEG", {"quality": 90, "restart_marker_blocks": 3}),
    ("RGB", "JPEG", {"quality": 90, "keep_rgb": True, "subsampling": "4:4:4"}),
    ("L", "JPEG", {"quality": 90}),
    ("CMYK", "JPEG", {"quality": 90}),
    ("RGB", "PNG", {}),
    ("RGBA", "PNG", {}),
    ("L", "PNG", {}),
    ("LA", "PNG", {}),
    ("RGB", "WEBP", {"quality": 90}),
    ("RGBA", "WEBP", {"lossless": True}),
    ("RGB", "GIF", {}),
    ("RGB", "BMP", {}),
    ("CMYK", "TIFF", {}),
)


def test_this_installation_has_all_fast_image_libraries() -> None:
    if FOUND.missing and not os.environ.get("CI"):
        pytest.skip(f"made by {FOUND}: {FOUND.missing}")
    assert FOUND.missing == ""


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_every_form_of_image_becomes_what_pillow_makes_of_it(by: Maker) -> None:
    images = [encoded(drawn(47, 61, mode), form, **options) for mode, form, options in FORMS]
    assert (sizes(images, by) == (47, 61)).all()
    boxes = [(0, 0, 47, 61), (5, 7, 31, 40), (11.25, 3.5, 20.5, 9.75), (46, 60, 1, 1)]
    for box, flip in zip(boxes, (0, 1, 0, 1), strict=True):
        count = len(images)
        found = made(images, [box] * count, [flip] * count, VIEW, by).reshape(count, 24, 32, 3)
        for form, image, pixels in zip(FORMS, images, found, strict=True):
            far = np.abs(pixels - expected(image, box, bool(flip), VIEW))
            assert far.max() <= TOLERANCE, (form, box)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_as_exif_says(form: str) -> None:
    for by in MAKERS:
        _check_turns(form, by)


def _check_turns(form: str, by: Maker) -> None:
    images = [
        encoded(drawn(40, 56), form, exif=exif(turn), quality=95) for turn in (*range(1, 9), 0, 9)
    ]
    shapes = sizes(images, by).tolist()
    assert shapes == [[40, 56]] * 4 + [[56, 40]] * 4 + [[40, 56]] * 2
    box = (3.0, 2.0, 30.0, 35.0)
    views = [PixelView(24, 32, layout, "uint8", None, None) for layout in ("HWC", "CHW")]
    for flip, view in itertools.product((0, 1), views):
        found = made(images, [box] * 10, [flip] * 10, view, by)
        for image, pixels in zip(images, found, strict=True):
            shaped = (
                pixels.reshape(24, 32, 3)
                if view.layout == "HWC"
                else pixels.reshape(3, 24, 32).transpose(1, 2, 0)
            )
            assert np.abs(shaped - expected(image, box, bool(flip), view)).max() <= TOLERANCE


@st.composite
def jpegs(draw: st.DrawFn) -> tuple[bytes, tuple[int, int]]:
    height, width = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    mode = draw(st.sampled_from(["RGB", "RGB", "RGB", "L", "CMYK"]))
    options: dict[str, Any] = {
        "quality": draw(st.sampled_from([50, 85, 95])),
        "progressive": draw(st.booleans()),
        "restart_marker_blocks": draw(st.sampled_from([0, 0, 2])),
        "exif": exif(draw(st.sampled_from([1, 1, 1, 2, 3, 6, 7]))),
    }
    if mode == "RGB":
        options["subsampling"] = draw(st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]))
    image = encoded(drawn(height, width, mode, seed=height), **options)
    return image, (height, width)


@st.composite
def boxes_in(draw: st.DrawFn, height: int, width: int) -> tuple[float, float, float, float]:
    def part(size: int) -> tuple[float, float]:
        if draw(st.booleans()):
            start = draw(st.integers(0, size - 1))
            return start, draw(st.integers(1, size - start))
        start = draw(st.floats(0, size * 0.99))
        return start, draw(st.floats(min(0.01, size - start), size - start))

    (top, down), (left, right) = part(height), part(width)
    return top, left, down, right


@given(jpegs(), st.data())
def test_any_box_of_any_jpeg_is_that_of_the_whole_image(
    jpeg: tuple[bytes, tuple[int, int]], data: st.DataObject
) -> None:
    image, _ = jpeg
    height, width = sizes([image])[0].tolist()
    box = data.draw(boxes_in(height, width))
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    flip = data.draw(st.integers(0, 1))
    view = PixelView(*shape, "HWC", "uint8", None, None)
    reference = expected(image, box, bool(flip), view)
    for by in MAKERS:
        pixels = made([image], [box], [flip], view, by).reshape(*shape, 3)
        assert np.abs(pixels - reference).max() <= TOLERANCE
    # A part decodes to the very values that it has in the whole image, which Pillow decodes.
    found = made([image], [box], [flip], view)
    assert (found == made([_lossless(image)], [box], [flip], view)).all()


def _lossless(image: bytes) -> bytes:
    """The pixels that Pillow decodes, as they are stored, with the same orientation."""
    with Image.open(io.BytesIO(image)) as opened:
        turn = opened.getexif().get(0x0112, 1)
        return encoded(opened.convert("RGB"), "PNG", compress_level=0, exif=exif(turn))


@given(jpegs(), st.data())
def test_reduced_crops_are_similar_with_all_implementations(
    jpeg: tuple[bytes, tuple[int, int]], data: st.DataObject
) -> None:
    image, _ = jpeg
    height, width = sizes([image])[0].tolist()
    box = data.draw(boxes_in(height, width))
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    view = PixelView(*shape, "HWC", "uint8", None, None)
    there, reduced = Encoded.of([image]), np.zeros(view.bytes, np.uint8)
    oracle.render(there.places, np.array([box]), np.zeros(1), view, reduced, may_reduce=True)
    for by in MAKERS:
        pixels = made([image], [box], [0], view, by, may_reduce=True)
        assert np.abs(pixels.astype(int) - reduced).max() <= TOLERANCE
        if box[2] < 2 * shape[0] or box[3] < 2 * shape[1]:
            assert (pixels == made([image], [box], [0], view, by)).all(), "it is not reduced"


def test_photographs_are_decoded_in_part_to_the_same_bytes(data_dir: Path) -> None:
    images = photographs(data_dir / "images")
    random = np.random.default_rng(0)
    view = PixelView(112, 96, "CHW", "uint8", None, None)
    whole = sizes(images).astype(float)
    assert (whole == sizes(images, PILLOW)).all()
    parts = whole * random.uniform(0.05, 1, whole.shape)
    boxes = np.concatenate([random.uniform(0, 1, whole.shape) * (whole - parts), parts], 1)
    flips = random.integers(0, 2, len(images))
    found = made(images, boxes, flips, view)
    assert (found == made([_lossless(image) for image in images], boxes, flips, view)).all()
    for row, image in enumerate(images[::8]):
        pixels = found[8 * row].reshape(3, 112, 96).transpose(1, 2, 0)
        far = np.abs(pixels - expected(image, boxes[8 * row], bool(flips[8 * row]), view))
        assert far.max() <= TOLERANCE


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_every_layout_and_dtype_holds_the_same_picture(by: Maker) -> None:
    for layout, width in itertools.product(("HWC", "CHW"), (1, 5, 33)):
        _check_dtypes(by, layout, width)


def _check_dtypes(by: Maker, layout: str, width: int) -> None:
    images = [encoded(drawn(40, 50), quality=95), encoded(drawn(40, 50), "PNG")]
    boxes, flips = [(2, 3, 30, 40)] * 2, [0, 1]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def values(dtype: str, of: tuple[float, float, float] | None) -> np.ndarray[Any, Any]:
        view = PixelView(17, width, layout, dtype, of, of and std)
        assert view.bytes == 17 * width * 3 * DTYPES[dtype]
        found = made(images, boxes, flips, view, by)
        if dtype == "bfloat16":
            words = found.view(np.uint16).astype(np.uint32) << 16
            found = words.view(np.float32)
        else:
            found = found.view(dtype)
        shaped = (
            found.reshape(2, 17, width, 3)
            if layout == "HWC"
            else found.reshape(2, 3, 17, width).transpose(0, 2, 3, 1)
        )
        return shaped.astype(np.float64)

    whole = values("uint8", None)
    for row, image in enumerate(images):
        view = PixelView(17, width, layout, "uint8", None, None)
        assert (
            np.abs(whole[row] - expected(image, boxes[row], bool(flips[row]), view)).max()
            <= TOLERANCE
        )
    plain, normal = values("float32", None), values("float32", mean)
    assert np.abs(plain * 255 - whole).max() <= 0.51
    assert np.abs(normal * std + mean - plain).max() < 1e-5
    for exact, of in ((plain, None), (normal, mean)):
        assert (values("float16", of) == exact.astype(np.float16)).all()
        assert np.abs(values("bfloat16", of) - exact).max() <= 2**-8 * np.abs(exact).max()
        assert (np.abs(values("bfloat16", of) / np.where(exact == 0, 1, exact) - 1) <= 2**-8)[
            exact != 0
        ].all()


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_sixteen_bits_become_their_upper_eight(by: Maker) -> None:
    values = np.arange(40 * 50, dtype=np.uint16).reshape(40, 50) * 32
    image = encoded(Image.fromarray(values), "PNG")
    view = PixelView(40, 50, "HWC", "uint8", None, None)
    found = made([image], [(0, 0, 40, 50)], [0], view, by).reshape(40, 50, 3)
    assert (found == (values >> 8)[..., None]).all()


def _tiff(bits: int, body: bytes, height: int, width: int) -> bytes:
    """An uncompressed grey picture."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 8, 278: height, 279: len(body)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    entries = entries.replace(
        struct.pack("<HHII", 273, 4, 1, 8), struct.pack("<HHII", 273, 4, 1, 110)
    )
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    assert len(head) == 110
    return head + body


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_every_depth_of_grey_has_its_whole_range(by: Maker) -> None:
    grey = np.arange(0, 256, 2, np.uint8).reshape(8, 16)
    wide, view = grey.astype(np.uint16), PixelView(8, 16, "HWC", "uint8", None, None)
    twelve = (wide << 4).reshape(-1, 2)
    packed = np.stack(
        [twelve[:, 0] >> 4, (twelve[:, 0] & 15) << 4 | twelve[:, 1] >> 8, twelve[:, 1] & 255], 1
    ).astype(np.uint8)
    images = [
        encoded(Image.fromarray(grey), "TIFF"),
        encoded(Image.fromarray(wide << 8), "TIFF"),
        encoded(Image.fromarray(wide << 8), "JPEG2000"),
        b"P5 16 8 65535\n" + (wide << 8).astype(">u2").tobytes(),
        _tiff(12, packed.tobytes(), 8, 16),
    ]
    found = made(images, [(0, 0, 8, 16)] * 5, [0] * 5, view, by).reshape(5, 8, 16, 3)
    assert (found == grey[..., None]).all()


@pytest.mark.parametrize("by", MAKERS, ids=str)
@pytest.mark.parametrize("dtype", ["f4", "i4", "u4"])
def test_grey_without_a_range_is_refused(dtype: str, by: Maker) -> None:
    values = np.linspace(0, 1, 128, dtype="f4").reshape(8, 16)
    image = encoded(Image.fromarray(values), "TIFF")
    if dtype != "f4":
        image = _tiff(32, (values * 2**30).astype(dtype).tobytes(), 8, 16)
    with pytest.raises(ImageError, match="for which no value is defined as white"):
        sizes([image], by)
    portable = b"Pf 16 8 -1.0\n" + values.tobytes()
    with pytest.raises(ImageError, match="floats, for which no value"):
        sizes([portable], by)


def _segment(content: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content


def _directory(order: str, kind: int, value: bytes, count: int = 1) -> bytes:
    """EXIF with one entry, the orientation."""
    start = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(f"{order}HHI", 0x0112, kind, count) + value
    return b"Exif\0\0" + start + struct.pack(f"{order}IH", 8, 1) + entry + bytes(4)


_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_SIX = {order: struct.pack(f"{order}I", 6) for order in "<>"}
_ATTRIBUTE, _ELEMENT = b'<x tiff:Orientation="%d"/>', b"<tiff:Orientation>%d</tiff:Orientation>"
# Segments of a JPEG, and whether Pillow turns it.
_SAID: tuple[tuple[bytes, bool], ...] = (
    (_segment(_directory("<", 4, _SIX["<"])), True),  # LONG
    (_segment(_directory(">", 4, _SIX[">"])), True),
    (_segment(_directory(">", 9, _SIX[">"])), True),  # SLONG
    (_segment(_directory(">", 3, b"\0\6\0\0")), True),
    (_segment(_directory(">", 3, b"\0\6\0\1", count=2)), True),
    (_segment(_directory(">", 6, b"\6\0\0\0")), True),  # SBYTE
    (
        _segment(_directory(">", 5, struct.pack(">I", 26)) + struct.pack(">II", 6, 1)),
        True,
    ),  # RATIONAL
    (_segment(_directory(">", 1, b"\6\0\0\0")), False),  # BYTE
    (_segment(b"Exif\0\0" + _directory(">", 4, _SIX[">"])), True),
    (_segment(_XMP + _ATTRIBUTE % 6), True),
    (_segment(_XMP + _ELEMENT % 6), True),
    (_segment(_XMP + b"tiff:Orientation=6 " + _ATTRIBUTE % 6), True),
    (_segment(_XMP + _ATTRIBUTE % 9), False),
    (_segment(_XMP + _ATTRIBUTE % 6) + _segment(_XMP + b"<x/>"), False),
    (_segment(_XMP + _ATTRIBUTE % 6) + _segment(_directory(">", 3, b"\0\1\0\0")), False),
    (_segment(_XMP + _ATTRIBUTE % 6) + _segment(_directory(">", 3, b"\0\0\0\0")), False),
    (_segment(_directory(">", 14, b"\0\6\0\0")) + _segment(_XMP + _ATTRIBUTE % 6), True),
    (_segment(b"Exif\0\0junk") + _segment(b"http://ns.adobe.com/xap"), False),
)


@pytest.mark.parametrize("by", MAKERS, ids=str)
@pytest.mark.parametrize("place", ["first", "before the scan"])
@pytest.mark.filterwarnings("ignore:Metadata Warning")  # Pillow's, of two values
def test_jpegs_are_turned_as_pillow_turns_them(place: str, by: Maker) -> None:
    base = encoded(drawn(40, 56), quality=95)
    at = 2 if place == "first" else base.index(b"\xff\xda")
    images = [base[:at] + said + base[at:] for said, _ in _SAID]
    assert [found == [56, 40] for found in sizes(images, by).tolist()] == [
        turns for _, turns in _SAID
    ]
    box = (3.0, 2.0, 30.0, 35.0)
    found = made(images, [box] * len(images), [0] * len(images), VIEW, by)
    for image, pixels in zip(images[:-1], found, strict=False):  # Pillow raises at the last
        far = np.abs(pixels.reshape(24, 32, 3) - expected(image, box, flip=False, view=VIEW))
        assert far.max() <= TOLERANCE


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_all_formats_are_turned_as_pillow_turns_them(by: Maker) -> None:
    picture, turn = drawn(40, 56), exif(6)
    late = b"eXIf" + turn[6:]
    late = struct.pack(">I", len(turn) - 6) + late + struct.pack(">I", zlib.crc32(late))
    plain, text, raw = encoded(picture, "PNG"), PngInfo(), PngInfo()
    text.add_itxt("XML:com.adobe.xmp", (_ELEMENT % 6).decode(), zip=True)
    raw.add_text("Raw profile type exif", f"\nexif\n{len(turn):8}\n{turn.hex()}\n", zip=True)
    end = plain.index(b"IEND") - 4
    images = [
        plain[:end] + late + plain[end:],
        encoded(picture, "PNG", pnginfo=text),
        encoded(picture, "PNG", pnginfo=raw),
        encoded(picture, "WEBP", xmp=_ATTRIBUTE % 6),
        encoded(picture, "WEBP", exif=_directory(">", 4, _SIX[">"])),
        encoded(picture, "TIFF", tiffinfo={0x0112: 6}),
        encoded(picture, "TIFF", tiffinfo={700: _ATTRIBUTE % 6}),
        encoded(picture, "TIFF", tiffinfo={0x0112: 3, 700: _ATTRIBUTE % 6}),
    ]
    assert sizes(images, by).tolist() == [[56, 40]] * 7 + [[40, 56]]
    box = (3.0, 2.0, 30.0, 35.0)
    found = made(images, [box] * 8, [0] * 8, VIEW, by)
    for image, pixels in zip(images, found, strict=True):
        far = np.abs(pixels.reshape(24, 32, 3) - expected(image, box, flip=False, view=VIEW))
        assert far.max() <= TOLERANCE


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_a_jpeg_whose_orientation_is_only_in_xmp_is_turned(data_dir: Path, by: Maker) -> None:
    image = (data_dir / "odd" / "orientation-6-in-xmp.jpg").read_bytes()
    assert sizes([image], by).tolist() == [list(seen(image).size[::-1])]
    found = made(
        [image], [(0, 0, 128, 96)], [0], PixelView(128, 96, "HWC", "uint8", None, None), by
    )
    assert np.abs(found.reshape(128, 96, 3) - np.asarray(seen(image), np.int64)).max() <= TOLERANCE


def test_threads_make_the_same_pixels_at_once() -> None:
    forms = FORMS[:9]
    images = [encoded(drawn(120, 160, mode), form, **options) for mode, form, options in forms]
    boxes, flips = [(7.5, 3, 90, 130)] * len(images), [0, 1, 0] * 3
    alone = made(images, boxes, flips, VIEW)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(made, images, boxes, flips, VIEW) for _ in range(16)]
        assert all((one.result() == alone).all() for one in found)


@pytest.mark.parametrize("by", MAKERS, ids=str)
def test_no_images_are_no_pixels(by: Maker) -> None:
    assert sizes([], by).shape == (0, 2)
    assert made([], [], [], VIEW, by).shape == (0, VIEW.bytes)


@settings(max_examples=30)
@given(st.integers(0, 8))
def test_a_single_colour_stays_itself_at_any_size(colour: int) -> None:
    value = (0, 1, 37, 100, 127, 128, 200, 254, 255)[colour]
    image = encoded(Image.new("RGB", (37, 300), (value,) * 3), "PNG")
    for shape in ((1, 1), (7, 3), (90, 200), (301, 40)):
        view = PixelView(*shape, "HWC", "uint8", None, None)
        assert (made([image], [(0.3, 0.2, 299.1, 36.5)], [0], view) == value).all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layout": "WHC"}, "layout"),
        ({"dtype": "int8"}, "dtype"),
        ({"height": 0}, "pixels"),
        ({"dtype": "uint8", "mean": (0.5, 0.5, 0.5)}, "uint8"),
        ({"std": (1.0, 0.0, 1.0)}, "std"),
    ],
)
def test_an_impossible_view_is_refused(changed: dict[str, Any], said: str) -> None:
    fields = {
        "height": 4,
        "width": 4,
        "layout": "HWC",
        "dtype": "float32",
        "mean": None,
        "std": None,
    }
    with pytest.raises(ConfigError, match=said):
        PixelView(**(fields | changed))


def test_what_is_seen_is_what_pillow_sees() -> None:
    image = encoded(drawn(30, 20), exif=exif(6), quality=95)
    assert seen(image).size == (30, 20)
