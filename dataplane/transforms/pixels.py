"""Decode images in memory, and write resized crops of them into a slab in the requested form.

Every image becomes RGB: grey is repeated; CMYK and YCCK are taken as inverted (as Adobe and Pillow
do) and converted without a colour profile; an alpha channel is dropped, and the colours under it
stay; 16-bit channels keep their upper eight bits. EXIF orientation is applied. A JPEG is decoded
only inside its box, and at 1/2, 1/4 or 1/8 scale if it may be reduced and that leaves enough
pixels. Every other image is decoded whole, by Pillow.

A result depends on image, box, flip, view and `may_reduce`, not on the processor. It differs by at
most `TOLERANCE` of 255 from Pillow's result for the whole image, unless a JPEG was reduced. If the
library was compiled without libjpeg-turbo, Pillow decodes JPEGs, too, within `TOLERANCE`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dataplane.model.errors import ImageError
from dataplane.transforms import pixels_pillow as pillow
from dataplane.transforms.image_steps import PixelChange
from dataplane.transforms.pixels_library import REASON_BYTES, Maker, maker
from dataplane.transforms.view import COLOURS, DTYPES, PixelView

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]

TOLERANCE: Final = 1
_FOR_PILLOW = 1
_CHANGED_BYTES = 4 << 20
"""The most RGB bytes that are changed before they are converted."""


class _View(ctypes.Structure):
    """The struct of csrc/view.h."""

    _fields_ = (
        ("height", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("is_planar", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("scale", ctypes.c_float * COLOURS),
        ("bias", ctypes.c_float * COLOURS),
    )


_Sides = ctypes.c_int32 * 2


class _Crop(Struct, frozen=True):
    """The crop of one upright image.   Shapes:  box: float64[4] = top, left, height, width."""

    box: Doubles
    is_flipped: bool
    may_reduce: bool

    def shrink(self, view: PixelView) -> int:
        """Return the largest reduction that still leaves the view's pixels: 1, 2, 4 or 8."""
        if not self.may_reduce:
            return 1
        least = min(self.box[2] / view.height, self.box[3] / view.width)
        return max(by for by in (1, 2, 4, 8) if by == 1 or least >= by)


def sizes(images: Ints, by: Maker | None = None) -> NDArray[np.int32]:
    """Return (height, width) of each image, from its header, with EXIF orientation applied.

    Shapes:  images: int64[n, 2], address and length of each: the caller keeps the memory alive.
             result: int32[n, 2].
    Raises:  ImageError: row is its index; truncated, too large, or not an image.
    """
    by = by or maker()
    images = np.ascontiguousarray(images, np.int64)
    found = np.empty((len(images), 2), np.int32)
    outcomes = np.full(len(images), _FOR_PILLOW, np.uint8)
    if not by.missing:
        reason = ctypes.create_string_buffer(REASON_BYTES)
        failed = by.library.pixels_sizes(
            images.ctypes.data, len(images), found.ctypes.data, outcomes.ctypes.data, reason
        )
        _refuse(failed, reason)
    for row in np.flatnonzero(outcomes == _FOR_PILLOW).tolist():
        with pillow.opened(images, row) as (image, orientation):
            found[row] = pillow.seen_size(image, orientation)
    return found


def render(
    images: Ints,
    boxes: Doubles,
    flips: Bytes,
    view: PixelView,
    out: Bytes,
    by: Maker | None = None,
    restart_indexes: Ints | None = None,
    *,
    may_reduce: bool = False,
    changes: Sequence[PixelChange] = (),
) -> None:
    """Render the box of each image: resized to the view, mirrored left-right where `flips` says so,
    changed by each of `changes`, normalised, in the view's layout.

    The resize is bilinear with antialiasing, as torchvision's antialias=True, and as Pillow's
    BILINEAR with a box, whose filter also uses the pixels around the box. With `may_reduce`, a JPEG
    whose box has at least 2, 4 or 8 times the pixels of the view, in both directions, is decoded at
    a half, a quarter or an eighth.

    `restart_indexes` is memory for each image, initially zero. A crop records there where rows and
    columns of the image begin in its bytes, so that later crops can skip what they do not need.
    Several processes may use it at the same time.

    Shapes:  images, restart indexes: int64[n, 2], address and length of each; address 0 means
    none, other addresses are multiples of 4.   flips: uint8[n].
             boxes: float64[n, 4] = top, left, height, width in pixels of the upright image.
             out: uint8[n * view.bytes].
    Raises:  ImageError: row is its index; its part of `out` is undefined.
    """
    by = by or maker()
    images = np.ascontiguousarray(images, np.int64)
    boxes = np.ascontiguousarray(boxes, np.float64)
    flips = np.ascontiguousarray(flips, np.uint8)
    count = len(images)
    none = np.zeros((count, 2), np.int64)
    kept = none if restart_indexes is None else np.ascontiguousarray(restart_indexes)
    if not (boxes.shape == (count, 4) and flips.shape == (count,) and kept.shape == (count, 2)
            and out.nbytes == count * view.bytes):  # fmt: skip
        raise ValueError("images, restart indexes, boxes, flips and out differ in length")
    if not out.flags.c_contiguous:
        raise ValueError("out is not contiguous")
    if changes:
        _render_changed(
            images, boxes, flips, view, out, by, kept, may_reduce=may_reduce, changes=changes
        )
        return
    outcomes = np.full(count, _FOR_PILLOW, np.uint8)
    if not by.missing:
        reason = ctypes.create_string_buffer(REASON_BYTES)
        failed = by.library.pixels_render(
            images.ctypes.data, kept.ctypes.data, count, boxes.ctypes.data, flips.ctypes.data,
            ctypes.byref(_form(view)), view.bytes, may_reduce,
            out.ctypes.data, outcomes.ctypes.data, reason,
        )  # fmt: skip
        _refuse(failed, reason)
    places = out.reshape(count, view.bytes)
    for row in np.flatnonzero(outcomes == _FOR_PILLOW).tolist():
        crop = _Crop(boxes[row], bool(flips[row]), may_reduce)
        _render_by_pillow(images, row, crop, view, by, places[row])


def _render_changed(
    images: Ints,
    boxes: Doubles,
    flips: Bytes,
    view: PixelView,
    out: Bytes,
    by: Maker,
    restart_indexes: Ints,
    *,
    may_reduce: bool,
    changes: Sequence[PixelChange],
) -> None:
    """Render a few images at a time: make RGB bytes, change them, and convert them to the view's
    form. Otherwise the same as `render`.
    """
    plain = replace(view, layout="HWC", dtype="uint8", mean=None, std=None)
    step = max(1, _CHANGED_BYTES // plain.bytes)
    places = out.reshape(-1, view.bytes)
    for first in range(0, len(places), step):
        part = slice(first, first + step)
        to = places[part]
        made = np.empty((len(to), view.height, view.width, COLOURS), np.uint8)
        try:
            render(
                images[part], boxes[part], flips[part], plain, made.reshape(-1), by,
                restart_indexes[part], may_reduce=may_reduce,
            )  # fmt: skip
        except ImageError as error:
            raise ImageError(str(error), row=first + int(error.row or 0)) from error
        for row, pixels in enumerate(made):
            for change in changes:
                _change(pixels, change, first + row, by)
        form = ctypes.byref(_form(view))
        by.library.pixels_form(made.ctypes.data, len(made), form, view.bytes, to.ctypes.data)


def _change(pixels: Bytes, change: PixelChange, row: int, by: Maker) -> None:
    """Change the pixels of one image in place.   Shapes:  pixels: uint8[height, width, 3]."""
    kind, drawn = change.kind, change.drawn[row]
    if kind.in_c:
        height, width, _ = pixels.shape
        function = getattr(by.library, kind.c_function)
        function(pixels.ctypes.data, height, width, change.numbers.ctypes.data, drawn.ctypes.data)
    elif kind.change is not None:
        kind.change(change.step, pixels, drawn)


def _render_by_pillow(
    images: Ints, row: int, crop: _Crop, view: PixelView, by: Maker, out: Bytes
) -> None:
    """Render one image that Pillow decodes."""
    with pillow.opened(images, row) as (image, orientation):
        _check(crop.box, *pillow.seen_size(image, orientation), row)
        decoded = pillow.decode(image, orientation, crop.shrink(view))
        if not _resize(by.library, decoded, crop, view, out):
            raise MemoryError("no memory for its resize")


def _resize(
    library: ctypes.CDLL, decoded: pillow.StoredPixels, crop: _Crop, view: PixelView, out: Bytes
) -> bool:
    """Resize one image; return False if memory ran out."""
    pixels = decoded.pixels
    failed = library.pixels_resize(
        pixels.tobytes("raw", "RGBX"), _Sides(pixels.height, pixels.width),
        _Sides(decoded.height, decoded.width), decoded.orientation, decoded.shrink,
        crop.box.ctypes.data, ctypes.byref(ctypes.c_uint8(crop.is_flipped)),
        ctypes.byref(_form(view)), out.ctypes.data,
    )  # fmt: skip
    return not failed


def _form(view: PixelView) -> _View:
    scale, bias = view.factors()
    form = _View(view.height, view.width, view.layout == "CHW", [*DTYPES].index(view.dtype))
    form.scale[:], form.bias[:] = scale.tolist(), bias.tolist()
    return form


def _refuse(row: int, reason: ctypes.Array[ctypes.c_char]) -> None:
    if row < 0:
        return
    said = reason.value.decode(errors="replace")
    # Our own C code and libjpeg report lack of memory with these messages.
    if said.startswith(("no memory", "Insufficient memory")):
        raise MemoryError(said)
    raise ImageError(said, row=row)


def _check(box: Doubles, height: int, width: int, row: int) -> None:
    slack = 1e-6
    top, left, down, right = box.tolist()
    if not (
        down > 0 and right > 0 and top >= -slack and left >= -slack
        and top + down <= height + slack and left + right <= width + slack
    ):  # fmt: skip
        raise ImageError(f"its box does not lie within its {height} x {width} pixels", row=row)
