"""Folders of image files: one row a file.

A shard is a run of files, joined (model/joined.py): its preamble is the head, which names them, and
its one block has their bytes.

Schema: `__key__`, the name of the file below the folder that the user named; `label`, the folder
at the beginning of that name, or else the folder that the file is in; `image`, the bytes of the
file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataplane.base.suffixes import BY_FORMAT, FILES
from dataplane.formats.arrays import offsets_of, widened
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_columns, check_rows
from dataplane.formats.faults import corrupt, describe, foreign_faults, require_bytes
from dataplane.model.errors import CorruptShard
from dataplane.model.joined import LABEL, Joined, head_bytes
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER

KEY, IMAGE = "__key__", "image"
_NARROW_BYTES = 4
_START_BYTES = 512


class Files:
    """The files of a folder."""

    name = FILES
    suffixes = BY_FORMAT[FILES]

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`; reads none of the files."""
        require_bytes(shard.url, shard.size_bytes, "joined")
        start = memoryview(shard.read(0, min(_START_BYTES, shard.size_bytes)))
        size = head_bytes(start)
        if not 0 < size <= shard.size_bytes:
            raise _no_list(shard.url, start)
        body = Region(size, shard.size_bytes - size)
        joined = _joined(shard.url, memoryview(shard.read(0, size)), body.length)
        others = _others(joined)
        own_bytes = others.nbytes + sum(map(len, others.column_names))
        # Only the images are in the block; a job that leaves them out need not read it.
        columns = [*(0, 0, own_bytes // max(others.num_columns, 1)) * others.num_columns]
        block = Block(
            len(joined.members),
            body,
            body.length + own_bytes,
            [*columns, 0, body.length, body.length],
        )
        schema = others.schema.append(pa.field(IMAGE, pa.binary()))
        nulls = [NEVER] * len(schema) if not joined.rows else ()
        return ShardIndex(schema, (block,), Region(0, size), zero_copy=False, nulls=nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        check_columns(schema, columns)
        joined = _joined(block.url, block.preamble, block.place.length)
        check_rows(block.url, block.place.offset, block.rows, len(joined.members))
        others = _others(joined)
        arrays = dict(zip(others.schema.names, others.columns, strict=True))
        if IMAGE in columns:
            lengths = np.array([member.size_bytes for member in joined.members], np.int64)
            offsets = offsets_of(lengths)
            kind = pa.binary() if offsets.itemsize == _NARROW_BYTES else widened(pa.binary())
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block.body)]
            arrays[IMAGE] = pa.Array.from_buffers(kind, len(lengths), buffers)
        return batch_of(arrays, schema, columns, block)


def _joined(url: str, head: memoryview, body_bytes: int) -> Joined:
    """Return the members that this head lists; they have `body_bytes` together.

    Raises:  CorruptShard.
    """
    with foreign_faults(url, 0, "the list of files is damaged"):
        joined = Joined.of_head(url, head)
    if sum(member.size_bytes for member in joined.members) != body_bytes:
        raise _no_list(url, head)
    return joined


def _no_list(url: str, start: memoryview) -> CorruptShard:
    head = describe(bytes(start[:_START_BYTES]))
    return corrupt(url, 0, "this is not a run of files", expected="a list of files", found=head)


def _others(joined: Joined) -> pa.RecordBatch:
    """Return the columns besides the images: those of the table, or names and labels."""
    if joined.rows:
        with pa.ipc.open_stream(pa.py_buffer(joined.rows)) as reader:
            return reader.read_next_batch()
    return pa.record_batch({KEY: pa.array(joined.keys()), LABEL: pa.array(joined.labels())})
