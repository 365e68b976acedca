"""NumPy's .npy files: a row is an element of the first axis, a block is a run of rows.

An array of numbers is one column `array`; the other axes are fixed-size lists. Numbers in the
machine's byte order are used where they lie in the file. An array of records (a structured dtype)
has a column for each field. Text and bytes come without the zeros that pad them, NaT is null.

Refused are Python objects, which would have to be unpickled, complex numbers, and arrays of several
axes in Fortran's order, whose rows are not contiguous. The header is the preamble.

Source:  https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import functools
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.base.suffixes import BY_FORMAT
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_rows, check_shard
from dataplane.formats.faults import FOREIGN, corrupt, describe, foreign_faults, require_bytes
from dataplane.formats.nulls import field_nodes
from dataplane.formats.source import BLOCK_BYTES
from dataplane.model.errors import SchemaMismatch
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER, UNKNOWN

COLUMN = "array"
HEADER_BYTES_MAX = 64 << 10
_MAGIC = b"\x93NUMPY"
_KEYS = {"descr", "fortran_order", "shape"}
_OF_HEADERS = (SyntaxError, TypeError, ValueError, LookupError, RecursionError, AttributeError)
_TEXTS = "SU"
_TIMES = "Mm"
_AXES_MAX = 64


class Npy:
    """The format of numpy.save."""

    name = "npy"
    suffixes = BY_FORMAT["npy"]

    def first_reads(self, size_bytes: int) -> tuple[Region, ...]:
        """Return the place of the header, with room for a long one."""
        return (Region(0, min(size_bytes, HEADER_BYTES_MAX)),)

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: the header says where everything is."""
        url, size = shard.url, shard.size_bytes
        require_bytes(url, size, "NumPy")
        layout = _layout_of(url, bytes(memoryview(shard.read(0, min(size, HEADER_BYTES_MAX)))))
        start, stored = layout.start, layout.row_bytes
        if size != start + layout.rows * stored:
            expected = f"{layout.rows * stored} bytes of {layout.rows} rows"
            raise corrupt(
                url,
                start,
                "the array is truncated, or something follows it",
                expected=expected,
                found=f"{size - start} bytes",
            )
        blocks = fixed_blocks(layout.rows, stored, start, layout.decoded_row_bytes)
        schema = pa.schema(list(zip(layout.names, layout.types, strict=True)))
        nulls = [
            UNKNOWN if pa.types.is_temporal(field.type) else NEVER for field in field_nodes(schema)
        ]
        return ShardIndex(schema, blocks, Region(0, start), layout.is_plain, nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        layout = _layout_of(block.url, bytes(block.preamble))
        stored = pa.schema(list(zip(layout.names, layout.types, strict=True)))
        check_shard(stored, schema, columns, block.url)
        count = -(-len(block.body) // layout.row_bytes)
        check_rows(block.url, block.place.offset, block.rows, count)
        rows = np.frombuffer(block.body, layout.dtype, count * math.prod(layout.shape))
        arrays = {}
        for name, kind in zip(layout.names, layout.types, strict=True):
            if name in columns:
                values = rows if layout.dtype.names is None else rows[name]
                with foreign_faults(block.url, block.place.offset, f"column {name!r} is damaged"):
                    arrays[name] = as_rows(values, kind)
        return batch_of(arrays, schema, columns, block)


def fixed_blocks(
    rows: int, row_bytes: int, start: int, decoded_row_bytes: int
) -> tuple[Block, ...]:
    """Cut rows of equal size into blocks of about 4 MiB; the first row begins at `start`."""
    step = max(1, BLOCK_BYTES // row_bytes)
    counts = [min(step, rows - first) for first in range(0, rows, step)]
    return tuple(
        Block(
            count,
            Region(start + at * step * row_bytes, count * row_bytes),
            count * decoded_row_bytes + 64,
        )
        for at, count in enumerate(counts)
    )


def as_rows(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return values as an array of `kind`: a number, text, time, or fixed-size lists of these. The
    numbers of a contiguous array in the machine's byte order and at aligned places are not copied.

    Raises:  Arrow's errors and ValueError: the values are damaged.
    """
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(as_rows(values, kind.value_type), type=kind)
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype.kind == "b":
        return pa.array(flat.view(np.uint8) != 0)
    if flat.dtype.kind in _TEXTS:
        texts = pa.array(flat.tolist(), kind)
        texts.validate(full=True)  # there may be numbers that are no characters
        return texts
    if not (flat.dtype.isnative and flat.flags.aligned):
        flat = flat.astype(flat.dtype.newbyteorder("="))
    if flat.dtype.kind in _TIMES:
        return pa.array(flat, kind)
    return pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])


class _Layout(Struct, frozen=True):
    """Facts from a header: where the array starts, its rows, the dtype and the shape of a row, and
    the columns. `is_plain`: rows can be used as they are stored.
    """

    start: int
    rows: int
    dtype: np.dtype
    shape: tuple[int, ...]
    names: tuple[str, ...]
    types: tuple[pa.DataType, ...]
    is_plain: bool

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def decoded_row_bytes(self) -> int:
        # Text has an offset for each value.
        values = len(self.names) * math.prod(self.shape)
        return self.row_bytes + 4 * values + sum(_text_count(kind) for kind in self.types) * 4


def _text_count(kind: pa.DataType) -> int:
    return kind.list_size * _text_count(kind.value_type) if pa.types.is_fixed_size_list(kind) else 1


def _layout_of(url: str, head: bytes) -> _Layout:
    """Parse a header.

    Raises:  CorruptShard.  SchemaMismatch: the array has no rows, or no values that we read.
    """
    size = _header_bytes(head)
    if size == 0:
        raise corrupt(url, 0, "not a NumPy file", expected="b'\\x93NUMPY'", found=describe(head))
    if size > len(head):
        raise corrupt(
            url, 0, "the header", expected=f"at most {len(head)} bytes", found=f"{size} bytes"
        )
    try:
        return _parsed(head[:size])
    except _Unsupported as fault:
        raise SchemaMismatch(f"{url}: {fault}", shard=url, field=COLUMN) from None
    except (*_OF_HEADERS, *FOREIGN, MemoryError, Warning) as fault:
        raise corrupt(url, 0, f"the header is damaged ({str(fault)[:100]})") from fault


def _header_bytes(head: bytes) -> int:
    """Return the length of the header with everything before it; 0 if this is no NumPy file."""
    if not head.startswith(_MAGIC) or len(head) < 12:
        return 0
    width = 2 if head[6] == 1 else 4
    return 8 + width + int.from_bytes(head[8 : 8 + width], "little")


class _Unsupported(Exception):
    """A sound array that is not read, and what to do."""


@functools.lru_cache(maxsize=256)
def _parsed(header: bytes) -> _Layout:
    text = header[10 if header[6] == 1 else 12 :]
    known = ast.literal_eval(text.decode("utf-8" if header[6] == 3 else "latin-1"))
    if set(known) != _KEYS or type(known["fortran_order"]) is not bool:
        raise ValueError(f"it has {sorted(known)}")
    shape = known["shape"]
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"its shape is {shape!r}")
    if len(shape) > _AXES_MAX:
        raise ValueError(f"it has {len(shape)} axes, and NumPy's arrays have at most {_AXES_MAX}")
    dtype = np.lib.format.descr_to_dtype(known["descr"])
    if not shape:
        _refuse("it has one value and no rows", "save an array with at least one axis")
    row = shape[1:]
    if known["fortran_order"] and row:
        _refuse(
            "it is in Fortran's order, in which no row is contiguous",
            "save numpy.ascontiguousarray(array)",
        )
    if dtype.hasobject:
        _refuse(
            "it has Python objects, which nodes do not unpickle",
            "save numbers, or strings of a fixed length",
        )
    if 0 in row or not dtype.itemsize:
        _refuse(f"its rows have no values (shape {shape}, dtype {dtype})", "leave it out")
    if dtype.names is None:
        kinds = {COLUMN: _kind_of(dtype, row)}
    elif row:
        _refuse("it has several axes of records", "save it with one axis")
    else:
        kinds = {name: _kind_of(dtype[name], ()) for name in dtype.names}
    is_plain = dtype.names is None and dtype.isnative and dtype.kind in "iuf"
    is_plain = is_plain and sys.byteorder == "little"
    return _Layout(len(header), shape[0], dtype, row, tuple(kinds), tuple(kinds.values()), is_plain)


def _kind_of(dtype: np.dtype, shape: tuple[int, ...]) -> pa.DataType:
    """Return the Arrow type of one row of this dtype and shape."""
    base, inner = dtype.subdtype or (dtype, ())
    if base.kind in _TIMES and np.datetime_data(base)[1] != 1:  # Arrow ignores the multiple
        unit = f"{base.kind}8[{np.datetime_data(base)[0]}]"
        _refuse(
            f"its times are multiples of a unit ({base})", f"save them as array.astype({unit!r})"
        )
    try:
        if base.names is not None or base.kind not in f"biuf{_TEXTS}{_TIMES}":
            raise pa.ArrowNotImplementedError
        kind = pa.array(np.empty(0, base.newbyteorder("="))).type
    except pa.ArrowNotImplementedError:
        _refuse(
            f"values of dtype {base} are not read",
            "save its numbers, as complex ones with array.view(float)",
        )
    for size in reversed((*shape, *inner)):
        kind = pa.list_(kind, size)
    return kind


def _refuse(what: str, way: str) -> NoReturn:
    raise _Unsupported(f"the array is not supported: {what}; {way}")
