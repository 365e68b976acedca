"""Columns whose value is the same in all rows of a shard: the keys of its folders "key=value".

1. A value depends only on the shard's url and on the column's type, which the dataset's schema has.
2. These columns follow those that the shards store. A column that any shard stores is read from the
   shards, also if a folder has its name.
3. Formats do not know of these columns: `decoded` adds them to a block.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from dataplane.formats.base import ColumnBounds, Format, RawBlock
from dataplane.model.errors import SchemaMismatch
from dataplane.model.typed import complete

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value of a folder that stands for null."""
_MARK = b"dataplane.folders"
_KEY = re.compile(r"/([^/=]+)=([^/]*)(?=/)")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_OFFSET_BYTES = 8


def folder_of(url: str) -> str:
    """Return the folder of a shard, which decides its values."""
    return url.rpartition("/")[0]


def folder_values(folder: str) -> dict[str, str | None]:
    """Return the keys of a folder, and their values as texts, None for null."""
    pairs = _KEY.findall(f"{folder}/")
    return {_plain(key): None if value == NULL else _plain(value) for key, value in pairs}


def _plain(text: str) -> str:
    try:
        return urllib.parse.unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def folder_columns(
    folders: Iterable[str], names: Iterable[str], known: Iterable[str]
) -> tuple[list[pa.Field], dict[str, int]]:
    """Return the columns of the shards in these folders, except `known` ones, and the bytes of
    the longest value of each. The user has given the dataset these `names`: a key that has a single
    value, and whose folder the user named in full, is no column.

    A column is int32 or int64 if all its values are integers of this type, as pyarrow infers it,
    and else a string. Shards without the key have null.
    """
    named = {pair for name in names for pair in _KEY.findall(f"{name.rstrip('/')}/")}
    values: dict[str, set[str | None]] = {}
    free = set[str]()
    for folder in folders:
        free.update(_plain(pair[0]) for pair in _KEY.findall(f"{folder}/") if pair not in named)
        for key, value in folder_values(folder).items():
            values.setdefault(key, set()).add(value)
    columns, sizes, others = [], {}, set(known)
    for key, texts in values.items():
        if key not in others and (key in free or len(texts) > 1):
            columns.append(pa.field(key, _type_of(texts)))
            sizes[key] = max(len((text or "").encode()) for text in texts) + _OFFSET_BYTES
    return columns, sizes


def checked_sizes(
    columns: Sequence[pa.Field], values: Iterable[tuple[str, Mapping[str, Any]]]
) -> dict[str, int]:
    """Return the bytes of the longest value of each of these columns, whose values in shards are
    given with the urls.

    Raises:  SchemaMismatch: the folders of a shard have another value, or none.
    """
    schema, sizes = pa.schema(columns), dict.fromkeys([column.name for column in columns], 0)
    for url, given in values:
        texts = folder_values(folder_of(url))
        for name, scalar in scalars(url, schema, sizes).items():
            if scalar.as_py() != given[name] or name not in texts:
                raise SchemaMismatch(
                    f"{url}: the table says that {name} is {given[name]!r}, which the names of the "
                    "file's folders do not say: write the table again with partitions by value",
                    shard=url,
                    field=name,
                    expected=given[name],
                    found=texts.get(name),
                )
            size = len((texts[name] or "").encode()) + _OFFSET_BYTES
            sizes[name] = max(sizes[name], size)
    return sizes


def _type_of(texts: Iterable[str | None]) -> pa.DataType:
    known = [text for text in texts if text is not None]
    if not known or not all(_INTEGER.fullmatch(text) for text in known):
        return pa.string()
    bits = max((int(text) if int(text) >= 0 else ~int(text)).bit_length() for text in known)
    return pa.int32() if bits < 32 else pa.int64() if bits < 64 else pa.string()


def with_folders(
    schema: pa.Schema, columns: Sequence[pa.Field], sizes: Mapping[str, int]
) -> pa.Schema:
    """Return the schema of the shards, followed by these columns of their folders."""
    mark = {**(schema.metadata or {}), _MARK: msgspec.json.encode(sizes)}
    return pa.schema([*schema, *columns], metadata=mark)


def folder_names(schema: pa.Schema) -> Mapping[str, int]:
    """Return the columns of a dataset's schema that folders have, with the bytes of a row."""
    mark = (schema.metadata or {}).get(_MARK)
    return {} if mark is None else msgspec.json.decode(mark, type=complete(dict[str, int]))


def scalars(url: str, schema: pa.Schema, names: Iterable[str]) -> dict[str, pa.Scalar]:
    """Return the value of each of these columns in all rows of a shard.

    Raises:  SchemaMismatch: a value is not of the column's type.
    """
    values = folder_values(folder_of(url))
    return {name: _scalar(url, schema.field(name), values.get(name)) for name in names}


def _scalar(url: str, field: pa.Field, text: str | None) -> pa.Scalar:
    kind = field.type
    if text is None:
        return pa.scalar(None, kind)
    try:
        if pa.types.is_integer(kind):
            return pa.scalar(int(text), kind)
        if pa.types.is_timestamp(kind):  # a time without a zone is UTC
            return pa.scalar(text).cast(pa.timestamp(kind.unit)).cast(kind)
        return pa.scalar(text).cast(kind)
    except (pa.ArrowException, ValueError, OverflowError) as fault:
        raise SchemaMismatch(
            f"{url}: the folder {field.name}={text} has no value of the column's type {kind}: "
            "rename the folder, or leave it out of the dataset",
            shard=url,
            field=field.name,
            expected=str(kind),
            found=text,
        ) from fault


def known_bounds(
    url: str, schema: pa.Schema, names: Iterable[str], rows: int
) -> dict[str, ColumnBounds]:
    """Return the bounds of those of these columns that folders have, in a block of a shard."""
    wanted = [name for name in folder_names(schema) if name in set(names)]
    bounds = {}
    for name, scalar in scalars(url, schema, wanted).items():
        value = scalar.as_py()
        bounds[name] = ColumnBounds(rows, rows if value is None else 0, value, value, is_exact=True)
    return bounds


def decoded(
    format_: Format, block: RawBlock, schema: pa.Schema, columns: Sequence[str]
) -> pa.RecordBatch:
    """Decode a block as `Format.decode` does, with the columns of folders.

    Raises:  as `Format.decode`.
    """
    names = folder_names(schema)
    if not names:
        return format_.decode(block, schema, columns)
    stored = pa.schema(list(schema)[: len(schema) - len(names)], metadata=schema.metadata)
    batch = format_.decode(block, stored, [name for name in columns if name not in names])
    values = scalars(block.url, schema, [name for name in columns if name in names])
    if not values:
        return batch
    arrays = [
        pa.repeat(values[name], batch.num_rows) if name in values else batch.column(name)
        for name in columns
    ]
    kept = (schema if name in values else batch.schema for name in columns)
    fields = [source.field(name) for source, name in zip(kept, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
