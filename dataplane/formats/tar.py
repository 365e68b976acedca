"""WebDataset tar: a block is a run of samples up to about 4 MiB; a .tar.gz shard is one block.

A sample is the run of members that share a key: the path up to the first dot of the file's name.
The rest of the name, in lower case, is the field. Directories, names without a dot or that start
with one, and names in double underscores are skipped, as the webdataset library does. A shard in
which the members of a key do not follow one another is refused.

Schema: `__key__`, then the fields of the shard in the order of occurrence, images of several
extensions as one column (see tarfields.py). cls, cls2, index, inx and id are int64 where all values
in the first 4 MiB are integers (else string); txt, text, transcript, json and jsn are string; all
others binary. A field that a sample lacks is null.

Source:  https://github.com/webdataset/webdataset (tariterators.py)
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.columns import bytes_column, primitive_column
from dataplane.formats.conform import batch_of, check_columns, check_rows, mismatch
from dataplane.formats.faults import corrupt, require_bytes
from dataplane.formats.gzipped import is_compressed
from dataplane.formats.inferred import inferred_schema
from dataplane.formats.source import (
    BLOCK_BYTES,
    ByteSource,
    Inflated,
    Memory,
    Window,
    block_source,
    holds_compressed,
)
from dataplane.formats.tarfields import (
    FieldReader,
    FieldSurvey,
    Sample,
    column_of,
    refuse_scattered,
    with_fields,
)
from dataplane.formats.tarheader import TarMember, members
from dataplane.model import Region
from dataplane.plan.null_counts import NEVER
from dataplane.suffixes import BY_FORMAT

KEY = "__key__"
INTEGERS = frozenset({"cls", "cls2", "index", "inx", "id"})
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn"})
ROW_BYTES = 128

_NAME = re.compile(r"((?:.*/)?([^./][^./]*))\.([^/]*)", re.DOTALL)
_INTEGER = re.compile(rb"\s*[+-]?[0-9]{1,19}\s*")


class Tar:
    """The WebDataset tar format, plain and gzip."""

    name = "tar"
    suffixes = BY_FORMAT["tar"]
    index_version = 1  # fields of the whole shard, images as one column

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: one pass over the headers."""
        require_bytes(shard.url, shard.size_bytes, "tar")
        window = Window(shard)
        compressed = is_compressed(bytes(window.view(0, 4)))
        source: ByteSource = Inflated(shard) if compressed else window
        head = Memory(shard.url, source.view(0, BLOCK_BYTES), 0)
        survey, integers = FieldSurvey(shard.url), dict[str, bool]()
        blocks: list[Block] = []
        start = end = rows = 0
        for sample in samples(source, 0, None):
            if rows and not compressed and sample.end - start > BLOCK_BYTES:
                blocks.append(_block(rows, start, end))
                start, rows = sample.start, 0
            if not rows:
                start = sample.start
            rows, end = rows + 1, sample.end
            survey.note(sample)
            if not INTEGERS.isdisjoint(sample.fields):
                for field in INTEGERS & sample.fields.keys():
                    is_integer = _is_integer(head, sample.fields[field])
                    integers[field] = integers.get(field, True) and is_integer
        if hashes := survey.scattered():
            again: ByteSource = Inflated(shard) if compressed else Window(shard)
            refuse_scattered(shard.url, samples(again, 0, None), hashes)
        count = rows + sum(block.rows for block in blocks)
        if compressed and rows:
            place = Region(0, shard.size_bytes)
            blocks = [Block(rows, place, end + ROW_BYTES * rows)]
        elif rows:
            blocks.append(_block(rows, start, end))
        columns = survey.columns()
        types = {KEY: pa.string()} | {
            name: _type(name, integers=integers.get(name, False)) for name in columns
        }
        schema = with_fields(inferred_schema(types if columns else {}), columns)
        lacking = (count - survey.count(fields) for fields in columns.values())
        nulls = array("q", [NEVER, *lacking] if columns else [])
        return ShardIndex(schema, tuple(blocks), Region(0, 0), zero_copy=False, nulls=nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        check_columns(schema, columns)
        compressed = holds_compressed(block)
        source = block_source(block, compressed=compressed)
        end = None if compressed else block.place.offset + block.place.length
        found = list(samples(source, source.base, end))
        check_rows(block.url, block.place.offset, block.rows, len(found))
        reader = FieldReader(block.url, schema, columns)
        fields = [reader.fields_of(sample) for sample in found]
        arrays = {
            name: _column(source, [each.get(name) for each in fields], schema.field(name))
            for name in columns
            if name != KEY
        }
        if KEY in columns:
            keys = [sample.key.encode() for sample in found]
            arrays[KEY] = bytes_column(keys, schema.field(KEY).type)
        return batch_of(arrays, schema, columns, block.rows)


def is_new_field(schema: pa.Schema, field: str) -> bool:
    """Whether a field that the dataset's first shard lacks is a column of its own. In a tar
    dataset, an image with such a field may belong to an image column of the first shard, or be
    refused when it is read.
    """
    return schema.get_field_index(KEY) < 0 or not column_of(schema, field)[0]


def samples(source: ByteSource, at: int, end: int | None) -> Iterator[Sample]:
    """Yield the samples of an archive, or of one block of it.

    Raises:  CorruptShard: as `members`, and if a sample has one field twice.
    """
    current: Sample | None = None
    for member in members(source, at, end):
        place = _NAME.fullmatch(member.name)
        if place is None or _is_meta(place.group(2)):
            continue
        key, field = place.group(1), place.group(3).lower()
        if current is None or current.key != key:
            if current is not None:
                yield current
            current = Sample(key, {field: member}, member.start, member.end)
            continue
        if field in current.fields or field == KEY:
            raise corrupt(
                source.url,
                member.start,
                f"the sample {key!r} has the field {field!r} twice; give each sample its own key",
            )
        current = Sample(key, current.fields | {field: member}, current.start, member.end)
    if current is not None:
        yield current


def _is_meta(base: str) -> bool:
    return base.startswith("__") and base.endswith("__")


def _block(rows: int, start: int, end: int) -> Block:
    return Block(rows, Region(start, end - start), end - start + ROW_BYTES * rows)


def _is_integer(head: Memory, member: TarMember) -> bool:
    """Whether a member's content is an integer; content beyond the sampled bytes counts as one."""
    if member.size > 64:
        return False
    content = head.view(member.body, member.size)
    return len(content) < member.size or bool(_INTEGER.fullmatch(bytes(content)))


def _type(field: str, *, integers: bool) -> pa.DataType:
    if field in INTEGERS:
        return pa.int64() if integers else pa.string()
    return pa.string() if field in TEXTS else pa.binary()


def _column(source: Memory, of_rows: Sequence[TarMember | None], field: pa.Field) -> pa.Array:
    url, name = source.url, field.name
    pieces = [None if m is None else source.view(m.body, m.size) for m in of_rows]
    if not pa.types.is_int64(field.type):
        column = bytes_column(pieces, field.type)
        if pa.types.is_string(field.type):
            _check_text(column, of_rows, pieces, url)
        return column
    values = np.zeros(len(pieces), np.int64)
    valid = np.zeros(len(pieces), bool)
    for row, (member, piece) in enumerate(zip(of_rows, pieces, strict=True)):
        if member is None or piece is None:
            continue
        content = bytes(piece)
        number = int(content) if _INTEGER.fullmatch(content) else None
        if number is None or not -(1 << 63) <= number < 1 << 63:
            raise mismatch(url, name, "an integer", f"{content[:40]!r} in member {member.name!r}")
        values[row], valid[row] = number, True
    return primitive_column(values, valid, field.type)


def _check_text(
    column: pa.Array,
    of_rows: Sequence[TarMember | None],
    pieces: Sequence[memoryview | None],
    url: str,
) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        for member, piece in zip(of_rows, pieces, strict=True):
            if member is not None and piece is not None:
                try:
                    bytes(piece).decode()
                except UnicodeDecodeError as fault:
                    raise corrupt(
                        url, member.body, f"member {member.name!r} is not UTF-8 text"
                    ) from fault
        raise
