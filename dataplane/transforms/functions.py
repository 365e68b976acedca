"""Names of user functions that workers call, and the columns that a map makes.

Code is named ("package.module:function") and never sent: a worker imports it.
"""

from __future__ import annotations

import re
import sys
from typing import Final, Self

import msgspec
import pyarrow as pa
from msgspec import Struct

from dataplane.errors import ConfigError
from dataplane.model import ColumnSpec

GENERATOR: Final = "generator"
"""The parameter of a function that takes random numbers."""
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME_MAX = 400
_KEY = b"dataplane.mapped"
_MOVE = (
    "move it into a module that this script imports, at the top level of that module, and pass it "
    'or its name, such as "mypackage.text:tokenise"'
)


def function_name(given: object, argument: str) -> str:
    """The name of a function or class, as "package.module:function"; "" for None.

    Raises:  ConfigError: it is not one that a worker finds by its name; says what to do.
    """
    if given is None:
        return ""
    if isinstance(given, str):
        if len(given) > _NAME_MAX or not _NAME.fullmatch(given):
            raise ConfigError(
                f'{argument}={given!r:.80}: write it as "package.module:function"', field=argument
            )
        if given.partition(":")[0] == "__main__":
            raise _not_found(argument, given, "is part of the script itself")
        return given
    if not callable(given):
        raise ConfigError(
            f"{argument}={given!r:.80}: pass a function of a module, or its name as "
            '"package.module:function"',
            field=argument,
        )
    return _name_of(given, argument)


def _name_of(given: object, argument: str) -> str:
    module, path = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str):
        kind = type(given)
        raise ConfigError(
            f"{argument}: an object of {kind.__module__}.{kind.__qualname__} has no name by which "
            "a worker could find it: pass a function that calls it, or a class, which each worker "
            "instantiates once without arguments",
            field=argument,
        )
    if path.endswith("<lambda>"):
        raise _not_found(argument, "a lambda", "has no name")
    if "<locals>" in path:
        raise _not_found(argument, path.rpartition(".")[2], "is local to a function")
    if module == "__main__":
        raise _not_found(argument, path, "is part of the script itself")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is not given:
        what = "is a method of an object" if hasattr(given, "__self__") else "is another object"
        raise _not_found(argument, f"{module}:{path}", what)
    return f"{module}:{path}"


def _not_found(argument: str, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{argument}: {name} {why}, so workers, which are other processes, cannot import it: "
        f"{_MOVE}",
        field=argument,
    )


class _Facts(Struct, frozen=True):
    reads: tuple[str, ...]
    row_bytes: int
    takes_generator: bool
    code: str


class MappedColumns(Struct, frozen=True):
    """What a map makes of the columns of a dataset, as a worker found out over the first rows.

    `reads` are the stored columns that it takes, `row_bytes` what a row of its result takes, about.
    `code` is a hash of the file that defines it: blocks of other code are not mixed with these.
    """

    schema: pa.Schema
    reads: tuple[str, ...]
    row_bytes: int
    takes_generator: bool
    code: str = ""

    def to_bytes(self) -> bytes:
        """The encoding that `from_bytes` reads."""
        facts = msgspec.json.encode(
            _Facts(self.reads, self.row_bytes, self.takes_generator, self.code)
        )
        content: bytes = self.schema.serialize().to_pybytes()
        return facts + b"\n" + content

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """The inverse of `to_bytes`."""
        line, _, schema = content.partition(b"\n")
        facts = msgspec.json.decode(line, type=_Facts)
        found = pa.ipc.read_schema(pa.py_buffer(schema))
        return cls(found, facts.reads, facts.row_bytes, facts.takes_generator, facts.code)


class CollatedColumns(Struct, frozen=True):
    """What a collate function makes of batches, as a worker found out over the first one, and the
    bytes that it takes for each sample, about.
    """

    specs: tuple[ColumnSpec, ...]
    row_bytes: int


def with_mapped(schema: pa.Schema, mapped: MappedColumns | None) -> pa.Schema:
    """The schema of shards, with the columns that a map makes of them in its metadata."""
    if mapped is None:
        return schema
    return schema.with_metadata({**(schema.metadata or {}), _KEY: mapped.to_bytes()})


def mapped_in(schema: pa.Schema) -> MappedColumns | None:
    """What `with_mapped` has added; None if there is no map."""
    content = (schema.metadata or {}).get(_KEY)
    return None if content is None else MappedColumns.from_bytes(content)
