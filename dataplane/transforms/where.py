"""The syntax tree of a condition on the columns of a row, and its canonical text.

    lang == 'en' and (score > 0.5 or score is null) and not `page.kind` in ('ad', 'stub')

The canonical text of a condition never changes, since saved states are compared by it.

Pure: a trainer links it.
"""

from __future__ import annotations

import enum
import re
from decimal import Decimal
from typing import Final

from msgspec import Struct

Scalar = bool | int | float | Decimal | str
"""A Decimal is a number with a fraction that no float has: `0.10000000000000000001`."""


class Relation(enum.StrEnum):
    """How two values are compared."""

    EQ = "=="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="


class Name(Struct, frozen=True):
    """A column, or a field of a struct below one."""

    parts: tuple[str, ...]


class Constant(Struct, frozen=True):
    """A number, a text, or true or false."""

    value: Scalar


class Arithmetic(Struct, frozen=True):
    """`operator` is one of + - * / %."""

    operator: str
    left: Node
    right: Node


class Length(Struct, frozen=True):
    """The characters of a text, the bytes of a binary value, or the values of a list."""

    of: Node


class Compared(Struct, frozen=True):
    """A comparison of two values."""

    relation: Relation
    left: Node
    right: Node


class Membership(Struct, frozen=True):
    """Whether a value is in a list."""

    of: Node
    values: tuple[Scalar, ...]


class Matching(Struct, frozen=True):
    """Whether a text matches a pattern, in which % is any text and _ any character."""

    of: Node
    pattern: str


class NullTest(Struct, frozen=True):
    """Whether a value is null."""

    of: Node


class Junction(Struct, frozen=True):
    """`operator` is "and" or "or", between two parts at least."""

    operator: str
    parts: tuple[Node, ...]


class Negation(Struct, frozen=True):
    """The opposite of a condition."""

    of: Node


Node = (
    Name | Constant | Arithmetic | Length | Compared | Membership | Matching | NullTest | Junction
    | Negation
)  # fmt: skip

WORDS: Final = frozenset(("and", "or", "not", "in", "is", "null", "none", "true", "false", "like"))
_BARE = re.compile(r"[^\W\d]\w*")
_STRENGTH: Final = {"or": 1, "and": 2, "not": 3, "test": 4, "+": 5, "-": 5, "*": 6, "/": 6, "%": 6}
_ATOM = 7


def canonical_text(node: Node) -> str:
    """Return one text for all ways to write this condition; it parses to the same tree."""
    return _written(node)[0]


def _written(node: Node) -> tuple[str, int]:
    """Return the text, and how strongly its outermost operator binds."""
    match node:
        case Name(parts):
            return ".".join(map(_name_written, parts)), _ATOM
        case Constant(value):
            return _constant(value), _ATOM
        case Length(of):
            return f"length({_within(of, 0)})", _ATOM
        case Arithmetic(operator, left, right):
            own = _STRENGTH[operator]
            return f"{_within(left, own)} {operator} {_within(right, own + 1)}", own
        case Junction(operator, parts):
            own = _STRENGTH[operator]
            return f" {operator} ".join(_within(part, own + 1) for part in parts), own
        case Negation(NullTest() | Membership() | Matching() as test):
            return _test(test, "not "), _STRENGTH["test"]
        case Negation(of):
            return f"not {_within(of, _STRENGTH['not'] + 1)}", _STRENGTH["not"]
        case Compared(relation, left, right):
            return f"{_operand(left)} {relation.value} {_operand(right)}", _STRENGTH["test"]
        case Membership() | Matching() | NullTest():
            return _test(node, ""), _STRENGTH["test"]


def _test(node: Membership | Matching | NullTest, negated: str) -> str:
    match node:
        case Membership(of, values):
            return f"{_operand(of)} {negated}in ({', '.join(map(_constant, values))})"
        case Matching(of, pattern):
            return f"{_operand(of)} {negated}like {_constant(pattern)}"
        case NullTest(of):
            return f"{_operand(of)} is {negated}null"


def _operand(node: Node) -> str:
    return _within(node, _STRENGTH["test"] + 1)


def _within(node: Node, least: int) -> str:
    text, own = _written(node)
    return text if own >= least else f"({text})"


def _name_written(part: str) -> str:
    if _BARE.fullmatch(part) and part.lower() not in WORDS:
        return part
    return "`" + part.replace("`", "``") + "`"


def _constant(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value) if isinstance(value, Decimal) else repr(value)
