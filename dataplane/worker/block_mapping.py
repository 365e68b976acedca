"""Apply a user's map to the blocks of a dataset, and find the map's columns from the first rows.

The first rows are read by a job of the node's own, before the job that has the map is opened: its
blocks have one column, whose first row lists the columns that the map returns.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.rpc import tasks
from dataplane.transforms.functions import GENERATOR
from dataplane.transforms.made_columns import MappedColumns
from dataplane.worker.functions import (
    CalledAt,
    UserFunction,
    check_code,
    loaded,
    mapped_block,
    untyped,
)

FOUND_COLUMNS = pa.schema([("columns", pa.large_binary())])
"""The schema of the blocks that list the columns of a map."""
COUNTED_ROWS = pa.schema([("rows", pa.list_(pa.uint8()))])
"""The schema of the blocks that count the rows of a map: each is a document of one token."""
_FIRST_ROWS = 64
_ARGUMENT = "map"


class BlockMapping(Struct, frozen=True):
    """Applies the function `name` to blocks. `columns` are those that the function returned for the
    first rows; None: they must be found. `resizes`: it may return another number of rows, and they
    are only counted if `counts`. `epoch`: it draws other random numbers in each epoch.
    """

    name: str
    seed: int
    columns: MappedColumns | None
    resizes: bool = False
    counts: bool = False
    epoch: int | None = None

    def applied(self, batch: pa.RecordBatch, raw: tasks.RawBlockRef) -> pa.RecordBatch:
        """Apply the function to a decoded block.

        Raises:  FunctionError: the function fails, or returns something else than it did for the
        first rows.  ConfigError: the function cannot be imported.
        """
        function = loaded(_ARGUMENT, self.name)
        if self.columns is None:
            return _found(self._find(function, batch, raw), batch.num_rows)
        check_code(function, self.columns.code, CalledAt(_ARGUMENT, self.name, raw.url, raw.index))
        made = self._mapped(function, batch, raw, self.columns.schema)
        return counted_rows(made.num_rows) if self.counts else made

    def check(self, made: pa.RecordBatch, raw: tasks.RawBlockRef) -> None:
        """Check that a whole block has as many rows as when they were counted.

        Raises:  FunctionError: it has not.
        """
        if raw.made_rows and made.num_rows != raw.made_rows:
            raise CalledAt(_ARGUMENT, self.name, raw.url, raw.index).fault(
                f"returned {made.num_rows} rows, and {raw.made_rows} when they were counted: with "
                "resizes=True it must always return the same for the same rows. Give it another "
                "`version` when a file that it opens, or code that it imports, changes"
            )

    def _mapped(
        self,
        function: UserFunction,
        batch: pa.RecordBatch,
        raw: tasks.RawBlockRef,
        schema: pa.Schema | None,
    ) -> pa.RecordBatch:
        at = CalledAt(_ARGUMENT, self.name, raw.url, raw.index)
        return mapped_block(
            function,
            batch,
            self.seed,
            raw.shard,
            at,
            schema,
            resizes=self.resizes,
            epoch=self.epoch,
        )

    def _find(
        self, function: UserFunction, batch: pa.RecordBatch, raw: tasks.RawBlockRef
    ) -> MappedColumns:
        at = CalledAt(_ARGUMENT, self.name, raw.url, raw.index)
        names = batch.schema.names
        reads = tuple(names) if function.reads is None else function.reads
        missing = [name for name in reads if name not in names]
        if missing:
            raise at.fault(
                f"reads column {missing[0]!r}, which the dataset does not have; it has: "
                f"{', '.join(names)}"
            )
        batch = batch.select(reads)
        some = self._mapped(function, batch.slice(0, _FIRST_ROWS), raw, None)
        if untyped(some.schema) and batch.num_rows > _FIRST_ROWS:
            some = self._mapped(function, batch, raw, None)
        if self.epoch is not None and not function.takes_generator:
            raise at.fault(
                f"takes no argument {GENERATOR!r}, and per_epoch=True is about the random numbers "
                "that this argument gives: add it, or leave per_epoch out"
            )
        unknown = untyped(some.schema)
        if unknown:
            raise at.fault(
                f"returned only nulls or empty lists in column {unknown[0]!r} for the first block, "
                "which have no type: return an Arrow array that has one, such as "
                "pyarrow.array(values, pyarrow.list_(pyarrow.int64()))"
            )
        row_bytes = sum(column.nbytes for column in some.columns) // max(some.num_rows, 1) + 1
        schema = some.schema.remove_metadata()
        return MappedColumns(schema, reads, row_bytes, function.takes_generator, function.code)


def counted_rows(rows: int) -> pa.RecordBatch:
    """Make a block that counts this many rows."""
    tokens = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.uint8))
    return pa.record_batch([tokens], COUNTED_ROWS.names)


def _found(columns: MappedColumns, rows: int) -> pa.RecordBatch:
    """Make a block whose first row lists the columns."""
    values = [columns.to_bytes(), *[None] * (rows - 1)]
    return pa.record_batch([pa.array(values, pa.large_binary())], FOUND_COLUMNS.names)
