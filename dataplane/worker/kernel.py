"""The compiled loops of kernel.c, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from dataplane.base import compiled

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
    # element_bytes, starts, lengths, put, room, out, out_bytes, padding (one element, or None: 0)
    "gather_runs": (_I64, (*_SOURCES, _I64, *(_POINTER,) * 5, _I64, ctypes.c_char_p)),
    # a struct packing, index, rows, count
    "gather_packs": (_I64, (*(_POINTER,) * 3, _I64)),
    # out
    "gather_valid": (None, (*_SOURCES, _POINTER)),
    # row_bytes, fields, fields_count
    "gather_packed": (None, (*_SOURCES, _I64, _POINTER, _I64)),
    # fields, fields_count, rows, row_bytes, out
    "pack_rows": (None, (_POINTER, _I64, _I64, _I64, _POINTER)),
    # an ArrowArray; out: int64[columns, 4]
    "place_columns": (None, (_POINTER, _POINTER)),
}


@functools.cache
def kernel() -> ctypes.CDLL:
    """The library, loaded once."""
    return compiled.load(LIBRARY, SOURCE, "gather_source_crc", _SIGNATURES)
