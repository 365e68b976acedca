"""JSON lines: a block is a run of whole lines, about 4 MiB; a .gz shard is one block.

Schema: from the first shard's first block. Integers are int64 and numbers with a fraction double;
if the first block has only integers and a later line a fraction, that line is a SchemaMismatch: a
column never changes its type, and never loses precision, behind one's back. Text stays text, dates
too. A field that a line lacks is null, a field that the schema lacks is a SchemaMismatch.

Source:  https://jsonlines.org
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from dataplane.errors import CorruptShard, SchemaMismatch
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_columns, check_rows
from dataplane.formats.faults import FOREIGN, corrupt, describe, foreign_faults, require_bytes
from dataplane.formats.gzipped import is_compressed
from dataplane.formats.inferred import inferred_schema
from dataplane.formats.source import (
    BLOCK_BYTES,
    Inflated,
    Source,
    Window,
    block_source,
    holds_compressed,
)
from dataplane.model import Region

# [1,2] takes two bytes a value and becomes int64.
GROWTH = 4
ROW_BYTES = 64
LINE_BYTES_MAX = 1 << 30
DEPTH_MAX = 256

_WHITESPACE = b" \t\r\n"
_IS_SPACE = np.isin(np.arange(256), list(_WHITESPACE))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """The JSON lines format, plain and gzip."""

    name = "jsonl"
    suffixes = (".jsonl.gz", ".ndjson.gz", ".json.gz", ".jsonl", ".ndjson")

    def index(self, shard: ShardReader) -> ShardIndex:
        """As `Format.index`: one pass that counts lines; only the first block is parsed."""
        require_bytes(shard.url, shard.size_bytes, "JSON lines")
        window = Window(shard)
        compressed = is_compressed(bytes(window.view(0, 4)))
        source: Source = Inflated(shard) if compressed else window
        schema = _sampled_schema(source)
        blocks = tuple(_blocks(source))
        if compressed and blocks:
            rows = sum(block.rows for block in blocks)
            decoded = sum(block.decoded_bytes for block in blocks)
            blocks = (Block(rows, Region(0, shard.size_bytes), decoded),)
        return ShardIndex(schema, blocks, Region(0, 0), zero_copy=False)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """As `Format.decode`."""
        check_columns(schema, columns)
        source = block_source(block, compressed=holds_compressed(block))
        body, base = source.view(source.base, source.length), source.base
        explicit = pa.schema([pa.field(f.name, f.type) for f in schema])
        _check_shape(block.url, body, base)
        try:
            table = _read(body, explicit)
            table.validate(full=True)
        except FOREIGN as fault:
            _explain(block.url, body, base, explicit, fault)
        if table.num_rows != block.rows:
            # Two objects on one line, perhaps.
            _find(block.url, body, base, explicit)
        check_rows(block.url, base, block.rows, table.num_rows)
        with foreign_faults(block.url, base, "the lines cannot be joined"):
            whole = table.combine_chunks().to_batches()
            if len(whole) != 1:
                raise ValueError(f"more than 2 GiB of text in {len(whole)} pieces")
            arrays = {name: whole[0].column(name) for name in columns}
            return batch_of(arrays, schema, columns, block.rows)


def _blocks(source: Source) -> Iterator[Block]:
    """Runs of lines. Only the places of newlines are looked at, and lines without content skipped.

    Raises:  CorruptShard: a line longer than 1 GiB.
    """
    at = start = 0
    rows = 0
    blank = True
    while piece := source.view(at, BLOCK_BYTES):
        codes = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(codes == 10)
        if len(ends):
            # The first line began in an earlier piece, so its blankness is remembered.
            blank = blank and not bytes(piece[: ends[0]]).strip(_WHITESPACE)
            rows += len(ends) - int(blank) - _blank_count(piece, codes, ends)
            end = at + int(ends[-1]) + 1
            if rows:
                yield _block(rows, start, end)
                start, rows = end, 0
            blank = not bytes(piece[ends[-1] + 1 :]).strip(_WHITESPACE)
        else:
            blank = blank and not bytes(piece).strip(_WHITESPACE)
        at += len(piece)
        if at - start > LINE_BYTES_MAX:
            raise corrupt(source.url, start, "a line is longer than 1 GiB; not JSON lines?")
    if rows or not blank:
        yield _block(rows + (not blank), start, at)


def _blank_count(piece: memoryview, codes: np.ndarray, ends: np.ndarray) -> int:
    """How many lines between newlines have no content. Few start with a space, and only those are
    looked at.
    """
    suspects = np.flatnonzero(_IS_SPACE[codes[ends[:-1] + 1]])
    return sum(
        not bytes(piece[ends[i] + 1 : ends[i + 1]]).strip(_WHITESPACE) for i in suspects.tolist()
    )


def _block(rows: int, start: int, end: int) -> Block:
    return Block(rows, Region(start, end - start), GROWTH * (end - start) + ROW_BYTES * rows)


def _sampled_schema(source: Source) -> pa.Schema:
    piece = source.view(0, BLOCK_BYTES)
    lines = bytes(piece)
    while b"\n" not in lines and len(lines) <= LINE_BYTES_MAX:
        longer = bytes(source.view(0, 2 * len(lines)))
        if len(longer) == len(lines):
            break
        lines = longer
    cut = lines.rfind(b"\n") + 1
    lines = lines[: cut or len(lines)]
    if not lines.strip(_WHITESPACE):
        return inferred_schema({}, closed=True)
    first = lines.removeprefix(_BOM).lstrip(_WHITESPACE)
    if not first.startswith(b"{"):
        raise corrupt(source.url, 0, "not JSON lines", expected="{", found=describe(lines))
    _check_shape(source.url, memoryview(lines), 0)
    try:
        found = {f.name: _as_text(f.type) for f in _read(memoryview(lines), None).schema}
    except FOREIGN as fault:
        _explain(source.url, memoryview(lines), 0, None, fault)
    return inferred_schema(found, closed=True)


def _check_shape(url: str, body: memoryview, base: int) -> None:
    """Refuse lines that are no objects, or nested deeper than the parser's stack bears.

    The parser goes on over the end of a line, and would carry its depth along; not so where each
    line starts with { and ends with }, since a { is an error after an unfinished value.
    """
    codes = np.frombuffer(body, np.uint8)
    ends = np.append(np.flatnonzero(codes == ord("\n")), len(codes))
    starts = np.append(0, ends[:-1] + 1)
    full = np.flatnonzero(ends > starts)
    starts, ends = starts[full], ends[full]
    # [ and { differ in one bit.
    opens = np.flatnonzero((codes | 0x20) == ord("{"))
    counts = np.searchsorted(opens, ends) - np.searchsorted(opens, starts)
    plain = (codes[starts] == ord("{")) & (codes[ends - 1] == ord("}")) & (counts <= DEPTH_MAX)
    for i in np.flatnonzero(~plain).tolist():
        line = bytes(body[starts[i] : ends[i]]).removeprefix(_BOM).strip(_WHITESPACE)
        if not line:
            continue
        number = int(full[i]) + 1
        where = f"line {number}" if base == 0 else f"line {number} from byte {base} on"
        if line[:1] != b"{" or line[-1:] != b"}":
            _check_line(url, line, base + int(starts[i]), where)
        elif counts[i] > DEPTH_MAX and _depth(line) > DEPTH_MAX:
            raise corrupt(
                url, base + int(starts[i]), f"{where} is nested deeper than {DEPTH_MAX} levels"
            )


def _depth(line: bytes) -> int:
    """How deep a line is nested, its strings left out."""
    codes = np.frombuffer(_STRING.sub(b"", line), np.uint8)
    steps = ((codes | 0x20) == ord("{")).astype(np.int64) - ((codes | 0x20) == ord("}"))
    return int(np.cumsum(steps).max(initial=0))


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The inferred type, but for dates that were read into text."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _as_text(f.type)) for f in kind.fields])
    return kind


def _read(body: memoryview, schema: pa.Schema | None) -> pa.Table:
    # One piece where it fits: a line may not be longer than the parser's block.
    size = min(len(body) + 1, LINE_BYTES_MAX)
    return pj.read_json(
        pa.BufferReader(pa.py_buffer(body)),
        read_options=pj.ReadOptions(use_threads=False, block_size=size),
        parse_options=pj.ParseOptions(
            explicit_schema=schema,
            newlines_in_values=False,
            unexpected_field_behavior="infer" if schema is None else "error",
        ),
    )


def _explain(
    url: str, body: memoryview, base: int, schema: pa.Schema | None, fault: Exception
) -> NoReturn:
    """Say which line the parser stumbled over."""
    _find(url, body, base, schema)
    lines = str(fault).splitlines() or [type(fault).__name__]
    raise SchemaMismatch(
        f"{url}: byte {base}: lines of one block disagree about a field ({lines[0][:300]}); give "
        "each field one type",
        shard=url,
        offset=base,
    ) from fault


def _find(url: str, body: memoryview, base: int, schema: pa.Schema | None) -> None:
    """Raise for the first line that is broken or does not fit, parsing them one by one."""
    at = 0
    for number, line in enumerate(bytes(body).split(b"\n"), 1):
        where = f"line {number}" if base == 0 else f"line {number} from byte {base} on"
        text = line.removeprefix(_BOM) if at == 0 else line
        if text.strip(_WHITESPACE):
            _check_line(url, text, base + at, where)
            _check_types(url, text, base + at, where, schema)
        at += len(line) + 1


def _check_line(url: str, line: bytes, offset: int, where: str) -> None:
    try:
        value: Any = json.loads(line)
    except RecursionError as fault:
        raise corrupt(url, offset, f"{where} is nested too deeply") from fault
    except ValueError as fault:
        raise CorruptShard(
            f"{url}: byte {offset}, {where}: broken JSON ({fault}); found {line[:80]!r}",
            shard=url,
            offset=offset,
            line=where,
            expected="a JSON object",
            found=repr(line[:80]),
        ) from fault
    if not isinstance(value, dict):
        raise corrupt(url, offset, where, expected="a JSON object", found=type(value).__name__)


def _check_types(url: str, line: bytes, offset: int, where: str, schema: pa.Schema | None) -> None:
    try:
        _read(memoryview(line), schema)
    except FOREIGN as fault:
        lines = str(fault).splitlines() or [type(fault).__name__]
        raise SchemaMismatch(
            f"{url}: byte {offset}, {where}: does not fit the dataset's schema, which the first "
            f"lines of the first shard set ({lines[0][:300]}). Name a shard first whose lines "
            "show every field and fractions, or rewrite this line",
            shard=url,
            offset=offset,
            line=where,
            expected="" if schema is None else ", ".join(f"{f.name}: {f.type}" for f in schema),
            found=repr(line[:80]),
        ) from fault
