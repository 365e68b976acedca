"""Reads one file with Dataplane, as a node and a trainer do, and with others, and compares."""

from __future__ import annotations

import ast
import gzip
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_torch import DataLoader
from dataplane_torch.tensors import Decoder
from foreign_values import difference, leaf_types, leaves, needs_fill
from msgspec import structs

from dataplane.client.stream import Batches
from dataplane.formats import base, registry
from dataplane.formats.faults import is_out_of_memory
from dataplane.formats.unsupported import supported_names
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.records import ColumnOptions, ListPolicy
from dataplane.plan.manifest import Manifest
from dataplane.rpc.messages import Batch
from dataplane.transforms.nulls import check_fills, check_nulls
from dataplane.worker.columns import open_block
from dataplane.worker.gather import Gather
from dataplane.worker.stacking import canonical_stacked, plan_stacked

Values = dict[str, list[Any]]
_FILLS = re.compile(r"pass fill_null=(\{.*?\})")
_OTHERS = re.compile(r"select the others with columns=\[…\]: (.*)$")
_REFUSED = re.compile(r"column '(.*?)' ")
FAULTS = ("RAW", "DIFFERS")
"""Verdicts that are a fault of ours; a killed process and a hanging one are others."""


@dataclass(frozen=True, slots=True)
class Read:
    """Dataplane's result for a file: batches, or the error that a user would get."""

    batches: tuple[Mapping[str, Any], ...] = ()
    schema: pa.Schema | None = None
    error: BaseException | None = None
    left_out: tuple[str, ...] = ()


ReadBy = Callable[[Path, str], Read]


def ours(path: Path, format_name: str = "") -> Read:
    """Index, check, decode, gather, and make batches. Columns of types that are not supported are
    left out, if there are others.
    """
    try:
        manifest = index_dataset([str(path)], format_name=format_name)
        schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
        try:
            return Read(tuple(_batches(manifest, schema, ())), schema)
        except ConfigError as refused:
            names = supported_names(schema)
            if "not supported" not in str(refused) or not names or len(names) == len(schema):
                raise
            left_out = tuple(name for name in schema.names if name not in names)
            return Read(tuple(_batches(manifest, schema, tuple(names))), schema, left_out=left_out)
    except (Exception, pa.ArrowException) as error:  # noqa: BLE001 - it is what we look for
        return Read(error=error)


def by_node(path: Path, format_name: str) -> Read:
    """The same through a DataLoader and its node, whose errors say what to pass for nulls and how
    to leave out unsupported columns.
    """
    columns, fills, known = None, dict[str, float](), list[str]()
    for _ in range(3):
        options: Any = {"columns": columns, "fill_null": fills, "format": format_name}
        try:
            with DataLoader(str(path), 64, lists="ragged", **options) as loader:
                left_out = tuple(name for name in known if name not in (columns or known))
                batches = tuple(loader)
            manifest = index_dataset([str(path)], format_name=format_name)
            schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
            return Read(batches, schema, left_out=left_out)
        except ConfigError as error:
            said = str(error)
            pasted, others = _FILLS.search(said), _OTHERS.search(said)
            if pasted is not None:
                fills |= ast.literal_eval(pasted[1])
            elif others is not None and "…" not in others[1]:
                columns = others[1].split(", ")
                known = [*columns, *_REFUSED.findall(said)]
            else:
                return Read(error=error)
        except (Exception, pa.ArrowException) as error:  # noqa: BLE001 - it is what we look for
            return Read(error=error)
    return Read(error=AssertionError("three answers of ConfigError are not enough"))


def _batches(
    manifest: Manifest, schema: pa.Schema, columns: tuple[str, ...]
) -> Iterator[Mapping[str, Any]]:
    url = manifest.shards[0].url
    options = ColumnOptions(columns=columns, lists=ListPolicy.RAGGED)
    plan = plan_stacked(schema, options, url)
    chosen = [schema.field(name) for name in columns or schema.names]
    kinds = leaf_types(pa.schema(chosen))
    fills = tuple((name, 0.0) for name, kind in kinds if needs_fill(kind))
    plan = plan_stacked(schema, structs.replace(options, fill_null=fills), url)
    check_fills(plan.leaves)
    check_nulls(plan.leaves, manifest.nulls, [url])
    format_, decoder = registry.by_name(manifest.format), Decoder(plan.specs)
    content = memoryview(Path(url.removeprefix("file://")).read_bytes())
    for block in range(manifest.block_count):
        raw = _raw_block(manifest, block, content)
        batch = format_.decode(raw, schema, plan.leaves.top_level)
        if batch.num_rows != raw.rows:
            raise AssertionError(f"{batch.num_rows} rows, the index says {raw.rows}")
        opened = open_block(canonical_stacked(batch, plan, url), plan.specs)
        rows = np.stack([np.zeros(raw.rows), np.arange(raw.rows)], 1).astype(np.int32)
        step = (Batch(0, raw.rows, raw.rows),)
        gather = Gather(plan.specs, [opened], rows, step, lists=plan.lists)
        room = gather.into(memoryview(bytearray())).bytes_needed or 1
        memory = np.zeros(room, np.uint8)
        columns_at = gather.into(memoryview(memory)).columns
        yield decoder.batch(Batches(memory, step, columns_at), 0)


def _raw_block(manifest: Manifest, block: int, content: memoryview) -> base.RawBlock:
    shard = manifest.shards[0]
    start, length = int(manifest.block_offset[block]), int(manifest.block_length[block])
    first = shard.preamble.offset
    return base.RawBlock(
        shard.url,
        manifest.block_in_shard(block),
        int(manifest.block_rows[block]),
        base.Region(start, length),
        shard.size_bytes,
        shard.preamble,
        content[first : first + shard.preamble.length],
        content[start : start + length],
    )


def verdict(
    path: Path, format_name: str, original: Path | None = None, read_by: ReadBy = ours
) -> tuple[str, str]:
    """How our result compares with other readers' of the same bytes: a word, and details.

    RAW       an error of another type, or one whose message is not a sentence
    DIFFERS   other values than other readers find, or than the original if no other can read it
    refused   other readers read it; "refused by all" if they do not; "memory" if it ran out
    equal     "equal to the original" for a mutant that others read differently; "equal but for
              columns" for columns of unsupported types; "alone" if no other reader can read it
    """
    read = read_by(path, format_name)
    if read.error is not None:
        return _refused(read.error, path, format_name)
    try:
        expected = reference(path, format_name, read)
    except Unreadable as error:
        if original is None:
            return "alone", f"others refuse it: {error}"
        try:
            expected = reference(original, format_name, read)
        except Unreadable as other:
            return "DIFFERS", f"the original does not fit: {other}; others refuse it: {error}"
    found = difference(expected, read.batches)
    if found and original is not None and _is_equal(original, format_name, read):
        return "equal to the original", f"others: {found}"
    if found:
        return "DIFFERS", found
    return ("equal but for columns", ", ".join(read.left_out)) if read.left_out else ("equal", "")


def _is_equal(path: Path, format_name: str, read: Read) -> bool:
    try:
        return not difference(reference(path, format_name, read), read.batches)
    except Unreadable:
        return False


def _refused(error: BaseException, path: Path, format_name: str) -> tuple[str, str]:
    said = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return "memory", said
    if not isinstance(error, DataplaneError) or "\n" in str(error) or len(str(error)) < 20:
        return "RAW", said
    try:
        reference(path, format_name, Read())
    except Unreadable:
        return "refused by all", said
    return "refused", said


class Unreadable(Exception):
    """Raised if no other reader can read the file."""


def reference(path: Path, format_name: str, read: Read) -> Values:
    """The values that other readers find in a file.   Raises:  Unreadable."""
    try:
        match format_name:
            case "parquet":
                opened = pq.ParquetFile(path, page_checksum_verification=True)
                return _leaves_of(opened.read(), read.left_out)
            case "arrow":
                return _leaves_of(_arrow_table(path), read.left_out)
            case "jsonl":
                return _typed(_json_rows(path), read)
            case "tar":
                return _typed(_tar_rows(path, read), read)
        return _records(path, read)
    except (Exception, pa.ArrowException) as error:
        raise Unreadable(f"{type(error).__name__}: {error!s:.300}") from error


def _leaves_of(table: pa.Table, left_out: tuple[str, ...]) -> Values:
    table = table.drop_columns(list(left_out))
    table.validate(full=True)
    return leaves(table)


def _arrow_table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            return pa.ipc.open_file(source).read_all()
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _plain_bytes(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def _json_rows(path: Path) -> list[Any]:
    lines = _plain_bytes(path).split(b"\n")
    return [json.loads(line) for line in lines if line.strip(b" \t\r")]


def _tar_rows(path: Path, read: Read) -> list[Any]:
    rows: list[dict[str, Any]] = []
    with tarfile.open(fileobj=io.BytesIO(_plain_bytes(path)), mode="r:") as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, slash, name = member.name.removeprefix("./").rpartition("/")
            stem, _, extension = name.partition(".")
            key, stored = f"{folder}{slash}{stem}", archive.extractfile(member)
            if stored is None or name.startswith("."):
                continue
            if not rows or rows[-1]["__key__"] != key:
                rows.append({"__key__": key})
            rows[-1][extension.lower()] = stored.read()
    kinds = {} if read.schema is None else {field.name: field.type for field in read.schema}
    for row in rows:
        for name, value in row.items():
            kind = kinds.get(name, pa.binary())
            if isinstance(value, bytes) and pa.types.is_integer(kind):
                row[name] = int(value)
            elif isinstance(value, bytes) and not pa.types.is_binary(kind):
                row[name] = value.decode()
    return rows


def _records(path: Path, read: Read) -> Values:
    """TFRecord has checksums: the expected values are beside the file, and a file that was cut
    between two records has the first of them.
    """
    rows = json.loads(path.with_suffix(".written").read_text())
    count = sum(len(next(iter(batch.values()))) for batch in read.batches)
    was_cut = len(path.read_bytes()) < path.with_suffix(".whole").stat().st_size
    return _typed(rows[:count] if was_cut else rows, read)


def _typed(rows: list[Any], read: Read) -> Values:
    """Rows of plain Python in the types that were inferred; no field may be left out."""
    if read.schema is None:
        return {}
    for row in rows:
        _expect_known(row, pa.struct(list(read.schema)))
    return leaves(pa.Table.from_pylist(rows, schema=read.schema))


def _expect_known(value: Any, kind: pa.DataType) -> None:
    if isinstance(value, dict) and pa.types.is_struct(kind):
        fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        for name, one in value.items():
            if name not in fields:
                raise KeyError(f"field {name!r} is in the file, and not in the schema")
            _expect_known(one, fields[name])
    elif isinstance(value, list) and pa.types.is_list(kind):
        for one in value:
            _expect_known(one, kind.value_type)
    elif isinstance(value, bool) != pa.types.is_boolean(kind) and isinstance(value, bool | int):
        raise TypeError(f"{value!r} as {kind}")
