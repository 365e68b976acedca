"""Pixels by Pillow: of every format but JPEG, and of all formats without the compiled library.

Pillow converts to RGB, and its ways are ours: grey is repeated, CMYK becomes RGB without a colour
profile, an alpha channel is dropped and what lies under it stays. Of 16 bits a channel the upper
eight count.
"""

from __future__ import annotations

import ctypes
import functools
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from dataplane.errors import ImageError
from dataplane.transforms.not_images import said_of

Bytes = NDArray[np.uint8]

# No format that starts another program, fetches something, or needs several files.
FORMATS = (
    "JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "JPEG2000", "PPM", "TGA", "ICO",
)  # fmt: skip
PIXELS_MAX = 178_956_970
"""Pillow's own limit against files that unpack to more than a machine has."""
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TRANSPOSING = 5
"""Orientations from this one on exchange rows and columns."""
# What Pillow's decoders raise when the bytes are not what they should be.
_FAULTS = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, AttributeError,
    ArithmeticError, AssertionError, RuntimeError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip


@functools.cache
def _formats() -> tuple[str, ...]:
    """Those of them that this Pillow was built with; it must be told to look for any."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def opened(images: NDArray[np.int64], row: int) -> Iterator[tuple[Image.Image, int]]:
    """One of the images, whose header was read, and its EXIF orientation.

    Shapes:  images: int64[n, 2], address and length of each.
    Raises:  ImageError: it, or what is done with it here, is refused by Pillow.
    """
    address, length = images[row].tolist()
    encoded = ctypes.string_at(address, length) if length else b""
    try:
        with Image.open(io.BytesIO(encoded), formats=_formats()) as image:
            if image.width * image.height > PIXELS_MAX:
                raise ImageError(
                    f"too large: {image.height} x {image.width} pixels, more than {PIXELS_MAX}",
                    row=row,
                )
            # All bytes at once: libjpeg cannot pause in the middle of arithmetic codes.
            image.decodermaxblock = max(image.decodermaxblock, length)
            yield image, _orientation(image)
    except UnidentifiedImageError:
        raise ImageError(said_of(encoded), row=row) from None
    except _FAULTS as fault:
        raise ImageError(f"Pillow cannot decode it: {fault}", row=row) from fault


def _orientation(image: Image.Image) -> int:
    """1 where there is none, or none that makes sense."""
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    found = exif.get(_ORIENTATION)
    return found if found in _TURNS else 1


def seen_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    """(height, width) of what people see of an image."""
    transposed = orientation >= _TRANSPOSING
    return (image.width, image.height) if transposed else (image.height, image.width)


def _rgb(image: Image.Image) -> Image.Image:
    """Decode an image, as it is stored."""
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image)
        # PNG's 16 bits were once opened as 32.
        if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
            values = values.clip(0, 255)
        else:
            values = values.clip(0, 0xFFFF) >> 8
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


@dataclass(frozen=True, slots=True)
class StoredPixels:
    """RGB pixels as they are stored: of a JPEG maybe 1/shrink of its `height` x `width`."""

    pixels: Image.Image
    orientation: int
    height: int
    width: int
    shrink: int


def decode(image: Image.Image, orientation: int, shrink: int) -> StoredPixels:
    """Decode an image that was opened; a JPEG at 1/shrink, a power of two, as libjpeg does it."""
    height, width = image.height, image.width
    if shrink > 1 and image.draft(None, (width // shrink, height // shrink)) is None:
        shrink = 1
    return StoredPixels(_rgb(image), orientation, height, width, shrink)


def resized(decoded: StoredPixels, box: NDArray[np.float64], height: int, width: int) -> Bytes:
    """What lies in the box of an image as it is seen.

    Shapes:  box: float64[4] = top, left, height, width.   result: uint8[height, width, 3].
    """
    image = decoded.pixels
    if decoded.orientation in _TURNS:
        image = image.transpose(_TURNS[decoded.orientation])
    top, left, down, right = _box_reduced(box, decoded).tolist()
    # Pillow allows no box that leaves the image by a rounding error.
    edges = (
        max(left, 0.0), max(top, 0.0),
        min(left + right, float(image.width)), min(top + down, float(image.height)),
    )  # fmt: skip
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, edges))


def _box_reduced(box: NDArray[np.float64], decoded: StoredPixels) -> NDArray[np.float64]:
    """Where a box lies in what is seen of the decoded pixels.

    If a side is no multiple of `shrink`, the last decoded row or column is only partly within the
    image. It is the last one that is stored, and so the first that is seen of a mirrored image.
    """
    shrink, orientation = decoded.shrink, decoded.orientation
    surplus = [-(-side // shrink) - side / shrink for side in (decoded.height, decoded.width)]
    before = [
        surplus[0] if orientation in {3, 4, 6, 7} else 0.0,
        surplus[1] if orientation in {2, 3, 7, 8} else 0.0,
    ]
    if orientation >= _TRANSPOSING:
        before.reverse()
    moved: NDArray[np.float64] = box / shrink + np.array([*before, 0.0, 0.0])
    return moved
