"""Build the tests of a condition from its syntax tree, and check them against the columns'
types.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Self, TypeGuard

import pyarrow as pa
from msgspec import Struct

from dataplane.errors import ConfigError
from dataplane.transforms.columns import shown
from dataplane.transforms.condition import (
    FieldTest,
    FlagTest,
    Inverse,
    Joined,
    LikeTest,
    MemberTest,
    NullOf,
    RelationTest,
    RowTest,
)
from dataplane.transforms.operands import (
    NUMBERS,
    ComputedValue,
    ConstantValue,
    FieldValue,
    LengthValue,
    Operand,
    OperandKind,
    kind_of,
    unwrapped,
)
from dataplane.transforms.where import (
    Arithmetic,
    Compared,
    Constant,
    Junction,
    Length,
    Matching,
    Membership,
    Name,
    Negation,
    Node,
    NullTest,
    Relation,
    Scalar,
    canonical_text,
)
from dataplane.transforms.where_parser import parse

_UNCOMPARED = frozenset((OperandKind.LIST, OperandKind.OTHER))
_EQUALITY = frozenset((Relation.EQ, Relation.NE))
_MIRRORED = {
    Relation.LT: Relation.GT,
    Relation.GT: Relation.LT,
    Relation.LE: Relation.GE,
    Relation.GE: Relation.LE,
}


# Compare columns of whole numbers and decimals with constants exactly.
#
# Column values are whole multiples of a unit: 1, or 10**-scale. A constant between two multiples
# equals no value, and is otherwise compared like the multiple below or above it.


class NumberGrid(Struct, frozen=True):
    """The values that a type can hold: whole numbers of units, from `lowest` to `highest`."""

    type: pa.DataType
    scale: int
    lowest: int
    highest: int

    @classmethod
    def of(cls, kind: pa.DataType) -> Self | None:
        """Return the grid of a column of this type; None for floats, and for types other than
        numbers.
        """
        kind = unwrapped(kind)
        if pa.types.is_decimal(kind):
            highest = 10**kind.precision - 1
            return cls(kind, kind.scale, -highest, highest)
        if not pa.types.is_integer(kind):
            return None
        is_signed = bool(pa.types.is_signed_integer(kind))
        end = 1 << int(kind.bit_width) - is_signed
        return cls(kind, 0, -end if is_signed else 0, end - 1)

    def test(self, relation: Relation, field: FieldValue, value: float | Decimal) -> FieldTest:
        """Build the test that compares a column of this type with a number."""
        units = self._units(value)
        if units != math.floor(units):
            if relation in {Relation.EQ, Relation.NE}:
                return FieldTest(field, relation, None, always=relation is Relation.NE)
            is_low = relation in {Relation.GT, Relation.LE}
            units = Fraction(math.floor(units) if is_low else math.ceil(units))
        whole = int(units)
        if self.lowest <= whole <= self.highest:
            return FieldTest(field, relation, pa.scalar(self._value(whole), self.type))
        is_less = {Relation.LT, Relation.LE} if whole > 0 else {Relation.GT, Relation.GE}
        return FieldTest(field, relation, None, always=relation in {Relation.NE, *is_less})

    def members(self, values: Iterable[float | Decimal]) -> pa.Array:
        """Select the numbers that are values of the type."""
        units = map(self._units, values)
        whole = [int(one) for one in units if one == math.floor(one)]
        inside = [one for one in whole if self.lowest <= one <= self.highest]
        return pa.array(map(self._value, inside), self.type)

    def _units(self, value: float | Decimal) -> Fraction:
        """Return the value in units. With decimals, numbers are compared as they are written: 0.1
        is a tenth.
        """
        is_written = isinstance(value, float) and not pa.types.is_integer(self.type)
        return Fraction(repr(value) if is_written else value) * Fraction(10) ** self.scale

    def _value(self, units: int) -> int | Decimal:
        if pa.types.is_integer(self.type):
            return units
        sign, digits, _ = Decimal(units).as_tuple()
        return Decimal((sign, digits, -self.scale))


class Condition(Struct, frozen=True):
    """A condition on the rows of a dataset. `columns` are the top-level columns that it reads,
    `fields` the names of columns, and of fields below them.
    """

    test: RowTest
    columns: tuple[str, ...]
    fields: tuple[str, ...]

    @classmethod
    def of(cls, where: str, schema: pa.Schema) -> Self:
        """Parse a condition on rows with this schema.

        Raises:  ConfigError: the text is not a condition, names a column that does not exist, or
        applies an operation that a column's type does not allow; names the column.
        """
        typed = _Typed(schema)
        test = typed.test(parse(where))
        columns = dict.fromkeys(field.top for field in typed.fields.values())
        if not columns:
            raise ConfigError(f"where={where!r:.200}: it names no column", field="where")
        return cls(test, tuple(columns), tuple(typed.fields))


class _Typed:
    """Resolves columns and checks types."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self.fields: dict[str, FieldValue] = {}

    def test(self, node: Node) -> RowTest:
        """Build the test of a condition."""
        match node:
            case Junction(operator, parts):
                return Joined(operator, [self.test(part) for part in parts])
            case Negation(of):
                return Inverse(self.test(of))
            case NullTest(of):
                return NullOf(self._field(of, "is null"))
            case Matching(of, pattern):
                field = self._field(of, "like")
                if field.kind is not OperandKind.TEXT:
                    raise _mistaken(of, field, "'like' is for texts")
                return LikeTest(field, pattern)
            case Membership(of, values):
                return self._membership(of, values)
            case Compared(relation, left, right):
                return self._comparison(relation, left, right)
        value = self._operand(node)
        if value.kind is not OperandKind.BOOL:
            raise _mistaken(node, value, "a condition must be true or false: compare it")
        return FlagTest(value)

    def _comparison(self, relation: Relation, left: Node, right: Node) -> RowTest:
        mine, other = self._operand(left), self._operand(right)
        if isinstance(mine, ConstantValue) and isinstance(other, FieldValue):
            left, right, mine, other = right, left, other, mine
            relation = _MIRRORED.get(relation, relation)
        if mine.kind in _UNCOMPARED or other.kind in _UNCOMPARED:
            node, value = (left, mine) if mine.kind in _UNCOMPARED else (right, other)
            raise _mistaken(node, value, "it can be tested with 'is null' and, a list, length()")
        if isinstance(mine, FieldValue) and isinstance(other, ConstantValue):
            return self._field_test(relation, left, mine, other.value)
        if mine.kind is not other.kind and not {mine.kind, other.kind} <= NUMBERS:
            raise _mistaken(left, mine, f"it is compared with {_told(right, other)}")
        if mine.kind is OperandKind.TIME and not _same_times(mine, other):
            raise _mistaken(left, mine, f"it is compared with {_told(right, other)}")
        return RelationTest(relation, mine, other)

    def _field_test(
        self, relation: Relation, node: Node, field: FieldValue, value: Scalar
    ) -> RowTest:
        grid = NumberGrid.of(field.type)
        if grid is not None and _is_number(value):
            return grid.test(relation, field, value)
        if field.kind is OperandKind.FLOAT and _is_number(value) and not _is_float(value):
            return RelationTest(relation, field, ConstantValue(value, OperandKind.INTEGER))
        found = _as_stored(node, field, value)
        return FieldTest(field, relation, found)

    def _membership(self, node: Node, values: Sequence[Scalar]) -> RowTest:
        of = self._operand(node)
        if of.kind in _UNCOMPARED:
            raise _mistaken(node, of, "'in' does not apply to it")
        grid = NumberGrid.of(of.type if isinstance(of, FieldValue) else pa.int64())
        if of.kind is OperandKind.FLOAT and (grid is None or not isinstance(of, FieldValue)):
            if wrong := [value for value in values if not _is_number(value)]:
                raise _mistaken(node, of, f"it is compared with {wrong[0]!r}")
            return MemberTest(of, pa.array(map(float, filter(_is_float, values)), pa.float64()))
        if isinstance(of, FieldValue) and grid is None:
            found = [_as_stored(node, of, value) for value in values]
            return MemberTest(of, pa.array([one.as_py() for one in found], found[0].type)
                              if of.kind is not OperandKind.TIME else _times(found))  # fmt: skip
        if grid is None or not all(map(_is_number, values)) or of.kind not in NUMBERS:
            raise _mistaken(node, of, f"it is compared with {values[0]!r}")
        return MemberTest(of, grid.members(filter(_is_number, values)))

    def _operand(self, node: Node) -> Operand:
        match node:
            case Name():
                return self._named(node)
            case Constant(value):
                plain = float(value) if isinstance(value, Decimal) else value
                return ConstantValue(plain, _constant_kind(value))
            case Length(of):
                field = self._field(of, "length()")
                if field.kind not in {OperandKind.TEXT, OperandKind.BYTES, OperandKind.LIST}:
                    raise _mistaken(of, field, "length() is for texts, bytes and lists")
                return LengthValue(field)
            case Arithmetic(operator, left, right):
                both = self._operand(left), self._operand(right)
                for each, one in zip((left, right), both, strict=True):
                    if one.kind not in NUMBERS:
                        raise _mistaken(each, one, f"{operator!r} is for numbers")
                return ComputedValue(operator, *both, canonical_text(node))
        raise ConfigError(
            f"where: {canonical_text(node)!r} is true or false, and is used as a value: join "
            "conditions with 'and' and 'or'",
            field="where",
        )

    def _field(self, node: Node, used: str) -> FieldValue:
        if not isinstance(node, Name):
            raise ConfigError(
                f"where: {used!r} is for columns, and {canonical_text(node)!r} is none",
                field="where",
            )
        return self._named(node)

    def _named(self, name: Name) -> FieldValue:
        for split in range(len(name.parts), 0, -1):
            at = self._schema.get_field_index(".".join(name.parts[:split]))
            if at < 0:
                continue
            top = self._schema.field(at)
            for path, kind in _below(top.type, name.parts[split:]):
                known = ".".join(name.parts)
                return self.fields.setdefault(
                    known, FieldValue(known, top.name, path, kind, kind_of(kind))
                )
        raise self._unknown(name)

    def _unknown(self, name: Name) -> ConfigError:
        every = list(_names(self._schema))
        asked = ".".join(name.parts)
        near = difflib.get_close_matches(asked, every, 3)
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
        return ConfigError(
            f"where: there is no column {asked!r}{meant} The dataset has: {shown(every)}. A text "
            "stands in quotes, as in lang == 'en'",
            field=asked,
        )


def _below(
    kind: pa.DataType, parts: Sequence[str]
) -> Iterator[tuple[tuple[int, ...], pa.DataType]]:
    """Yield the path and type of the field at these names below a column, if it exists."""
    kind_in = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if not parts:
        yield (), kind
        return
    if not pa.types.is_struct(kind_in):
        return
    for split in range(len(parts), 0, -1):
        at = kind_in.get_field_index(".".join(parts[:split]))
        if at >= 0:
            for path, found in _below(kind_in.field(at).type, parts[split:]):
                yield (at, *path), found
                return


def _names(schema: pa.Schema) -> Iterator[str]:
    for field in schema:
        yield from _names_below(field.name, field.type)


def _names_below(name: str, kind: pa.DataType) -> Iterator[str]:
    yield name
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if pa.types.is_struct(kind):
        for field in kind.fields:
            yield from _names_below(f"{name}.{field.name}", field.type)


def _is_number(value: Scalar) -> TypeGuard[float | Decimal]:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _is_float(value: Scalar) -> bool:
    """Whether a number equals a float. A number with a fraction means the nearest float."""
    return not isinstance(value, int) or value == float(value)


def _constant_kind(value: Scalar) -> OperandKind:
    if isinstance(value, bool):
        return OperandKind.BOOL
    if isinstance(value, str):
        return OperandKind.TEXT
    return OperandKind.INTEGER if isinstance(value, int) else OperandKind.FLOAT


def _as_stored(node: Node, field: FieldValue, value: Scalar) -> pa.Scalar:
    """Convert a constant to the type in which the column's values are compared."""
    match field.kind, value:
        case OperandKind.FLOAT, (int() | float() | Decimal()) if _is_number(value):
            return pa.scalar(float(value))
        case OperandKind.TEXT, str():
            return pa.scalar(value, pa.large_string())
        case OperandKind.BYTES, str():
            return pa.scalar(value.encode(), pa.large_binary())
        case OperandKind.BOOL, bool():
            return pa.scalar(value)
        case OperandKind.TIME, str():
            return _time(node, field, value)
    text = canonical_text(Constant(value))
    advice = {
        OperandKind.TEXT: f"write it in quotes: '{value}'",
        OperandKind.TIME: "write it as a text in ISO 8601, such as '2024-01-31' or "
        "'2024-01-31 12:00:00'",
        OperandKind.BOOL: "compare it with true or false, or with nothing",
    }.get(field.kind, "compare it with a number")
    raise _mistaken(node, field, f"it is compared with {text}: {advice}")


def _time(node: Node, field: FieldValue, text: str) -> pa.Scalar:
    """Parse a time in the unit and time zone of a column; without a zone, it is in UTC."""
    kind = unwrapped(field.type)
    try:
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            return _instant(text, kind)
        if pa.types.is_date64(kind):
            return pa.scalar(text).cast(pa.date32()).cast(kind)
        return pa.scalar(text).cast(kind)
    except pa.ArrowException as fault:
        raise _mistaken(
            node, field, f"{text!r} is no such time ({fault}): write '2024-01-31', or '2024-01-31 "
            "12:00:00'",
        ) from fault  # fmt: skip


def _instant(text: str, kind: pa.DataType) -> pa.Scalar:
    """Parse a time. Nanoseconds keep all digits of a text, and the column's own unit allows all of
    its years.

    Raises:  ArrowInvalid: the text is no time, or lies outside of the column's range.
    """
    for unit, zone in itertools.product(("ns", kind.unit), ("UTC", None)):
        with contextlib.suppress(pa.ArrowInvalid):  # a text that names a zone, or one that does not
            found = pa.scalar(text).cast(pa.timestamp(unit, zone)).cast(pa.int64())
            return found.cast(pa.timestamp(unit, "UTC")).cast(kind)
    return pa.scalar(text).cast(kind)


def _times(found: Sequence[pa.Scalar]) -> pa.Array:
    return pa.concat_arrays([pa.repeat(one, 1) for one in found])


def _same_times(left: Operand, right: Operand) -> bool:
    kinds = [unwrapped(one.type) for one in (left, right) if isinstance(one, FieldValue)]
    tests = (pa.types.is_date, pa.types.is_timestamp)
    zones = {getattr(kind, "tz", None) is None for kind in kinds}
    return any(all(map(test, kinds)) for test in tests) and len(kinds) == 2 and len(zones) == 1


def _told(node: Node, value: Operand) -> str:
    kind = value.type if isinstance(value, FieldValue) else value.kind.value
    return f"{canonical_text(node)} ({kind})"


def _mistaken(node: Node, value: Operand, why: str) -> ConfigError:
    name = value.name if isinstance(value, FieldValue) else "where"
    return ConfigError(f"where: {_told(node, value)}: {why}", field=name)
