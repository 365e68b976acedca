"""The user's own samples: copies of some whole shards, on which every loader is measured.

Dataplane reads the copies as they are. From the same copies come the source shards that every other
loader converts: of the columns that all of them can take. Every loader gets Dataplane's values of a
column (see dataplane/transforms/columns.py): dates are integers, a null among floats is NaN, a null
list is empty. A column without such a form, or with nulls that have none, is left out, and a note
says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane.base import suffixes
from dataplane.commands.datasets import read_block, schema_of
from dataplane.formats import registry
from dataplane.formats.base import Format
from dataplane.index.indexing import choose_shards, index_dataset
from dataplane.model.errors import ConfigError, DataplaneError, TruncatedRead, rebuild
from dataplane.model.records import ColumnOptions, ColumnSpec, ListPolicy, ObjectInfo
from dataplane.model.records import Kind as Form
from dataplane.plan.manifest import Manifest
from dataplane.store.connect import connect
from dataplane.store.expand import expand
from dataplane.store.urls import normalise
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import ColumnPlan, LeafPart, plan_columns
from dataplane_bench.model import About, ColumnType, Workload, WorkloadColumn
from dataplane_bench.workloads.generate import BATCHES_MIN, RECIPES, SHARD_COUNT

_SHARD_BYTES = 64 << 20
_GROUP_BYTES = 4 << 20
_COLOURS = ("YCbCr", "RGB", "Gray")
"""Of a JPEG that every decoder turns into RGB; CMYK is not among them."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column as the benchmark has it, and what of the shards it is made of."""

    column: WorkloadColumn
    leaf: ColumnPlan

    @property
    def name(self) -> str:
        """Dataplane's name for it."""
        return self.leaf.specs[0].name

    @property
    def field(self) -> pa.Field:
        return pa.field(
            self.column.name,
            _stored_type(self.column),
            nullable=False,
        )


class _Unfit(Exception):
    """A value that not every loader can take; says which kind."""


def write_source(manifest: Manifest, folder: Path) -> About:
    """All samples as source shards in this empty folder.

    Raises:  ConfigError: no column is usable.  CorruptShard and what else reading can raise.
    """
    chosen, notes = _usable(manifest)
    while chosen:
        unfit = _write_usable(manifest, chosen, folder)
        if not unfit:
            return About(
                tuple(usable.column for usable in chosen),
                tuple(usable.name for usable in chosen),
                manifest.sample_count,
                tuple(notes),
            )
        # Rare: a column turned out to have nulls only while it was written.
        notes += [_note(leaf, why) for leaf, why in unfit.items()]
        chosen = [usable for usable in chosen if usable.name not in unfit]
        for path in folder.glob("*.parquet"):
            path.unlink()
    raise ConfigError("no column of these samples suits every loader: " + "; ".join(notes))


def _usable(manifest: Manifest) -> tuple[list[_Column], list[str]]:
    schema = schema_of(manifest)
    plan = plan_columns(schema, ColumnOptions(lists=ListPolicy.RAGGED))
    first = read_block(manifest, 0, schema, plan.top_level)
    chosen: list[_Column] = []
    notes: list[str] = []
    names = shared_names([spec.name for spec in plan.specs])
    for index, (spec, name) in enumerate(zip(plan.specs, names, strict=True)):
        leaf = ColumnPlan.of(plan.options, [(plan.leaves[index], LeafPart.VALUES)])
        try:
            column = _column(name, spec, leaf, first)
        except _Unfit as error:
            notes.append(_note(spec.name, str(error)))
        else:
            chosen.append(_Column(column, leaf))
    return chosen, notes


def shared_names(leaves: Sequence[str]) -> list[str]:
    """The names of columns that are Dataplane's `leaves`: every loader can take them, as part of
    a file's name, as a key, as an identifier; no two are the same.
    """
    names: list[str] = []
    for leaf in leaves:
        letters = (
            letter if letter.isascii() and letter.isalnum() else " " for letter in leaf.lower()
        )
        name = "_".join("".join(letters).split()) or "column"
        if not name[0].isalpha():
            name = f"column_{name}"
        number, first = 2, name
        while name in names:
            name, number = f"{first}_{number}", number + 1
        names.append(name)
    return names


def _note(leaf: str, why: str) -> str:
    return f"column {leaf} is left out: {why}"


def _column(name: str, spec: ColumnSpec, leaf: ColumnPlan, first: pa.RecordBatch) -> WorkloadColumn:
    """Raises:  _Unfit."""
    match spec.kind:
        case Form.FIXED if 0 in spec.shape:
            raise _Unfit("it is empty in every sample")
        case Form.FIXED:
            return WorkloadColumn(name, ColumnType.FIXED, spec.dtype, spec.shape)
        case Form.RAGGED:
            return WorkloadColumn(name, ColumnType.RAGGED, spec.dtype)
        case Form.STRING:
            return WorkloadColumn(name, ColumnType.STRING)
        case Form.BYTES:
            column = WorkloadColumn(name, ColumnType.IMAGE)
            _check(column, canonical(first, leaf, "").column(0).slice(0, 1))
            return column
        case _:
            raise _Unfit(f"it is neither numbers nor text nor JPEGs, but {leaf.schema.types[0]}")


def _write_usable(manifest: Manifest, chosen: Sequence[_Column], folder: Path) -> dict[str, str]:
    """The source shards; or columns that are not usable after all, by leaf, and why."""
    schema = pa.schema([usable.field for usable in chosen])
    total = int(manifest.block_decoded.sum())
    shard_count = max(SHARD_COUNT, total // _SHARD_BYTES)
    shard_rows = max(-(-manifest.sample_count // shard_count), 1)
    group_rows = max(_GROUP_BYTES * manifest.sample_count // max(total, 1), 1)
    batches = _batches(manifest, chosen, schema)
    shard, rows = 0, []
    for batch in batches:
        if isinstance(batch, dict):
            return batch
        rows.append(batch)
        while (held := sum(len(piece) for piece in rows)) >= shard_rows:
            table = pa.Table.from_batches(rows, schema)
            _write_shard(table.slice(0, shard_rows), folder, shard, group_rows)
            rows = table.slice(shard_rows).to_batches() if held > shard_rows else []
            shard += 1
    if rows:
        _write_shard(pa.Table.from_batches(rows, schema), folder, shard, group_rows)
    return {}


def _write_shard(table: pa.Table, folder: Path, shard: int, group_rows: int) -> None:
    pq.write_table(table, folder / f"shard-{shard:05d}.parquet", row_group_size=group_rows)


def _batches(
    manifest: Manifest, chosen: Sequence[_Column], schema: pa.Schema
) -> Iterator[pa.RecordBatch | dict[str, str]]:
    """Block after block; or a block's unfit columns."""
    whole = schema_of(manifest)
    top_level = tuple(dict.fromkeys(usable.leaf.top_level[0] for usable in chosen))
    for block in range(manifest.block_count):
        read = read_block(manifest, block, whole, top_level)
        url = manifest.shards[int(manifest.block_shard[block])].url
        arrays, unfit = [], {}
        for usable in chosen:
            try:
                arrays.append(_values(usable, read, url))
            except _Unfit as error:
                unfit[usable.name] = str(error)
        yield unfit or pa.RecordBatch.from_arrays(arrays, schema=schema)


def _values(usable: _Column, read: pa.RecordBatch, url: str) -> pa.Array:
    """Raises:  _Unfit."""
    try:
        values = canonical(read, usable.leaf, url).column(0)
    except ConfigError as error:
        raise _Unfit("it has nulls, which tensors of whole numbers have not") from error
    _check(usable.column, values)
    return values.cast(_stored_type(usable.column))


def _check(column: WorkloadColumn, values: pa.Array) -> None:
    """Raises:  _Unfit."""
    if values.null_count:
        raise _Unfit("it has nulls")
    if column.kind is not ColumnType.IMAGE:
        return
    import simplejpeg  # type: ignore[import-untyped]

    for value in values:
        encoded = memoryview(value.as_buffer()).cast("B")
        if encoded[:2].tobytes() != b"\xff\xd8":
            raise _Unfit("it is bytes, but not of JPEGs")
        try:
            colour = simplejpeg.decode_jpeg_header(encoded)[2]
        except ValueError as error:
            raise _Unfit(f"one of its JPEGs is broken: {error}") from error
        if colour not in _COLOURS:
            raise _Unfit(f"not every decoder turns a {colour} JPEG into RGB")


def _stored_type(column: WorkloadColumn) -> pa.DataType:
    match column.kind:
        case ColumnType.STRING:
            return pa.string()
        case ColumnType.IMAGE:
            return pa.binary()
    number = pa.bool_() if column.dtype == "bool" else pa.from_numpy_dtype(column.dtype)
    if column.kind is ColumnType.RAGGED:
        return pa.list_(number)
    return pa.list_(number, int(np.prod(column.shape))) if column.shape else number


VERSION = 2
"""Of what is made of the same shards."""
BYTE_LIMIT = 1 << 30
_COPIES_AT_ONCE = 4


def own(
    urls: Sequence[str],
    root: Path,
    *,
    batch_size: int | None = None,
    byte_limit: int = BYTE_LIMIT,
) -> tuple[Workload, tuple[str, ...]]:
    """A workload of the first shards, copied below `root` unless they are there; and notes on what
    was left out. At least one shard is taken, however large.

    Raises:  ConfigError: no shard, no sample, no usable column, or a batch larger than all samples.
    What the store, the format and the copies may be wrong with.
    """
    chosen, listed = _shards(urls)
    taken = _first(listed, byte_limit)
    fingerprint = _fingerprint(chosen, taken)
    folder = root / fingerprint
    if not folder.exists():
        try:
            _make(chosen, taken, folder)
        except OSError as error:
            raise ConfigError(f"cannot copy shards into {root}: {error}") from error
    about = About.read(folder)
    columns, count, notes = about.columns, about.sample_count, about.notes
    if len(taken) < len(listed):
        sizes = [sum(shard.size_bytes for shard in some) / (1 << 20) for some in (taken, listed)]
        first = (
            f"of {len(listed):,} shards ({sizes[1]:,.0f} MiB), the first {len(taken):,} are "
            f"compared ({sizes[0]:,.0f} MiB)"
        )
        notes = (first, *notes)
    blank = Workload("", columns, 1, count, folder / "source", fingerprint, 0.0)
    like = RECIPES[blank.shape]
    if batch_size is not None and batch_size > count:
        raise ConfigError(f"a batch of {batch_size:,} from {count:,} samples: lower --batch-size")
    workload = dataclasses.replace(
        blank,
        name=like.name,
        batch_size=batch_size or max(min(like.batch_size, count // BATCHES_MIN), 1),
        step_ms=like.step_ms,
        urls=tuple(str(path) for path in sorted((folder / "shards").iterdir())),
    )
    return workload, notes


def _shards(urls: Sequence[str]) -> tuple[Format, list[ObjectInfo]]:
    """The shards that `urls` name, resolved by Dataplane; a saved manifest names its shards."""
    names = [normalise(url) for url in urls]
    if len(names) == 1 and names[0].endswith(suffixes.MANIFEST):
        manifest = index_dataset(names)
        listed = [ObjectInfo(shard.url, shard.size_bytes, shard.etag) for shard in manifest.shards]
        return registry.by_name(manifest.format), listed
    return choose_shards(expand(names, connect), names, "", connect)


def _first(listed: Sequence[ObjectInfo], byte_limit: int) -> list[ObjectInfo]:
    taken, size = list(listed[:1]), listed[0].size_bytes
    for shard in listed[1:]:
        size += shard.size_bytes
        if size > byte_limit:
            break
        taken.append(shard)
    return taken


def _fingerprint(chosen: Format, taken: Sequence[ObjectInfo]) -> str:
    content = [VERSION, chosen.name, [[shard.url, shard.size_bytes, shard.etag] for shard in taken]]
    return "own-" + hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def _make(chosen: Format, taken: Sequence[ObjectInfo], folder: Path) -> None:
    """The folder: shards, source and what is known of them. It is complete or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (new / "source").mkdir()
        copies = _copied(chosen, taken, new / "shards")
        with _blaming(taken, copies):
            manifest = index_dataset(copies, format_name=chosen.name, workers=_COPIES_AT_ONCE)
            write_source(manifest, new / "source").write(new)
        new.chmod(0o755)
        # Another process was faster: its folder exists and is equally valid.
        with contextlib.suppress(OSError):
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextlib.contextmanager
def _blaming(taken: Sequence[ObjectInfo], copies: Sequence[Path]) -> Iterator[None]:
    """A fault of a copy is a fault of the user's shard: errors name the shard."""
    try:
        yield
    except DataplaneError as error:
        message, nouns = str(error), dict(error.nouns)
        for shard, copy in zip(taken, copies, strict=True):
            message = message.replace(f"file://{copy}", shard.url)
            if nouns.get("shard") == f"file://{copy}":
                nouns["shard"] = shard.url
        raise rebuild(type(error).__name__, message, nouns) from error


def _copied(chosen: Format, taken: Sequence[ObjectInfo], folder: Path) -> list[Path]:
    folder.mkdir()

    def copy(index: int) -> Path:
        shard = taken[index]
        name = f"{index:05d}-{Path(shard.url).name}"
        if registry.format_of_url(name) != chosen:
            name += chosen.suffixes[-1]  # a manifest knows the format, whatever the names
        with (folder / name).open("wb") as copied:
            for piece in connect(shard.url).stream(shard.url, shard.etag):
                copied.write(piece)
            if copied.tell() != shard.size_bytes:
                raise TruncatedRead(
                    f"{shard.url} has {shard.size_bytes} bytes, and {copied.tell()} came",
                    shard=shard.url,
                    offset=0,
                    expected=shard.size_bytes,
                    found=copied.tell(),
                )
        return folder / name

    with ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="bench-copy") as pool:
        return list(pool.map(copy, range(len(taken))))
