"""The columns that user functions make: a map of a block, a collate function of a batch."""

from __future__ import annotations

from typing import Self

import msgspec
import pyarrow as pa
from msgspec import Struct

from dataplane.model import ColumnSpec

_KEY = b"dataplane.mapped"


class _Facts(Struct, frozen=True):
    reads: tuple[str, ...]
    row_bytes: int
    takes_generator: bool
    code: str


class MappedColumns(Struct, frozen=True):
    """What a map makes of the columns of a dataset, as a worker found out over the first rows.

    `reads` are the stored columns that it takes, `row_bytes` what a row of its result takes, about.
    `code` is a hash of the file that defines it: blocks of other code are not mixed with these.
    """

    schema: pa.Schema
    reads: tuple[str, ...]
    row_bytes: int
    takes_generator: bool
    code: str = ""

    def to_bytes(self) -> bytes:
        """The encoding that `from_bytes` reads."""
        facts = msgspec.json.encode(
            _Facts(self.reads, self.row_bytes, self.takes_generator, self.code)
        )
        content: bytes = self.schema.serialize().to_pybytes()
        return facts + b"\n" + content

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """The inverse of `to_bytes`."""
        line, _, schema = content.partition(b"\n")
        facts = msgspec.json.decode(line, type=_Facts)
        found = pa.ipc.read_schema(pa.py_buffer(schema))
        return cls(found, facts.reads, facts.row_bytes, facts.takes_generator, facts.code)


class CollatedColumns(Struct, frozen=True):
    """What a collate function makes of batches, as a worker found out over the first one, and the
    bytes that it takes for each sample, about. `code` is a hash of the file that defines it.
    """

    specs: tuple[ColumnSpec, ...]
    row_bytes: int
    code: str = ""


def with_mapped(schema: pa.Schema, mapped: MappedColumns | None) -> pa.Schema:
    """The schema of shards, with the columns that a map makes of them in its metadata."""
    if mapped is None:
        return schema
    return schema.with_metadata({**(schema.metadata or {}), _KEY: mapped.to_bytes()})


def mapped_in(schema: pa.Schema) -> MappedColumns | None:
    """What `with_mapped` has added; None if there is no map."""
    content = (schema.metadata or {}).get(_KEY)
    return None if content is None else MappedColumns.from_bytes(content)
