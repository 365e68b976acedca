"""The values in a condition: columns, constants, and computed values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Protocol

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.errors import ConfigError
from dataplane.formats.arrays import decoded
from dataplane.transforms.canonical import leaf_array
from dataplane.transforms.plain import is_any_list
from dataplane.transforms.where import Scalar

_INT64_END = 1 << 63


class OperandKind(enum.StrEnum):
    """The kind of a value, which decides what may be done with it."""

    INTEGER = "whole numbers"
    FLOAT = "numbers"
    TEXT = "texts"
    BYTES = "bytes"
    BOOL = "true or false"
    TIME = "dates and timestamps"
    LIST = "lists"
    OTHER = "values that cannot be compared"


NUMBERS = frozenset((OperandKind.INTEGER, OperandKind.FLOAT))


class Operand(Protocol):
    """A value of each row of a block, null if a column that it needs is null. `kind` says which
    operations it allows, `columns` are the columns that it needs.
    """

    @property
    def kind(self) -> OperandKind: ...

    @property
    def columns(self) -> frozenset[str]: ...

    def values(self, batch: pa.RecordBatch, /) -> pa.Array | pa.Scalar:
        """Return the values, in one of the plain types of their kind."""


class FieldValue(Struct, frozen=True):
    """A column, or a field below one: `path` are indices into the structs on the way down."""

    name: str
    top: str
    path: tuple[int, ...]
    type: pa.DataType
    kind: OperandKind

    @property
    def columns(self) -> frozenset[str]:
        return frozenset((self.name,))

    def stored(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the field as it is stored in the block."""
        return leaf_array(batch.column(self.top), self.path)

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `Operand.values`."""
        array = decoded(self.stored(batch))
        plain = _plain_type(array.type)
        return array if plain is None else array.cast(plain)


class ConstantValue(Struct, frozen=True):
    """A number, a text, or true or false."""

    value: Scalar
    kind: OperandKind
    columns: frozenset[str] = frozenset()

    def values(self, _: pa.RecordBatch) -> pa.Scalar:
        """Implement `Operand.values`."""
        value = self.value
        if isinstance(value, int) and not -_INT64_END <= value < _INT64_END:
            return pa.scalar(Decimal(value))
        return pa.scalar(value)


class ComputedValue(Struct, frozen=True):
    """Two numbers and one of + - * / %. Whole numbers give whole numbers, except for /."""

    operator: str
    left: Operand
    right: Operand
    text: str

    @property
    def kind(self) -> OperandKind:
        kinds = {self.left.kind, self.right.kind}
        is_whole = kinds == {OperandKind.INTEGER} and self.operator != "/"
        return OperandKind.INTEGER if is_whole else OperandKind.FLOAT

    @property
    def columns(self) -> frozenset[str]:
        return self.left.columns | self.right.columns

    def values(self, batch: pa.RecordBatch) -> pa.Array | pa.Scalar:
        """Implement `Operand.values`.

        Raises:  ConfigError: a result exceeds 64 bits.
        """
        import pyarrow.compute as pc

        target = pa.int64() if self.kind is OperandKind.INTEGER else pa.float64()
        try:
            left, right = (
                pc.cast(each.values(batch), target, safe=target == pa.int64())
                for each in (self.left, self.right)
            )
            if self.operator == "%":
                return _remainder(left, right, batch.num_rows)
            return getattr(pc, _KERNELS[self.operator, target == pa.int64()])(left, right)
        except pa.ArrowInvalid as fault:
            raise ConfigError(
                f"where: {self.text} has no room in 64 bits ({fault}): write a number of it as a "
                "fraction, such as 2.0, to compute with floats",
                field="where",
            ) from fault


class LengthValue(Struct, frozen=True):
    """The length of a column's text, bytes or list."""

    of: FieldValue
    kind: OperandKind = OperandKind.INTEGER

    @property
    def columns(self) -> frozenset[str]:
        return self.of.columns

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `Operand.values`."""
        import pyarrow.compute as pc

        array = self.of.values(batch)
        if self.of.kind is OperandKind.TEXT:
            return pc.utf8_length(array)
        if self.of.kind is OperandKind.BYTES:
            return pc.binary_length(array)
        return pc.list_value_length(array)


def kind_of(stored: pa.DataType) -> OperandKind:
    """The kind of a column's values."""
    kind = unwrapped(stored)
    for found, tests in _KINDS:
        if any(test(kind) for test in tests):
            return found
    return OperandKind.OTHER


def unwrapped(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values within a dictionary, run ends or an extension."""
    while isinstance(kind, pa.BaseExtensionType) or _is_wrapped(kind):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return kind


def _is_wrapped(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind))


def _is_list(kind: pa.DataType) -> bool:
    return is_any_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


_KINDS: Sequence[tuple[OperandKind, Sequence[Callable[[pa.DataType], bool]]]] = (
    (OperandKind.BOOL, (pa.types.is_boolean,)),
    (OperandKind.INTEGER, (pa.types.is_integer,)),
    (OperandKind.FLOAT, (pa.types.is_floating, pa.types.is_decimal)),
    (OperandKind.TEXT, (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)),
    (
        OperandKind.BYTES,
        (
            *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
            pa.types.is_fixed_size_binary,
        ),
    ),
    (OperandKind.TIME, (_is_time,)),
    (OperandKind.LIST, (_is_list,)),
)
_KERNELS = {
    ("+", True): "add_checked",
    ("-", True): "subtract_checked",
    ("*", True): "multiply_checked",
    ("+", False): "add",
    ("-", False): "subtract",
    ("*", False): "multiply",
    ("/", False): "divide",
}


def _plain_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type in which to compare values of this type, if kernels do not support it."""
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.large_binary()
    return None


def _remainder(left: pa.Array | pa.Scalar, right: pa.Array | pa.Scalar, rows: int) -> pa.Array:
    """Return the remainder with the sign of the divisor, as in Python; null where the
    divisor is 0.
    """
    both = [one if isinstance(one, pa.Array) else pa.repeat(one, rows) for one in (left, right)]
    values = [one.fill_null(0).to_numpy() for one in both]
    is_null = np.logical_or.reduce([
        one.is_null().to_numpy(zero_copy_only=False) for one in both
    ])  # fmt: skip
    is_null |= values[1] == 0
    with np.errstate(all="ignore"):
        found = np.mod(values[0], np.where(is_null, 1, values[1]))
    return pa.array(found, mask=is_null)
