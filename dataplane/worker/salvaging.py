"""The rows of a block that cannot be decoded or mapped, and the rows that replace them.

1. A bad row is replaced by another one of its block and view: docs/order.md specifies which. So the
   content of a block depends only on its bytes, the seed and the job's view and functions.
2. If more than half of the rows are bad, and more than 16, the whole block is.
3. Blocks without bad rows cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.units import clipped
from dataplane.formats import folders
from dataplane.formats.arrays import joined, take_rows
from dataplane.formats.base import Format, RawBlock
from dataplane.formats.faults import bad_rows
from dataplane.model.changes import BY_BLOCK, ReplacedRow
from dataplane.model.errors import ConfigError, CorruptShard, DataplaneError, FunctionError
from dataplane.model.records import Region
from dataplane.model.typed import complete
from dataplane.plan.tombstones import substitute, substitute_key
from dataplane.plan.views import chosen
from dataplane.rpc import tasks
from dataplane.transforms.row_filter import BlockRows, Bools, RowFilter

_WHY_MAX = 150
REPLACED_MARK = b"dataplane.replaced"
"""The metadata of a decoded block in which its replaced rows are listed."""

Bad = dict[int, str]
"""Rows of a block that cannot be read, and why."""


class Replaced(Struct, frozen=True, array_like=True):
    """A replaced row of a block: its place, as slabs count the rows, and its entry in the
    ledger.
    """

    place: int
    row: ReplacedRow


def decoded(
    format_: Format, block: RawBlock, schema: pa.Schema, columns: Sequence[str]
) -> tuple[pa.RecordBatch, Bad]:
    """Decode a block, and find the rows that cannot be decoded. These get the values of any other
    row.

    Raises:  CorruptShard: the whole block is bad.
    """
    try:
        return folders.decoded(format_, block, schema, columns), {}
    except CorruptShard as fault:
        return _decoded_apart(format_, block, schema, columns, fault)


def view_mask(
    format_: Format, block: RawBlock, schema: pa.Schema, rows: RowFilter, stored: BlockRows
) -> Bools:
    """Return which rows of a block a view keeps. Rows whose condition cannot be evaluated are kept,
    to be replaced by other rows and reported.

    Shapes:  result: bool[rows].
    """
    try:
        batch, bad = decoded(format_, block, schema, rows.columns)
        return viewed(batch, bad, rows, stored, block.url)[0]
    except CorruptShard:
        mask: Bools = chosen(rows.view, stored.word, stored.first, stored.count)
        return mask


def viewed(
    batch: pa.RecordBatch, bad: Bad, rows: RowFilter, stored: BlockRows, url: str
) -> tuple[Bools, Bad]:
    """Return which rows of a block a view keeps, and which rows are bad: those given, and those at
    which the condition fails. A view keeps bad rows of its shares.

    Shapes:  result: bool[rows].
    Raises:  CorruptShard: the condition fails at too many rows.
    """
    try:
        mask, failed = rows.mask(batch, stored), Bad()
    except ConfigError as error:
        fault = CorruptShard(f"{url}: where= fails at too many rows: {error}", shard=url)

        def part(first: int, stop: int) -> Bools:
            return rows.mask(batch.slice(first, stop - first), stored.part(first, stop))

        failed = bad_rows(part, batch.num_rows, fault, (ConfigError,))
        other = next(row for row in range(batch.num_rows) if row not in failed)
        places = [other if row in failed else row for row in range(batch.num_rows)]
        mask = rows.mask(taken(batch, places), stored)
    all_bad = failed | bad
    if all_bad:
        of_shares = chosen(rows.view, stored.word, stored.first, stored.count)
        mask[list(all_bad)] = of_shares[list(all_bad)]
    return mask, all_bad


def _decoded_apart(
    format_: Format,
    block: RawBlock,
    schema: pa.Schema,
    columns: Sequence[str],
    fault: CorruptShard,
) -> tuple[pa.RecordBatch, Bad]:
    """Decode the rows of a damaged block separately.

    Raises:  CorruptShard: `fault`, if the format cannot do that, or too many rows are bad.
    """
    rows_apart = getattr(format_, "rows_apart", None)
    ends = None if rows_apart is None or block.pieces else rows_apart(block)
    if ends is None or len(ends) != block.rows + 1:
        raise fault
    good: list[pa.RecordBatch] = []

    def decode(first: int, stop: int) -> None:
        start, end = ends[first], ends[stop]
        place = Region(block.place.offset + start, end - start)
        body = block.body[start:end]
        part = replace(block, rows=stop - first, place=place, body=body, first_row=first)
        good.append(folders.decoded(format_, part, schema, columns))

    bad = bad_rows(decode, block.rows, fault)
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * block.rows, pa.struct([]))), bad
    arrays = [joined([batch.column(at) for batch in good]) for at in range(len(columns))]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    places, at = [], 0
    for row in range(block.rows):
        places.append(min(at, batch.num_rows - 1))
        at += row not in bad
    return taken(batch, places), bad


def unmapped(
    call: Callable[[pa.RecordBatch], object], batch: pa.RecordBatch, fault: DataplaneError
) -> Bad:
    """Return the rows of a block at which a function fails.

    Raises:  FunctionError: `fault`, if there are too many.
    """
    return bad_rows(
        lambda first, stop: call(batch.slice(first, stop - first)),
        batch.num_rows,
        fault,
        (CorruptShard, FunctionError),
    )


def stand_ins(raw: tasks.RawBlockRef, numbers: Sequence[int], bad: Bad, seed: int) -> list[int]:
    """Return, for each row of a block, the row whose content it gets. `numbers` are the numbers of
    the rows among all rows that the block stores.

    Raises:  CorruptShard: all rows are bad.
    """
    rows = list(range(len(numbers)))
    if bad and len(bad) == len(rows):
        raise CorruptShard(
            f"{raw.url}: all rows of block {raw.index} are bad: {bad[0]}", shard=raw.url
        )
    for row in bad:
        keyed = substitute_key(seed, raw.shard, raw.first_row + numbers[row])
        rows[row] = substitute(keyed, len(rows), bad)
    return rows


def taken(batch: pa.RecordBatch, rows: list[int]) -> pa.RecordBatch:
    """Return these rows of a block; there are as many as the block has."""
    if not batch.num_columns:
        return batch
    chosen = np.array(rows, np.int64)
    arrays = [take_rows(array, chosen) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def replaced(raw: tasks.RawBlockRef, numbers: Sequence[int], bad: Bad, seed: int) -> list[Replaced]:
    """Return the replaced rows of a block, by their numbers in the shard."""
    rows, first = stand_ins(raw, numbers, bad, seed), raw.first_row
    return [
        Replaced(
            row,
            ReplacedRow(raw.url, raw.shard, first + numbers[row], first + numbers[rows[row]], why),
        )
        for row, why in bad.items()
    ]


def all_replaced(
    raw: tasks.RawBlockRef, other: tasks.RawBlockRef, numbers: Sequence[int], why: str
) -> list[Replaced]:
    """Return all rows of a block as replaced by the rows with these numbers of the block
    `other`.
    """
    place = "" if other.url == raw.url else f" of {other.url}"
    said = f"{clipped(why, _WHY_MAX)}{BY_BLOCK}{other.index}{place}"
    if raw.stored_rows:  # name the block: which of its rows are in the view is unknown
        said = f"block {raw.index}: {said}"
    return [
        Replaced(
            at,
            ReplacedRow(raw.url, raw.shard, raw.first_row + at, other.first_row + number, said),
        )
        for at, number in enumerate(numbers)
    ]


def marked(batch: pa.RecordBatch, rows: list[Replaced]) -> pa.RecordBatch:
    """Return the block with a list of its replaced rows."""
    if not rows:
        return batch
    return batch.replace_schema_metadata({REPLACED_MARK: msgspec.json.encode(rows)})


def replaced_of(batch: pa.RecordBatch) -> dict[int, ReplacedRow]:
    """Return the replaced rows of a block that was decoded, by their places in it."""
    listed = (batch.schema.metadata or {}).get(REPLACED_MARK)
    if listed is None:
        return {}
    rows = msgspec.json.decode(listed, type=complete(list[Replaced]))
    return {row.place: row.row for row in rows}
