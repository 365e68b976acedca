"""A condition on the rows of a dataset, evaluated on blocks, and on the bounds that statistics
state for the columns of a block. Columns are looked up and types are checked once.

1. A comparison with null is neither true nor false, as in SQL; rows are kept only if the condition
   is true.
2. Numbers are compared exactly, whatever their types are.
3. Statistics rule out a result only if the condition has this result for no row of the block.
"""

from __future__ import annotations

import decimal
import enum
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from dataplane.formats.arrays import decoded
from dataplane.formats.base import ColumnBounds
from dataplane.model.errors import ConfigError
from dataplane.transforms.canonical import leaf_array
from dataplane.transforms.plain import is_any_list
from dataplane.transforms.typed_condition import COMPARE, COMPUTE, TypedCondition, too_large
from dataplane.transforms.where import Constant, Field, Node, Operation, Stored, parse

Bounds = Mapping[str, ColumnBounds]


class Outcomes(enum.Flag):
    """The possible results of a condition on some rows."""

    NONE = 0
    TRUE = 1
    FALSE = 2
    NULL = 4
    ANY = TRUE | FALSE | NULL


class Condition(Struct, frozen=True):
    """A condition on the rows of a dataset. `columns` are the top-level columns that it reads;
    `fields` are the names of these columns, and of fields below them.
    """

    test: Node
    columns: tuple[str, ...]
    fields: tuple[str, ...]

    @classmethod
    def of(cls, where: str, schema: pa.Schema) -> Self:
        """Parse a condition on rows with this schema.

        Raises:  ConfigError: the text is not a condition, names a column that does not exist, or
        applies an operation that a column's type does not allow; names the column.
        """
        typed = TypedCondition(schema)
        test = typed.test(parse(where))
        columns = dict.fromkeys(field.top for field in typed.fields.values())
        if not columns:
            raise ConfigError(
                f"where={where!r:.200} uses no column: compare a column with a value", field="where"
            )
        return cls(test, tuple(columns), tuple(typed.fields))

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """Evaluate the condition for each row.

        Shapes:  result: bool[rows], with nulls.
        Raises:  ConfigError: a number that the condition computes exceeds 64 bits.
        """
        return _values(self.test, batch)

    def outcomes(self, bounds: Bounds) -> Outcomes:
        """Return the possible results on rows whose columns have these bounds."""
        return _outcomes(self.test, bounds)

    def known(self, outcome: Outcomes) -> frozenset[str]:
        """Return the columns that cannot be null in a row for which the result is `outcome`."""
        return _known(self.test, outcome)


# Evaluate a condition on the rows of a block.


def _values(node: Node, batch: pa.RecordBatch) -> Any:
    if isinstance(node, Operation):
        name, operands = node.operator, node.operands
        if name in _OF_LISTS:
            return _of_lists(name, batch, *operands)
        if name not in _JOIN:
            return _EVALUATE[name](*[_values(operand, batch) for operand in operands])
        # A loop instead of recursion: a condition may have thousands of parts.
        return functools.reduce(_JOIN[name], (_values(operand, batch) for operand in operands))
    if isinstance(node, Field):
        return _plain(decoded(leaf_array(batch.column(node.top), node.path)))
    if isinstance(node, Constant):
        return pa.repeat(node.value, batch.num_rows)
    assert isinstance(node, Stored)
    return node.value


def _plain(array: pa.Array) -> pa.Array:
    """Convert values to a type that Arrow's kernels support."""
    kind = array.type
    if pa.types.is_float16(kind):
        return array.cast(pa.float32())
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return array.cast(pa.decimal128(kind.precision, kind.scale))
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.large_binary())
    return array


def _length(array: pa.Array) -> pa.Array:
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return pc.utf8_length(array)
    is_list = is_any_list(array.type) or pa.types.is_fixed_size_list(array.type)
    return pc.list_value_length(array) if is_list else pc.binary_length(array)


def _of_lists(word: str, batch: pa.RecordBatch, of: Node, name: Node, test: Node) -> pa.Array:
    """Evaluate a test for the values of lists, and join the results of each list with "or" or
    "and".
    """
    assert isinstance(name, Constant)
    lists = _values(of, batch)
    lengths = _length(lists).fill_null(0).to_numpy()
    rows = np.arange(len(lists)).repeat(lengths)
    values = pa.RecordBatch.from_arrays([lists.flatten()], names=[name.value])
    results = _values(test, values).cast(pa.int8()).fill_null(2).to_numpy()
    # Sum up how often each list has each result.
    false, true, null = (
        np.bincount(rows[results == one], minlength=len(lists)) for one in range(3)
    )
    decides = true if word == "any" else false
    is_null = (decides == 0) & (null > 0) | lists.is_null().to_numpy(zero_copy_only=False)
    return pa.array((decides > 0) == (word == "any"), mask=is_null)


def _computed(sign: str, left: pa.Array, right: pa.Array, text: str) -> pa.Array:
    """Compute in 64 bits. Whole numbers give whole numbers, except with /."""
    is_whole = sign != "/" and all(map(pa.types.is_integer, (left.type, right.type)))
    try:
        target = pa.int64() if is_whole else pa.float64()
        left, right = (pc.cast(values, target, safe=is_whole) for values in (left, right))
        if sign == "%":
            return _remainder(left, right)
        return getattr(pc, COMPUTE[sign] + ("_checked" if is_whole else ""))(left, right)
    except pa.ArrowInvalid as fault:
        raise too_large(f"{text} ({fault})") from fault


def _remainder(left: pa.Array, right: pa.Array) -> pa.Array:
    """Return the remainder with the sign of the divisor, as in Python; null where the
    divisor is 0.
    """
    values = [array.fill_null(0).to_numpy() for array in (left, right)]
    nulls = [array.is_null().to_numpy(zero_copy_only=False) for array in (left, right)]
    is_null = nulls[0] | nulls[1] | (values[1] == 0)
    with np.errstate(all="ignore"):
        return pa.array(np.mod(values[0], np.where(is_null, 1, values[1])), mask=is_null)


def _related(relation: str, left: pa.Array, right: pa.Array | pa.Scalar) -> pa.Array:
    """Compare values of one kind, exactly. A scalar has the type of the array."""
    kernel, compare = _RELATE[relation], COMPARE[relation]
    if isinstance(right, pa.Scalar):
        return kernel(left, right)
    types = left.type, right.type
    try:
        if sum(map(pa.types.is_floating, types)) == 1:
            if any(map(pa.types.is_decimal, types)):
                raise pa.ArrowInvalid("decimals are not compared as floats")
            left, right = (values.cast(pa.float64()) for values in (left, right))
        return kernel(left, right)
    except pa.ArrowInvalid:  # no Arrow type holds the values of both sides exactly
        pairs = zip(_python_values(left), _python_values(right), strict=True)
    with decimal.localcontext() as context:
        context.traps[decimal.InvalidOperation] = False  # so that NaN is neither less nor greater
        results = [
            None if value is None or other is None else compare(value, other)
            for value, other in pairs
        ]
    return pa.array(results, pa.bool_())


def _python_values(array: pa.Array) -> list[Any]:
    """Convert values to Python objects that compare exactly with those of other types. Timestamps
    become whole nanoseconds, since datetime lacks their precision and range.
    """
    if not pa.types.is_timestamp(array.type):
        return [*array.to_pylist()]
    ticks, values = _TICKS_NS[array.type.unit], array.cast(pa.int64()).to_pylist()
    return [None if value is None else value * ticks for value in values]


def _in(values: pa.Array, members: pa.Array) -> pa.Array:
    if pa.types.is_floating(members.type):
        # Compare as "==" does: float32 values exactly as stored, and -0.0 equal to 0.0.
        values, members = (pc.add(both.cast(pa.float64()), 0.0) for both in (values, members))
    is_member = pc.is_in(values, value_set=members.cast(values.type))
    return pc.if_else(pc.is_valid(values), is_member, pa.scalar(None, pa.bool_()))


def _like(values: pa.Array, pattern: str) -> pa.Array:
    """Return whether texts match a pattern. A backslash escapes %, _ and itself; before other
    characters it has no special meaning.
    """
    if "\\" not in pattern:
        return pc.match_like(values, pattern)
    # Arrow's own LIKE treats a backslash differently depending on its place: use a regex instead.
    parts = (
        {"%": ".*", "_": "."}.get(other) or re.escape(escaped or other)
        for escaped, other in _PATTERN_PARTS.findall(pattern)
    )
    return pc.match_substring_regex(values, f"(?s)\\A{''.join(parts)}\\z")


_PATTERN_PARTS = re.compile(r"\\([%_\\])|(.)", re.DOTALL)
_TICKS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_RELATE = {"==": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal,
           ">": pc.greater, ">=": pc.greater_equal}  # fmt: skip
_OF_LISTS = frozenset(("any", "all"))
_JOIN = {"and": pc.and_kleene, "or": pc.or_kleene}
_EVALUATE: Mapping[str, Callable[..., pa.Array]] = {
    "not": pc.invert,
    "is": pc.is_null,
    "in": _in,
    "like": _like,
    "length": _length,
    **{sign: functools.partial(_computed, sign) for sign in COMPUTE},
    **{relation: functools.partial(_related, relation) for relation in _RELATE},
}


# Evaluate a condition on statistics: the bounds of the columns of a block.

_OPPOSITE = {
    Outcomes(4 * null + 2 * false + true): Outcomes(4 * null + 2 * true + false)
    for null, false, true in itertools.product((0, 1), repeat=3)
}
_UNKNOWN = ColumnBounds(rows=-1)


def _outcomes(node: Node, bounds: Bounds) -> Outcomes:
    match node:
        case Constant(value):
            return Outcomes.TRUE if value else Outcomes.FALSE
        case Field(name):
            return _outcomes_within(bounds.get(name, _UNKNOWN), "==", [True])
        case Operation("is", (Field(name),)):
            column = bounds.get(name, _UNKNOWN)
            if column.null_count in {0, column.rows}:
                return Outcomes.TRUE if column.null_count else Outcomes.FALSE
            return Outcomes.TRUE | Outcomes.FALSE
        case Operation("in", (Field(name), Stored(members))):
            return _outcomes_within(bounds.get(name, _UNKNOWN), "==", list(map(_python, members)))
        case Operation(relation, (Field(name), Stored(value))) if relation in _RELATE:
            return _outcomes_within(bounds.get(name, _UNKNOWN), relation, [_python(value)])
        case Operation("not", (of,)):
            return _OPPOSITE[_outcomes(of, bounds)]
        case Operation("and" | "or" as word, parts):
            return _joined(word, [_outcomes(part, bounds) for part in parts])
    return Outcomes.ANY


def _joined(word: str, parts: Sequence[Outcomes]) -> Outcomes:
    if word == "or":  # by De Morgan's law, "a or b" is "not (not a and not b)"
        return _OPPOSITE[_joined("and", [_OPPOSITE[part] for part in parts])]
    joined = Outcomes.NONE
    if any(Outcomes.FALSE in part for part in parts):
        joined |= Outcomes.FALSE
    if all(Outcomes.TRUE in part for part in parts):
        joined |= Outcomes.TRUE
    if any(Outcomes.NULL in part for part in parts) and Outcomes.FALSE not in list(parts):
        joined |= Outcomes.NULL
    return joined


def _outcomes_within(column: ColumnBounds, relation: str, values: Sequence[object]) -> Outcomes:
    """Return the possible results for a column with these bounds that is compared with any of these
    values.
    """
    if column.null_count == column.rows:
        return Outcomes.NULL
    outcomes = Outcomes.NONE if column.null_count == 0 else Outcomes.NULL
    if column.lowest is None:
        return Outcomes.TRUE | Outcomes.FALSE | outcomes
    with_each = [_outcomes_compared(column, relation, value) for value in values]
    if any(may_be_true for may_be_true, _ in with_each):
        outcomes |= Outcomes.TRUE
    return outcomes | (Outcomes.FALSE if all(may for _, may in with_each) else Outcomes.NONE)


def _outcomes_compared(column: ColumnBounds, relation: str, value: Any) -> tuple[bool, bool]:
    """Return whether a comparison may be true, and whether it may be false, for values within these
    bounds. Bounds do not cover NaN, which differs from every number; all other comparisons with it
    are false.
    """
    lowest, highest, nan = column.lowest, column.highest, column.may_be_nan
    try:
        equal = lowest <= value <= highest
        differ = nan or not column.is_exact or not lowest == highest == value
        return {
            "==": (equal, differ),
            "!=": (differ, equal),
            "<": (lowest < value, nan or highest >= value),
            "<=": (lowest <= value, nan or highest > value),
            ">": (highest > value, nan or lowest <= value),
            ">=": (highest >= value, nan or lowest < value),
        }[relation]
    except TypeError:  # the bounds have a type that cannot be compared with this value
        return True, True


def _python(value: pa.Scalar) -> object:
    """Return the value in the form that bounds have; None if Python has no type for it."""
    try:
        return value.as_py()
    except ValueError:  # a time in nanoseconds
        return None


def _known(node: Node, outcome: Outcomes) -> frozenset[str]:
    match node:
        case Field(name):
            return frozenset((name,))
        case Operation("is", (of,)):
            return _known(of, outcome) if outcome is Outcomes.FALSE else frozenset()
        case Operation("not", (of,)):
            return _known(of, _OPPOSITE[outcome])
        case Operation("any" | "all", (of, *_)):
            return _known(of, outcome)
        case Operation(word, parts):
            columns = [_known(part, outcome) for part in parts]
            decides = {"and": Outcomes.FALSE, "or": Outcomes.TRUE}.get(word)
            return (frozenset.intersection if outcome is decides else frozenset.union)(*columns)
    return frozenset()
