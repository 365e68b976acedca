"""The compiled loops of kernel.c, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

from dataplane import compiled

SOURCE = Path(__file__).with_name("kernel.c")
LIBRARY = Path(__file__).with_name("libkernel.so")

_I64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SOURCES = (_POINTER, _I64, _POINTER, _I64)
_SIGNATURES: dict[str, compiled.Signature] = {
    # index, count, block_rows, blocks -> the first row outside of its block
    "gather_check": (_I64, (_POINTER, _I64, _POINTER, _I64)),
    # sources, stride, index, count, then: row_bytes, out
    "gather_fixed": (None, (*_SOURCES, _I64, _POINTER)),
    # starts, lengths: both are written
    "gather_spans": (_I64, (*_SOURCES, _POINTER, _POINTER)),
    # element_bytes, starts, lengths, put, room, out, out_bytes
    "gather_runs": (_I64, (*_SOURCES, _I64, *(_POINTER,) * 5, _I64)),
    # out
    "gather_valid": (None, (*_SOURCES, _POINTER)),
    # row_bytes, fields, fields_count
    "gather_packed": (None, (*_SOURCES, _I64, _POINTER, _I64)),
    # fields, fields_count, rows, row_bytes, out
    "pack_rows": (None, (_POINTER, _I64, _I64, _I64, _POINTER)),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The library, or why there is none: numpy takes its place then."""

    library: ctypes.CDLL | None
    missing: str = ""

    def __str__(self) -> str:
        return f"numpy ({self.missing})" if self.library is None else "the compiled kernel"


@functools.cache
def kernel() -> Kernel:
    """The library that was made from the kernel.c which lies here, loaded once."""
    return load(LIBRARY, SOURCE)


def load(path: Path, source: Path) -> Kernel:
    """A library, if it is there and was made from this source."""
    found = compiled.load(path, (source,), "gather_source_crc", _SIGNATURES)
    return Kernel(found.library, found.missing)
