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
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from dataplane.formats.faults import is_out_of_memory
from dataplane.model.errors import ImageError

# -- bytes that are not images ---------------------------------------------------------------------
#
# Guess the content of bytes that no decoder recognizes as an image.


# The first bytes of a file, and the content that they indicate. The first match counts.
_BEGINNINGS: Final[tuple[tuple[bytes, str], ...]] = (
    (b"\xff\xd8\xff", "a damaged JPEG image"),
    (b"\x89PNG\r\n\x1a\n", "a damaged PNG image"),
    (b"GIF8", "a damaged GIF image"),
    (b"BM", "a damaged BMP image"),
    (b"II*\0", "a damaged TIFF image"),
    (b"MM\0*", "a damaged TIFF image"),
    (b"\xff\x0a", "a JPEG XL image, which is not supported: convert it"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image, which is not supported: convert it"),
    (b"8BPS", "a Photoshop file, which is not supported: convert it"),
    (b"<svg", "an SVG drawing, which is not supported: convert it"),
    (b"<?xml", "XML, such as an SVG drawing, which is not supported: convert it"),
    (b"<!doctype", "an HTML page, as servers send in place of an image"),
    (b"<html", "an HTML page, as servers send in place of an image"),
    (b"<head", "an HTML page, as servers send in place of an image"),
    (b"{", "JSON"),
    (b"PK\x03\x04", "a zip file"),
    (b"\x1f\x8b", "gzip: unpack it before it is stored"),
    (b"\x93NUMPY", "a numpy array (.npy)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"%PDF", "a PDF file"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"OggS", "Ogg audio or video"),
    (b"ID3", "MP3 audio"),
    (b"fLaC", "FLAC audio"),
    (b"/9j/", "a JPEG image in base64: decode that before it is stored"),
    (b"iVBORw0KGgo", "a PNG image in base64: decode that before it is stored"),
    (b"data:image", "a data: url: store the bytes of its image"),
)
_BRANDS: Final = {
    b"avif": "a damaged AVIF image, or one that this Pillow cannot decode",
    b"heic": "a HEIC image, which is not supported: convert it",
    b"heix": "a HEIC image, which is not supported: convert it",
    b"mif1": "a HEIF image, which is not supported: convert it",
}
_SHOWN_BYTES = 16
_SHOWN_LETTERS = 40


def said_of(found: bytes) -> str:
    """Describe bytes that are not an image: their count, the first of them, and a guess."""
    if not found:
        return "0 bytes, where an image should be"
    size = "1 byte that is" if len(found) == 1 else f"{len(found)} bytes that begin with"
    more = " …" if len(found) > _SHOWN_BYTES else ""
    begin = f"{found[:_SHOWN_BYTES].hex(' ')}{more}"
    return f"not an image that can be read: {size} {begin}, {_like(found)}"


def _like(found: bytes) -> str:
    start = found[:512].lstrip()
    lower = start[:16].lower()
    for beginning, name in _BEGINNINGS:
        if found.startswith(beginning) or (beginning[:1] == b"<" and lower.startswith(beginning)):
            return f"which looks like {name}"
    if found[:4] == b"RIFF":
        return (
            "which looks like a damaged WebP image"
            if found[8:12] == b"WEBP"
            else "which looks like audio or video (RIFF)"
        )
    if found[4:8] == b"ftyp":
        return f"which looks like {_BRANDS.get(found[8:12], 'a video (MP4 or MOV)')}"
    if not any(found):
        return "and all of them are zero"
    text = found[:_SHOWN_LETTERS].decode("ascii", errors="replace")
    if text.isascii() and all(letter.isprintable() or letter.isspace() for letter in text):
        path = "; is it the path of an image?" if _is_path(found) else ""
        return f"which is text: {text!r}{path}"
    return "of an unknown kind"


def _is_path(found: bytes) -> bool:
    ends = (b".jpg", b".jpeg", b".png", b".webp", b".gif", b".bmp", b".tif", b".tiff")
    return len(found) < 4096 and found.strip().lower().endswith(ends)


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
