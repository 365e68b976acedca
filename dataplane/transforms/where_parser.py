"""Parse the text of a condition into its syntax tree. Nothing is evaluated, and never as Python.

Pure: a trainer links it.
"""

from __future__ import annotations

import contextlib
import decimal
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Final

from msgspec import Struct

from dataplane.errors import ConfigError
from dataplane.transforms.where import (
    WORDS,
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

TEXT_MAX = 32 << 10
DEPTH_MAX = 40
NODES_MAX = 4000
SUMS_MAX = 64
"""Operators + - * / and % in a condition, since each may lie inside of another."""
_SHOWN = 24
_WHOLE_MAX = 10**76 - 1  # as many digits as a decimal has
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXACT = decimal.Context(prec=TEXT_MAX)
_EXAMPLE = "lang == 'en' and score > 0.5"
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
_RELATIONS: Final = {**{one.value: one for one in Relation}, "=": Relation.EQ, "<>": Relation.NE}


class _Token(Struct, frozen=True):
    kind: str
    text: str
    at: int


def parse(text: str) -> Node:
    """Return the syntax tree of a condition.

    Raises:  ConfigError: the text is not a condition; names the place and what may stand there.
    """
    if len(text) > TEXT_MAX:
        raise ConfigError(
            f"where= has {len(text)} characters, and {TEXT_MAX} are allowed: make a column of what "
            "it decides",
            field="where",
        )
    if half := _SURROGATE.search(text):
        raise _fault(text, half.start(), "this is half of a character: decode the text as UTF-8")
    return _Parser(text).whole()


def canonical_where(given: object) -> str:
    """The canonical text of a loader's argument where=; "" for None.

    Raises:  ConfigError: it is not a condition.
    """
    if given is None:
        return ""
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(
            f'where={given!r:.80}: pass a condition as text, such as where="{_EXAMPLE}"',
            field="where",
        )
    return canonical_text(parse(given))


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._scanned()
        self._at = self._depth = self._nodes = self._sums = 0

    def whole(self) -> Node:
        found = self._either()
        if self._next.kind != "end":
            if self._next.text in _RELATIONS:
                raise self._error("comparisons cannot be chained: write a < b and b < c")
            raise self._error("expected 'and', 'or', a comparison, or the end")
        return found

    def _scanned(self) -> Sequence[_Token]:
        tokens: list[_Token] = []
        at = 0
        while not tokens or tokens[-1].kind != "end":
            found = _TOKEN.match(self._text, at)
            if found is None:
                begin = len(self._text) - len(self._text[at:].lstrip())
                raise _fault(self._text, begin, _unreadable(self._text[begin:]))
            kind = str(found.lastgroup)
            tokens.append(_Token(kind, found[kind], found.start(kind)))
            at = found.end()
        return tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _error(self, why: str) -> ConfigError:
        return _fault(self._text, self._next.at, why)

    def _is(self, *texts: str) -> bool:
        one = self._next
        return (one.kind == "word" and one.text.lower() in texts) or (
            one.kind == "sign" and one.text in texts
        )

    def _took(self, *texts: str) -> str:
        """Consume and return the next token if it is one of these; else return ""."""
        if not self._is(*texts):
            return ""
        self._at += 1
        return self._tokens[self._at - 1].text.lower()

    def _need(self, text: str, why: str) -> None:
        if not self._took(text):
            raise self._error(why)

    def _counted(self, node: Node) -> Node:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise self._error(f"the condition has more than {NODES_MAX} parts")
        return node

    def _either(self) -> Node:
        with self._nested():
            return self._joined("or", lambda: self._joined("and", self._negated))

    @contextlib.contextmanager
    def _nested(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(
                f"parentheses, 'not' and length() are nested more than {DEPTH_MAX} deep"
            )
        yield
        self._depth -= 1

    def _joined(self, word: str, part: Callable[[], Node]) -> Node:
        parts: list[Node] = [part()]
        while self._took(word):
            parts.append(part())
        if len(parts) == 1:
            return parts[0]
        flat = [
            one
            for each in parts
            for one in (
                each.parts if isinstance(each, Junction) and each.operator == word else (each,)
            )
        ]
        return self._counted(Junction(word, tuple(flat)))

    def _negated(self) -> Node:
        if not self._took("not"):
            return self._tested()
        with self._nested():
            inner = _inverse(self._negated())
        return self._counted(inner)

    def _tested(self) -> Node:
        left = self._sum()
        if relation := self._took(*_RELATIONS):
            if self._is("null", "none"):
                raise self._error("nothing equals null: write 'is null' or 'is not null'")
            return self._counted(Compared(_RELATIONS[relation], left, self._sum()))
        if self._took("is"):
            negated = self._took("not")
            if not self._took("null", "none"):
                raise self._error("expected 'null' or 'not null'; compare values with ==")
            return self._maybe(NullTest(left), negated)
        negated = self._took("not")
        if self._took("in"):
            return self._maybe(Membership(left, self._values()), negated)
        if self._took("like"):
            return self._maybe(Matching(left, self._pattern()), negated)
        if negated:
            raise self._error("expected 'in' or 'like'")
        return left

    def _maybe(self, test: Node, negated: str) -> Node:
        return self._counted(Negation(test) if negated else test)

    def _values(self) -> tuple[Scalar, ...]:
        self._need("(", "expected a list in parentheses, such as ('en', 'de')")
        values: list[Scalar] = []
        while not self._took(")"):
            if values:
                self._need(",", "expected ',' or ')'")
                if self._took(")"):
                    break
            found = self._signed()
            if not isinstance(found, Constant):
                raise self._error("a list after 'in' has only numbers, texts, true and false")
            self._counted(found)
            values.append(found.value)
        if not values:
            raise self._error("the list has no values")
        kinds = {bool if isinstance(one, bool) else str if isinstance(one, str) else float
                 for one in values}  # fmt: skip
        if len(kinds) > 1:
            raise self._error("the values of a list have one kind: numbers, texts, or true, false")
        return tuple(sorted(set(values)))

    def _pattern(self) -> str:
        if self._next.kind != "text":
            raise self._error("expected a pattern in quotes, such as 'https://%'")
        self._at += 1
        return _unquoted(self._tokens[self._at - 1].text)

    def _sum(self) -> Node:
        found = self._product()
        while operator := self._took("+", "-"):
            found = self._computed(operator, found, self._product())
        return found

    def _product(self) -> Node:
        found = self._signed()
        while operator := self._took("*", "/", "%"):
            found = self._computed(operator, found, self._signed())
        return found

    def _computed(self, operator: str, left: Node, right: Node) -> Node:
        self._sums += 1
        if self._sums > SUMS_MAX:
            raise self._error(f"the condition has more than {SUMS_MAX} operations + - * / %")
        return self._counted(Arithmetic(operator, left, right))

    def _signed(self) -> Node:
        is_negative = False
        while sign := self._took("-", "+"):
            is_negative ^= sign == "-"
        found = self._value()
        if not is_negative:
            return found
        if isinstance(found, Constant) and not isinstance(found.value, bool | str):
            value = found.value
            # "-" would round a Decimal to 28 digits.
            return Constant(value.copy_negate() if isinstance(value, Decimal) else -value)
        return self._computed("-", Constant(0), found)

    def _value(self) -> Node:
        token, place = self._next, self._at
        self._at += 1
        match token.kind, token.text.lower():
            case "sign", "(":
                found = self._either()
                self._need(")", "expected ')'")
                return found
            case "number", text:
                return Constant(self._number(text))
            case "text", _:
                return Constant(_unquoted(token.text))
            case "word", ("true" | "false") as text:
                return Constant(text == "true")
            case "quoted", _:
                return self._name()
            case "word", text if text not in WORDS:
                return self._name()
        self._at = place
        raise self._error(f"expected a column or a value, as in {_EXAMPLE}")

    def _number(self, text: str) -> int | float | Decimal:
        """Parse a whole number, the float that `text` stands for, or else the exact decimal."""
        written, nearest = Decimal(text), float(text)
        # Without limits, a short text would be a fraction of a billion digits.
        if nearest == float("inf"):
            raise self._error("this number is too large")
        if written and not nearest:
            raise self._error("this number is too small")
        if not text.isdigit() and Decimal(repr(nearest)) == written:
            return nearest
        if written != written.to_integral_value(context=_EXACT):
            return written.normalize(_EXACT)
        if written > _WHOLE_MAX:
            raise self._error("this number is too large")
        return int(written)

    def _name(self) -> Node:
        parts = [_part(self._tokens[self._at - 1])]
        while self._took("."):
            if self._next.kind not in {"word", "quoted"}:
                raise self._error("expected the name of a field after '.'")
            parts.append(_part(self._next))
            self._at += 1
        if not self._is("("):
            return self._counted(Name(tuple(parts)))
        if [part.lower() for part in parts] != ["length"]:
            raise self._error("there are no functions but length(…)")
        self._at += 1
        with self._nested():
            inner = self._sum()
        self._need(")", "expected ')'")
        return self._counted(Length(inner))


def _inverse(node: Node) -> Node:
    return node.of if isinstance(node, Negation) else Negation(node)


def _part(token: _Token) -> str:
    return token.text[1:-1].replace("``", "`") if token.kind == "quoted" else token.text


def _unquoted(text: str) -> str:
    return text[1:-1].replace(text[0] * 2, text[0])


def _unreadable(rest: str) -> str:
    if rest[0] in "'\"`":
        return f"the quote {rest[0]} is not closed; inside of it, it is written twice"
    if rest[0].isdigit():
        return "this is not a number; a column whose name begins so stands in backquotes: `2nd`"
    if rest[:2] in {"&&", "||"} or rest[0] in "&|!~":
        return "write 'and', 'or' and 'not'"
    return "this character cannot stand here; a column with it stands in backquotes: `a/b`"


def _fault(text: str, at: int, why: str) -> ConfigError:
    shown = text[at : at + _SHOWN]
    place = f"character {at + 1} ({shown!r})" if shown else "the end"
    return ConfigError(f"where={text[:200]!r}: at {place}: {why}", field="where")
