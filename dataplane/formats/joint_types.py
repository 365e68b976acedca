"""Choose a type in which a column can be read from all shards of a dataset, if the shards differ.

Text of any offset width or encoding is text, and a time is the same in every time zone. Numbers,
times and decimals of different sizes, units and scales have a joint type if one type holds the
values of both: no value changes. Two joint types do not hold every value: double, for integers of
64 bits beside floats, and a finer unit of time, whose range is smaller. Decoding checks each of
these values, and refuses those that do not fit. Types of different kinds have no joint type.

Formats without a stored schema infer one from a shard's first samples, and mark it as inferred. Two
inferred schemas may differ only because one sample lacked some values, so a dataset keeps the first
schema unless another one contradicts it. Decoding checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from dataplane.formats.arrays import ANY_LISTS, BYTES, TEXTS, widened

INFERRED_MARK = b"dataplane.inferred"
_ARRAYS_MARK = b"dataplane.arrays"

_NUMBERS = (
    *(pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()),
    *(pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
)
_MANTISSA_BITS = {16: 11, 32: 24, 64: 53}


def _range(kind: pa.DataType) -> tuple[float, float, bool]:
    """Return the range in which a type holds all integers, and whether the type has fractions."""
    bits = int(kind.bit_width)
    if pa.types.is_floating(kind):
        end = 1 << _MANTISSA_BITS[bits]
        return -end, end, True
    is_signed = bool(pa.types.is_signed_integer(kind))
    end = 1 << bits - is_signed
    return -end if is_signed else 0, end - 1, False


_RANGES = {kind.id: _range(kind) for kind in _NUMBERS}
_UNITS = ("s", "ms", "us", "ns")
_DIGITS_MAX, _DIGITS_128 = 76, 38


def inferred_schema(columns: Mapping[str, pa.DataType], *, closed: bool = False) -> pa.Schema:
    """Make a schema of nullable columns, marked as inferred. `closed` means that decoding refuses a
    column that the schema lacks.
    """
    return pa.schema(
        list(columns.items()), metadata={INFERRED_MARK: b"closed" if closed else b"open"}
    )


def is_inferred(schema: pa.Schema) -> bool:
    """Return whether a schema was inferred."""
    return INFERRED_MARK in (schema.metadata or {})


def is_closed(schema: pa.Schema) -> bool:
    """Return whether decoding with this inferred schema refuses columns that it lacks."""
    return bool((schema.metadata or {}).get(INFERRED_MARK) == b"closed")


def marked_arrays(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Mark columns of arrays that state their own shapes, so that shards may have several."""
    for at, field in enumerate(schema):
        if field.name in names:
            known = {**(field.metadata or {}), _ARRAYS_MARK: b""}
            schema = schema.set(at, field.with_metadata(known))
    return schema


def joint_arrays(field: pa.Field, kind: pa.DataType, other: pa.Field) -> pa.DataType | None:
    """Return the type of a dataset's column of arrays, which is of `kind` so far, with a shard
    whose arrays have another shape: nested lists. None if a field has no such arrays.
    """
    if any(_ARRAYS_MARK not in (known.metadata or {}) for known in (field, other)):
        return None
    unsized, joined = _unsized(kind), _unsized(other.type)
    return joint_type(kind if unsized.equals(kind) else unsized, joined)


def _unsized(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_unsized(kind.value_type))
    return kind


def contradicts(expected: pa.DataType, kind: pa.DataType, *, closed: bool) -> bool:
    """Return whether values of an inferred type cannot be read as `expected`. `closed` means that a
    single value does not count as a list.
    """
    if expected.equals(kind) or pa.types.is_null(kind):
        return False
    if pa.types.is_list(expected):
        if closed and not pa.types.is_list(kind):
            return True
        inner = kind.value_type if pa.types.is_list(kind) else kind
        return contradicts(expected.value_type, inner, closed=closed)
    if pa.types.is_struct(expected) and pa.types.is_struct(kind):
        fields = {field.name: field.type for field in expected.fields}
        return any(
            field.name not in fields or contradicts(fields[field.name], field.type, closed=closed)
            for field in kind.fields
        )
    if pa.types.is_uint64(expected):
        return not pa.types.is_int64(kind)
    return not (pa.types.is_float64(expected) and pa.types.is_integer(kind))


_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def same_type(expected: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether types are equal, except for nullability, metadata and names of list children.
    An extension of an expected plain type is accepted: some writers mark text as JSON, or 16 bytes
    as a UUID, and pyarrow shows the mark for a whole Parquet file but not for a footer alone.
    """
    if expected.equals(kind):
        return True
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(expected, pa.BaseExtensionType):
        return same_type(expected, kind.storage_type)
    if pa.types.is_struct(expected) and pa.types.is_struct(kind):
        return [f.name for f in expected.fields] == [f.name for f in kind.fields] and all(
            same_type(a.type, b.type) for a, b in zip(expected.fields, kind.fields, strict=True)
        )
    if pa.types.is_map(expected) and pa.types.is_map(kind):
        return same_type(expected.key_type, kind.key_type) and same_type(
            expected.item_type, kind.item_type
        )
    for is_kind in _LISTS:
        if is_kind(expected) and is_kind(kind):
            sizes_equal = getattr(expected, "list_size", 0) == getattr(kind, "list_size", 0)
            return sizes_equal and same_type(expected.value_type, kind.value_type)
    return False


def is_readable_as(kind: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether values of a shard can be read as the dataset's type."""
    joint = joint_type(expected, kind)
    return joint is not None and same_type(expected, joint)


def joint_type(kind: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type in which columns of both stored types can be read, preferably the first type;
    None if there is no such type.
    """
    if same_type(kind, other) or pa.types.is_null(other):
        return kind
    if pa.types.is_null(kind):
        return other
    if (first := _unwrapped(kind)) is not kind or _unwrapped(other) is not other:
        return joint_type(first, _unwrapped(other))
    for family, largest in ((TEXTS, pa.large_string()), (BYTES, pa.large_binary())):
        if kind.id in family and other.id in family:
            return largest
    if pa.types.is_decimal(kind) and pa.types.is_decimal(other):
        return _joint_decimal(kind, other)
    return _joint_number(kind, other) or _joint_time(kind, other) or _joint_nested(kind, other)


def _joint_number(kind: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the smallest type that holds all numbers of both types. For integers of 64 bits beside
    floats this is double, which holds only integers up to 2**53.
    """
    if not (kind.id in _RANGES and other.id in _RANGES):
        return None
    lows, highs, floats = zip(_RANGES[kind.id], _RANGES[other.id], strict=True)
    for joint in _NUMBERS:
        low, high, is_float = _RANGES[joint.id]
        holds = low <= min(lows) and high >= max(highs)
        if is_float == any(floats) and (holds or joint == pa.float64()):
            return joint
    return None


def _joint_time(kind: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type with the finer unit; a time zone is kept only if both types have it."""
    if pa.types.is_date(kind) and pa.types.is_date(other):
        return pa.date64()
    for is_kind in (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time):
        if is_kind(kind) and is_kind(other):
            unit = max(kind.unit, other.unit, key=_UNITS.index)
            if is_kind is pa.types.is_duration:
                return pa.duration(unit)
            if is_kind is pa.types.is_time:
                return pa.time32(unit) if unit in _UNITS[:2] else pa.time64(unit)
            if bool(kind.tz) == bool(other.tz):
                return pa.timestamp(unit, kind.tz if kind.tz == other.tz else "UTC")
    return None


def _joint_nested(kind: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if kind.id in ANY_LISTS and other.id in ANY_LISTS:
        value = joint_type(kind.value_type, other.value_type)
        return None if value is None else pa.large_list(value)
    if pa.types.is_fixed_size_list(kind) and pa.types.is_fixed_size_list(other):
        value = joint_type(kind.value_type, other.value_type)
        is_alike = value is not None and kind.list_size == other.list_size
        return pa.list_(value, kind.list_size) if is_alike else None
    if pa.types.is_map(kind) and pa.types.is_map(other):
        key = joint_type(kind.key_type, other.key_type)
        value = joint_type(kind.item_type, other.item_type)
        return None if key is None or value is None else pa.map_(key, value)
    if pa.types.is_struct(kind) and pa.types.is_struct(other):
        return _joint_struct(kind, other)
    return None


def _joint_struct(kind: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    theirs = {field.name: field.type for field in other.fields}
    names = [field.name for field in kind.fields]
    if len(set(names)) < len(names) or sorted(names) != sorted(f.name for f in other.fields):
        return None
    fields = []
    for field in kind.fields:
        joint = joint_type(field.type, theirs[field.name])
        if joint is None:
            return None
        fields.append(pa.field(field.name, joint))
    return pa.struct(fields)


def _joint_decimal(kind: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    scale = max(kind.scale, other.scale)
    digits = scale + max(kind.precision - kind.scale, other.precision - other.scale)
    if digits > _DIGITS_MAX:
        return None
    wide = kind if kind.precision >= other.precision else other
    is_wide = wide.bit_width > 128 or digits > _DIGITS_128
    return (pa.decimal256 if is_wide else pa.decimal128)(digits, scale)


def joint_inferred(kind: pa.DataType, other: pa.DataType, *, closed: bool) -> pa.DataType | None:
    """Return the joint type of two types inferred from samples; see `joint_type`. `closed` means
    that the decoder does not make a list of a single value.
    """
    if not contradicts(kind, other, closed=closed):
        return kind
    if pa.types.is_null(kind):
        return other
    if _is_number(kind) and _is_number(other):
        numbers = (pa.float64(), pa.uint64(), pa.int64())
        return next((candidate for candidate in numbers if candidate in {kind, other}), None)
    if pa.types.is_struct(kind) and pa.types.is_struct(other):
        return _inferred_struct(kind, other, closed=closed)
    if not closed or (pa.types.is_list(kind) and pa.types.is_list(other)):
        elements = [
            candidate.value_type if pa.types.is_list(candidate) else candidate
            for candidate in (kind, other)
        ]
        if elements == [kind, other]:
            return None
        element = joint_inferred(*elements, closed=closed)
        return None if element is None else pa.list_(element)
    return None


def _inferred_struct(kind: pa.DataType, other: pa.DataType, *, closed: bool) -> pa.DataType | None:
    fields = {field.name: field.type for field in kind.fields}
    for field in other.fields:
        known = fields.get(field.name, pa.null())
        joint = joint_inferred(known, field.type, closed=closed)
        if joint is None:
            return None
        fields[field.name] = joint
    return pa.struct(list(fields.items()))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_float64(kind))


def _unwrapped(kind: pa.DataType) -> pa.DataType:
    """Remove extensions, dictionaries and run-end encodings from a type. A fixed-shape tensor type
    is kept, since its shape matters.
    """
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind
    if isinstance(kind, pa.BaseExtensionType):
        return _unwrapped(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return widened(_unwrapped(kind.value_type))
    return kind
