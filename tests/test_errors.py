"""Attributes of errors."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.model import errors
from dataplane.model.errors import DataplaneError, DataStallError

ROOT = Path(__file__).resolve().parents[1]
CLASSES = errors._tree(DataplaneError)


def known(cls: type[DataplaneError]) -> set[str]:
    return {noun for each in cls.__mro__ for noun in vars(each).get("known", ())}


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_a_noun_that_the_raiser_left_out_is_none(cls: type[DataplaneError]) -> None:
    bare = cls("it failed")
    assert known(cls)
    assert {getattr(bare, noun) for noun in known(cls)} == {None}
    for noun in sorted(known(cls)):
        assert getattr(cls("it failed", **{noun: "x"}), noun) == "x"
    assert not hasattr(bare, "no_such_noun")
    for same in (pickle.loads(pickle.dumps(bare)), copy.copy(bare)):
        assert (type(same), str(same), same.nouns) == (cls, "it failed", {})


def test_a_stall_that_names_no_shard_has_none() -> None:
    error = DataStallError("no batch within 3 s", stage="node")
    assert (error.stage, error.shard, error.node) == ("node", None, None)


def _raised() -> Iterator[tuple[str, str, str]]:
    """(class, noun, place) of each error that is made by name."""
    for path in [*(ROOT / "dataplane").rglob("*.py"), *(ROOT / "loaders").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                for keyword in node.keywords if name in CLASSES else ():
                    if keyword.arg is not None:
                        yield name, keyword.arg, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_class_knows_the_nouns_that_it_is_raised_with() -> None:
    unknown = [
        f"{place}: {name} is raised with {noun!r}, which it does not know"
        for name, noun, place in _raised()
        if noun not in known(CLASSES[name])
    ]
    assert not unknown, "\n".join(unknown)
