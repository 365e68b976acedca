"""Columns made by user functions: a map of a block, or a collate function of a batch."""

from __future__ import annotations

from typing import Self

import msgspec
import pyarrow as pa
from msgspec import Struct

from dataplane.model.records import ColumnSpec
from dataplane.model.typed import complete

_KEY = b"dataplane.mapped"


class _Facts(Struct, frozen=True):
    reads: tuple[str, ...]
    row_bytes: int
    takes_generator: bool
    code: str


class MappedColumns(Struct, frozen=True):
    """The columns that a map makes of a dataset, determined by a worker from the first rows.

    `reads` are the stored columns that the map takes; `row_bytes` is the approximate size of one of
    the resulting rows. `code` is a hash of the file that defines the map: blocks made by different
    code are not mixed.
    """

    schema: pa.Schema
    reads: tuple[str, ...]
    row_bytes: int
    takes_generator: bool
    code: str = ""

    def to_bytes(self) -> bytes:
        """Encode for `from_bytes`."""
        facts = msgspec.json.encode(
            _Facts(self.reads, self.row_bytes, self.takes_generator, self.code)
        )
        content: bytes = self.schema.serialize().to_pybytes()
        return facts + b"\n" + content

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Invert `to_bytes`."""
        line, _, schema = content.partition(b"\n")
        facts = msgspec.json.decode(line, type=complete(_Facts))
        found = pa.ipc.read_schema(pa.py_buffer(schema))
        return cls(found, facts.reads, facts.row_bytes, facts.takes_generator, facts.code)


class CollatedColumns(Struct, frozen=True):
    """The columns that a collate function makes of batches, and their approximate size per sample,
    determined by a worker from the first batch. `code` is a hash of the file that defines the
    function.
    """

    specs: tuple[ColumnSpec, ...]
    row_bytes: int
    code: str = ""


def with_mapped(schema: pa.Schema, mapped: MappedColumns | None) -> pa.Schema:
    """Return the schema of shards with the columns of a map in its metadata."""
    if mapped is None:
        return schema
    return schema.with_metadata({**(schema.metadata or {}), _KEY: mapped.to_bytes()})


def mapped_in(schema: pa.Schema) -> MappedColumns | None:
    """Return the columns that `with_mapped` has added; None if there is no map."""
    content = (schema.metadata or {}).get(_KEY)
    return None if content is None else MappedColumns.from_bytes(content)
