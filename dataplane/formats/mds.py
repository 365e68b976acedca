"""MosaicML's MDS shards: a block is a run of samples, about 4 MiB; a compressed shard is one block.

A shard is self-contained: number of samples (uint32), their offsets (uint32 each, and the end), the
columns as JSON, and the samples, each with the sizes of those of its values that have no fixed size
(uint32 each), and the values. Everything before the samples is the preamble.

Numbers are columns of their type. `str`, `json` and the digits of `str_int`, `str_float` and
`str_decimal` are text. `bytes`, `jpeg`, `png` and `pil` (raw pixels, behind their size and mode)
are binary, lists of images lists of these. `ndarray` with type and shape is a fixed-size list.
Other arrays have the type and the axes of the shard's first sample: with one axis they are lists;
with several they are fixed-size lists if every sample of every shard has the same shape, for which
shards are indexed whole; else they are nested lists. Pickled columns are never read.

Source:  streaming/base/format/mds in github.com/mosaicml/streaming
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.base.suffixes import BY_FORMAT
from dataplane.formats.base import RawBlock, ShardIndex, ShardReader
from dataplane.formats.cells import (
    NUMBER_BYTES,
    Arrays,
    Cells,
    array_kinds,
    blocks_of,
    cells_of,
    decoded_batch,
    fixed_column,
    lists_column,
    offsets_in,
    refuse_mixed,
    runs_in,
    samples_apart,
    samples_of,
    schema_of,
    source_of,
    text_column,
)
from dataplane.formats.faults import corrupt, require_bytes
from dataplane.formats.nulls import node_count
from dataplane.formats.source import (
    PROBE_BYTES,
    Memory,
    block_source,
    holds_compressed,
    is_compressed,
)
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER

_NUMBERS = {
    **{f"{kind}{bits}": np.dtype(f"<{kind[0]}{bits // 8}") for kind in ("int", "uint")
       for bits in (8, 16, 32, 64)},
    **{f"float{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}  # fmt: skip
_SCALARS = {**_NUMBERS, "int": _NUMBERS["int64"]}
_TEXTS = {"str", "json", "str_int", "str_float", "str_decimal"}
_BYTES = {"bytes", "jpeg", "png", "pil"}
# Lists of values, and the bytes before their number.
_LISTS = {"list[jpeg]": 4, "list[png]": 4, "list[pil]": 4, "jpeg_array": 0, "jpegarray": 0}
# The codes of types in arrays that state their type, by which the format orders width and kind.
_BY_CODE = {
    int(name.lstrip("uintfloa")) + {"u": 0, "i": 1, "f": 2}[name[0]]: dtype
    for name, dtype in _NUMBERS.items()
}
_CONFIG_BYTES_MAX = 16 << 20
_UINT32 = np.dtype("<u4")
_WHAT = "an MDS shard"


class Mds:
    """The MDS format, plain and in gzip or zstd."""

    name = "mds"
    suffixes = BY_FORMAT["mds"]
    index_version = 1  # raised when arrays got the shape of all samples

    def first_reads(self, size_bytes: int) -> tuple[Region, ...]:
        """Return the place of the first offsets, or of the whole header of a small shard."""
        return (Region(0, min(size_bytes, PROBE_BYTES)),)

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: read the header, and samples if their arrays may vary."""
        url, size = shard.url, shard.size_bytes
        require_bytes(url, size, "MDS")
        head = bytes(memoryview(shard.read(0, min(size, PROBE_BYTES))))
        compressed = is_compressed(head[:4])
        source = source_of(shard, compressed=compressed)
        offsets = offsets_in(url, source, None if compressed else size, _WHAT)
        before, start = NUMBER_BYTES * (len(offsets) + 1), int(offsets[0])
        columns = _columns_in(url, bytes(source.view(before, start - before)), before)
        ragged = {
            at: functools.partial(column.arrays, url=url)
            for at, column in enumerate(columns)
            if column.is_ragged
        }
        kinds: dict[int, pa.DataType] = {}
        if len(offsets) > 1 and ragged:
            try:
                kinds = array_kinds(runs_in(source, offsets, [c.size for c in columns]), ragged)
            except (ValueError, LookupError) as fault:
                what = f"an array of {[columns[at].name for at in ragged]} is damaged ({fault})"
                raise corrupt(url, start, what) from fault
        schema = schema_of(columns, ragged, kinds)
        growth = 1 + 4 * any(pa.types.is_list(kind) and pa.types.is_list(kind.value_type)
                             for kind in schema.types)  # fmt: skip

        def decoded(rows: int, length: int) -> int:
            return growth * length + rows * 8 * len(columns) + 64

        blocks = blocks_of(offsets, decoded, size if compressed else None)
        preamble = Region(0, 0 if compressed else start)
        return ShardIndex(schema, blocks, preamble, False, [NEVER] * node_count(schema))

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        url, compressed = block.url, holds_compressed(block)
        source = block_source(block, compressed=compressed)
        header = source if compressed else Memory(url, block.preamble, 0)
        offsets = offsets_in(url, header, source.length if compressed else None, _WHAT)
        before, start = NUMBER_BYTES * (len(offsets) + 1), int(offsets[0])
        stored = _columns_in(url, bytes(header.view(before, start - before)), before)
        places = samples_of(offsets, block, compressed=compressed)
        body = source.view(source.base, source.length)
        cells = cells_of(url, body, places, source.base, [column.size for column in stored])
        return decoded_batch(stored, cells, block, schema, columns)

    def rows_apart(self, block: RawBlock) -> Sequence[int] | None:
        """Return where the samples of a block begin; see `samples_apart`."""
        return samples_apart(block, _WHAT)


class _Column(Struct, frozen=True):
    """One column: the size of its values if that is fixed; of numbers and arrays their dtype, of
    arrays the fixed shape; why it cannot be read.
    """

    name: str
    encoding: str
    size: int | None
    dtype: np.dtype | None = None
    shape: tuple[int, ...] | None = None
    refused: str = ""

    @property
    def is_ragged(self) -> bool:
        """Return whether the values are arrays whose type is seen in a sample."""
        return self.encoding.startswith("ndarray") and self.size is None

    @property
    def type(self) -> pa.DataType:
        """The type of the column, unless it is seen in samples."""
        if self.encoding in _TEXTS:
            return pa.string()
        if self.encoding in _LISTS:
            return pa.list_(pa.binary())
        if self.encoding in _SCALARS and self.dtype is not None:
            return pa.from_numpy_dtype(self.dtype)
        if self.dtype is not None and self.shape is not None:
            kind = pa.from_numpy_dtype(self.dtype)
            for size in reversed(self.shape):
                kind = pa.list_(kind, size)
            return kind
        return pa.binary()

    def array(self, cells: Cells, kind: pa.DataType, url: str) -> pa.Array:
        """Return the column's values; `kind` is its type in the dataset.

        Raises:  SchemaMismatch: an array has another type or other axes than the first one.
        ValueError, LookupError, Arrow's errors: a value is damaged.
        """
        if self.encoding in _LISTS:
            return lists_column(cells, _LISTS[self.encoding])
        if self.dtype is not None and self.size is not None:
            return fixed_column(cells, self.dtype, self.type)
        if self.is_ragged:
            return self.arrays(cells, url).column(kind)
        return text_column(cells, self.type)

    def arrays(self, cells: Cells, url: str) -> Arrays:
        """Return arrays that state their shape, and their type if the column has none."""
        dtype, skip = self.dtype, 0
        if dtype is None:
            codes, skip = cells.numbers(np.dtype("u1"), 1)[:, 0], 1
            refuse_mixed(codes, self.name, url, "types")
            dtype = _BY_CODE[int(codes[0])]
        heads = cells.numbers(np.dtype("u1"), 1, skip)[:, 0].astype(np.int64)
        axes, widths = heads >> 2, heads & 3
        refuse_mixed(axes, self.name, url, "numbers of axes")
        count = int(axes[0])
        if not count:
            raise ValueError("an array has no axes")
        shapes = np.zeros((len(heads), count), np.int64)
        for width in np.unique(widths).tolist():
            rows = np.flatnonzero(widths == width)
            some = Cells(cells.body, cells.starts[rows], cells.lengths[rows])
            shapes[rows] = some.numbers(np.dtype(f"<u{1 << width}"), count, skip + 1)
        return Arrays(cells, shapes, dtype, skip + 1 + (count << widths), self.name, url)


def _columns_in(url: str, config: bytes, offset: int) -> tuple[_Column, ...]:
    try:
        return _parsed(config)
    except (ValueError, TypeError, LookupError, RecursionError) as fault:
        what = f"the description of the columns is damaged ({str(fault)[:200]})"
        raise corrupt(url, offset, what) from fault


@functools.lru_cache(maxsize=64)
def _parsed(config: bytes) -> tuple[_Column, ...]:
    if len(config) > _CONFIG_BYTES_MAX:
        raise ValueError(f"it has {len(config)} bytes")
    known: Any = json.loads(config)
    if (known["format"], known["version"]) != ("mds", 2):
        raise ValueError(f"format {known['format']!r}, version {known['version']!r}")
    names, encodings, sizes = (known[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    if not all(type(text) is str for text in (*names, *encodings)) or len({*names}) < len(names):
        raise ValueError("names or encodings are no texts, or occur twice")
    return tuple(_column(*facts) for facts in zip(names, encodings, sizes, strict=True))


def _column(name: str, encoding: str, size: object) -> _Column:
    family, *options = encoding.split(":")
    dtype, shape, expected, refused = _SCALARS.get(encoding), None, None, ""
    if dtype is not None:
        expected = dtype.itemsize
    elif family == "ndarray" and len(options) <= 2:
        dtype = _NUMBERS[options[0]] if options else None
        if dtype is not None and len(options) > 1:
            shape = tuple(map(int, options[1].split(",")))
            expected = int(np.prod(shape)) * dtype.itemsize
            if min(shape) < 1:
                raise ValueError(f"the shape {shape}")
    elif encoding == "pkl":
        refused = "is pickled, which nodes do not unpickle: write it as json or another encoding"
    elif encoding not in _TEXTS | _BYTES | set(_LISTS):
        refused = f"has the encoding {encoding!r}, which MDS does not define"
        expected = size if type(size) is int and size > 0 else None
    if size != expected:
        raise ValueError(f"column {name!r} of encoding {encoding} has size {size}")
    return _Column(name, encoding, expected, dtype, shape, refused)
