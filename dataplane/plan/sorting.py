"""Sorts rows of words that begin with a hash: by sorting.c, and by numpy where it is not compiled.

The result is the same: there is one way to sort numbers.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataplane import compiled

SOURCE = Path(__file__).with_name("sorting.c")
LIBRARY = Path(__file__).with_name("libsorting.so")

_I64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, compiled.Signature] = {
    # words, rows, count, scratch
    "sort_words": (None, (_POINTER, _I64, _I64, _POINTER)),
}


@functools.cache
def sorting() -> compiled.Compiled:
    """The library, loaded once."""
    return load(LIBRARY, SOURCE)


def load(path: Path, source: Path) -> compiled.Compiled:
    """A library, if it is there and was made from this source."""
    return compiled.load(path, (source,), "sorting_source_crc", _SIGNATURES)


def sort_rows(words: NDArray[np.uint64], library: ctypes.CDLL | None) -> None:
    """Sort each row by itself, in place.

    Shapes:  words: uint64[m, n], contiguous.
    """
    if library is None:
        words.sort(axis=1)
        return
    assert words.flags.c_contiguous
    scratch = np.empty(words.shape[1], np.uint64)
    library.sort_words(words.ctypes.data, *words.shape, scratch.ctypes.data)
