"""Look up the columns of a condition in a schema, check types, and convert constants to them.

A comparison with a constant is converted to a comparison with a value of the column's own type that
has the same result for every row. So numbers are compared exactly, both by Arrow and with
statistics.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa

from dataplane.model.errors import ConfigError
from dataplane.transforms.columns import shown
from dataplane.transforms.plain import is_any_list
from dataplane.transforms.where import (
    Constant,
    Field,
    Name,
    Node,
    Operation,
    Stored,
    canonical_text,
)

COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
COMPUTE: Mapping[str, str] = {
    "+": "add", "-": "subtract", "*": "multiply", "/": "divide", "%": ""
}  # fmt: skip
"""Arrow's kernel for each operator; there is none for %."""


class _Kind(enum.StrEnum):
    """The kind of a value, which decides which operators apply to it."""

    INTEGER = "whole numbers"
    FLOAT = "numbers"
    TEXT = "texts"
    BYTES = "bytes"
    BOOL = "true or false"
    TIME = "dates and timestamps"
    LIST = "lists"
    OTHER = "values that cannot be compared"


_NUMBERS = frozenset((_Kind.INTEGER, _Kind.FLOAT))
_WITH_LENGTH = frozenset((_Kind.TEXT, _Kind.BYTES, _Kind.LIST))
_KINDS: Sequence[tuple[_Kind, Sequence[Callable[[pa.DataType], bool]]]] = (
    (_Kind.BOOL, (pa.types.is_boolean,)),
    (_Kind.INTEGER, (pa.types.is_integer,)),
    (_Kind.FLOAT, (pa.types.is_floating, pa.types.is_decimal)),
    (_Kind.TEXT, (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)),
    (_Kind.BYTES, (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view,
                   pa.types.is_fixed_size_binary)),
    (_Kind.TIME, (pa.types.is_date, pa.types.is_timestamp)),
    (_Kind.LIST, (is_any_list, pa.types.is_fixed_size_list)),
)  # fmt: skip


@functools.lru_cache(maxsize=256)
def _kind_of(kind: pa.DataType) -> _Kind:
    matching = (name for name, tests in _KINDS if any(test(kind) for test in tests))
    return next(matching, _Kind.OTHER)


def _type_of(node: Node) -> pa.DataType:
    """Return the type of an operand's values, without dictionary, run ends and extension."""
    match node:
        case Field():
            return _unwrapped(node.type)
        case Stored(value):
            return value.type
        case Constant(value):
            plain = {bool: pa.bool_(), str: pa.string(), int: pa.int64()}
            return plain.get(type(value), pa.float64())
        case Operation(sign, operands) if sign in COMPUTE:
            is_whole = all(pa.types.is_integer(_type_of(operand)) for operand in operands[:2])
            return pa.int64() if is_whole and sign != "/" else pa.float64()
    return pa.int64()


def _unwrapped(kind: pa.DataType) -> pa.DataType:
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


class TypedCondition:
    """Looks up the columns of a condition, checks types, and converts constants to them."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self.fields: dict[str, Field] = {}

    def test(self, node: Node) -> Node:
        """Return the condition with columns in place of names, and typed values of constants."""
        match node:
            case Operation("and" | "or" | "not" as word, parts):
                return Operation(word, tuple(map(self.test, parts)))
            case Operation("any" | "all" as word, (of, Name((name,)), test)):
                lists = self._field(of, word, {_Kind.LIST}, f"{word}() is for lists")
                values = pa.schema([(name, _type_of(lists).value_type)])
                return Operation(word, (lists, Constant(name), TypedCondition(values).test(test)))
            case Operation("is", (of, _)):
                return Operation("is", (self._field(of, "is null"),))
            case Operation("like", (of, Constant(pattern))):
                field = self._field(of, "like", {_Kind.TEXT}, "'like' is for texts")
                return Operation("like", (field, Stored(pattern)))
            case Operation("in", (of, Constant(tuple(values)))):
                operand = self._comparable(of, "'in' does not apply to it")
                pairs = [_stored("==", of, operand, value) for value in values]
                if isinstance(operand, Constant):
                    return Constant(operand.value in values)
                # Leave out values that the column's type cannot hold: `_stored` changed their
                # relation.
                members = [value for relation, value in pairs if relation == "=="]
                return Operation("in", (operand, Stored(pa.array(members, pairs[0][1].type))))
            case Operation(relation, (left, right)) if relation in COMPARE:
                return self._comparison(relation, left, right)
        value = self._operand(node)
        if not pa.types.is_boolean(_type_of(value)):
            raise _mistaken(node, value, "a condition must be true or false: compare it")
        return value

    def _comparison(self, relation: str, left: Node, right: Node) -> Node:
        if isinstance(left, Constant):
            left, right, relation = right, left, relation.translate(_MIRRORED)
        why = "it can be tested with 'is null' and, a list, any(), all() and length()"
        operand, other = self._comparable(left, why), self._comparable(right, why)
        if isinstance(other, Constant):
            same, value = _stored(relation, left, operand, other.value)
            if isinstance(operand, Constant):
                return Constant(COMPARE[relation](operand.value, other.value))
            return Operation(same, (operand, Stored(value)))
        types = _type_of(operand), _type_of(other)
        kinds = {_kind_of(kind) for kind in types}
        if (kinds == {_Kind.TIME} and not _are_same_times(*types)) or (
            len(kinds) > 1 and not kinds <= _NUMBERS
        ):
            raise _mistaken(left, operand, f"it is compared with {_described(right, other)}")
        return Operation(relation, (operand, other))

    def _comparable(self, node: Node, why: str) -> Node:
        operand = self._operand(node)
        if _kind_of(_type_of(operand)) in {_Kind.LIST, _Kind.OTHER}:
            raise _mistaken(node, operand, why)
        return operand

    def _operand(self, node: Node) -> Node:
        match node:
            case Name():
                return self._named(node)
            case Constant():
                return node
            case Operation("length", (of,)):
                why = "length() is for texts, bytes and lists"
                return Operation("length", (self._field(of, "length()", _WITH_LENGTH, why),))
            case Operation(sign, parts) if sign in COMPUTE:
                operands = tuple(map(self._operand, parts))
                for part, operand in zip(parts, operands, strict=True):
                    if _kind_of(_type_of(operand)) not in _NUMBERS:
                        raise _mistaken(part, operand, f"{sign!r} is for numbers")
                is_whole = _type_of(Operation(sign, operands)) == pa.int64()
                operands = tuple(_in_64_bits(of, is_whole=is_whole) for of in operands)
                if sign != "%" and sum(isinstance(of, Constant) for of in operands) == 1:
                    operands = tuple(
                        Stored(pa.scalar(of.value)) if isinstance(of, Constant) else of
                        for of in operands
                    )
                return Operation(sign, (*operands, Stored(canonical_text(node))))
        raise ConfigError(
            f"where: {canonical_text(node)!r} is true or false, but is used as a value: join "
            "conditions with 'and' and 'or'",
            field="where",
        )

    def _field(
        self, node: Node, used: str, kinds: AbstractSet[_Kind] = frozenset(_Kind), why: str = ""
    ) -> Field:
        if not isinstance(node, Name):
            raise ConfigError(
                f"where: {used!r} applies to columns, and {canonical_text(node)!r} is not a column",
                field="where",
            )
        field = self._named(node)
        if _kind_of(_type_of(field)) not in kinds:
            raise _mistaken(node, field, why)
        return field

    def _named(self, name: Name) -> Field:
        known = ".".join(name.parts)
        for split in range(len(name.parts), 0, -1):
            at = self._schema.get_field_index(".".join(name.parts[:split]))
            below = None if at < 0 else _below(self._schema.field(at).type, name.parts[split:])
            if below is not None:
                field = Field(known, self._schema.field(at).name, *below)
                return self.fields.setdefault(known, field)
        every = [full for field in self._schema for full in _names(field.name, field.type)]
        near = difflib.get_close_matches(known, every, 3)
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
        raise ConfigError(
            f"where: there is no column {known!r}{meant} The dataset has: {shown(every)}. Write a "
            "text in quotes, as in lang == 'en'",
            field=known,
        )


def _in_64_bits(operand: Node, *, is_whole: bool) -> Node:
    match operand:
        case Constant(int(value)) if is_whole and not -(1 << 63) <= value < 1 << 63:
            raise too_large(value)
        case Constant(int() | float() | Decimal() as value) if not is_whole:
            return Constant(float(value))
    return operand


def too_large(what: object) -> ConfigError:
    """Return the error about a whole number that does not fit into 64 bits."""
    return ConfigError(
        f"where: {what} does not fit into 64 bits: write one of its numbers with a fraction, such "
        "as 2.0, to compute with floats",
        field="where",
    )


def _below(kind: pa.DataType, parts: Sequence[str]) -> tuple[tuple[int, ...], pa.DataType] | None:
    """Return the path and type of the field at these names below a column, if it exists."""
    if not parts:
        return (), kind
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    for split in range(len(parts), 0, -1) if pa.types.is_struct(kind) else ():
        at = kind.get_field_index(".".join(parts[:split]))
        if at >= 0 and (below := _below(kind.field(at).type, parts[split:])) is not None:
            return (at, *below[0]), below[1]
    return None


def _names(name: str, kind: pa.DataType) -> Iterator[str]:
    yield name
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    for field in kind.fields if pa.types.is_struct(kind) else ():
        yield from _names(f"{name}.{field.name}", field.type)


def _are_same_times(*types: pa.DataType) -> bool:
    zones = {getattr(kind, "tz", None) is None for kind in types}
    tests = (pa.types.is_date, pa.types.is_timestamp)
    return len(zones) == 1 and any(all(map(test, types)) for test in tests)


def _described(node: Node, operand: Node) -> str:
    kind = operand.type if isinstance(operand, Field) else _kind_of(_type_of(operand)).value
    return f"{canonical_text(node)} ({kind})"


def _mistaken(node: Node, operand: Node, why: str) -> ConfigError:
    name = operand.name if isinstance(operand, Field) else "where"
    return ConfigError(f"where: {_described(node, operand)}: {why}", field=name)


# Convert constants to the type of a column.

_MIRRORED = str.maketrans("<>", "><")


def _stored(relation: str, node: Node, operand: Node, value: Any) -> tuple[str, pa.Scalar]:
    """Convert a comparison of an operand with a constant: return a relation, and a value of the
    operand's type, that give the same result for every row.
    """
    kind = _type_of(operand)
    of, is_flag = _kind_of(kind), isinstance(value, bool)
    match of, value:
        case _Kind.BOOL, bool():
            return relation, pa.scalar(value)
        case ((_Kind.INTEGER | _Kind.FLOAT), (int() | float() | Decimal())) if not is_flag:
            is_float = pa.types.is_floating(kind)
            return _on_floats(relation, value) if is_float else _on_grid(relation, value, kind)
        case _Kind.TEXT, str():
            return relation, pa.scalar(value, pa.large_string())
        case _Kind.BYTES, str():
            return relation, pa.scalar(value.encode(), pa.large_binary())
        case _Kind.TIME, str():
            try:
                return relation, _time(value, kind)
            except pa.ArrowException as fault:
                why = f"{value!r} is not a time in its range ({fault}): write {_TIMES}"
                raise _mistaken(node, operand, why) from fault
    advice = {
        _Kind.TEXT: f"write it in quotes: '{value}'",
        _Kind.TIME: f"write it as a text in ISO 8601, such as {_TIMES}",
        _Kind.BOOL: "compare it with true or false, or use it alone",
    }.get(of, "compare it with a number")
    text = canonical_text(Constant(value))
    raise _mistaken(node, operand, f"it is compared with {text}: {advice}")


def _on_floats(relation: str, value: float | Decimal) -> tuple[str, pa.Scalar]:
    """Compare floats with a number. A number with a fraction stands for the nearest float."""
    nearest = float(value)
    if not isinstance(value, int) or value == nearest:
        return relation, pa.scalar(nearest)
    if relation == "!=":
        return relation, pa.scalar(math.nan)  # true for every float
    if relation == "==":
        return "<", pa.scalar(-math.inf)  # false for every float
    lower = nearest if nearest < value else math.nextafter(nearest, -math.inf)
    return "<=" if "<" in relation else ">", pa.scalar(lower)


def _on_grid(relation: str, value: float | Decimal, kind: pa.DataType) -> tuple[str, pa.Scalar]:
    """Compare whole numbers or decimals with a number. They are multiples of a unit, 1 or
    10**-scale; a constant between two multiples is replaced by the lower one.
    """
    if is_whole := bool(pa.types.is_integer(kind)):
        is_signed = bool(pa.types.is_signed_integer(kind))
        end = 1 << int(kind.bit_width) - is_signed
        lowest, highest, scale = -end if is_signed else 0, end - 1, 0
    else:
        highest, scale = 10**kind.precision - 1, kind.scale
        lowest = -highest
    # When compared with decimals, a constant has exactly the value that the user wrote: 0.1 is a
    # tenth.
    is_written = isinstance(value, float) and not is_whole
    units = Fraction(repr(value) if is_written else value) * Fraction(10) ** scale

    def scalar(unit: int) -> pa.Scalar:
        sign, digits, _ = Decimal(unit).as_tuple()
        return pa.scalar(unit if is_whole else Decimal((sign, digits, -scale)), kind)

    lower = math.floor(units)
    if lower == units and lowest <= lower <= highest:
        return relation, scalar(lower)
    if relation in {"==", "!="} or lower < lowest:  # the result is the same for all values
        return "<" if "<" in relation or relation == "==" else ">=", scalar(lowest)
    return "<=" if "<" in relation else ">", scalar(min(lower, highest))


def _time(text: str, kind: pa.DataType) -> pa.Scalar:
    """Parse a time in the unit and time zone of a column. A text without a zone is in UTC.

    For a column with a time zone, the text is first parsed as nanoseconds, which keeps all of its
    digits, and if that fails in the column's unit, which covers more years.

    Raises:  ArrowInvalid: the text is not a time, or it lies outside of the column's range.
    """
    if pa.types.is_date64(kind):
        return pa.scalar(text).cast(pa.date32()).cast(kind)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        for unit, zone in itertools.product(("ns", kind.unit), ("UTC", None)):
            with contextlib.suppress(
                pa.ArrowInvalid
            ):  # fails if the text names a zone, or lacks it
                ticks = pa.scalar(text).cast(pa.timestamp(unit, zone)).cast(pa.int64())
                return ticks.cast(pa.timestamp(unit, "UTC")).cast(kind)
    return pa.scalar(text).cast(kind)


_TIMES = "'2024-01-31' or '2024-01-31 12:00:00'"
