"""C files have no cycles and a header per concern, and Python calls functions as declared."""

from __future__ import annotations

import ctypes
import graphlib
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from dataplane.base import compiled
from dataplane.base.build_kernels import LIBRARIES, Library
from dataplane.formats import parquet_footers
from dataplane.plan import loops
from dataplane.store import receiving
from dataplane.transforms import pixels_library
from dataplane.transforms.steps.registry import STEPS
from dataplane.worker import kernel

ROOT = Path(__file__).resolve().parents[1]
C_FILES = sorted(
    path for folder in ("dataplane", "loaders") for path in (ROOT / folder).rglob("*.[ch]")
)
INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# A function at the beginning of a line: whether it is static, what it gives, its name, its arguments,
# and whether a body follows.
FUNCTION = re.compile(
    r"^(static |INLINE |EXPORT )?((?:const )?(?:(?:struct|enum) )?\w+ \**)(\w+)\(([^;{}]*?)\)\s*([;{])",
    re.MULTILINE | re.DOTALL,
)
TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "void": None,
}
POINTERS = {ctypes.c_void_p, ctypes.c_char_p}
SIGNATURES: Mapping[str, Mapping[str, compiled.Signature]] = {
    "libkernel.so": kernel._SIGNATURES,
    "libloops.so": loops._SIGNATURES,
    "libparquet_facts.so": parquet_footers._SIGNATURES,
    "libpixels.so": pixels_library._SIGNATURES,
    "libreceive.so": receiving._SIGNATURES,
}


def included(path: Path) -> list[Path]:
    return [(path.parent / name).resolve() for name in INCLUDED.findall(path.read_text())]


def functions(path: Path, ending: str, kind: str = "") -> dict[str, tuple[str, str]]:
    """What each function gives and takes that other files can call: those that are declared (;), or
    defined ({); those for Python alone if the kind is EXPORT.
    """
    found = FUNCTION.findall(COMMENT.sub("", path.read_text()))
    return {
        name: (gives.strip(), takes)
        for how, gives, name, takes, end in found
        if end == ending and how not in {"static ", "INLINE "} and kind in how
        if gives.strip() != "else"
    }


def arguments(takes: str) -> list[str]:
    return [] if takes == "void" else [re.sub(r"\s+", " ", one).strip() for one in takes.split(",")]


def test_all_c_is_part_of_a_library() -> None:
    built = {path for library in LIBRARIES for path in library.sources_in(ROOT)}
    assert built == set(C_FILES)
    for library in LIBRARIES:
        assert library.sources_in(ROOT) == compiled.sources_of(ROOT / library.sources)


def test_files_include_each_other_in_one_direction() -> None:
    """A header and the C file of its name are one: to need the one is to need the other."""
    needs = {path.with_suffix(""): set[Path]() for path in C_FILES}
    for path in C_FILES:
        missing = [one for one in included(path) if one not in C_FILES]
        assert not missing, f"{path} includes {missing}"
        needs[path.with_suffix("")] |= {one.with_suffix("") for one in included(path)}
    for path, others in needs.items():
        others.discard(path)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as fault:
        names = " -> ".join(path.name for path in fault.args[1])
        pytest.fail(f"a cycle of C files: {names}", pytrace=False)


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: path.name)
def test_a_header_declares_the_functions_of_one_file(path: Path) -> None:
    """And all of them that are not static."""
    header, source = path.with_suffix(".h"), path.with_suffix(".c")
    if path.parent.name == "steps":
        # change.h declares it.
        header = next(one for one in included(path) if one.name == "change.h")
        (name,) = re.findall(r"^CHANGE\((\w+)\)$", path.read_text(), re.MULTILINE)
        assert name in {kind.name for kind in STEPS if kind.in_c}
    assert path == header or header in included(path), f"{path.name} does not include its header"
    declared = functions(header, ";")
    defined = functions(source, "{") if source.exists() else {}
    assert declared.keys() == defined.keys()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.path.name)
def test_python_calls_functions_as_they_are_declared(library: Library) -> None:
    headers = [path for path in library.sources_in(ROOT) if path.suffix == ".h"]
    declared = {
        name: told for path in headers for name, told in functions(path, ";", "EXPORT ").items()
    }
    signatures = SIGNATURES[library.path.name]
    assert {name for name in declared if not name.endswith("_source_crc")} == signatures.keys()
    for name, (gives, takes) in signatures.items():
        result, given = declared[name]
        assert gives == TYPES[result], name
        assert len(takes) == len(arguments(given)), name
        for kind, argument in zip(takes, arguments(given), strict=True):
            if "*" in argument:
                assert kind in POINTERS, f"{name}: {argument}"
            else:
                assert kind == TYPES[argument.split()[0]], f"{name}: {argument}"
