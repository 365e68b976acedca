"""Many strings in one buffer: a million names without a million objects. Pure.

1. Every text is valid UTF-8, and the buffer begins with the first and ends with the last.
2. Operations over all texts take a few passes over arrays; a str is made only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.errors import ConfigError
from dataplane.plan.loops import lay_records

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

_WORD = 8
_TOGETHER = 1 << 15
_LOOKED_AT = 1 << 20


class Piece(Struct, frozen=True, eq=False):
    """One slice of a buffer for each of n records: content[starts[i]:stops[i]] for record i.

    Shapes:  content: any, contiguous.   starts, stops: int64[n].
    """

    content: NDArray[Any]
    starts: Int64
    stops: Int64


class Texts(Struct, frozen=True, eq=False):
    """n texts, the i-th of which is content[starts[i]:starts[i + 1]]. The arrays are read-only.

    Shapes:  content: uint8[starts[n]].   starts: int64[n + 1], ascending, from 0.
    """

    content: Bytes
    starts: Int64

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Raises:  UnicodeEncodeError: a text cannot be encoded as UTF-8."""
        encoded = [text.encode() for text in texts]
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=starts[1:])
        return cls(fixed(np.frombuffer(b"".join(encoded), np.uint8)), fixed(starts))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> str:
        """Raises:  IndexError: there is no such text."""
        index += len(self) if index < 0 else 0
        if index < 0:
            raise IndexError("the index is beyond the last text")
        at = self.starts.item
        return bytes(self.content.data[at(index) : at(index + 1)]).decode()

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Texts)
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.content, other.content)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def lengths(self) -> Int64:
        """Shapes:  result: int64[n], bytes."""
        return np.diff(self.starts)

    def piece(self, skipped: int = 0) -> Piece:
        """Return these texts without the first `skipped` bytes of each."""
        starts = self.starts[:-1]
        return Piece(self.content, starts + skipped if skipped else starts, self.starts[1:])

    def starting_with(self, prefix: bytes) -> Bools:
        """Return which texts begin with these bytes.

        Shapes:  result: bool[n].
        """
        found: Bools = self.lengths >= len(prefix)
        for at, byte in enumerate(prefix):
            if not found.any():
                break
            places = self.starts[:-1] + at
            found &= self.content.take(places, mode="clip") == byte
        return found

    def shared_prefix_bytes(self) -> int:
        """Return the length of the prefix that all texts share."""
        length = int(self.lengths.min(initial=len(self.content)))
        at = 0
        if length >= _WORD:
            # Compare eight bytes at a time, at any alignment.
            shape = (len(self.content) - _WORD + 1,)
            words = np.ndarray(shape, np.uint64, self.content.data, strides=(1,))
            while at + _WORD <= length and _is_one(words[self.starts[:-1] + at]):
                at += _WORD
        while at < length and _is_one(self.content[self.starts[:-1] + at]):
            at += 1
        return at

    def changed(self, change: Callable[[str], str], marks: bytes) -> Texts:
        """Return these texts, with `change` applied to those with a byte of `marks`."""
        places = self._places_of(marks)
        if not len(places):
            return self
        touched = np.zeros(len(self), np.bool_)
        touched[np.searchsorted(self.starts, places, side="right") - 1] = True
        others = Texts.of(change(self[int(index)]) for index in np.flatnonzero(touched))
        stops = np.where(touched, self.starts[:-1], self.starts[1:])
        begin, end = np.zeros((2, len(self)), np.int64)
        begin[touched], end[touched] = others.starts[:-1], others.starts[1:]
        pieces = Piece(self.content, self.starts[:-1], stops), Piece(others.content, begin, end)
        starts = np.zeros(len(self) + 1, np.int64)
        np.cumsum(stops - self.starts[:-1] + end - begin, out=starts[1:])
        return Texts(fixed(np.concatenate([*records((), pieces)])), fixed(starts))

    def _places_of(self, marks: bytes) -> Int64:
        """Return the places of these bytes in the content."""
        found = [np.empty(0, np.int64)]
        for begin in range(0, len(self.content), _LOOKED_AT):
            some = self.content[begin : begin + _LOOKED_AT]
            is_marked = np.zeros(len(some), np.bool_)
            for mark in marks:
                is_marked |= some == mark
            found.append(np.flatnonzero(is_marked) + begin)
        return np.concatenate(found)


def records(numbers: Sequence[NDArray[Any]], pieces: Sequence[Piece]) -> Iterator[Bytes]:
    """Yield the records, several in each array. Record i consists of the i-th of all numbers, as
    int64, followed by the i-th of all pieces.

    Shapes:  numbers: integer[n] each.   result: uint8[m], little-endian.
    """
    for begin in range(0, len(pieces[0].starts), _TOGETHER):
        some = slice(begin, begin + _TOGETHER)
        contents, starts, lengths = [], [], []
        if numbers:
            head = np.stack([column[some] for column in numbers], 1).astype("<i8")
            contents.append(head.view(np.uint8).reshape(-1))
            starts.append(np.arange(len(head)) * head.itemsize * len(numbers))
            lengths.append(np.full(len(head), head.itemsize * len(numbers)))
        for piece in pieces:
            size = piece.content.itemsize
            contents.append(piece.content.view(np.uint8))
            starts.append(piece.starts[some] * size)
            lengths.append((piece.stops[some] - piece.starts[some]) * size)
        yield lay_records(contents, starts, lengths)


def _is_one(values: NDArray[Any]) -> bool:
    return bool((values == values[:1]).all())


def fixed(values: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only, and return it."""
    view = values.view()
    view.flags.writeable = False
    return view


# -- arrow -------------------------------------------------------------------------------------
#
# Convert columns between numpy and Arrow, without a copy if their layout is the same.
#
# Arrow's own conversions are not used, since they import its compute module, numpy.ma, and pandas
# if it is installed, which takes up to half a second.


def numbers_of(array: Any) -> NDArray[Any]:
    """Shapes:  result: of the array's own type, [n].

    Raises:  ValueError: a value is missing.
    """
    if array.null_count:
        raise ValueError("a number is missing")
    buffer, end = array.buffers()[1], array.offset + len(array)
    whole = np.frombuffer(buffer, str(array.type), end) if end else np.empty(0, str(array.type))
    return whole[array.offset :]


def numbers(values: NDArray[Any]) -> Any:
    """Convert numbers to an Arrow array.   Shapes:  values: [n]."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def flags(values: Bools) -> Any:
    """Convert flags to an Arrow array.   Shapes:  values: bool[n]."""
    bits = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])


def flags_of(array: Any) -> Bools:
    """Shapes:  result: bool[n]."""
    if not len(array):
        return np.empty(0, np.bool_)
    bits = np.frombuffer(array.buffers()[1], np.uint8)
    found = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
    return found[array.offset :].view(np.bool_)


def starts_of_lists(array: Any) -> Int64:
    """Return where the values of each list begin, counted from the first list's start, and where
    the last list ends.

    Shapes:  result: int64[n + 1].
    """
    offsets = numbers_of(array.offsets).astype(np.int64)
    return offsets - offsets[:1]


def values_of_lists(array: Any) -> NDArray[Any]:
    """Return the values of all lists.   Shapes:  result: of the values' own type, [m]."""
    offsets = numbers_of(array.offsets)
    return numbers_of(array.values)[offsets[0] : offsets[-1]]


def texts_of(array: Any) -> Texts:
    """Return the strings of a validated array."""
    _, offsets, content = array.buffers()
    stops = np.frombuffer(offsets, np.int32, array.offset + len(array) + 1)[array.offset :]
    whole = np.empty(0, np.uint8) if content is None else np.frombuffer(content, np.uint8)
    starts = stops.astype(np.int64)
    starts -= starts[:1]
    return Texts(fixed(whole[stops[0] : stops[-1]]), fixed(starts))


def strings(texts: Texts) -> Any:
    """Convert texts to an Arrow array.

    Raises:  ConfigError: 2 GiB of them, or more.
    """
    if len(texts.content) > np.iinfo(np.int32).max:
        raise ConfigError(
            f"the names of {len(texts)} shards have {len(texts.content)} characters in all, and a"
            " manifest holds 2**31 of them: split the dataset, or shorten its folders' names"
        )
    offsets = pa.py_buffer(texts.starts.astype(np.int32))
    content = pa.py_buffer(np.ascontiguousarray(texts.content))
    return pa.Array.from_buffers(pa.string(), len(texts), [None, offsets, content])


def lists(starts: Int64, values: NDArray[Any]) -> Any:
    """Make an Arrow array of lists of these values; list i begins at starts[i]."""
    return pa.ListArray.from_arrays(numbers(starts.astype(np.int32)), numbers(values))
