"""Compare columns of whole numbers and decimals with constants exactly.

Column values are whole multiples of a unit: 1, or 10**-scale. A constant between two multiples
equals no value, and is otherwise compared like the multiple below or above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Self

import pyarrow as pa
from msgspec import Struct

from dataplane.transforms.condition import FieldTest
from dataplane.transforms.operands import FieldValue, unwrapped
from dataplane.transforms.where import Relation


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
