"""What makes pixels: libpixels.so over a libjpeg-turbo, the same over Pillow, or Pillow alone."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import PIL

from dataplane import compiled

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = Path(__file__).with_name("libpixels.so")
REASON_BYTES = 256
_SONAME = "libjpeg.so.62"

_I64, _I32, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
_SIGNATURES: dict[str, compiled.Signature] = {
    # path, reason -> whether it is a libjpeg-turbo that can be used
    "pixels_open": (_I64, (ctypes.c_char_p, _POINTER)),
    # images, count, sizes, outcomes, reason -> the first row that failed
    "pixels_sizes": (_I64, (_POINTER, _I64, *(_POINTER,) * 3)),
    # images, trails, count, boxes, flips, view, view_bytes, out, outcomes, reason -> the same
    "pixels_render": (
        _I64,
        (_POINTER, _POINTER, _I64, *(_POINTER,) * 3, _I64, *(_POINTER,) * 3),
    ),
    # pixels, height, width, orientation, box, flip, view, out -> 0, or 1: no memory
    "pixels_resize": (_I64, (_POINTER, _I32, _I32, _I32, *(_POINTER,) * 4)),
}


@dataclass(frozen=True, slots=True)
class Maker:
    """`library` is None where Pillow and numpy do all; without `has_jpeg` Pillow decodes, and the
    library resizes. `missing` says why.
    """

    library: ctypes.CDLL | None
    has_jpeg: bool
    missing: str = ""

    def __str__(self) -> str:
        if self.library is None:
            return f"Pillow and numpy ({self.missing})"
        return "libjpeg-turbo" if self.has_jpeg else f"Pillow, resized in C ({self.missing})"


PILLOW = Maker(None, has_jpeg=False, missing="chosen")


@functools.cache
def maker() -> Maker:
    """The best that this installation has, loaded once."""
    return load(LIBRARY, SOURCES)


def load(path: Path, sources: Path) -> Maker:
    """With the library, if it was made from these sources, and the first libjpeg that it takes."""
    files = sorted(file for file in sources.iterdir() if file.suffix in {".c", ".h"})
    found = compiled.load(path, files, "pixels_source_crc", _SIGNATURES)
    library = found.library
    if library is None:
        return Maker(None, has_jpeg=False, missing=found.missing)
    refusals = []
    reason = ctypes.create_string_buffer(REASON_BYTES)
    for candidate in _candidates():
        if library.pixels_open(candidate.encode(), reason):
            return Maker(library, has_jpeg=True)
        refusals.append(f"{candidate}: {reason.value.decode(errors='replace')}")
    return Maker(library, has_jpeg=False, missing="; ".join(refusals))


def _candidates() -> Iterator[str]:
    """What Pillow's wheel carries, and what the system has."""
    carried = Path(PIL.__file__).parents[1] / "pillow.libs"
    yield from (str(path) for path in sorted(carried.glob("libjpeg-*.so.62*")))
    yield _SONAME
