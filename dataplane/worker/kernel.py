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
    # The comments name the parameters. `_SOURCES` stands for: sources, stride, index, count. A
    # result is the first row that is out of bounds, or -1 if none is.
    #
    # index, count, block_rows, blocks
    "gather_check": (_I64, (_POINTER, _I64, _POINTER, _I64)),
    # _SOURCES, row_bytes, out
    "gather_fixed": (None, (*_SOURCES, _I64, _POINTER)),
    # _SOURCES, starts, lengths (both are written)
    "gather_spans": (_I64, (*_SOURCES, _POINTER, _POINTER)),
    # _SOURCES, element_bytes, starts, lengths, put, room, out, out_bytes, padding (one element;
    # None: zeros)
    "gather_runs": (_I64, (*_SOURCES, _I64, *(_POINTER,) * 5, _I64, ctypes.c_char_p)),
    # a struct packing, index, rows, count
    "gather_packs": (_I64, (*(_POINTER,) * 3, _I64)),
    # _SOURCES, out
    "gather_valid": (None, (*_SOURCES, _POINTER)),
    # _SOURCES, row_bytes, fields, fields_count
    "gather_packed": (None, (*_SOURCES, _I64, _POINTER, _I64)),
    # fields, fields_count, rows, row_bytes, out
    "pack_rows": (None, (_POINTER, _I64, _I64, _I64, _POINTER)),
    # an ArrowArray; out: int64[columns, 4]
    "place_columns": (None, (_POINTER, _POINTER)),
}


@functools.cache
def kernel() -> ctypes.CDLL:
    """Return the library, which is loaded only once."""
    return compiled.load(LIBRARY, SOURCE, "gather_source_crc", _SIGNATURES)
