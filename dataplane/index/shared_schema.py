"""Merge the schemas of all shards into the schema of a dataset.

1. The result depends on the shards and their order, not on the order in which they are noted.
2. If no shard adds anything to the first one's schema, that schema is the result.
3. Each distinct schema is merged once, however many shards have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
from msgspec import Struct

from dataplane.formats.joint_types import (
    is_closed,
    is_inferred,
    joint_arrays,
    joint_inferred,
    joint_type,
)
from dataplane.formats.unsupported import Difference, differing, mismatch_of, with_difference

_AT_HAND = 8
"""The first schemas, up to this number, are recognised as objects, without being serialised."""


class _Seen(Struct, eq=False):
    """A distinct schema, the first shard that has it, and the first shard with samples
    that has it.
    """

    schema: pa.Schema
    shard: int
    filled: int | None


class SharedSchema:
    """Merges the schemas of shards. Shards are given by number; errors name their urls."""

    def __init__(self, url_of: Callable[[int], str]) -> None:
        self._url_of = url_of
        self._first: _Seen | None = None
        self._seen: dict[bytes, _Seen] = {}
        self._at_hand: list[_Seen] = []

    def note(self, shard: int, schema: pa.Schema, *, has_rows: bool) -> pa.Schema:
        """Note a shard's schema; returns the object that stands for all equal ones.

        Raises:  SchemaMismatch: no column can be read from this shard and from the first one.
        """
        seen = next((each for each in self._at_hand if each.schema is schema), None)
        if seen is None:
            key = schema.serialize().to_pybytes()
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = _Seen(schema, shard, None)
                if len(self._at_hand) < _AT_HAND:
                    self._at_hand.append(seen)
        seen.shard = min(seen.shard, shard)
        if has_rows and (seen.filled is None or shard < seen.filled):
            is_new, seen.filled = seen.filled is None, shard
            self._first = seen if shard == 0 else self._first
            if is_new and self._first not in (None, seen):
                self._expect_columns(_merged([self._first, seen]))
        return seen.schema

    def _expect_columns(self, schema: pa.Schema) -> None:
        """Check that at least one column of a merged schema can be read from all shards.

        Raises:  SchemaMismatch: names the first column.
        """
        marks = [differing(field) for field in schema]
        if marks and marks[0] is not None and None not in marks:
            raise mismatch_of(schema.field(0).name, marks[0], self._url_of)

    def merged(self) -> pa.Schema:
        """Return the dataset's schema. Columns whose batches would differ from shard to shard are
        marked. Shards without samples count only if no shard has any.

        Raises:  SchemaMismatch: no column can be read from all shards.
        """
        if not self._seen:
            return pa.schema([])
        every = sorted(self._seen.values(), key=lambda seen: seen.shard)
        first = every[0]
        filled = [seen for seen in every if seen.filled is not None]
        whole = _merged([first, *(seen for seen in filled if seen is not first)])
        if first.filled is None and filled and whole is not first.schema:
            whole = _merged(sorted(filled, key=_first_filled))
        if whole is not first.schema:
            self._expect_columns(whole)
        return whole


def _first_filled(seen: _Seen) -> int:
    return seen.shard if seen.filled is None else seen.filled


class _Column(Struct, eq=False):
    """A column of the schemas merged so far: its field; the type that fits all of them, and a shard
    that decided it; how many schemas in a row have it, from the first one on; and the difference,
    if any.
    """

    field: pa.Field
    type: pa.DataType
    shard: int
    run: int
    difference: Difference | None = None


def _merged(schemas: Sequence[_Seen]) -> pa.Schema:
    """Merge these schemas into one; return the first schema itself if it fits all."""
    first = schemas[0].schema
    if len(schemas) == 1:
        return first
    from dataplane.formats.tar import is_new_field

    inferred, closed = is_inferred(first), is_closed(first)
    columns: dict[str, _Column] = {}
    for at, seen in enumerate(schemas):
        for field in seen.schema:
            column = columns.get(field.name)
            if column is not None:
                column.run += column.run == at
                _merge(column, field, _first_filled(seen), inferred=inferred, closed=closed)
            elif not at or not inferred or closed or is_new_field(first, field.name):
                columns[field.name] = _Column(field, field.type, _first_filled(seen), int(not at))
    if not inferred:
        _mark_missing(columns, schemas)
    fields = [_field_of(column) for column in columns.values()]
    is_first = len(fields) == len(first) and all(
        field is column.field for field, column in zip(fields, columns.values(), strict=True)
    )
    return first if is_first else pa.schema(fields, metadata=first.metadata)


def _merge(column: _Column, other: pa.Field, shard: int, *, inferred: bool, closed: bool) -> None:
    kind = other.type
    if column.difference is not None or column.type.equals(kind):
        return
    if inferred:
        joint = joint_inferred(column.type, kind, closed=closed)
    else:
        joint = joint_type(column.type, kind) or joint_arrays(column.field, column.type, other)
    if joint is None:
        shards, types = (column.shard, shard), (str(column.type), str(kind))
        column.difference = Difference(shards, types)
    elif joint is not column.type:
        column.type, column.shard = joint, shard


def _mark_missing(columns: Mapping[str, _Column], schemas: Sequence[_Seen]) -> None:
    for column in columns.values():
        if column.difference is None and column.run < len(schemas):
            lacking, kind = _first_filled(schemas[column.run]), str(column.type)
            pairs = sorted([(column.shard, kind), (lacking, "")])
            column.difference = Difference(*zip(*pairs, strict=True))


def _field_of(column: _Column) -> pa.Field:
    field = column.field
    if column.type is not field.type and not column.type.equals(field.type):
        field = field.with_type(column.type)
    return field if column.difference is None else with_difference(field, column.difference)
