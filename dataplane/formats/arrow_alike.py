"""Decide whether the size of an Arrow record batch says all that an index needs to know about it.

A file's footer lists the size of each batch. If all columns have fixed widths, a batch of the same
size as one without nulls has the same number of rows and no nulls, so its metadata need not be
read. Decoding checks the rows and nulls of every block anyway.

Source:  https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataplane.formats.flatbuf import RECORDS, Head
from dataplane.formats.nulls import children

_MULTIPLES = (8, 64)
_NODES_MAX = 8
_NUMBERS_OF_ROWS_MAX = 1 << 14
_ROW_BITS_MAX = 1 << 40
_BITS = 8

_Nodes = tuple[tuple[int, int], ...]
"""For each array, depth first: how many values it has for each row, and the bits of a value; 0 bits
if it has no buffer of values.
"""


def is_told_by_size(schema: pa.Schema, head: Head) -> bool:
    """Whether every batch with a body as long as this one has the same number of rows and no nulls.
    Assumes that one writer made both batches, and pads all buffers alike.
    """
    if head.kind != RECORDS or head.compressed or not head.rows or any(head.nulls):
        return False
    nodes = _nodes(schema)
    if nodes is None or head.rows > head.body_length * _BITS:
        return False
    sizes = _buffer_bytes(nodes, head.rows)
    if not len(sizes) == len(head.sizes) == len(head.starts):
        return False
    ends = [*head.starts[1:], head.body_length]
    places = [end - start for start, end in zip(head.starts, ends, strict=True)]
    for alignment in _MULTIPLES:
        if places == [_padded(size, alignment) for size in sizes]:
            return _is_only_solution(nodes, head.rows, alignment)
    return False


def _nodes(schema: pa.Schema) -> _Nodes | None:
    """Return None if a column's size depends on more than its row count, or if there are many
    columns.
    """
    if len(schema) > _NODES_MAX:
        return None
    try:
        found = tuple(node for kind in schema.types for node in _nodes_of(kind, 1))
    except ValueError:
        return None
    is_small = sum(count * max(bits, 1) for count, bits in found) <= _ROW_BITS_MAX
    return found if found and len(found) <= _NODES_MAX and is_small else None


def _nodes_of(kind: pa.DataType, count: int) -> Iterator[tuple[int, int]]:
    """Raises:  ValueError: a value of this type has no fixed width."""
    if isinstance(kind, pa.BaseExtensionType):
        yield from _nodes_of(kind.storage_type, count)
    elif pa.types.is_fixed_size_list(kind) or pa.types.is_struct(kind):
        yield count, 0
        below = count * (kind.list_size if pa.types.is_fixed_size_list(kind) else 1)
        for child in children(kind):
            yield from _nodes_of(child.type, below)
    elif pa.types.is_nested(kind) or pa.types.is_dictionary(kind) or pa.types.is_null(kind):
        raise ValueError(kind)
    else:
        yield count, kind.bit_width


def _buffer_bytes(nodes: _Nodes, rows: int) -> list[int]:
    """Return the size of each buffer if no array has nulls: per array a validity buffer, then
    values.
    """
    sizes = []
    for count, bits in nodes:
        sizes += [0, -(-rows * count * bits // 8)] if bits else [0]
    return sizes


@functools.lru_cache(maxsize=1024)
def _is_only_solution(nodes: _Nodes, rows: int, alignment: int) -> bool:
    """Whether only this number of rows fits this size, with or without validity buffers."""
    size = int(_body_bytes(nodes, np.array([rows]), alignment)[0])
    if _body_bytes(nodes, np.array([rows + 1]), alignment)[0] == size:
        return False
    with_all = sum(count * (bits + 1) for count, bits in nodes) / 8
    # The padding of all buffers is what a smaller number of rows may have on top.
    least = max(0, int((size - 2 * alignment * len(nodes)) / with_all) - 1)
    if rows - least > _NUMBERS_OF_ROWS_MAX:
        return False
    others = np.arange(least, rows, dtype=np.int64)
    missing = size - _body_bytes(nodes, others, alignment)
    validity = [_padded(-(-others * count // 8), alignment) for count, _ in nodes]
    for present in range(1 << len(nodes)):
        more = sum(each for at, each in enumerate(validity) if present >> at & 1)
        if (missing == more).any():
            return False
    return True


def _body_bytes(nodes: _Nodes, rows: NDArray[np.int64], alignment: int) -> NDArray[np.int64]:
    """Shapes:  rows: int64[N].   result: int64[N], without buffers of validity."""
    found = np.zeros(len(rows), np.int64)
    for count, bits in nodes:
        found += _padded(-(-rows * count * bits // 8), alignment)
    return found


def _padded(size: NDArray[np.int64] | int, alignment: int) -> NDArray[np.int64] | int:
    return -(-size // alignment) * alignment
