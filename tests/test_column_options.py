"""A column option is named only in its definition, its arguments, its use, and its user interfaces.

All other code passes `ColumnOptions` on as a whole: clients, messages, nodes, the coordinator,
workers and digests name none of its fields, so a new field touches none of them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.model.records import ColumnOptions, StackSpec
from dataplane.transforms.options import in_order

ROOT = Path(__file__).resolve().parents[1]
FIELDS = list(ColumnOptions.__struct_fields__)
DEFINITION, CHECKS = "dataplane/model/records.py", "dataplane/transforms/options.py"
OFFERS = "dataplane/commands/"
"""The flags of commands."""
# Names with other meanings, too: they count only where they mean options.
AMBIGUOUS = {"columns", "lists", "stack", "nulls", "codes", "dtype", "fill_null", "pad_value"}
MAKERS = {"ColumnOptions", "column_options"}


@functools.cache
def _modules() -> dict[str, frozenset[str]]:
    """Return the names in each module."""
    paths = [path for top in ("dataplane", "loaders") for path in (ROOT / top).rglob("*.py")]
    generated = ROOT / "dataplane" / "rpc" / "v1"
    return {
        str(path.relative_to(ROOT)): frozenset(_named(ast.parse(path.read_text())))
        for path in paths
        if generated not in path.parents
    }


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=func):
            return _last_name(func)
    return ""


def _named(tree: ast.Module) -> Iterator[str]:
    """Names of options that a module says."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="pc")):
                pass  # Arrow's own functions
            case ast.Attribute(value=value, attr=name):
                yield name if _last_name(value).endswith("options") else f"?{name}"
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                yield name if _last_name(value).endswith("options") else f"?{name}"
            case ast.Call(keywords=keywords, args=args):
                of_options = bool(args) and _last_name(args[0]).endswith("options")
                is_maker = of_options or _last_name(node) in MAKERS
                for keyword in keywords:
                    yield f"{keyword.arg}" if is_maker else f"?{keyword.arg}"
            case ast.ClassDef(name="ColumnOptions" | "ColumnArguments", body=body):
                yield from (one.target.id for one in body if isinstance(one, ast.AnnAssign))
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Constant(value=str(name)):
                yield f"?{name}"


def _naming(option: str) -> set[str]:
    """The modules that name an option; all user interfaces count as one."""
    names = {option} if option in AMBIGUOUS else {option, f"?{option}"}
    modules = {path for path, named in _modules().items() if not names.isdisjoint(named)}
    return {"offers" if path.startswith(OFFERS) else path for path in modules}


@pytest.mark.parametrize("option", FIELDS)
def test_an_option_is_named_in_four_places_at_most(option: str) -> None:
    found = _naming(option)
    assert {DEFINITION, CHECKS} <= found
    assert len(found) <= 4, sorted(found)
    used = found - {DEFINITION, CHECKS, "offers"}
    assert all(path.startswith("dataplane/transforms/") for path in used), sorted(found)


def test_equal_jobs_are_equal_in_whatever_order_things_are_named() -> None:
    said = ColumnOptions(
        columns=("b", "a"),
        fill_null=(("b", 1.0), ("a", 0.0)),
        stack=(StackSpec("y", ("d", "c")), StackSpec("x", ("f", "e"))),
        max_length=(("b", 1), ("a", 2)),
        codes=("b", "a"),
        dtype=(("b", "int64"), ("a", "float32")),
    )
    assert in_order(said) == ColumnOptions(
        columns=("b", "a"),
        fill_null=(("a", 0.0), ("b", 1.0)),
        stack=(StackSpec("x", ("f", "e")), StackSpec("y", ("d", "c"))),
        max_length=(("a", 2), ("b", 1)),
        codes=("a", "b"),
        dtype=(("a", "float32"), ("b", "int64")),
    )
    assert in_order(in_order(said)) == in_order(said)
