"""Raw files of token ids, one integer after the other, without a header: `tokens:uint16,end=50256`.

Nothing in such a file says what it holds, so the format's name does: the type of the ids, and
either `end`, the id that ends each document, or `length`, the ids of a row. With `end`, a row is a
document with its end token; what follows the last end token is a document, too. With `length`, rows
have equal size and are used where they lie in the file; ids at the end of the file that do not fill
a row are left out. A block is a run of rows of about 4 MiB. The column is `tokens`.

Source:  nanoGPT's and llm.c's scripts write such files with numpy.ndarray.tofile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
import pyarrow as pa

from dataplane.formats.arrays import list_column
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_rows, check_shard
from dataplane.formats.faults import corrupt, describe, require_bytes
from dataplane.formats.npy import as_rows, fixed_blocks
from dataplane.formats.source import BLOCK_BYTES
from dataplane.model.errors import ConfigError
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER

COLUMN = "tokens"
DOCUMENT_BYTES_MAX = 1 << 30
_TYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_OTHERS = ("a Git LFS", "an HTML page", "a Parquet file", "an Arrow IPC file")


class TokenFile:
    """One kind of token files. `parameters` is the format's name behind the colon.

    Raises:  ConfigError: the parameters are wrong.
    """

    suffixes = (".bin", ".tokens", ".tok")
    """Suffixes by which such files are chosen from a folder, once their format was named."""
    needs = 'its name: format="tokens:uint16,end=50256" or "tokens:uint16,length=1024"'

    def __init__(self, parameters: str) -> None:
        self.name = f"tokens:{parameters}"
        kind, *rest = parameters.split(",")
        if kind not in _TYPES or len(rest) != 1:
            self._refuse()
        name, _, number = rest[0].partition("=")
        if name not in {"end", "length"} or not (number.isascii() and number.isdigit()):
            self._refuse()
        self._dtype, value = np.dtype(f"<{np.dtype(kind).str[1:]}"), int(number)
        self._length = value if name == "length" else 0
        self._end = self._dtype.type(0)
        limit = np.iinfo(kind if name == "end" else "int32").max
        if (name == "length" and not value) or value > limit:
            self._refuse()
        number_type = pa.from_numpy_dtype(np.dtype(kind))
        if self._length:
            self._kind = pa.list_(number_type, value)
        else:
            self._kind, self._end = pa.list_(number_type), self._dtype.type(value)

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"the format {self.name!r} does not say how to read tokens: give the type of the ids "
            f"({', '.join(_TYPES)}), and the id that ends a document or the ids of a row, as in "
            "tokens:uint16,end=50256 or tokens:uint16,length=1024",
            field="format",
        )

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`. Files with an end token are read once; of others, only the
        first bytes, to recognise files of other kinds.
        """
        require_bytes(shard.url, shard.size_bytes, "token")
        self._check(shard)
        schema = pa.schema([(COLUMN, self._kind)])
        width = self._dtype.itemsize
        if self._length:
            row = self._length * width
            blocks = fixed_blocks(shard.size_bytes // row, row, 0, row)
        else:
            blocks = tuple(
                Block(rows, Region(start * width, count * width), count * width + 4 * rows + 64)
                for rows, start, count in self._runs(shard)
            )
        return ShardIndex(schema, blocks, Region(0, 0), bool(self._length), [NEVER, NEVER])

    def _check(self, shard: ShardReader) -> None:
        """Refuse files that certainly have no tokens.   Raises:  CorruptShard."""
        kind = describe(bytes(memoryview(shard.read(0, min(shard.size_bytes, 512)))))
        if kind.startswith(_OTHERS):
            raise corrupt(shard.url, 0, "no token ids", expected=self.name, found=kind)
        if shard.size_bytes % self._dtype.itemsize:
            raise corrupt(
                shard.url,
                0,
                "the file is truncated, or its ids are of another type",
                expected=f"a multiple of {self._dtype.itemsize} bytes",
                found=f"{shard.size_bytes} bytes",
            )

    def _runs(self, shard: ShardReader) -> Iterator[tuple[int, int, int]]:
        """Yield runs of documents: their number, where the first begins, and how many ids they
        have.

        Raises:  CorruptShard: a document is larger than 1 GiB.
        """
        width = self._dtype.itemsize
        step, count = BLOCK_BYTES // width, shard.size_bytes // width
        start = 0
        for at in range(0, count, step):
            piece = shard.read(at * width, min(step, count - at) * width)
            ids = np.frombuffer(memoryview(piece), self._dtype)
            ends = np.flatnonzero(ids == self._end)
            if len(ends):
                stop = at + int(ends[-1]) + 1
                yield len(ends), start, stop - start
                start = stop
            elif (at + len(ids) - start) * width > DOCUMENT_BYTES_MAX:
                what = f"no id {self._end} within 1 GiB: is it the end token?"
                raise corrupt(shard.url, start * width, what)
        if start < count:
            yield 1, start, count - start

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        check_shard(pa.schema([(COLUMN, self._kind)]), schema, columns, block.url)
        ids = np.frombuffer(block.body, self._dtype, len(block.body) // self._dtype.itemsize)
        if self._length:
            rows = math.ceil(len(ids) / self._length)
        else:
            stops = np.flatnonzero(ids == self._end) + 1
            if len(ids) and (not len(stops) or stops[-1] < len(ids)):
                stops = np.append(stops, len(ids))
            rows = len(stops)
        check_rows(block.url, block.place.offset, block.rows, rows)
        if COLUMN not in columns:
            return batch_of({}, schema, columns, block)
        if self._length:
            return batch_of({COLUMN: as_rows(ids, self._kind)}, schema, columns, block)
        counts = np.diff(stops, prepend=0)
        array = list_column(counts, np.ones(rows, np.bool_), as_rows(ids, self._kind.value_type))
        return batch_of({COLUMN: array}, schema, columns, block)
