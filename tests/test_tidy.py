"""The house rules that no linter checks: sizes, names, and forbidden constructs."""

from __future__ import annotations

import ast
import functools
import gc
import json
import re
import subprocess
import sys
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
STUB = re.compile(UNFINISHED.pattern + r"|\bNotImplemented" + r"Error\b")
MACHINE_PATH = re.compile("|".join(rf"(?<![\w.-])/{top}/" for top in ("work", "root", "home")))

# A docstring names its subject: these words begin with a pronoun or a fragment instead.
FRAGMENT = re.compile(r"(That|Those|It|What|As|Of)\b")
NAMES_OF_NOTHING = frozenset({"found", "one", "told", "each", "asked"})
VAGUE_FUNCTIONS = frozenset({"tell", "look", "ask"})
CRUMB_LINES_MAX = 80
# Offences that are left, by rule and folder. A number may only fall: lower it when you can.
LEFT = {
    "docstrings": {"dataplane": 0, "loaders": 0, "benchmarks": 0, "tests": 62},
    "names": {"dataplane": 456, "loaders": 23, "benchmarks": 0, "tests": 2085},
    "functions": {"dataplane": 38, "loaders": 0, "benchmarks": 0, "tests": 41},
    "crumbs": {"dataplane": 3, "loaders": 3},
}

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
    """Offences by rule, found in one pass: the trees of all modules fill a gigabyte.

    Trees have no cycles: without looks for garbage, they are made in a quarter of the time. A
    third of all nodes are names that are read, and rules are for names that are given.
    """
    offences: dict[Rule, list[Offence]] = defaultdict(list)
    gc.disable()
    for path in sources(*PRODUCT, "tests"):
        for node in nodes_of(ast.parse(path.read_text(), str(path))):
            if type(node) is ast.Name and type(node.ctx) is ast.Load:
                continue
            for kept in _rules.get(type(node), ()):
                offences[kept].extend(kept(path, node))
    gc.enable()
    return offences


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that have fields, as ast.walk gives them, in half its time."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                if value._fields:
                    waiting.append(value)
            elif isinstance(value, list):
                waiting += [child for child in value if isinstance(child, ast.AST)]


def expect_kept(one: Rule) -> None:
    expect_none(iter(_broken().get(one, ())))


def expect_no_more(rule_name: str, offences: Iterator[Offence]) -> None:
    """Compare the offences of each folder with the number in `LEFT`, and list those beyond it."""
    of_folder: dict[str, list[Offence]] = defaultdict(list)
    for offence in offences:
        of_folder[offence.split("/", maxsplit=1)[0]].append(offence)
    for folder, most in LEFT[rule_name].items():
        offences_here = of_folder.pop(folder, [])
        if len(offences_here) > most:
            listed = "\n".join(offences_here)
            pytest.fail(f"{len(offences_here)}, more than {most}:\n{listed}", pytrace=False)
    expect_none(offence for others in of_folder.values() for offence in others)


@functools.cache
def top_folder(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def at(path: Path, line: int, what: str) -> Offence:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def expect_none(offences: Iterator[Offence]) -> None:
    found = list(offences)
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@functools.cache
def words(name: str) -> frozenset[str]:
    """The words of a snake_case or CamelCase name, lower case and in the singular."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return frozenset(word.lower().removesuffix("s") for word in parts)


def names_defined(node: ast.AST) -> Iterator[str]:
    """The names that we choose ourselves; parameters of a pytest hook are pytest's choice."""
    if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Store):
        return
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


@rule(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
def docstrings_name_their_subject(path: Path, node: ast.AST) -> Iterator[Offence]:
    assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    text = ast.get_docstring(node) or ""
    if FRAGMENT.match(text):
        line = getattr(node, "lineno", 1)
        yield at(path, line, f"a docstring names its subject: {text.splitlines()[0]!r}")


def test_docstrings_name_their_subject() -> None:
    expect_no_more("docstrings", iter(_broken().get(docstrings_name_their_subject, ())))


@rule(ast.FunctionDef, ast.AsyncFunctionDef, ast.Name, ast.Attribute)
def variables_say_what_they_hold(path: Path, node: ast.AST) -> Iterator[Offence]:
    defines_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name in names_defined(node):
        is_function = defines_function and name == getattr(node, "name", None)
        if name in NAMES_OF_NOTHING and not is_function:
            yield at(path, getattr(node, "lineno", 1), f"{name!r} does not say what it holds")


def test_variables_say_what_they_hold() -> None:
    expect_no_more("names", iter(_broken().get(variables_say_what_they_hold, ())))


@rule(ast.FunctionDef, ast.AsyncFunctionDef)
def functions_say_what_they_do(path: Path, node: ast.AST) -> Iterator[Offence]:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if node.name.strip("_") in VAGUE_FUNCTIONS:
        yield at(path, node.lineno, f"{node.name!r}: is it send, tick, request or report?")


def test_functions_say_what_they_do() -> None:
    expect_no_more("functions", iter(_broken().get(functions_say_what_they_do, ())))


@rule(ast.Import, ast.ImportFrom)
def product_modules_that_import(path: Path, node: ast.AST) -> Iterator[str]:
    """No offences: each line has a product module and what it imports."""
    if top_folder(path) in {"dataplane", "loaders"}:
        yield from (f"{_dotted(path)} {name}" for name in imported(node))


def _dotted(path: Path) -> str:
    base = ROOT / "loaders" if top_folder(path) == "loaders" else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def _importers() -> dict[str, set[str]]:
    """The product modules that import each product module, by dotted names."""
    importers: dict[str, set[str]] = {
        _dotted(path): set() for path in sources("dataplane", "loaders")
    }
    for line in _broken()[product_modules_that_import]:
        importer, member = line.split()
        module = member if member in importers else member.rpartition(".")[0]
        importers.get(module, set()).add(importer)
    return importers


def test_small_modules_have_several_importers() -> None:
    """A module of less than 80 lines with one importer belongs into that importer."""

    def offences() -> Iterator[Offence]:
        for name, importers in sorted(_importers().items()):
            top = ROOT if name.startswith("dataplane.") else ROOT / "loaders"
            path = top.joinpath(*name.split(".")).with_suffix(".py")
            # Commands and image steps have a file each, which a list of them imports.
            is_listed = importers <= {"dataplane.cli", "dataplane.transforms.steps.registry"}
            if len(importers) == 1 and path.exists() and not is_listed:
                count = len(path.read_text().splitlines())
                if count < CRUMB_LINES_MAX:
                    yield at(path, 1, f"{count} lines, imported by {min(importers)} alone")

    expect_no_more("crumbs", offences())


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


@rule(ast.Call)
def msgspec_reads_complete_types(path: Path, node: ast.AST) -> Iterator[Offence]:
    assert isinstance(node, ast.Call)
    if top_folder(path) not in ("dataplane", "loaders") or path.name == "typed.py":
        return
    name = ast.unparse(node.func)
    reads = re.fullmatch(r"msgspec\.(convert|\w+\.(decode|Decoder))", name)
    if reads and "complete(" not in ast.unparse(node):
        yield at(path, node.lineno, f"{name} of a type that is not typed.complete")


def test_msgspec_reads_complete_types() -> None:
    expect_kept(msgspec_reads_complete_types)


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


def test_nothing_is_unfinished() -> None:
    def offences() -> Iterator[Offence]:
        for path in text_files():
            unfinished = STUB if path.suffix == ".py" else UNFINISHED
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if unfinished.search(line):
                    yield at(path, number, f"unfinished: {line.strip()}")

    expect_none(offences())


def test_no_path_of_anyones_machine_is_written_down() -> None:
    expect_none(
        at(path, number, f"a path of one machine: {line.strip()}")
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    )


def test_the_reference_says_what_the_code_says():
    """If not, run `python docs/build.py` and commit the pages."""
    docs = ROOT / "docs"
    pages = [*docs.glob("reference/*.md"), docs / "migrate" / "names.md"]
    written = {page.relative_to(docs).as_posix(): page.read_text() for page in pages}
    # In a process of its own: what other tests have imported or set must not change a page.
    code = "import json, runpy; print(json.dumps(runpy.run_path('docs/build.py')['reference']()))"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    assert written == json.loads(made.stdout)
