"""The software that makes pixels, and its name: libpixels.so, linked with libjpeg-turbo if that was
present at compile time, and Pillow for everything that the library does not decode.
"""

from __future__ import annotations

import ctypes
import functools
import re
import zlib
from pathlib import Path

import PIL
from msgspec import Struct
from PIL import features

from dataplane.base import compiled
from dataplane.transforms.steps import registry

SOURCES = Path(__file__).parent
LIBRARY = Path(__file__).with_name("libpixels.so")
REASON_BYTES = 256
_PATH_BYTES = 4096
_VERSION = re.compile(rb"libjpeg-turbo version ([0-9.]+)")
# Codecs of Pillow whose versions may give different pixels.
_CODECS = {
    "libjpeg_turbo": "libjpeg-turbo",
    "webp": "libwebp",
    "avif": "libavif",
    "jpg_2000": "openjpeg",
    "libtiff": "libtiff",
}

_I64, _I32, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
_SIGNATURES: dict[str, compiled.Signature] = {
    # path, reason: both are written -> whether libjpeg is the one that this was compiled for
    "pixels_open": (_I64, (_POINTER, _POINTER)),
    # images, count, sizes, outcomes, reason -> the first row that failed
    "pixels_sizes": (_I64, (_POINTER, _I64, *(_POINTER,) * 3)),
    # images, restart indexes, count, boxes, flips, view, view_bytes, may_reduce, out, outcomes,
    # reason -> the first row that failed
    "pixels_render": (
        _I64,
        (_POINTER, _POINTER, _I64, *(_POINTER,) * 3, _I64, _I32, *(_POINTER,) * 3),
    ),
    # pixels, decoded, stored, orientation, shrink, box, flip, view, out -> 0, or 1: no memory
    "pixels_resize": (_I64, (*(_POINTER,) * 3, _I32, _I32, *(_POINTER,) * 4)),
    # pixels, count, view, view_bytes, out
    "pixels_form": (None, (_POINTER, _I64, _POINTER, _I64, _POINTER)),
}
# pixels, height, width, numbers, drawn
_CHANGE: compiled.Signature = (None, (_POINTER, _I32, _I32, _POINTER, _POINTER))


class Maker(Struct, frozen=True):
    """The software that makes pixels. Two makers with the same `name` make the same pixels of the
    same images. `missing` says why Pillow decodes JPEGs instead of the library; "" if the library
    decodes them.
    """

    library: ctypes.CDLL
    name: str
    missing: str = ""

    def __str__(self) -> str:
        return self.name


@functools.cache
def maker() -> Maker:
    """Return the maker of this installation, loaded once.

    Raises:  ConfigError: as `compiled.load`.
    """
    return load(LIBRARY, SOURCES)


def load(path: Path, sources: Path) -> Maker:
    """Load the library at this path, which was compiled from these sources.

    Raises:  ConfigError: as `compiled.load`.
    """
    changes = {kind.c_function: _CHANGE for kind in registry.STEPS if kind.in_c}
    library = compiled.load(path, sources, "pixels_source_crc", _SIGNATURES | changes)
    kernels = f"kernels {compiled.crc_of(sources):08x}; {_pillow_name()}"
    where = ctypes.create_string_buffer(_PATH_BYTES)
    reason = ctypes.create_string_buffer(REASON_BYTES)
    if not library.pixels_open(where, reason):
        said = reason.value.decode(errors="replace")
        return Maker(library, kernels, f"{where.value.decode(errors='replace')}: {said}")
    turbo = _libjpeg_version(Path(where.value.decode(errors="surrogateescape")))
    return Maker(library, f"libjpeg-turbo {turbo}, {kernels}")


def _libjpeg_version(path: Path) -> str:
    """Read libjpeg's version from the library's file, since no function returns it. If the file
    does not contain it, return the file's checksum.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return "of unknown version"
    found = _VERSION.search(content)
    return found[1].decode() if found else f"with checksum {zlib.crc32(content):08x}"


def _pillow_name() -> str:
    """Return the versions of Pillow and of its decoders, including JPEG's only if it is used."""
    versions = {name: features.version(feature) for feature, name in _CODECS.items()}
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"Pillow {PIL.__version__} ({said})"
