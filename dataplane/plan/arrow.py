"""Convert columns between numpy and Arrow, without a copy if their form is the same.

Written by hand: Arrow's own conversions import its compute module, numpy.ma, and pandas if it is
installed, which takes up to half a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataplane.errors import ConfigError
from dataplane.plan.texts import Bools, Int64, Texts, fixed


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
    """The values of all lists. Shapes:  result: of the values' own type, [m]."""
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
