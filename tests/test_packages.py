"""pyproject.toml is right about other packages for the code that is checked in."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
DOORS = {
    contract["id"].removeprefix("door-"): contract["ignore_imports"]
    for contract in PROJECT["tool"]["importlinter"]["contracts"]
    if contract["id"].startswith("door-")
}
GENERATED = {
    "protobuf": r"Protobuf Python Version: ([\d.]+)",
}


@pytest.mark.parametrize("package", GENERATED)
def test_generated_code_runs_on_the_oldest_version_that_is_allowed(package):
    """It refuses to be imported by any version before the one that it was generated for."""
    (oldest,) = (
        Version(bound.version)
        for one in REQUIREMENTS
        if one.name == package
        for bound in one.specifier
        if bound.operator == ">="
    )
    files = (ROOT / "dataplane" / "rpc" / "v1").glob("*.py")
    needed = {
        Version(version)
        for file in files
        for version in re.findall(GENERATED[package], file.read_text())
    }
    assert needed
    assert max(needed).release[:2] <= oldest.release[:2]


@pytest.mark.parametrize("room", DOORS)
def test_a_room_names_the_modules_of_its_door(room):
    """The import contract allows others to import these, and no more."""
    page = (ROOT / "dataplane" / room / "__init__.py").read_text().split("The door:")[1]
    assert {*re.findall(r"`(\w+)`", page)} == {line.rsplit(".", 1)[1] for line in DOORS[room]}
