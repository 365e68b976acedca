"""Estimate the decoded size of a compressed record batch from its metadata alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

# A batch with values of unknown length (text, binary) is assumed to compress at most this much.
VARIABLE_RATIO = 8
_NUMBERS = frozenset(
    kind.id
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()),
        *(pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_()),
    )
)
"""Types whose ids tell their widths: wide tables have tens of thousands of such columns."""


def decoded_estimate(schema: pa.Schema, nodes: Sequence[int], body_length: int) -> int:
    """Estimate the bytes of a decoded batch: exact for fixed-width types, a generous guess for
    others.

    Shapes:  nodes: the lengths of the batch's arrays, depth first, as its metadata lists them.
    """
    sizes = column_sizes(schema, nodes)
    is_variable = any(variable for _, variable in sizes)
    return sum(size for size, _ in sizes) + is_variable * VARIABLE_RATIO * body_length


def column_sizes(schema: pa.Schema, nodes: Sequence[int]) -> list[tuple[int, bool]]:
    """Return, per column, the bytes of its fixed-width values, and whether it has other values.

    Shapes:  nodes: as in `decoded_estimate`.
    """
    lengths = iter(nodes)
    known: dict[tuple[int, int], tuple[int, bool]] = {}
    found = []
    for kind in schema.types:
        if kind.id not in _NUMBERS:
            found.append(_size(kind, lengths))
            continue
        length = next(lengths, 0)
        size = known.get((kind.id, length))
        if size is None:
            size = known[kind.id, length] = _size(kind, iter((length,)))
        found.append(size)
    return found


def _size(kind: pa.DataType, lengths: Iterator[int]) -> tuple[int, bool]:
    """Return the bytes of fixed-width values of a type, and whether it has other values."""
    if isinstance(kind, pa.BaseExtensionType):
        return _size(kind.storage_type, lengths)
    length = next(lengths, 0)
    validity = length // 8 + 64
    if pa.types.is_dictionary(kind):
        return length * kind.index_type.bit_width // 8 + validity, False
    if pa.types.is_nested(kind):
        size, variable = 8 * length + validity, False
        for i in range(kind.num_fields):
            inner, more = _size(kind.field(i).type, lengths)
            size, variable = size + inner, variable or more
        return size, variable
    try:
        return length * kind.bit_width // 8 + validity, False
    except ValueError:
        return 16 * length + validity, True
