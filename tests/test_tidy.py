"""The house rules that no linter checks: sizes, names, and forbidden constructs."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("dataplane", "loaders", "benchmarks")
GENERATED = ROOT / "dataplane" / "rpc" / "v1"
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
LINE_LENGTH_MAX = 100
UNUSED_WORDS = frozenset(
    {"chunk", "item", "manager", "handler", "util", "helper", "common", "misc"}
)
PRINTING_ALLOWED = ("dataplane/cli.py", "dataplane/commands/", "benchmarks/")
PICKLES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve"})
TEXT_FILES = (".py", ".md", ".toml", ".proto", ".yaml", ".yml", ".cfg", ".sh", ".lock")
# Written in pieces, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
MACHINE_PATH = re.compile("|".join(rf"(?<![\w.-])/{top}/" for top in ("work", "root", "home")))

PRAGMA = re.compile(r"\s*# (noqa|type: ignore|fmt:).*$")

Offence = str
Rule = Callable[[Path, ast.AST], Iterator[Offence]]
_rules: dict[type[ast.AST], list[Rule]] = defaultdict(list)


def sources(*tops: str) -> Iterator[Path]:
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            if GENERATED not in path.parents:
                yield path


def text_files() -> Iterator[Path]:
    yield from (path for path in sorted(ROOT.iterdir()) if path.suffix in TEXT_FILES)
    yield from (ROOT / "Makefile", ROOT / ".ci" / "run")
    for top in (*PRODUCT, "proto", "tests", "docs", "deploy"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and (path.suffix in TEXT_FILES or path.name == "Dockerfile"):
                yield path


def rule(*kinds: type[ast.AST]) -> Callable[[Rule], Rule]:
    """A rule for every node of these kinds, in all modules."""

    def add(one: Rule) -> Rule:
        for kind in kinds:
            _rules[kind].append(one)
        return one

    return add


@functools.cache
def _broken() -> dict[Rule, list[Offence]]:
    """What breaks each rule, found in one pass: the trees of all modules fill a gigabyte."""
    found: dict[Rule, list[Offence]] = defaultdict(list)
    for path in sources(*PRODUCT, "tests"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            for one in _rules.get(type(node), ()):
                found[one].extend(one(path, node))
    return found


def expect_kept(one: Rule) -> None:
    expect_none(iter(_broken().get(one, ())))


def top_folder(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def at(path: Path, line: int, what: str) -> Offence:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def expect_none(offences: Iterator[Offence]) -> None:
    found = list(offences)
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def words(name: str) -> Iterator[str]:
    """The words of a snake_case or CamelCase name, lower case and in the singular."""
    for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name):
        yield word.lower().removesuffix("s")


def names_defined(node: ast.AST) -> Iterator[str]:
    """The names that we choose ourselves; parameters of a pytest hook are pytest's choice."""
    match node:
        case ast.ClassDef(name=name):
            yield name
        case ast.FunctionDef(name=name, args=args) | ast.AsyncFunctionDef(name=name, args=args):
            yield name
            if not name.startswith("pytest_"):
                every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
                yield from (one.arg for one in every if one is not None)
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
            yield name
        case ast.alias(asname=str(name)):
            yield name
        case _:
            pass


def imported(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from (f"{module}.{alias.name}" for alias in names)
        case _:
            pass


def test_modules_are_short() -> None:
    def offences() -> Iterator[Offence]:
        for path in sources(*PRODUCT, "tests"):
            count = len(path.read_text().splitlines())
            if count > MODULE_LINES_MAX:
                yield at(path, count, f"{count} lines; a module has at most {MODULE_LINES_MAX}")

    expect_none(offences())


@rule(ast.FunctionDef, ast.AsyncFunctionDef)
def functions_are_short(path: Path, node: ast.AST) -> Iterator[Offence]:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    count = (node.end_lineno or node.lineno) - node.lineno + 1
    if count > FUNCTION_LINES_MAX:
        yield at(path, node.lineno, f"{node.name} has {count} lines, not 60 at most")


def test_functions_are_short() -> None:
    expect_kept(functions_are_short)


def test_lines_are_short() -> None:
    def offences() -> Iterator[Offence]:
        for path in sources(*PRODUCT):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                # As ruff counts: what speaks to a tool is no part of it, and a URL is not broken.
                length = len(PRAGMA.sub("", line))
                if length > LINE_LENGTH_MAX and "://" not in line:
                    yield at(path, number, f"{length} characters, not {LINE_LENGTH_MAX} at most")

    expect_none(offences())


@rule(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Name, ast.Attribute, ast.alias)
def names_say_something(path: Path, node: ast.AST) -> Iterator[Offence]:
    for name in names_defined(node):
        line = getattr(node, "lineno", 1)
        for word in UNUSED_WORDS.intersection(words(name)):
            yield at(path, line, f"{name!r} has the word {word!r}")
        # In tests it is hypothesis' own word for what it draws.
        if name == "data" and top_folder(path) != "tests":
            yield at(path, line, "'data' alone says nothing")


def test_names_are_made_of_words_that_say_something() -> None:
    for path in sources(*PRODUCT, "tests"):
        assert not UNUSED_WORDS.intersection(words(path.stem)), path
    expect_kept(names_say_something)


@rule(ast.ExceptHandler)
def no_except_is_bare(path: Path, node: ast.AST) -> Iterator[Offence]:
    assert isinstance(node, ast.ExceptHandler)
    if node.type is None:
        yield at(path, node.lineno, "a bare except also catches Ctrl-C; name the error")


def test_no_except_is_bare() -> None:
    expect_kept(no_except_is_bare)


@rule(ast.Call)
def only_commands_print(path: Path, node: ast.AST) -> Iterator[Offence]:
    match node:
        case ast.Call(func=ast.Name(id="print"), lineno=line):
            if not str(path.relative_to(ROOT)).startswith(PRINTING_ALLOWED):
                yield at(path, line, "print() belongs to the command line; log, or raise")


def test_only_the_command_line_and_benchmarks_print() -> None:
    expect_kept(only_commands_print)


@rule(ast.Import, ast.ImportFrom, ast.Attribute)
def no_test_sleeps(path: Path, node: ast.AST) -> Iterator[Offence]:
    if top_folder(path) == "tests":
        sleep = isinstance(node, ast.Attribute) and node.attr == "sleep"
        if "time.sleep" in imported(node) or (sleep and ast.unparse(node) == "time.sleep"):
            yield at(path, getattr(node, "lineno", 1), "tests wait for events, not for time")


def test_tests_do_not_sleep() -> None:
    expect_kept(no_test_sleeps)


@rule(ast.Import, ast.ImportFrom)
def no_pickle_outside_the_embedded_torch_path(path: Path, node: ast.AST) -> Iterator[Offence]:
    if top_folder(path) in ("dataplane", "benchmarks"):
        for name in imported(node):
            if name.split(".", maxsplit=1)[0] in PICKLES:
                line = getattr(node, "lineno", 1)
                yield at(path, line, f"{name} is code on a wire (invariant 7)")


def test_no_pickle_outside_the_embedded_torch_path() -> None:
    expect_kept(no_pickle_outside_the_embedded_torch_path)


@rule(ast.Name)
def no_stub_is_left(path: Path, node: ast.AST) -> Iterator[Offence]:
    assert isinstance(node, ast.Name)
    if node.id == "NotImplementedError":
        yield at(path, node.lineno, "a stub: write it, or leave it out")


def test_nothing_is_unfinished() -> None:
    def offences() -> Iterator[Offence]:
        for path in text_files():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if UNFINISHED.search(line):
                    yield at(path, number, f"unfinished: {line.strip()}")

    expect_none(offences())
    expect_kept(no_stub_is_left)


def test_no_path_of_anyones_machine_is_written_down() -> None:
    expect_none(
        at(path, number, f"a path of one machine: {line.strip()}")
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    )
