"""Compare a shard's columns with the dataset's schema, and refuse differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from dataplane.base.units import some_of
from dataplane.formats.arrays import first_refused, read_as, record_batch, widened
from dataplane.formats.base import RawBlock
from dataplane.formats.faults import FOREIGN, corrupt, foreign_faults
from dataplane.formats.joint_types import is_readable_as, same_type
from dataplane.formats.nulls import is_flat
from dataplane.formats.unsupported import is_missing
from dataplane.model.errors import ConfigError, SchemaMismatch

_NAMES_SHOWN = 100
_LIST_TYPES = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def dataset_schema(schema: pa.Schema, url: str) -> pa.Schema:
    """Return a shard's schema in the form in which schemas are compared: every field nullable.

    Raises:  ConfigError: two columns have the same name.  CorruptShard: a name is not UTF-8.
    """
    # Access the names here: pyarrow raises for a name that is not UTF-8 only when it is accessed.
    with foreign_faults(url, 0, "the schema of the shard is damaged"):
        names = schema.names
        if len(set(names)) < len(names):
            name = next(name for name, count in Counter(names).items() if count > 1)
            raise ConfigError(
                f"{url}: not supported: two columns are named {name!r}; rename one",
                shard=url,
                field=name,
            )
        if is_flat(schema) and False not in [field.nullable for field in schema]:
            return schema
        return pa.schema([_nullable(field) for field in schema], metadata=schema.metadata)


def _nullable(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _relaxed(field.type), nullable=True, metadata=field.metadata)


def _relaxed(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_nullable(field) for field in kind.fields])
    if pa.types.is_list(kind):
        return pa.list_(_nullable(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_nullable(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_nullable(kind.value_field), kind.list_size)
    return kind


def mismatch(url: str, field: str, expected: str, stored: str, advice: str = "") -> SchemaMismatch:
    """Return the error for a shard whose column differs from the dataset's."""
    advice = advice or "rewrite the shard, or leave it out of the dataset"
    return SchemaMismatch(
        f"{url}: column {field!r}: the dataset has {expected}, this shard has {stored}; {advice}",
        shard=url,
        field=field,
        expected=expected,
        found=stored,
    )


def check_columns(schema: pa.Schema, columns: Sequence[str]) -> None:
    """Refuse columns that the dataset does not have.

    Raises:  ConfigError.
    """
    every = schema.names  # pyarrow builds a new list at each access
    known = frozenset(every)
    for name in columns:
        if name not in known:
            have = some_of(every, _NAMES_SHOWN)
            raise ConfigError(f"the dataset has no column {name!r}; it has {have}", field=name)


def check_shard(
    stored: pa.Schema, schema: pa.Schema, columns: Sequence[str], url: str
) -> list[str]:
    """Refuse a shard that has one of `columns` with another type, or lacks it unless the dataset's
    schema says that some shards do. Return the columns that the shard has.

    Raises:  SchemaMismatch: shard, field, expected, found.  ConfigError: no such column.
    """
    check_columns(schema, columns)
    present = []
    for name in columns:
        field = schema.field(name)
        at = stored.get_field_index(name)
        if at < 0:
            if not is_missing(field):
                raise mismatch(url, name, str(field.type), "no such column")
            continue
        if not is_readable_as(stored.field(at).type, field.type):
            raise mismatch(url, name, str(field.type), str(stored.field(at).type))
        present.append(name)
    return present


def is_as_stored(stored: pa.Schema, schema: pa.Schema, columns: Sequence[str]) -> bool:
    """Return whether all columns of a shard are wanted, in stored order and with stored types. If
    so, the caller skips the check of each column, which takes seconds for 100,000 columns.
    """
    return (
        0 < len(columns) == len(schema) and stored.equals(schema) and list(columns) == schema.names
    )


def batch_of(
    arrays: Mapping[str, pa.Array], schema: pa.Schema, columns: Sequence[str], block: RawBlock
) -> pa.RecordBatch:
    """Combine arrays into one batch with exactly `columns`, in the dataset's types; with wide
    offsets where narrow ones cannot hold a block. Columns without an array are null.

    Raises:  SchemaMismatch: a value does not fit into the dataset's type.
    """
    wanted = [schema.field(name) for name in columns]
    if not wanted:
        # RecordBatch.from_arrays would lose the number of rows if there are no columns.
        return pa.RecordBatch.from_struct_array(pa.array([{}] * block.rows, type=pa.struct([])))
    typed = [
        _typed(arrays[field.name], field, block)
        if field.name in arrays
        else pa.nulls(block.rows, field.type)
        for field in wanted
    ]
    return record_batch(typed, pa.schema(wanted))


def _typed(array: pa.Array, field: pa.Field, block: RawBlock) -> pa.Array:
    kind = field.type
    try:
        return read_as(array, kind)
    except pa.ArrowInvalid as fault:
        if same_type(widened(kind), array.type):
            return array
        if same_type(kind, array.type):
            raise
        row = first_refused(array, lambda some: read_as(some, kind))
        raise SchemaMismatch(
            f"{block.url}: row {row} of block {block.index}: column {field.name!r} is "
            f"{array.type} here and {kind} in the dataset, whose shards differ, and this type "
            f"cannot hold {array[row]!s:.100} ({str(fault).partition(chr(10))[0]:.200}); write the "
            "shards again with one type, or leave the column out with columns=[…]",
            shard=block.url,
            field=field.name,
            expected=str(kind),
            found=str(array.type),
        ) from fault


def check_rows(url: str, offset: int, expected: int, count: int) -> None:
    """Refuse a block whose number of samples differs from the manifest's.

    Raises:  CorruptShard.
    """
    if expected != count:
        raise corrupt(
            url, offset, "the number of samples in the block", expected=expected, found=count
        )


def validated(batch: pa.RecordBatch, url: str, offset: int) -> pa.RecordBatch:
    """Check a batch's buffers in full (offsets in bounds, text in UTF-8), and return the batch.

    Raises:  CorruptShard: names the column.
    """
    try:
        batch.validate(full=True)
    except FOREIGN:
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            with foreign_faults(url, offset, f"column {name!r} decodes to invalid values"):
                check_values(array)
    return batch


def check_values(array: pa.Array) -> None:
    """Check an array in full, except the values of times and decimals. Arrow refuses a date64 that
    is not a whole day, a time of day beyond midnight, and a decimal with more digits than its type.
    Writers produce these and pyarrow reads them, so they are delivered as stored.

    Raises:  Arrow's errors: offsets out of bounds, text that is not UTF-8.
    """
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        array.validate()
        kind = _without_limits(array.type)
        if kind.equals(array.type):
            raise
        array.view(kind).validate(full=True)


def _without_limits(kind: pa.DataType) -> pa.DataType:
    """Return a type with the same buffers, but in which every time and every decimal is valid."""
    if isinstance(kind, pa.BaseExtensionType):
        return _without_limits(kind.storage_type)
    if pa.types.is_decimal(kind):
        return pa.binary(kind.byte_width)
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_limits(kind.value_type), kind.ordered)
    if pa.types.is_map(kind):
        return pa.map_(_without_limits(kind.key_type), _without_limits(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_limits(field.type)) for field in kind.fields])
    for is_kind, make in _LIST_TYPES:
        if is_kind(kind):
            return make(_without_limits(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_without_limits(kind.value_type), kind.list_size)
    return kind
