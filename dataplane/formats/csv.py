"""Text tables (.csv, .tsv): a block is a run of whole records, about 4 MiB; a compressed shard is
one block.

The first record names the columns; one without a name is `Unnamed: 0`, by its number. Every value
is text, as it is written: a table says nothing about types, and a guess from its first lines would
change with the shards. An empty field is null, and `""` an empty text. Fields are separated by
commas, in .tsv by tabs. A field with a separator, a newline or a quote stands in quotes, in which
quotes are doubled. Empty lines are skipped, also before the names.

Source:  RFC 4180
"""

from __future__ import annotations

import csv
import io
import re
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
from numpy.typing import NDArray

from dataplane.base.suffixes import BY_FORMAT, path_of
from dataplane.formats.arrays import joined
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_rows, check_shard
from dataplane.formats.faults import corrupt, describe, foreign_faults, require_bytes
from dataplane.formats.source import (
    BLOCK_BYTES,
    PROBE_BYTES,
    ByteSource,
    Inflated,
    Memory,
    Window,
    block_source,
    holds_compressed,
    is_compressed,
)
from dataplane.model.errors import CorruptShard, SchemaMismatch
from dataplane.model.records import Region
from dataplane.plan.columns import UNKNOWN

RECORD_BYTES_MAX = 64 << 20
_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_BOM = b"\xef\xbb\xbf"
# A mark of UTF-8 and empty lines before the names.
_BEFORE = re.compile(rb"(?:\xef\xbb\xbf)?(?:\r?\n)*")
_NAMES = "the names of columns"
_CONTROLS = {*range(32)} - {*b"\t\n\r"}
_TABS = (".tsv", ".tsv.gz", ".tsv.zst")
# Arrow's parser takes at most 2 GiB at once.
_PARSED_BYTES_MAX = 1 << 30

# Else Arrow's parser starts a thread and opens a pipe to be cancelled by the signals of a terminal.
pa.enable_signal_handlers(False)


class Csv:
    """Tables of text, plain and compressed."""

    name = "csv"
    suffixes = BY_FORMAT["csv"]

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: read everything once, since records may have any length."""
        url, size = shard.url, shard.size_bytes
        require_bytes(url, size, "CSV")
        window = Window(shard)
        compressed = is_compressed(bytes(window.view(0, 4)))
        source: ByteSource = Inflated(shard) if compressed else window
        names, start = _header(source)
        schema = pa.schema([(name, pa.string()) for name in names])
        nulls = None
        blocks = []
        for rows, place, body in _runs(source, start):
            if nulls is None:
                nulls = _nulls(url, body, place, names)
            decoded = place.length + rows * len(names) * 5 + 64 * len(names)
            blocks.append(Block(rows, place, decoded))
        if nulls is None or len(blocks) > 1:
            nulls = [count or UNKNOWN for count in nulls or [0] * len(names)]
        if compressed and blocks:
            rows, decoded = (sum(b.rows for b in blocks), sum(b.decoded_bytes for b in blocks))
            blocks = [Block(rows, Region(0, size), decoded)]
        preamble = Region(0, 0 if compressed else start)
        return ShardIndex(schema, tuple(blocks), preamble, False, array("q", nulls))

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        url, compressed = block.url, holds_compressed(block)
        source = block_source(block, compressed=compressed)
        names, start = _header(source if compressed else Memory(url, block.preamble, 0))
        check_shard(pa.schema([(name, pa.string()) for name in names]), schema, columns, url)
        at = start if compressed else source.base
        body = source.view(at, source.base + source.length - at)
        check_rows(url, at, block.rows, len(_starts(url, body, at)) - 1)
        wanted = [name for name in columns if name in names]
        table = _parsed(url, body, at, names, wanted)
        check_rows(url, at, block.rows, table.num_rows if wanted else block.rows)
        with foreign_faults(url, at, "the records cannot be joined"):
            arrays = {name: joined(table.column(name).chunks) for name in wanted}
        return batch_of(arrays, schema, columns, block)

    def rows_apart(self, block: RawBlock) -> Sequence[int] | None:
        """Return where the records of a block begin in its bytes, and its end; None if they are
        compressed.
        """
        if holds_compressed(block):
            return None
        return _starts(block.url, block.body, block.place.offset)


def _delimiter(url: str) -> str:
    return "\t" if path_of(url).endswith(_TABS) else ","


def _header(source: ByteSource) -> tuple[list[str], int]:
    """Return the names of the columns, and where the first record begins.

    Raises:  CorruptShard: this is no text table.   SchemaMismatch: two columns have one name.
    """
    url, length = source.url, PROBE_BYTES
    kind = describe(bytes(source.view(0, 512)))
    if not kind.startswith("bytes"):
        raise corrupt(url, 0, "no text table", expected=_NAMES, found=kind)
    while True:
        head = source.view(0, length)
        before = _BEFORE.match(head)
        begin = before.end() if before else 0
        ends = _ends(url, head, 0, is_last=len(head) < length)
        ends = ends[ends > begin]
        if len(ends) or len(head) < length or length >= RECORD_BYTES_MAX:
            break
        length *= 2
    if not len(ends):
        what = "the table has only empty lines" if begin == len(head) else "no text table"
        raise corrupt(url, 0, what, expected=_NAMES, found=kind)
    line = bytes(head[begin : ends[0]])
    if _CONTROLS.intersection(line):
        raise corrupt(url, 0, "no text table", expected=_NAMES, found=kind)
    try:
        text = io.StringIO(line.decode(), newline="")
        names, *more = csv.reader(text, delimiter=_delimiter(url), strict=True)
    except (ValueError, csv.Error) as fault:
        raise corrupt(url, 0, f"the names of the columns are damaged ({fault})") from fault
    if more or not names:
        raise corrupt(url, 0, "lines end with carriage returns alone: write newlines after them")
    names = [name or f"Unnamed: {at}" for at, name in enumerate(names)]
    twin = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twin is not None:
        what = f"{url}: two columns are named {twin!r}; rename one"
        raise SchemaMismatch(what, shard=url, field=twin)
    return names, min(int(ends[0]) + 1, len(head))


def _ends(url: str, body: memoryview, offset: int, *, is_last: bool) -> NDArray[np.int64]:
    """Return where the records of `body` end: at newlines outside of quotes. If it `is_last`, its
    end is the end of a record, too.

    Raises:  CorruptShard: a quote is not where it can be, or the last one is not closed.
    """
    codes = np.frombuffer(body, np.uint8)
    ends = np.flatnonzero(codes == _NEWLINE)
    quotes = np.flatnonzero(codes == _QUOTE)
    if len(quotes):
        ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
        within = len(codes) if is_last else int(ends[-1]) if len(ends) else 0
        _check_quotes(url, codes, quotes[quotes < within], offset)
        if is_last and len(quotes) % 2:
            at = offset + int(quotes[-1])
            raise corrupt(url, at, "a quote is not closed: the table is truncated or damaged")
    if is_last and len(codes) and (not len(ends) or ends[-1] < len(codes) - 1):
        ends = np.append(ends, len(codes))
    return ends


def _check_quotes(
    url: str, codes: NDArray[np.uint8], quotes: NDArray[np.int64], offset: int
) -> None:
    """Check that every other quote begins a field, or is doubled, and that the others end one."""
    separator = ord(_delimiter(url))
    opening, closing = quotes[::2], quotes[1::2]
    before = codes[np.maximum(opening - 1, 0)]
    is_wrong = ~np.isin(before, (separator, _NEWLINE, _QUOTE)) & (opening > 0)
    if offset == 0 and codes[:3].tobytes() == _BOM:
        is_wrong &= opening != len(_BOM)
    after = codes[np.minimum(closing + 1, len(codes) - 1)]
    is_late = ~np.isin(after, (separator, _NEWLINE, _RETURN, _QUOTE)) & (closing < len(codes) - 1)
    wrong = [*opening[is_wrong][:1].tolist(), *closing[is_late][:1].tolist()]
    if wrong:
        raise corrupt(
            url,
            offset + min(wrong),
            "a quote inside of a field: put the field in quotes, and double the quotes in it",
        )


def _full(body: memoryview, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the records begin that are no empty lines."""
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts
    first = np.frombuffer(body, np.uint8)[np.minimum(starts, len(body) - 1)]
    full: NDArray[np.int64] = starts[(lengths > 1) | ((lengths == 1) & (first != _RETURN))]
    return full


def _starts(url: str, body: memoryview, offset: int) -> list[int]:
    """Return where the records of a block begin, the first at 0, and the end of the block."""
    ends = _ends(url, body, offset, is_last=True)
    full: list[int] = _full(body, ends).tolist() if len(ends) else []
    return [0, *full[1:], len(body)] if full else [0]


def _runs(source: ByteSource, start: int) -> Iterator[tuple[int, Region, memoryview]]:
    """Cut the shard into runs of records: their number, place and bytes.

    Raises:  CorruptShard: a record is longer than 64 MiB.
    """
    length = BLOCK_BYTES
    while body := source.view(start, length):
        ends = _ends(source.url, body, start, is_last=len(body) < length)
        if not len(ends):
            if length > RECORD_BYTES_MAX:
                what = "a record is longer than 64 MiB: is a quote not closed?"
                raise corrupt(source.url, start, what)
            length *= 2
            continue
        cut = min(int(ends[-1]) + 1, len(body))
        rows = len(_full(body, ends))
        if rows:
            yield rows, Region(start, cut), body[:cut]
        start, length = start + cut, BLOCK_BYTES


def _parsed(
    url: str, body: memoryview, offset: int, names: Sequence[str], wanted: Sequence[str]
) -> pa.Table:
    """Parse records.   Raises:  CorruptShard: shows a record with too few or too many fields."""
    with foreign_faults(url, offset, "a record does not fit the table"):
        return pc.read_csv(
            pa.BufferReader(pa.py_buffer(body)),
            pc.ReadOptions(
                use_threads=False,
                block_size=min(len(body) + 1, _PARSED_BYTES_MAX),
                column_names=list(names),
            ),
            pc.ParseOptions(delimiter=_delimiter(url), newlines_in_values=True),
            pc.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                include_columns=list(wanted or names[:1]),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )


def _nulls(url: str, body: memoryview, place: Region, names: Sequence[str]) -> list[int]:
    """Count the nulls of the first block. If it is damaged, decoding says so."""
    try:
        table = _parsed(url, body, place.offset, names, names)
    except CorruptShard:
        return [UNKNOWN] * len(names)
    return [column.null_count for column in table.columns]
