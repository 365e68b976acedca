"""The grammar of where=: one canonical text for each condition, and errors that name the place."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.transforms.options import view_of
from dataplane.transforms.where import (
    DEPTH_MAX,
    NODES_MAX,
    RELATIONS,
    SUMS_MAX,
    TEXT_MAX,
    Constant,
    Name,
    Node,
    Operation,
    canonical_text,
    canonical_where,
    parse,
)

NAMES = st.builds(
    lambda parts: Name(tuple(parts)),
    st.lists(st.sampled_from(["a", "Ünïcode", "and", "a b", "x.y", "`", "2nd"]), min_size=1),
)
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = NUMBERS | st.booleans() | st.text(max_size=5)
LISTS = st.one_of(*(st.sets(kind, min_size=1, max_size=3) for kind in (NUMBERS, st.text())))


def _operation(operators: list[str], *operands: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.builds(Operation, st.sampled_from(operators), st.tuples(*operands))


def _operands(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return _operation(list("+-*/%"), inner, inner) | _operation(["length"], inner)


OPERANDS = st.recursive(NAMES | st.builds(Constant, VALUES), _operands, max_leaves=6)
TESTS = st.one_of(
    NAMES,
    _operation(sorted(RELATIONS), OPERANDS, OPERANDS),
    _operation(["in"], OPERANDS, LISTS.map(lambda values: Constant(tuple(sorted(values))))),
    _operation(["like"], OPERANDS, st.builds(Constant, st.text(max_size=5))),
    _operation(["is"], OPERANDS, st.just(Constant(None))),
)


VALUE_NAMES = st.sampled_from([Name(("x",)), Name(("for",))])


def _joined(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return (
        _operation(["any", "all"], NAMES, VALUE_NAMES, inner)
        | _operation(["not"], inner.filter(lambda node: not _is(node, "not")))
        | st.builds(
            _junction, st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3)
        )
    )


def _is(node: Node, operator: str) -> bool:
    return isinstance(node, Operation) and node.operator == operator


def _junction(operator: str, parts: list[Node]) -> Node:
    flat: list[Node] = []
    for part in parts:
        flat += part.operands if isinstance(part, Operation) and _is(part, operator) else (part,)
    return Operation(operator, tuple(flat))


@given(st.recursive(TESTS, _joined, max_leaves=8))
def test_the_canonical_text_of_a_condition_parses_to_it(node: Node) -> None:
    text = canonical_text(node)
    assert parse(text) == node
    assert canonical_where(text) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("lang = 'en'", "lang == 'en'"),
        ('lang="it\'s"', "lang == 'it''s'"),
        ("a<>1 OR b IS NOT None", "a != 1 or b is not null"),
        ("((a)) and (b and (c))", "a and b and c"),
        ("not not a", "a"),
        ("not a in (3, 1, 1,)", "a not in (1, 3)"),
        ("not (a > 1)", "not a > 1"),
        ("(a or b) and c", "(a or b) and c"),
        ("a or (b and c)", "a or b and c"),
        ("-x*2 + 3 > 1 - (y - z)", "(0 - x) * 2 + 3 > 1 - (y - z)"),
        ("meta . `my key` is null", "meta.`my key` is null"),
        ("x >= -.5e3", "x >= -500.0"),
        ("x > 0.10 and y > 1e30", "x > 0.1 and y > 1e+30"),
        ("x == -0.100000000000000000010", "x == -0.10000000000000000001"),
        ("x in (9007199254740993.0, 2.0)", "x in (2.0, 9007199254740993)"),
        ("x > " + "1" * 40 + ".5e-300", "x > " + "1." + "1" * 39 + "5E-261"),
        ("length > 3 and Length (text) > length", "length > 3 and length(text) > length"),
        ("Any( x>3 for x in a.b ) and len(a)=1", "any(x > 3 for x in a.b) and length(a) == 1"),
        ("not all((x or y) for x in l)", "not all(x or y for x in l)"),
        ("`and` == TRUE", "`and` == true"),
    ],
)
def test_equal_conditions_have_one_text(text: str, canonical: str) -> None:
    assert canonical_where(text) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a <", "at the end: expected a column or a value"),
        ("a < b < c", r"character 7 \('< c'\): comparisons cannot be chained"),
        ("a == null", "write 'is null'"),
        ("lang == 'en", r"character 9 .*the quote ' is not closed"),
        ("a && b", r"character 3 .*write 'and', 'or' and 'not'"),
        ("5x > 1", "this is not a number"),
        ("__import__('os').system('x')", "the only functions are length"),
        ("lambda: 1", "not allowed here|expected"),
        ("a in ()", "no values"),
        ("a in (b)", "may contain numbers, texts"),
        ("a in (1, 'x')", "have one kind"),
        ("a b", r"character 3 \('b'\): expected 'and', 'or', a comparison, or the end"),
        ("a is 5", "expected 'null' or 'not null'"),
        ("a/b.c and /x", r"character 11 \('/x'\): expected a column"),
        ("a > 1e999", "too large"),
        ("a > " + "9" * 80, "too large"),
        ("a > 1e-999999999", "too small"),
        ("x like y", "pattern in quotes"),
        ("any(l > 3)", r"character 10 \('\)'\): expected the form any\(x > 3 for x in tags\)"),
        ("all(x > 3 for 'x' in l)", "expected the form all"),
        ("any(" * 3000 + "a", "nested more than"),
        ("length(" * 3000 + "a" + ")" * 3000 + " > 1", "nested more than"),
        ("lang == '\udc80'", r"character 10 .*half of a character"),
        ("(" * (DEPTH_MAX + 1) + "a" + ")" * (DEPTH_MAX + 1), "nested more than"),
        ("not " * (DEPTH_MAX + 1) + "a", "nested more than"),
        ("+".join("a" * (SUMS_MAX + 2)) + " > 1", "operations"),
        (" or ".join("a" * (NODES_MAX + 1)), "more than 4000 parts"),
        (" " * TEXT_MAX + "a", "characters"),
        ("", "pass a condition as text"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        canonical_where(text)
    assert told.value.nouns["field"] == "where"


@given(st.text("ab()'\"`.,<>=!+-*/%1 \nandornotisnull", max_size=30) | st.text(max_size=20))
def test_any_text_is_a_condition_or_a_told_mistake(text: str) -> None:
    try:
        found = canonical_where(text)
    except ConfigError:
        return
    assert canonical_where(found) == found


UNIT = 1 << 32


@pytest.mark.parametrize(
    ("given", "view"),
    [
        ({}, View()),
        ({"sample": 0.25}, View(sample=UNIT // 4)),
        ({"sample": 1}, View(sample=UNIT)),
        ({"split": ("train", 0.75)}, View(split_to=3 * UNIT // 4)),
        ({"split": ["validation", 0.25]}, View(split_from=3 * UNIT // 4, split_to=UNIT)),
        ({"split": ("mine", 0.25, 0.5)}, View(split_from=UNIT // 4, split_to=UNIT // 2)),
        ({"split": ("Test", 1)}, View(split_to=UNIT)),
        ({"limit": 7}, View(limit=7)),
    ],
)
def test_rows_are_chosen(given: dict[str, Any], view: View) -> None:
    assert view_of(**given) == view


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sample": 0}, "share of all rows"),
        ({"sample": 1.5}, "share of all rows"),
        ({"sample": "0.1"}, "share of all rows"),
        ({"sample": float("nan")}, "share of all rows"),
        ({"sample": True}, "share of all rows"),
        ({"sample": 1e-12}, "share of all rows"),
        ({"split": "train"}, "first 99 %"),
        ({"split": ("train",)}, "first 99 %"),
        ({"split": ("train", 0)}, "first 99 %"),
        ({"split": ("train", 0.5, 0.25)}, "first 99 %"),
        ({"split": ("train", 0.1, 1.01)}, "first 99 %"),
        ({"split": ("mine", 0.5)}, "which end"),
        ({"split": ("mine", 0.5, 0.5 + 1e-12)}, "no rows"),
        ({"limit": 0}, "number of rows"),
        ({"limit": 2.5}, "number of rows"),
        ({"limit": True}, "number of rows"),
    ],
)
def test_a_mistake_is_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        view_of(**given)
    assert told.value.nouns["field"] in given
