"""Evaluate a condition on the rows of a block, and on the known bounds of a block's columns.

Null follows SQL: a comparison with null is neither true nor false, and only rows for which the
condition is true are kept.
"""

from __future__ import annotations

import decimal
import enum
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
from msgspec import Struct

from dataplane.formats.base import ColumnBounds
from dataplane.transforms.operands import FieldValue, Operand
from dataplane.transforms.where import Relation

Bounds = Mapping[str, ColumnBounds]


class Outcomes(enum.Flag):
    """The possible results of a condition on some rows."""

    TRUE = 1
    FALSE = 2
    NULL = 4


ANY = Outcomes.TRUE | Outcomes.FALSE | Outcomes.NULL
_OPPOSITE = {Outcomes.TRUE: Outcomes.FALSE, Outcomes.FALSE: Outcomes.TRUE}


class RowTest(Protocol):
    """A condition, or a part of one."""

    def values(self, batch: pa.RecordBatch, /) -> pa.Array:
        """Evaluate the condition for each row.

        Shapes:  result: bool[rows], with nulls.
        """

    def outcomes(self, bounds: Bounds, /) -> Outcomes:
        """Return the possible results on rows whose columns have these bounds."""

    def known(self, outcome: Outcomes, /) -> frozenset[str]:
        """Return the columns that cannot be null in a row with this result, TRUE or FALSE."""


class FieldTest(Struct, frozen=True):
    """A column compared with a constant of its type. If the constant lies outside of its type, the
    result is `always`.
    """

    field: FieldValue
    relation: Relation
    value: pa.Scalar | None
    always: bool | None = None

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `RowTest.values`."""
        import pyarrow.compute as pc

        if self.always is not None:
            valid = self.field.stored(batch).is_valid()
            return pc.if_else(valid, self.always, pa.scalar(None, pa.bool_()))
        return getattr(pc, _KERNELS[self.relation])(self.field.values(batch), self.value)

    def outcomes(self, bounds: Bounds) -> Outcomes:
        """Implement `RowTest.outcomes`."""
        found = bounds.get(self.field.name)
        nulls = _null_outcomes(found)
        if found is not None and found.null_count == found.rows:
            return Outcomes.NULL
        if self.always is not None:
            return nulls | (Outcomes.TRUE if self.always else Outcomes.FALSE)
        if found is None or found.lowest is None or self.value is None:
            return nulls | Outcomes.TRUE | Outcomes.FALSE
        return nulls | _compared(self.relation, found, _plain(self.value))

    def known(self, _: Outcomes) -> frozenset[str]:
        """Implement `RowTest.known`."""
        return self.field.columns


class RelationTest(Struct, frozen=True):
    """A comparison of two values of one kind."""

    relation: Relation
    left: Operand
    right: Operand

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `RowTest.values`."""
        import pyarrow.compute as pc

        left, right = self.left.values(batch), self.right.values(batch)
        is_float = [pa.types.is_floating(one.type) for one in (left, right)]
        try:
            if any(is_float) and not all(is_float):
                # Unless a whole number has no float. Decimals have none in general.
                left, right = (_as_float(one) for one in (left, right))
            return _of_rows(getattr(pc, _KERNELS[self.relation])(left, right), batch)
        except pa.ArrowInvalid:  # Arrow has no type for the values of both
            both = (_plain_values(_of_rows(one, batch)) for one in (left, right))
            return _exactly(self.relation, *both)

    def outcomes(self, _: Bounds) -> Outcomes:
        """Implement `RowTest.outcomes`."""
        return ANY

    def known(self, _: Outcomes) -> frozenset[str]:
        """Implement `RowTest.known`."""
        return self.left.columns | self.right.columns


class MemberTest(Struct, frozen=True):
    """Whether a value is in a list of values of its type."""

    of: Operand
    members: pa.Array

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `RowTest.values`."""
        import pyarrow.compute as pc

        values = self.of.values(batch)
        members = self.members
        if pa.types.is_floating(members.type):
            # As "==" compares them: 32-bit floats as they are stored, and -0.0 with 0.0.
            values, members = (pc.add(one.cast(pa.float64()), 0.0) for one in (values, members))
        found = _of_rows(pc.is_in(values, value_set=members.cast(values.type)), batch)
        valid = _of_rows(pc.is_valid(values), batch)
        return pc.if_else(valid, found, pa.scalar(None, pa.bool_()))

    def outcomes(self, bounds: Bounds) -> Outcomes:
        """Implement `RowTest.outcomes`."""
        found = bounds.get(self.of.name) if isinstance(self.of, FieldValue) else None
        nulls = _null_outcomes(found)
        if found is not None and found.null_count == found.rows:
            return Outcomes.NULL
        if found is None or found.lowest is None:
            return nulls | Outcomes.TRUE | Outcomes.FALSE
        each = [_compared(Relation.EQ, found, _plain(one)) for one in self.members]
        is_one = any(Outcomes.FALSE not in one for one in each)
        is_none = not any(Outcomes.TRUE in one for one in each)
        nulls |= Outcomes(0) if is_none else Outcomes.TRUE
        return nulls if is_one else nulls | Outcomes.FALSE

    def known(self, _: Outcomes) -> frozenset[str]:
        """Implement `RowTest.known`."""
        return self.of.columns


class LikeTest(Struct, frozen=True):
    """Whether a text matches a pattern. A backslash escapes %, _ and itself; before other
    characters it has no special meaning.
    """

    of: FieldValue
    pattern: str

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `RowTest.values`."""
        import pyarrow.compute as pc

        values = self.of.values(batch)
        if "\\" not in self.pattern:
            return pc.match_like(values, self.pattern)
        # What Arrow makes of a backslash depends on where it stands.
        return pc.match_substring_regex(values, _expression(self.pattern))

    def outcomes(self, _: Bounds) -> Outcomes:
        """Implement `RowTest.outcomes`."""
        return ANY

    def known(self, _: Outcomes) -> frozenset[str]:
        """Implement `RowTest.known`."""
        return self.of.columns


class NullOf(Struct, frozen=True):
    """Whether a column is null."""

    of: FieldValue

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `RowTest.values`."""
        return self.of.stored(batch).is_null()

    def outcomes(self, bounds: Bounds) -> Outcomes:
        """Implement `RowTest.outcomes`."""
        found = bounds.get(self.of.name)
        if found is None or found.null_count is None:
            return Outcomes.TRUE | Outcomes.FALSE
        if not found.null_count:
            return Outcomes.FALSE
        return Outcomes.TRUE if found.null_count == found.rows else Outcomes.TRUE | Outcomes.FALSE

    def known(self, outcome: Outcomes) -> frozenset[str]:
        """Implement `RowTest.known`."""
        return self.of.columns if outcome is Outcomes.FALSE else frozenset()


class FlagTest(Struct, frozen=True):
    """A column of bools, or one bool for all rows."""

    of: Operand

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `RowTest.values`."""
        return _of_rows(self.of.values(batch), batch)

    def outcomes(self, bounds: Bounds) -> Outcomes:
        """Implement `RowTest.outcomes`."""
        found = bounds.get(self.of.name) if isinstance(self.of, FieldValue) else None
        if found is None or found.lowest is None:
            return ANY
        return _null_outcomes(found) | _compared(Relation.EQ, found, value=True)

    def known(self, _: Outcomes) -> frozenset[str]:
        """Implement `RowTest.known`."""
        return self.of.columns


class Joined(Struct, frozen=True):
    """Tests joined by "and" or "or"."""

    operator: str
    parts: Sequence[RowTest]

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `RowTest.values`."""
        import pyarrow.compute as pc

        join = pc.and_kleene if self.operator == "and" else pc.or_kleene
        found = self.parts[0].values(batch)
        for part in self.parts[1:]:
            found = join(found, part.values(batch))
        return found

    def outcomes(self, bounds: Bounds) -> Outcomes:
        """Implement `RowTest.outcomes`."""
        # "or" is "and" of the opposites.
        decides, other = Outcomes.FALSE, Outcomes.TRUE
        if self.operator == "or":
            decides, other = other, decides
        each = [part.outcomes(bounds) for part in self.parts]
        found = Outcomes(0)
        if any(decides in one for one in each):
            found |= decides
        if all(other in one for one in each):
            found |= other
        if any(Outcomes.NULL in one for one in each) and all(one != decides for one in each):
            found |= Outcomes.NULL
        return found

    def known(self, outcome: Outcomes) -> frozenset[str]:
        """Implement `RowTest.known`."""
        each = [part.known(outcome) for part in self.parts]
        needs_all = (self.operator == "and") == (outcome is Outcomes.TRUE)
        return frozenset.union(*each) if needs_all else frozenset.intersection(*each)


class Inverse(Struct, frozen=True):
    """The opposite of a test."""

    of: RowTest

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Implement `RowTest.values`."""
        import pyarrow.compute as pc

        return pc.invert(self.of.values(batch))

    def outcomes(self, bounds: Bounds) -> Outcomes:
        """Implement `RowTest.outcomes`."""
        inner = self.of.outcomes(bounds)
        found = inner & Outcomes.NULL
        for one, opposite in _OPPOSITE.items():
            found |= opposite if one in inner else Outcomes(0)
        return found

    def known(self, outcome: Outcomes) -> frozenset[str]:
        """Implement `RowTest.known`."""
        return self.of.known(_OPPOSITE[outcome])


_KERNELS = {
    Relation.EQ: "equal",
    Relation.NE: "not_equal",
    Relation.LT: "less",
    Relation.LE: "less_equal",
    Relation.GT: "greater",
    Relation.GE: "greater_equal",
}


def _plain(value: pa.Scalar) -> object:
    """Return the value in the form that bounds have; None if Python has no type for it."""
    try:
        return value.as_py()
    except ValueError:  # nanoseconds
        return None


def _null_outcomes(found: ColumnBounds | None) -> Outcomes:
    return Outcomes(0) if found is not None and found.null_count == 0 else Outcomes.NULL


def _compared(relation: Relation, found: ColumnBounds, value: object) -> Outcomes:
    """Return the possible results for values within these bounds. NaN is in no bounds: it differs
    from every number, and all other comparisons with it are false.
    """
    lowest, highest = found.lowest, found.highest
    try:
        may_be = {
            Relation.EQ: lowest <= value <= highest,
            Relation.NE: not found.is_exact or not lowest == highest == value,
            Relation.LT: lowest < value,
            Relation.LE: lowest <= value,
            Relation.GT: highest > value,
            Relation.GE: highest >= value,
        }
    except TypeError:  # a type of bounds that this value is not compared with
        return Outcomes.TRUE | Outcomes.FALSE
    nan = found.may_be_nan
    is_true = may_be[relation] or (nan and relation is Relation.NE)
    is_false = may_be[_NOT[relation]] or (nan and relation is not Relation.NE)
    outcomes = Outcomes.TRUE if is_true else Outcomes(0)
    return outcomes | Outcomes.FALSE if is_false else outcomes


_PARTS = re.compile(r"\\([%_\\])|(.)", re.DOTALL)
_OPERATORS: Mapping[Relation, Callable[[Any, Any], bool]] = {
    Relation.EQ: operator.eq,
    Relation.NE: operator.ne,
    Relation.LT: operator.lt,
    Relation.LE: operator.le,
    Relation.GT: operator.gt,
    Relation.GE: operator.ge,
}
_NOT = {
    Relation.EQ: Relation.NE,
    Relation.NE: Relation.EQ,
    Relation.LT: Relation.GE,
    Relation.LE: Relation.GT,
    Relation.GT: Relation.LE,
    Relation.GE: Relation.LT,
}


def _as_float(found: pa.Array | pa.Scalar) -> pa.Array | pa.Scalar:
    """Convert values to floats.

    Raises:  ArrowInvalid: a value is no float.
    """
    if pa.types.is_decimal(found.type):
        raise pa.ArrowInvalid("decimals are no floats")
    return found.cast(pa.float64())


def _exactly(relation: Relation, left: Sequence[Any], right: Sequence[Any]) -> pa.Array:
    """Compare whole numbers, decimals and floats exactly, one by one, as Python does."""
    compare = _OPERATORS[relation]
    with decimal.localcontext() as context:
        context.traps[decimal.InvalidOperation] = False  # so that NaN is neither less nor greater
        return pa.array(
            [
                None if one is None or other is None else compare(one, other)
                for one, other in zip(left, right, strict=True)
            ],
            pa.bool_(),
        )


_TICKS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def _plain_values(found: pa.Array) -> Sequence[Any]:
    """Convert values so that Python compares them with those of other types. Timestamps become
    whole nanoseconds, since datetime has neither their digits nor their years.
    """
    is_time = pa.types.is_timestamp(found.type)
    ticks = _TICKS_NS[found.type.unit] if is_time else 1
    values = (found.cast(pa.int64()) if is_time else found).to_pylist()
    return [None if one is None else one * ticks for one in values] if is_time else [*values]


def _expression(pattern: str) -> str:
    """Return the regular expression of a pattern."""
    parts = []
    for taken, one in _PARTS.findall(pattern):
        parts.append({"%": ".*", "_": "."}.get(one) or re.escape(taken or one))
    return f"(?s)\\A{''.join(parts)}\\z"


def _of_rows(found: pa.Array | pa.Scalar, batch: pa.RecordBatch) -> pa.Array:
    """Repeat one value for all rows."""
    return found if isinstance(found, pa.Array) else pa.repeat(found, batch.num_rows)
