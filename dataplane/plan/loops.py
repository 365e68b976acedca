"""Python bindings of loops.c, the loops that a plan runs over all of its samples."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataplane.base import compiled

SOURCE = Path(__file__).with_name("loops.c")
LIBRARY = Path(__file__).with_name("libloops.so")

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_I64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, compiled.Signature] = {
    # words, rows, count, scratch
    "sort_words": (None, (_POINTER, _I64, _I64, _POINTER)),
    # places, count, first, shift, starts, found, within
    "find_places": (None, (_POINTER, _I64, _POINTER, _I64, *(_POINTER,) * 3)),
    # to, records, pieces, contents, starts, lengths
    "lay_records": (None, (_POINTER, _I64, _I64, *(_POINTER,) * 3)),
    # values, count, lowest, span, seen, distinct, numbers -> how many are distinct
    "number_values": (_I64, (_POINTER, _I64, _I64, _I64, *(_POINTER,) * 3)),
    # lengths, ranked, count, room, most, scratch, placed, starts -> how many packs
    "best_fit": (_I64, (_POINTER, _POINTER, _I64, _I64, _I64, *(_POINTER,) * 3)),
}


@functools.cache
def loops() -> ctypes.CDLL:
    """Return the library, which is loaded once."""
    return compiled.load(LIBRARY, SOURCE, "loops_source_crc", _SIGNATURES)


def sort_rows(words: NDArray[np.uint64]) -> None:
    """Sort each row independently, in place.

    Shapes:  words: uint64[m, n], contiguous.
    """
    assert words.flags.c_contiguous
    scratch = np.empty(words.shape[1], np.uint64)
    loops().sort_words(words.ctypes.data, *words.shape, scratch.ctypes.data)


def find_places(places: Int64, first: Int32, shift: int, starts: Int64) -> tuple[Int64, Int64]:
    """Return the interval that contains each place, and the place's offset in it. `first[p]` is the
    interval of place p << shift, or of the last place if p << shift is beyond it.

    Shapes:  places: int64[m], each in an interval.   starts: int64[n + 1], rising, from 0.
    first: int32[p + 2], where p is the part of the last place.   result: int64[m], int64[m].
    """
    places, starts = (np.ascontiguousarray(one, np.int64) for one in (places, starts))
    first = np.ascontiguousarray(first, np.int32)
    found, within = np.empty_like(places), np.empty_like(places)
    loops().find_places(
        places.ctypes.data, len(places), first.ctypes.data, shift, starts.ctypes.data,
        found.ctypes.data, within.ctypes.data,
    )  # fmt: skip
    return found, within


def lay_records(
    contents: Sequence[Bytes], starts: Sequence[Int64], lengths: Sequence[Int64]
) -> Bytes:
    """Concatenate all pieces of record 0, then of record 1, … Piece p of record i is the
    lengths[p][i] bytes of contents[p] from starts[p][i] on, which must exist.

    Shapes:  starts, lengths: int64[n] each.   result: uint8[sum of all lengths].
    """
    made = np.empty(int(sum(of_piece.sum() for of_piece in lengths)), np.uint8)
    kept = [
        [np.ascontiguousarray(array) for array in arrays] for arrays in (contents, starts, lengths)
    ]
    tables = [(_POINTER * len(arrays))(*(array.ctypes.data for array in arrays)) for arrays in kept]
    loops().lay_records(made.ctypes.data, len(starts[0]), len(contents), *tables)
    return made


def number_values(values: Int64, lowest: int, span: int) -> tuple[Int64, Int64]:
    """Return the distinct values in ascending order, and the index of each value among them.

    Shapes:  values: int64[n], in [lowest, lowest + span).   result: int64[m], int64[n].
    """
    values = np.ascontiguousarray(values, np.int64)
    memory, distinct, found = np.zeros(span, np.int64), np.empty(span, np.int64), values.copy()
    count = loops().number_values(
        values.ctypes.data, len(values), lowest, span, memory.ctypes.data, distinct.ctypes.data,
        found.ctypes.data,
    )  # fmt: skip
    return distinct[:count], found


def best_fit_count(lengths: Int64, room: int, most: int) -> int:
    """Return how many packs `best_fit` makes of these rows, in any order."""
    lengths, scratch = _to_fit(lengths, room)
    count: int = loops().best_fit(
        lengths.ctypes.data, None, len(lengths), room, most, scratch.ctypes.data, None, None
    )
    return count


def best_fit(lengths: Int64, ranked: Int64, room: int, most: int) -> tuple[Int64, Int64]:
    """Put rows into packs of `room` tokens, best fit, longest rows first, and rows of equal length
    in the order `ranked`. loops.h describes the algorithm.

    Shapes:  lengths, ranked: int64[n], lengths in [0, room].   result: the rows, pack after pack,
    int64[m], without those of length 0, and where each pack begins, int64[packs + 1].
    """
    lengths, scratch = _to_fit(lengths, room)
    ranked = np.ascontiguousarray(ranked, np.int64)
    placed, starts = np.empty_like(lengths), np.empty(len(lengths) + 1, np.int64)
    count = loops().best_fit(
        lengths.ctypes.data, ranked.ctypes.data, len(lengths), room, most, scratch.ctypes.data,
        placed.ctypes.data, starts.ctypes.data,
    )  # fmt: skip
    starts = starts[: count + 1]
    return placed[: starts[-1]], starts


def _to_fit(lengths: Int64, room: int) -> tuple[Int64, Int64]:
    """Return the lengths as C expects them, and scratch memory."""
    assert not len(lengths) or 0 <= lengths.min() <= lengths.max() <= room
    scratch = np.empty(4 * len(lengths) + 4 * room + 64, np.int64)
    return np.ascontiguousarray(lengths, np.int64), scratch
