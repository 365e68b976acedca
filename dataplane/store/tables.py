"""Tables of Delta Lake and Iceberg: the files of one version, as deltalake and pyiceberg list them.

A url "delta+URL" names a Delta table by its folder, and perhaps a version: "delta+s3://bucket/t@1".
"iceberg+URL" names an Iceberg table by the file of metadata that its catalog points to, which
nobody changes, and perhaps a snapshot, by number.

1. An opened table has a name that pins the version, and names the same files ever after.
2. A table whose files alone do not have its rows and columns is refused: with rows that are marked
   as deleted, with columns that have other names in files than in the table, with partition values
   that neither files nor, for Delta, folders have, or with dropped columns that files still have.
"""

from __future__ import annotations

import contextlib
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from msgspec import Struct

from dataplane.base.suffixes import TABLE_PREFIXES
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.records import ObjectInfo
from dataplane.store.base import Store
from dataplane.store.urls import FILE_PREFIX, folder_of, normalise

_VERSION = re.compile(r"(.+)@(\d+)/?", re.DOTALL)
_PACKAGES = {"delta": "deltalake", "iceberg": "pyiceberg"}


class OpenTable(Struct, frozen=True, eq=False):
    """The files of one version of a table, sorted by url; the name that pins it; and the columns
    whose values the files' folders have, with each file's values. The files have no columns but
    `known`, if there are any, and all those of `most_nulls`, with at most so many nulls.
    """

    name: str
    files: Sequence[ObjectInfo]
    columns: Sequence[pa.Field] = ()
    values: Sequence[tuple[str, dict[str, Any]]] = ()
    known: Sequence[str] = ()
    most_nulls: Mapping[str, int] = {}

    def check(self, nulls: Mapping[str, int]) -> None:
        """Check the columns that the files have, whose known numbers of nulls these are.

        Raises:  ConfigError: they are not those of the table.
        """
        root = self.name.partition("+")[2]
        dropped = next((name for name in nulls if self.known and name not in self.known), None)
        if dropped is not None:
            way = "write its files again, with the procedure rewrite_data_files"
            raise _refusal(root, f"has files with the column {dropped!r}, which was dropped", way)
        for name, most in self.most_nulls.items():
            if name not in nulls or nulls[name] > most:
                way = "write it as a new table"
                raise _refusal(root, f"has files without the partition column {name!r}", way)


def open_table(names: Sequence[str], connect: Callable[[str], Store]) -> OpenTable | None:
    """Return the table of these normalised names; None if they name no table.

    Raises:  ConfigError: not a table that can be read, or its package is missing.
    """
    name = next((name for name in names if name.startswith(TABLE_PREFIXES)), None)
    if name is None:
        return None
    if len(names) > 1:
        raise ConfigError(f"{name} is a whole dataset: pass only it", field="urls")
    kind, _, url = name.partition("+")
    pinned = _VERSION.fullmatch(url)
    root, version = (pinned[1], int(pinned[2])) if pinned else (url.rstrip("/"), None)
    with _foreign(kind, name):
        table = (_delta if kind == "delta" else _iceberg)(root, version, connect)
    if not table.files:
        raise ConfigError(f"{table.name} has no files", field="urls", shard=root)
    return table


@contextlib.contextmanager
def _foreign(kind: str, name: str) -> Iterator[None]:
    """Convert the errors of the table's package, of many classes."""
    package = _PACKAGES[kind]
    try:
        yield
    except DataplaneError:
        raise
    except ImportError as fault:
        raise ConfigError(
            f"{name}: {package} is not installed: pip install 'dataplane-loader[{kind}]'",
            field="urls",
        ) from fault
    except Exception as fault:
        raise ConfigError(
            f"{name}: {package} cannot open this version of the table: {fault!s:.300}", field="urls"
        ) from fault


def _refusal(root: str, why: str, way: str) -> ConfigError:
    return ConfigError(f"{root} {why}: {way}", field="urls", shard=root)


def _delta(root: str, version: int | None, connect: Callable[[str], Store]) -> OpenTable:
    from deltalake import DeltaTable

    path = root.removeprefix(FILE_PREFIX)
    if not DeltaTable.is_deltatable(path):
        way = f"restore the log, or pass {root} for all Parquet files of the folder"
        raise _refusal(root, "is no Delta table, since its _delta_log has no version", way)
    table = DeltaTable(path, version=version)
    name = f"delta+{root}@{table.version()}"
    settings = table.metadata().configuration
    if settings.get("delta.columnMapping.mode", "none") != "none":
        way = "write it without column mapping, as a new table"
        raise _refusal(root, "has other names of columns in its files", way)
    marks = getattr(table, "deletion_vectors", None)
    features = table.protocol().reader_features or ()
    is_marked = "deletionVectors" in features if marks is None else pa.table(marks()).num_rows
    if is_marked:
        way = "write its files again, with REORG TABLE … APPLY (PURGE)"
        raise _refusal(root, "has rows that deletion vectors mark as deleted", way)
    schema = pa.schema(table.schema())
    keys = table.metadata().partition_columns
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    urls = [_absolute(root, urllib.parse.unquote(action["path"])) for action in actions]
    values = [{key: action[f"partition.{key}"] for key in keys} for action in actions]
    pairs = sorted(zip(urls, values, strict=True), key=lambda pair: pair[0])
    files = _listed(f"{root}/", [url for url, _ in pairs], connect)
    return OpenTable(name, files, [schema.field(key).with_metadata(None) for key in keys], pairs)


def _absolute(root: str, path: str) -> str:
    return normalise(path) if path.startswith("/") or "://" in path else f"{root}/{path}"


def _iceberg(url: str, version: int | None, connect: Callable[[str], Store]) -> OpenTable:
    from pyiceberg.table import StaticTable

    if not url.endswith((".metadata.json", ".metadata.json.gz")):
        way = "pass iceberg+ and the metadata_location of pyiceberg's table, which ends in .json"
        raise _refusal(url, "does not say which version of the table is meant", way)
    table = StaticTable.from_metadata(url)
    snapshot = table.snapshot_by_id(version) if version else table.current_snapshot()
    if snapshot is None:
        raise _refusal(url, "has no such snapshot", "pass the number of one, or none")
    pairs = {
        (number, schema.find_column_name(number))
        for schema in table.metadata.schemas
        for number in schema.field_ids
    }
    if len(dict(pairs)) < len(pairs) or len({name for _, name in pairs}) < len(pairs):
        raise _refusal(url, "has columns that were renamed", "write it as a new table")
    tasks = list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files())
    if any(task.delete_files for task in tasks):
        way = "write its files again, with the procedure rewrite_data_files"
        raise _refusal(url, "has files of deleted rows", way)
    urls = sorted(normalise(task.file.file_path) for task in tasks)
    folder = folder_of(url).removesuffix("metadata/")
    is_last = snapshot == table.current_snapshot()
    schema = table.schema() if is_last else table.scan(snapshot_id=version).projection()
    if any(getattr(column, "initial_default", None) is not None for column in schema.fields):
        way = "write it as a new table"
        raise _refusal(url, "has columns with values for files that lack them", way)
    return OpenTable(
        f"iceberg+{url}@{snapshot.snapshot_id}",
        _listed(folder, urls, connect),
        known=[column.name for column in schema.fields],
        most_nulls=_most_nulls(schema, table.specs(), [task.file for task in tasks]),
    )


def _most_nulls(schema: Any, specs: Mapping[int, Any], files: Iterable[Any]) -> dict[str, int]:
    """Return the number of nulls that each column by whose values files are divided may have."""
    names = {column.field_id: column.name for column in schema.fields}
    places = {
        number: {
            names[field.source_id]: at
            for at, field in enumerate(spec.fields)
            if str(field.transform) == "identity" and field.source_id in names
        }
        for number, spec in specs.items()
    }
    most = {name: 0 for of_spec in places.values() for name in of_spec}
    for file in files:
        at = places[file.spec_id]
        for name in most:
            if name not in at or file.partition[at[name]] is None:
                most[name] += file.record_count
    return most


def _listed(
    folder: str, urls: Iterable[str], connect: Callable[[str], Store]
) -> Sequence[ObjectInfo]:
    """Return these objects, most of which lie in this folder."""
    known = {info.url: info for info in connect(folder).list(folder)}
    return [known.get(url) or connect(url).head(url) for url in urls]
