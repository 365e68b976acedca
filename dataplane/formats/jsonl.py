"""JSON lines: a block is a run of whole lines, about 4 MiB; a .gz shard is one block.

The schema comes from the first block of each shard, and from later blocks that have new fields, or
the first values of a field. Integers are int64, or uint64 if they do not fit; numbers with a
fraction are double. If these blocks have only integers and a later line has a fraction, that line
is a SchemaMismatch: a column never changes its type silently, and an integer is exact or refused
(see jsonchecks.py). Text stays text, also if it looks like a date. A field that a line lacks is
null; a field that the schema lacks is a SchemaMismatch.

Source:  https://jsonlines.org
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.suffixes import BY_FORMAT
from dataplane.formats.arrays import joined
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_columns, check_rows
from dataplane.formats.faults import (
    FOREIGN,
    bad_rows,
    corrupt,
    describe,
    foreign_faults,
    is_out_of_memory,
    require_bytes,
)
from dataplane.formats.joint_types import inferred_schema, is_closed, joint_inferred
from dataplane.formats.jsonchecks import (
    JsonLine,
    KnownKeys,
    check_exact,
    exact_types,
    has_large,
    unknown_field,
)
from dataplane.formats.nulls import aligned, alignment, counted
from dataplane.formats.source import (
    BLOCK_BYTES,
    ByteSource,
    Inflated,
    Window,
    block_source,
    holds_compressed,
    is_compressed,
)
from dataplane.formats.unsupported import differing
from dataplane.model.errors import CorruptShard, SchemaMismatch
from dataplane.model.records import Region
from dataplane.plan.columns import UNKNOWN

# The most decoded bytes per stored byte: in [1,2], a value takes two bytes and becomes an int64.
GROWTH = 4
ROW_BYTES = 64
LINE_BYTES_MAX = 1 << 30
_SURVEYED_BYTES_MAX = 64 << 20
DEPTH_MAX = 256

_WHITESPACE = b" \t\r\n"
_IS_SPACE = np.isin(np.arange(256), list(_WHITESPACE))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BOM = b"\xef\xbb\xbf"
# The beginnings of the parser's messages for valid JSON that does not fit its column.
_OF_TYPES = ("changed from", "unexpected field", "Failed to convert")


# Read lists whose values are all null in the first lines, such as `{"tags": [null, null]}`.
#
# For such a list, Arrow's JSON parser creates fewer values than the offsets say. So the list is
# read as a list of bools, and any value other than null is an error.


def parser_type(kind: pa.DataType, *, in_list: bool = False) -> pa.DataType:
    """Return the type to request from the parser to get `kind`."""
    if pa.types.is_list(kind):
        return pa.list_(parser_type(kind.value_type, in_list=True))
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, parser_type(f.type, in_list=in_list)) for f in kind.fields])
    return pa.bool_() if in_list and pa.types.is_null(kind) else kind


def from_parser(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert an array of `parser_type(kind)` to `kind`.

    Raises:  ValueError: a value is not null although it must be.
    """
    if array.type.equals(kind):
        return array
    mask = array.is_null() if array.null_count else None
    if pa.types.is_list(kind):
        values = from_parser(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=mask)
    if pa.types.is_struct(kind):
        children = [from_parser(array.field(i), f.type) for i, f in enumerate(kind.fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind.fields), mask=mask)
    if array.null_count != len(array):
        raise ValueError("Failed to convert: a value in a list that had only nulls before")
    return pa.nulls(len(array))


class JsonLines:
    """The JSON lines format, plain and gzip."""

    name = "jsonl"
    suffixes = BY_FORMAT["jsonl"]
    index_version = 1  # raised when indexes got the fields of the whole shard

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: count lines and search for new fields in one pass. Only the
        first block, and blocks with new fields, are parsed.
        """
        require_bytes(shard.url, shard.size_bytes, "JSON lines")
        window = Window(shard)
        compressed = is_compressed(bytes(window.view(0, 4)))
        source: ByteSource = Inflated(shard) if compressed else window
        sample = _sampled(source)
        fields = _FieldSurvey(shard.url, sample)
        blocks = tuple(_blocks(source, fields.note))
        rows = sum(block.rows for block in blocks)
        is_whole = sample.table.num_rows == rows
        if compressed and blocks:
            decoded = sum(block.decoded_bytes for block in blocks)
            blocks = (Block(rows, Region(0, shard.size_bytes), decoded),)
        schema = inferred_schema(fields.types, closed=True)
        # Fields that the sample lacks are null in all of its lines.
        places = np.array(alignment(schema, sample.table.schema), np.int64)
        counts = aligned(
            places, [*_sampled_nulls(sample.table, is_whole=is_whole)], sample.table.num_rows
        )
        nulls = array("q", counts.tolist())
        return ShardIndex(schema, blocks, Region(0, 0), zero_copy=False, nulls=nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        check_columns(schema, columns)
        source = block_source(block, compressed=holds_compressed(block))
        body, base = source.view(source.base, source.length), source.base
        # Leave out fields that differ from shard to shard: they are never requested.
        alike = {f.name: f.type for f in schema if differing(f) is None}
        explicit = inferred_schema(alike, closed=len(alike) == len(schema))
        _check_shape(block.url, body, base)
        try:
            table = _read(body, explicit)
            table.validate(full=True)
        except FOREIGN as fault:
            _explain(block.url, body, base, explicit, fault)
        if table.num_rows != block.rows:
            # Check line by line: one line may have two objects.
            _find(block.url, body, base, explicit)
        check_rows(block.url, base, block.rows, table.num_rows)
        if any(has_large(column) for column in table.columns):
            check_exact(block.url, _lines(body, base), {f.name: f.type for f in explicit})
        with foreign_faults(block.url, base, "the lines cannot be joined"):
            arrays = {name: joined(table.column(name).chunks) for name in columns}
            return batch_of(arrays, schema, columns, block)

    def rows_apart(self, block: RawBlock) -> Sequence[int] | None:
        """Return where the lines of a block begin in its bytes, and its end; None if they are
        compressed.
        """
        if holds_compressed(block):
            return None
        ends = np.append(np.flatnonzero(np.frombuffer(block.body, np.uint8) == 10), len(block.body))
        starts = np.append(0, ends[:-1] + 1)
        lines = zip(starts.tolist(), ends.tolist(), strict=True)
        full = [at for at, end in lines if bytes(block.body[at:end]).strip(_WHITESPACE)]
        return [0, *full[1:], len(block.body)]


def _blocks(
    source: ByteSource, note: Callable[[Sequence[memoryview], int], None]
) -> Iterator[Block]:
    """Cut the shard into runs of lines at newlines; skip lines without content. Pass each block's
    offset and its bytes, in pieces, to `note`, except for blocks with a line of many MiB, since
    indexing has little memory.

    Raises:  CorruptShard: a line longer than 1 GiB.
    """
    at = start = 0
    rows = 0
    blank = True
    held: list[memoryview] = []
    while piece := source.view(at, BLOCK_BYTES):
        codes = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(codes == 10)
        if len(ends):
            # The first line may have begun in an earlier piece: `blank` says whether its beginning
            # was blank.
            blank = blank and not bytes(piece[: ends[0]]).strip(_WHITESPACE)
            rows += len(ends) - int(blank) - _blank_count(piece, codes, ends)
            cut = int(ends[-1]) + 1
            held.append(piece[:cut])
            if rows:
                if at + cut - start <= _SURVEYED_BYTES_MAX:
                    note(held, start)
                yield _block(rows, start, at + cut)
                start, rows, held = at + cut, 0, []
            held.append(piece[cut:])
            blank = not bytes(piece[cut:]).strip(_WHITESPACE)
        else:
            blank = blank and not bytes(piece).strip(_WHITESPACE)
            held.append(piece)
        at += len(piece)
        if at - start > _SURVEYED_BYTES_MAX:
            held.clear()
        if at - start > LINE_BYTES_MAX:
            raise corrupt(source.url, start, "a line is longer than 1 GiB: is this JSON lines?")
    if rows or not blank:
        if at - start <= _SURVEYED_BYTES_MAX:
            note(held, start)
        yield _block(rows + (not blank), start, at)


def _blank_count(piece: memoryview, codes: np.ndarray, ends: np.ndarray) -> int:
    """Count the lines between newlines that have no content. Examines only lines that start with a
    space, which are few.
    """
    suspects = np.flatnonzero(_IS_SPACE[codes[ends[:-1] + 1]])
    return sum(
        not bytes(piece[ends[i] + 1 : ends[i + 1]]).strip(_WHITESPACE) for i in suspects.tolist()
    )


def _block(rows: int, start: int, end: int) -> Block:
    return Block(rows, Region(start, end - start), GROWTH * (end - start) + ROW_BYTES * rows)


class _Sample(Struct, frozen=True):
    """The first lines of a shard: their types, their values, and their size in bytes."""

    types: dict[str, pa.DataType]
    table: pa.Table
    length: int


def _sampled(source: ByteSource) -> _Sample:
    """Parse the first lines and infer the types."""
    piece = source.view(0, BLOCK_BYTES)
    lines = bytes(piece)
    first = lines.removeprefix(_BOM).lstrip(_WHITESPACE)
    if first and not first.startswith(b"{"):  # perhaps no line of it ever ends
        raise corrupt(source.url, 0, "not JSON lines", expected="{", found=describe(lines))
    while b"\n" not in lines and len(lines) <= LINE_BYTES_MAX:
        longer = bytes(source.view(0, 2 * len(lines)))
        if len(longer) == len(lines):
            break
        lines = longer
    cut = lines.rfind(b"\n") + 1
    lines = lines[: cut or len(lines)]
    if not lines.strip(_WHITESPACE):
        return _Sample({}, pa.table({}), len(lines))
    try:
        return _inferred(source.url, lines, 0)
    except SchemaMismatch:
        raise
    except CorruptShard as fault:
        return _inferred_apart(source.url, lines, fault)


def _inferred_apart(url: str, lines: bytes, fault: CorruptShard) -> _Sample:
    """Infer the types of the lines that are not broken. Decoding reports broken lines, if they are
    ever read.
    """
    full = [line for line in lines.splitlines(keepends=True) if line.strip(_WHITESPACE)]

    def read(first: int, stop: int) -> None:
        try:
            _inferred(url, b"".join(full[first:stop]), 0)
        except SchemaMismatch:  # the lines contradict each other, but none is broken
            return

    broken = bad_rows(read, len(full), fault)
    whole = b"".join(line for at, line in enumerate(full) if at not in broken)
    return replace(_inferred(url, whole, 0), length=len(lines))


def _inferred(url: str, lines: bytes, base: int) -> _Sample:
    """Infer the types of some lines.

    Raises:  CorruptShard, SchemaMismatch: the lines are broken, or contradict each other.
    """
    body = memoryview(lines)
    _check_shape(url, body, base)
    try:
        table = _read(body, None)
        types = {field.name: _as_text(field.type) for field in table.schema}
    except FOREIGN as fault:
        _explain(url, body, base, None, fault)
    if any(has_large(column) for column in table.columns):
        types = exact_types(url, list(_lines(body, base)), types)
    return _Sample(types, table, len(lines))


class _FieldSurvey:
    """Collects the fields of a shard's lines: the fields of the sample, and fields that occur, or
    have values, only in a later block. Of the later blocks, only those that may have such fields
    are parsed.
    """

    def __init__(self, url: str, sample: _Sample) -> None:
        self._url, self._sampled_bytes = url, sample.length
        self.types = dict(sample.types)
        self._keys = KnownKeys(self.types)

    def note(self, pieces: Sequence[memoryview], start: int) -> None:
        """Note the fields of a block."""
        length = sum(map(len, pieces))
        if start + length <= self._sampled_bytes or not self._keys.may_be_more(pieces):
            return
        try:
            types = _inferred(self._url, b"".join(pieces), start).types
        except (CorruptShard, SchemaMismatch):
            return  # decoding reports the damage, if the block is ever read
        before = dict(self.types)
        for name, kind in types.items():
            known = self.types.get(name, kind)
            joint = joint_inferred(known, kind, closed=True)
            self.types[name] = known if joint is None else joint
        if self.types != before:
            self._keys = KnownKeys(self.types)


def _sampled_nulls(sample: pa.Table, *, is_whole: bool) -> Iterator[int]:
    """Return `ShardIndex.nulls` for the sample."""
    for column in sample.columns:
        pieces = column.chunks or [pa.array([], column.type)]
        by_piece = [counted([piece]) for piece in pieces]
        for counts in zip(*by_piece, strict=True):
            total = sum(counts)
            yield total if total or is_whole else UNKNOWN


def _check_shape(url: str, body: memoryview, base: int) -> None:
    """Refuse lines that are not objects, or that are nested more deeply than the parser's stack
    allows.

    The parser continues after the end of an unfinished line and keeps its nesting depth. It cannot
    do so if each line starts with { and ends with }: a { after an unfinished value is an error.
    """
    codes = np.frombuffer(body, np.uint8)
    ends = np.append(np.flatnonzero(codes == ord("\n")), len(codes))
    starts = np.append(0, ends[:-1] + 1)
    full = np.flatnonzero(ends > starts)
    starts, ends = starts[full], ends[full]
    # Setting one bit turns [ into {, so one comparison finds both.
    opens = np.flatnonzero((codes | 0x20) == ord("{"))
    counts = np.searchsorted(opens, ends) - np.searchsorted(opens, starts)
    plain = (codes[starts] == ord("{")) & (codes[ends - 1] == ord("}")) & (counts <= DEPTH_MAX)
    for i in np.flatnonzero(~plain).tolist():
        line = bytes(body[starts[i] : ends[i]]).removeprefix(_BOM).strip(_WHITESPACE)
        if not line:
            continue
        where = _place(int(full[i]) + 1, base)
        if line[:1] != b"{" or line[-1:] != b"}":
            _check_line(url, line, base + int(starts[i]), where)
        elif counts[i] > DEPTH_MAX and _depth(line) > DEPTH_MAX:
            raise corrupt(
                url, base + int(starts[i]), f"{where} is nested deeper than {DEPTH_MAX} levels"
            )


def _depth(line: bytes) -> int:
    """Return how deep a line is nested, ignoring brackets in strings."""
    codes = np.frombuffer(_STRING.sub(b"", line), np.uint8)
    steps = ((codes | 0x20) == ord("{")).astype(np.int64) - ((codes | 0x20) == ord("}"))
    return int(np.cumsum(steps).max(initial=0))


def _as_text(kind: pa.DataType) -> pa.DataType:
    """Return the inferred type, with dates turned back into text."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _as_text(f.type)) for f in kind.fields])
    return kind


def _read(body: memoryview, schema: pa.Schema | None) -> pa.Table:
    """Parse lines into a table of this inferred schema, or infer one."""
    # Parse in one piece if possible: the parser refuses lines longer than its block.
    size = min(len(body) + 1, LINE_BYTES_MAX)
    explicit = (
        None if schema is None else pa.schema([(f.name, parser_type(f.type)) for f in schema])
    )
    others = "infer" if schema is None else "error" if is_closed(schema) else "ignore"
    table = pj.read_json(
        pa.BufferReader(pa.py_buffer(body)),
        read_options=pj.ReadOptions(use_threads=False, block_size=size),
        parse_options=pj.ParseOptions(
            explicit_schema=explicit,
            newlines_in_values=False,
            unexpected_field_behavior=others,
        ),
    )
    if schema is None or schema.equals(explicit, check_metadata=False):
        return table
    columns = [
        pa.chunked_array([from_parser(piece, field.type) for piece in column.chunks], field.type)
        for field, column in zip(schema, table.columns, strict=True)
    ]
    return pa.table(columns, schema=schema)


def _explain(
    url: str, body: memoryview, base: int, schema: pa.Schema | None, fault: Exception
) -> NoReturn:
    """Raise an error that names the line on which the parser failed.

    Raises:  CorruptShard, SchemaMismatch.  MemoryError: there was too little memory.
    """
    if is_out_of_memory(fault):
        raise MemoryError(str(fault)) from fault
    _find(url, body, base, schema)
    lines = str(fault).splitlines() or [type(fault).__name__]
    raise SchemaMismatch(
        f"{url}: byte {base}: lines of one block disagree about a field ({lines[0][:300]}); give "
        "each field one type",
        shard=url,
        offset=base,
    ) from fault


def _find(url: str, body: memoryview, base: int, schema: pa.Schema | None) -> None:
    """Parse the lines one by one, and raise for the first that is broken or does not fit."""
    for line in _lines(body, base):
        _check_line(url, line.text, line.offset, line.where)
        _check_types(url, line, schema)


def _lines(body: memoryview, base: int) -> Iterator[JsonLine]:
    """Yield the lines that have content."""
    at = 0
    for number, line in enumerate(bytes(body).split(b"\n"), 1):
        text = line.removeprefix(_BOM) if at == 0 else line
        if text.strip(_WHITESPACE):
            yield JsonLine(text, base + at, _place(number, base))
        at += len(line) + 1


def _place(number: int, base: int) -> str:
    return f"line {number}" if base == 0 else f"line {number} from byte {base} on"


def _check_line(url: str, line: bytes, offset: int, where: str) -> None:
    try:
        value: Any = json.loads(line)
    except RecursionError as fault:
        raise corrupt(url, offset, f"{where} is nested too deeply") from fault
    except ValueError as fault:
        raise _broken(url, JsonLine(line, offset, where), str(fault)) from fault
    if not isinstance(value, dict):
        raise corrupt(url, offset, where, expected="a JSON object", found=type(value).__name__)


def _broken(url: str, line: JsonLine, reason: str) -> CorruptShard:
    shown = repr(line.text[:80])
    return CorruptShard(
        f"{url}: byte {line.offset}, {line.where}: broken JSON ({reason}); found {shown}",
        shard=url,
        offset=line.offset,
        line=line.where,
        expected="a JSON object",
        found=shown,
    )


def _check_types(url: str, line: JsonLine, schema: pa.Schema | None) -> None:
    try:
        _read(memoryview(line.text), schema).validate(full=True)
    except FOREIGN as fault:
        if is_out_of_memory(fault):
            raise MemoryError(str(fault)) from fault
        lines = str(fault).splitlines() or [type(fault).__name__]
        reason = lines[0][:300]
        if not any(word in reason for word in _OF_TYPES):
            raise _broken(url, line, reason) from fault
        field = "" if schema is None else unknown_field(json.loads(line.text), schema)
        reason = f"field {field!r} is not in it" if field else reason
        raise SchemaMismatch(
            f"{url}: byte {line.offset}, {line.where}: does not fit the dataset's schema, which "
            f"the first 4 MiB of each shard and the lines with new fields set ({reason}). Move a "
            "line that has every field, and fractions where they occur, to the start of a shard, "
            "or rewrite this line",
            shard=url,
            offset=line.offset,
            line=line.where,
            field=field or None,
            expected="" if schema is None else ", ".join(f"{f.name}: {f.type}" for f in schema),
            found=repr(line.text[:80]),
        ) from fault
