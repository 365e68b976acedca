"""How large a compressed record batch will be, from its metadata alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

# Values of unknown length (text, binary) are assumed to compress at most this much.
VARIABLE_RATIO = 8


def decoded_estimate(schema: pa.Schema, nodes: Sequence[int], body_length: int) -> int:
    """Bytes of a decoded batch: exact for fixed-width types, an upper guess for others.

    Shapes:  nodes: the lengths of the batch's arrays, depth first, as its metadata lists them.
    """
    lengths = iter(nodes)
    total = 0
    for field in schema:
        size, variable = _size(field.type, lengths)
        total += size + (VARIABLE_RATIO * body_length if variable else 0)
    return total


def _size(kind: pa.DataType, lengths: Iterator[int]) -> tuple[int, bool]:
    """The bytes of fixed-width values, and whether there are other values."""
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
