"""Decode images with Pillow: every format but JPEG, and also JPEG if the library was compiled
without libjpeg-turbo.

Pixels are converted to RGB as pixels.py specifies.
"""

from __future__ import annotations

import ctypes
import functools
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from dataplane.formats.faults import is_out_of_memory
from dataplane.model.errors import ImageError
from dataplane.transforms.not_images import said_of

Bytes = NDArray[np.uint8]

# The formats that are decoded. Formats that start another program, fetch something, or need several
# files are left out.
FORMATS = (
    "JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "JPEG2000", "PPM", "TGA", "ICO",
)  # fmt: skip
PIXELS_MAX = 178_956_970
"""Pillow's own limit, which prevents files that decompress to more than a machine's memory."""
_ORIENTATION = 0x0112
_ORIENTATIONS = range(1, 9)
# Formats whose 16-bit pixels Pillow opens as 32-bit pixels.
_SIXTEEN_BITS = frozenset({"PNG", "PPM"})
# TIFF's BitsPerSample.
_BITS = 0x0102
_TWELVE_BITS = 12
# Bytes without which a PNG or a TIFF has no orientation; for PNG with the name that Pillow gives to
# the metadata.
_PNG_WORDS = {
    b"eXIf": "exif",
    b"Raw profile type exif": "Raw profile type exif",
    b"XML:com.adobe.xmp": "XML:com.adobe.xmp",
}
_TIFF_WORD = b"tiff:Orientation"
_TRANSPOSING = 5
"""Orientations from this one on exchange rows and columns."""
# Errors of Pillow's decoders for invalid bytes.
_FAULTS = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, AttributeError,
    ArithmeticError, AssertionError, RuntimeError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return the formats that this Pillow was built with; Image.init() registers all of them."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def opened(images: NDArray[np.int64], row: int) -> Iterator[tuple[Image.Image, int]]:
    """Open one of the images, reading its header and EXIF orientation.

    Shapes:  images: int64[n, 2], address and length of each.
    Raises:  ImageError: Pillow refuses the image, or an operation on it inside the `with` block.
    MemoryError: memory ran out; the image may be valid.
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
            if image.mode == "F" or (image.mode == "I" and image.format not in _SIXTEEN_BITS):
                kind = "floats" if image.mode == "F" else "signed or 32-bit numbers"
                raise ImageError(
                    f"its pixels are {kind}, for which no value is defined as white: convert it to "
                    "8 or 16 bits before it is stored",
                    row=row,
                )
            # Pass all bytes at once: libjpeg cannot pause in the middle of arithmetic coding.
            image.decodermaxblock = max(image.decodermaxblock, length)
            yield image, _orientation(image, encoded)
    except UnidentifiedImageError:
        raise ImageError(said_of(encoded), row=row) from None
    except _FAULTS as fault:
        if is_out_of_memory(fault):
            raise MemoryError(str(fault)) from fault
        raise ImageError(f"Pillow cannot decode it: {fault}", row=row) from fault


def _orientation(image: Image.Image, encoded: bytes) -> int:
    """Return the orientation that Pillow's exif_transpose would apply, from EXIF or else from XMP;
    1 if it is missing or invalid.
    """
    if image.format == "TIFF":
        if _TIFF_WORD in encoded:
            image.load()  # only a loaded image has the size after rotation
        return 1  # Pillow itself applies the orientation when it loads the image
    if image.format == "PNG":
        words = [name for word, name in _PNG_WORDS.items() if word in encoded]
        if not words:
            return 1
        if any(name not in image.info for name in words):
            image.load()  # load all of it: metadata may come after the pixels
    try:
        # Call the method of the base class, since PngImageFile.getexif decodes the image.
        turn = Image.Image.getexif(image).get(_ORIENTATION)
        return 1 if turn is None or turn not in _ORIENTATIONS else int(turn)
    except _FAULTS as fault:
        if is_out_of_memory(fault):
            raise
        return 1


def seen_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    """Return (height, width) of an image with its orientation applied."""
    transposed = orientation >= _TRANSPOSING
    return (image.width, image.height) if transposed else (image.height, image.width)


def _rgb(image: Image.Image) -> Image.Image:
    """Decode an image without applying its orientation."""
    if image.mode.startswith("I"):
        bits = _TWELVE_BITS if getattr(image, "tag_v2", {}).get(_BITS) == (_TWELVE_BITS,) else 16
        values = np.asarray(image).clip(0, (1 << bits) - 1) >> (bits - 8)
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


class StoredPixels(Struct, frozen=True):
    """RGB pixels before their orientation is applied; a JPEG may be 1/shrink of its `height` x
    `width`.
    """

    pixels: Image.Image
    orientation: int
    height: int
    width: int
    shrink: int


def decode(image: Image.Image, orientation: int, shrink: int) -> StoredPixels:
    """Decode an opened image; a JPEG at 1/shrink, a power of two, as libjpeg does."""
    height, width = image.height, image.width
    if shrink > 1 and image.draft(None, (width // shrink, height // shrink)) is None:
        shrink = 1
    return StoredPixels(_rgb(image), orientation, height, width, shrink)
