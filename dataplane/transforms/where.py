"""Conditions on the columns of a row: the syntax tree, its canonical text, and the parser.

    lang == 'en' and (score > 0.5 or score is null) and not `page.kind` in ('ad', 'stub')

1. The canonical text of a condition never changes, since saved states are compared by it.
2. A text is never run as Python, and its depth, its parts and its numbers are limited.

Pure: a trainer imports it.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final

from msgspec import Struct

from dataplane.model.errors import ConfigError

TEXT_MAX = 32 << 10
DEPTH_MAX = 40
NODES_MAX = 4000
SUMS_MAX = 64
"""The most operators + - * / and % in a condition; limited since each may contain another."""

Scalar = bool | int | float | Decimal | str
"""A Decimal is a number with a fraction that no float represents: `0.10000000000000000001`."""


class Name(Struct, frozen=True):
    """A column, or a field of a struct below one."""

    parts: tuple[str, ...]


class Constant(Struct, frozen=True):
    """A number, a text, true or false; the list after `in`; or None for the null after `is`."""

    value: Scalar | tuple[Scalar, ...] | None


class Operation(Struct, frozen=True):
    """An operator and its operands. "and" and "or" have at least two operands, "not" and "length"
    one, and comparisons, "in", "like", "is" and + - * / % have two.
    """

    operator: str
    operands: tuple[Node, ...]


class Field(Struct, frozen=True):
    """A name that was found in a schema: `path` are indices into the structs below the column
    `top`, `type` is a pyarrow type.
    """

    name: str
    top: str
    path: tuple[int, ...]
    type: Any


class Stored(Struct, frozen=True):
    """A constant in a column's type: a pyarrow Scalar, or an Array of the values after `in`."""

    value: Any


Node = Name | Constant | Operation | Field | Stored
"""The nodes of a tree. The parser makes no Field and no Stored: they replace names and constants
when types are known.
"""

RELATIONS: Final = frozenset(("==", "!=", "<", "<=", ">", ">="))
_WORDS: Final = frozenset(("and", "or", "not", "in", "is", "null", "none", "true", "false", "like"))
_TESTS: Final = frozenset(("in", "like", "is"))
_BARE = re.compile(r"[^\W\d]\w*")
_STRENGTH: Final = {"or": 1, "and": 2, "not": 3, **dict.fromkeys(RELATIONS | _TESTS, 4),
                    **dict.fromkeys("+-", 5), **dict.fromkeys("*/%", 6),
                    **dict.fromkeys(("length", "any", "all"), 7)}  # fmt: skip


def canonical_text(node: Node) -> str:
    """Return the canonical text of a condition; parsing it gives the same tree."""
    match node:
        case Name(parts):
            return ".".join(map(_name_written, parts))
        case Constant(value):
            return _constant(value)
        case Operation("length", (of,)):
            return f"length({canonical_text(of)})"
        case Operation("any" | "all" as word, (of, name, test)):
            name_text, of_text = canonical_text(name), canonical_text(of)
            return f"{word}({canonical_text(test)} for {name_text} in {of_text})"
        case Operation("not", (Operation(test, (of, value)),)) if test in _TESTS:
            negated = "is not" if test == "is" else f"not {test}"
            return f"{_within(of, 5)} {negated} {canonical_text(value)}"
        case Operation("not", (of,)):
            return f"not {_within(of, 4)}"
        case Operation(operator, (first, *others)):
            own = _STRENGTH[operator]
            written = [_within(first, own + (operator not in set("+-*/%")))]
            written += [_within(other, own + 1) for other in others]
            return f" {operator} ".join(written)
    raise TypeError(f"{type(node).__name__} has no text")


def _within(node: Node, least: int) -> str:
    own = 7
    if isinstance(node, Operation):
        is_test = node.operator == "not" and _operator(node.operands[0]) in _TESTS
        own = 4 if is_test else _STRENGTH[node.operator]
    text = canonical_text(node)
    return text if own >= least else f"({text})"


def _operator(node: Node) -> str:
    return node.operator if isinstance(node, Operation) else ""


def _name_written(part: str) -> str:
    if _BARE.fullmatch(part) and part.lower() not in _WORDS:
        return part
    return "`" + part.replace("`", "``") + "`"


def _constant(value: Scalar | tuple[Scalar, ...] | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, bool | Decimal):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


_EXAMPLE = "lang == 'en' and score > 0.5"
_SHOWN = 24
_WHOLE_MAX = 10**76 - 1  # the 76 digits of a decimal256
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXACT = decimal.Context(prec=TEXT_MAX)
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    |(?P<word>[^\W\d]\w*)
    |(?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
    |(?P<quoted>`(?:[^`]|``)+`)
    |(?P<sign><=|>=|==|!=|<>|[=<>+\-*/%(),.])
    |(?P<end>\Z)
    )""",
    re.VERBOSE,
)
_SPELLED: Final = {"=": "==", "<>": "!=", **{relation: relation for relation in RELATIONS}}


def canonical_where(given: object) -> str:
    """Return the canonical text of the loader's argument where=; "" for None.

    Raises:  ConfigError: the argument is not a condition.
    """
    if given is None:
        return ""
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(
            f'where={given!r:.80}: pass a condition as text, such as where="{_EXAMPLE}"',
            field="where",
        )
    return canonical_text(parse(given))


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Node:
    """Return the syntax tree of a condition.

    Raises:  ConfigError: the text is not a condition; says where, and what is expected there.
    """
    if len(text) > TEXT_MAX:
        raise ConfigError(
            f"where= has {len(text)} characters, more than the {TEXT_MAX} that are allowed: store "
            "its result as a column of the dataset",
            field="where",
        )
    if half := _SURROGATE.search(text):
        raise _fault(text, half.start(), "this is half of a character: decode the text as UTF-8")
    return _Parser(text).whole()


class _Token(Struct, frozen=True):
    """A piece of the text. `word` is its meaning, if it is a word or a sign."""

    kind: str
    text: str
    at: int
    word: str


class _Parser:
    """Parses a text by recursive descent, with one method for each precedence of operators."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = self._depth = self._nodes = self._sums = 0

    def whole(self) -> Node:
        node = self._either()
        if self._next.word in _SPELLED:
            raise self._error("comparisons cannot be chained: write a < b and b < c")
        if self._next.kind != "end":
            raise self._error("expected 'and', 'or', a comparison, or the end")
        return node

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _error(self, why: str) -> ConfigError:
        return _fault(self._text, self._next.at, why)

    def _is(self, *texts: str) -> bool:
        return self._next.word in texts

    def _took(self, *texts: str) -> str:
        """Consume and return the next token if it is one of these; otherwise return ""."""
        word = self._next.word
        if word not in texts:
            return ""
        self._at += 1
        return word

    def _took_any(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _need(self, text: str, why: str) -> None:
        if not self._took(text):
            raise self._error(why)

    def _counted(self, node: Node) -> Node:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise self._error(f"the condition has more than {NODES_MAX} parts")
        return node

    def _operation(self, operator: str, *operands: Node) -> Node:
        return self._counted(Operation(operator, operands))

    @contextlib.contextmanager
    def _nested(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(
                f"parentheses, 'not' and length() are nested more than {DEPTH_MAX} deep"
            )
        yield
        self._depth -= 1

    def _either(self) -> Node:
        with self._nested():
            return self._joined("or", lambda: self._joined("and", self._negated))

    def _joined(self, word: str, part: Callable[[], Node]) -> Node:
        parts = [part()]
        while self._took(word):
            parts.append(part())
        if len(parts) == 1:
            return parts[0]
        flat: list[Node] = []
        for node in parts:
            is_same = isinstance(node, Operation) and node.operator == word
            flat += node.operands if isinstance(node, Operation) and is_same else (node,)
        return self._operation(word, *flat)

    def _negated(self) -> Node:
        if not self._took("not"):
            return self._tested()
        with self._nested():
            return self._opposite(self._negated())

    def _opposite(self, node: Node) -> Node:
        if isinstance(node, Operation) and node.operator == "not":
            return self._counted(node.operands[0])
        return self._operation("not", node)

    def _tested(self) -> Node:
        left = self._sum()
        if self._next.word in _SPELLED:
            relation = _SPELLED[self._took_any().word]
            if self._is("null", "none"):
                raise self._error("nothing equals null: write 'is null' or 'is not null'")
            return self._operation(relation, left, self._sum())
        test = self._took("is")
        is_negated = bool(self._took("not"))
        test = test or self._took("in", "like")
        if not test and is_negated:
            raise self._error("expected 'in' or 'like'")
        if not test:
            return left
        value = {"is": self._null, "in": self._values, "like": self._pattern}[test]()
        node = Operation(test, (left, Constant(value)))
        return self._opposite(node) if is_negated else self._counted(node)

    def _null(self) -> None:
        if not self._took("null", "none"):
            raise self._error("expected 'null' or 'not null'; compare values with ==")

    def _pattern(self) -> str:
        if self._next.kind != "text":
            raise self._error("expected a pattern in quotes, such as 'https://%'")
        return _unquoted(self._took_any().text)

    def _values(self) -> tuple[Scalar, ...]:
        self._need("(", "expected a list in parentheses, such as ('en', 'de')")
        values: list[Scalar] = []
        while not self._took(")"):
            if values:
                self._need(",", "expected ',' or ')'")
                if self._took(")"):
                    break
            node = self._counted(self._signed())
            if not isinstance(node, Constant) or not isinstance(node.value, Scalar):
                raise self._error("a list after 'in' may contain numbers, texts, true and false")
            values.append(node.value)
        if not values:
            raise self._error("the list has no values")
        if len({type(value) if isinstance(value, bool | str) else float for value in values}) > 1:
            raise self._error("the values of a list have one kind: numbers, texts, or true, false")
        return tuple(sorted(set(values)))

    def _sum(self) -> Node:
        return self._computed("+-", lambda: self._computed("*/%", self._signed))

    def _computed(self, operators: str, operand: Callable[[], Node]) -> Node:
        node = operand()
        while operator := self._took(*operators):
            node = self._arithmetic(operator, node, operand())
        return node

    def _arithmetic(self, operator: str, left: Node, right: Node) -> Node:
        self._sums += 1
        if self._sums > SUMS_MAX:
            raise self._error(f"the condition has more than {SUMS_MAX} operations + - * / %")
        return self._operation(operator, left, right)

    def _signed(self) -> Node:
        is_negative = False
        while sign := self._took("-", "+"):
            is_negative ^= sign == "-"
        node = self._value()
        if not is_negative:
            return node
        value = node.value if isinstance(node, Constant) else None
        if isinstance(value, Decimal):
            return Constant(value.copy_negate())  # unary minus would round it to 28 digits
        if isinstance(value, int | float) and not isinstance(value, bool):
            return Constant(-value)
        return self._arithmetic("-", Constant(0), node)

    def _value(self) -> Node:
        token = self._next
        if self._took("("):
            node = self._either()
            self._need(")", "expected ')'")
            return node
        if self._is("true", "false"):
            return Constant(self._took_any().word == "true")
        if token.kind == "number":
            number = self._number(token)
            self._at += 1
            return Constant(number)
        if token.kind == "text":
            return Constant(_unquoted(self._took_any().text))
        if token.kind == "quoted" or (token.kind == "word" and token.word not in _WORDS):
            return self._name()
        raise self._error(f"expected a column or a value, as in {_EXAMPLE}")

    def _number(self, token: _Token) -> int | float | Decimal:
        """Parse a whole number, or the float that the text denotes, or else the exact decimal."""
        written, nearest = Decimal(token.text), float(token.text)
        # Refuse very large and very small numbers: a short text could denote a fraction of a
        # billion digits.
        if nearest == float("inf"):
            raise self._error("this number is too large")
        if written and not nearest:
            raise self._error("this number is too small")
        if not token.text.isdigit() and Decimal(repr(nearest)) == written:
            return nearest
        if written != written.to_integral_value(context=_EXACT):
            return written.normalize(_EXACT)
        if written > _WHOLE_MAX:
            raise self._error("this number is too large")
        return int(written)

    def _name(self) -> Node:
        parts = [_part(self._took_any())]
        while self._took("."):
            if self._next.kind not in {"word", "quoted"}:
                raise self._error("expected the name of a field after '.'")
            parts.append(_part(self._took_any()))
        if not self._is("("):
            return self._counted(Name(tuple(parts)))
        function = ".".join(parts).lower()
        if function not in {"length", "len", "any", "all"}:
            raise self._error("the only functions are length(…), any(…) and all(…)")
        self._took("(")
        if function in {"any", "all"}:
            return self._of_lists(function)
        with self._nested():
            inner = self._sum()
        self._need(")", "expected ')'")
        return self._operation("length", inner)

    def _of_lists(self, word: str) -> Node:
        """Parse the rest of "any(x > 3 for x in tags)"."""
        test, expected = self._either(), f"expected the form {word}(x > 3 for x in tags)"
        self._need("for", expected)
        if self._next.kind != "word" or self._is(*_WORDS):
            raise self._error(expected)
        name = self._counted(Name((self._took_any().text,)))
        self._need("in", expected)
        of = self._value()
        self._need(")", expected)
        return self._operation(word, of, name, test)


def _tokens(text: str) -> Iterator[_Token]:
    at, kind = 0, ""
    while kind != "end":
        match = _TOKEN.match(text, at)
        if match is None:
            begin = len(text) - len(text[at:].lstrip())
            raise _fault(text, begin, _unreadable(text[begin:]))
        kind = str(match.lastgroup)
        word = match[kind].lower() if kind in {"word", "sign"} else ""
        yield _Token(kind, match[kind], match.start(kind), word)
        at = match.end()


def _part(token: _Token) -> str:
    return token.text[1:-1].replace("``", "`") if token.kind == "quoted" else token.text


def _unquoted(text: str) -> str:
    return text[1:-1].replace(text[0] * 2, text[0])


def _unreadable(rest: str) -> str:
    if rest[0] in "'\"`":
        return f"the quote {rest[0]} is not closed; write it twice to use it in the text"
    if rest[0].isdigit():
        return "this is not a number; write a column name that begins like this as `2nd`"
    if rest[:2] in {"&&", "||"} or rest[0] in "&|!~":
        return "write 'and', 'or' and 'not'"
    return "this character is not allowed here; write a column name that contains it as `a/b`"


def _fault(text: str, at: int, why: str) -> ConfigError:
    shown = text[at : at + _SHOWN]
    place = f"character {at + 1} ({shown!r})" if shown else "the end"
    return ConfigError(f"where={text[:200]!r}: at {place}: {why}", field="where")
