"""Folders of image files, and tables of paths: one row a file.

A shard is a run of files, joined (model/joined.py): its preamble is the head, which names them, and
its one block has their bytes.

Schema: `__key__`, the name of the file below the folder that the user named; `label`, the folder
at the beginning of that name, or else the folder that the file is in; `image`, the bytes of the
file. If the
files are those that a table names, its columns take the place of the first two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa

from dataplane.base.suffixes import BY_FORMAT, FILES
from dataplane.formats.arrays import offsets_of, widened
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_columns, check_rows
from dataplane.formats.faults import corrupt, describe, foreign_faults, require_bytes
from dataplane.formats.nulls import node_count
from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.joined import IMAGE, KEY, LABEL, ROWS, Joined, files_of, head_bytes
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER, UNKNOWN

_NARROW_BYTES = 4
_START_BYTES = 512
_ALL = slice(None)


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
        if missing := len(joined.missing()):
            nulls = [*[UNKNOWN] * (node_count(schema) - 1), missing]
        return ShardIndex(schema, (block,), Region(0, size), zero_copy=False, nulls=nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        check_columns(schema, columns)
        rows = slice(block.first_row, block.first_row + block.rows)
        joined = _joined(block.url, block.preamble, block.place.length, rows)
        members, missing = joined.members[rows], joined.missing()
        check_rows(block.url, block.place.offset, block.rows, len(members))
        others = _others(joined).slice(block.first_row, block.rows)
        arrays = dict(zip(others.schema.names, others.columns, strict=True))
        if IMAGE in columns:
            for row in missing.keys() & set(range(rows.start, rows.stop)):
                raise CorruptShard(
                    f"{block.url}: row {row} names a file that is not there: {missing[row]}",
                    shard=block.url,
                )
            lengths = np.array([member.size_bytes for member in members], np.int64)
            offsets = offsets_of(lengths)
            kind = pa.binary() if offsets.itemsize == _NARROW_BYTES else widened(pa.binary())
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block.body)]
            arrays[IMAGE] = pa.Array.from_buffers(kind, len(lengths), buffers)
        return batch_of(arrays, schema, columns, block)

    def rows_apart(self, block: RawBlock) -> Sequence[int]:
        """Return where the files of a block begin in its bytes, and its end."""
        members = _joined(block.url, block.preamble, block.place.length).members
        return [*accumulate((member.size_bytes for member in members), initial=0)]


class FileTable(Files):
    """Reads tables of paths whole, for index/files.py: the rows are in the metadata of the schema
    that `index` returns. `parameters` are those of the format's name.
    """

    suffixes: tuple[str, ...] = ()
    needs = 'a table, and the name of its column of paths: files="path"'

    def __init__(self, parameters: str) -> None:
        self.name = f"{FILES}:{parameters}"

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`.   Raises:  ConfigError: the table has no such column."""
        from dataplane.formats import registry  # late, since the registry imports this module

        name, column = files_of(self.name)
        reader = registry.by_name(name) if name else registry.dataset_format([shard.url])
        if reader.name == FILES:
            raise ConfigError(
                f"{shard.url} is an image, and files={column!r} needs a table: name the table",
                shard=shard.url,
                field="files",
            )
        index = reader.index(shard)
        names = index.schema.names
        if column not in names or (IMAGE in names and column != IMAGE):
            raise _no_paths(shard.url, column, names)
        preamble = _read(shard, index.preamble)
        batches = [
            reader.decode(
                RawBlock(
                    shard.url, number, block.rows, block.place, shard.size_bytes, index.preamble,
                    preamble, _read(shard, block.place),
                ),
                index.schema,
                names,
            )
            for number, block in enumerate(index.blocks)
            if block.rows
        ]  # fmt: skip
        tables = [pa.Table.from_batches([batch]) for batch in batches]
        rows, sink = pa.concat_tables(tables, promote_options="permissive"), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows.combine_chunks())
        schema = pa.schema([], {ROWS: sink.getvalue().to_pybytes()})
        return ShardIndex(schema, (), Region(0, 0), zero_copy=False)


def _read(shard: ShardReader, place: Region) -> memoryview:
    return memoryview(shard.read(place.offset, place.length) if place.length else b"")


def _no_paths(url: str, column: str, names: Sequence[str]) -> ConfigError:
    if column in names:
        return ConfigError(
            f"{url}: the bytes of the files come as the column {IMAGE!r}, and the table has one of "
            f"this name beside {column!r}: rename it",
            shard=url,
            field="files",
        )
    return ConfigError(
        f"{url} has no column {column!r}, which files= names; it has {', '.join(names)}",
        shard=url,
        field="files",
    )


def _joined(url: str, head: memoryview, body_bytes: int, rows: slice = _ALL) -> Joined:
    """Return the members that this head lists; `rows` of them have `body_bytes` together.

    Raises:  CorruptShard.
    """
    with foreign_faults(url, 0, "the list of files is damaged"):
        joined = Joined.of_head(url, head)
    if sum(member.size_bytes for member in joined.members[rows]) != body_bytes:
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
