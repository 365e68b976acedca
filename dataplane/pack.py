"""Write a dataset as new shards: `dataplane pack`, and `pack_shards` for other programs.

The blocks of a dataset, or of a view of it, are divided into parts. Each part becomes one shard, in
the dataset's own order.

1. A part depends only on its job and its number: it may be written by any process, at any time.
2. A shard appears whole or not at all. Its record, an object below "_dataplane/" whose name has the
   shard's size and checksum, appears after it. A part that has a record is not written again.
3. A folder has the parts of one job. Any other job is refused, and nothing that others wrote is
   changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import Struct, structs

from dataplane.base.machine import set_process
from dataplane.base.suffixes import BY_FORMAT, FILES
from dataplane.formats import folders, registry, tar
from dataplane.formats.base import RawBlock
from dataplane.formats.unsupported import refuse_differing, refuse_unknown, supported_names
from dataplane.index.indexing import open_manifest
from dataplane.index.journal import publish
from dataplane.index.viewing import canonical_view, viewed, with_view
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError, DatasetChangedError
from dataplane.model.joined import IMAGE, KEY, LABEL
from dataplane.model.records import Region, View
from dataplane.node.dataset import StoredRows, stored_rows
from dataplane.plan.manifest import Manifest
from dataplane.plan.views import filters
from dataplane.rpc.messages import DatasetSource
from dataplane.store.connect import OBSTORE_SCHEMES, Stores
from dataplane.store.expand import Connect
from dataplane.store.urls import is_hidden, local_path, normalise, scheme_of
from dataplane.transforms.functions import function_name
from dataplane.transforms.row_filter import RowFilter, reads_columns
from dataplane.worker.functions import CalledAt, UserFunction, loaded, mapped_block

SHARD_BYTES = 128 << 20
"""The size of a part, in bytes of memory. A process needs about three times as much."""
BLOCK_BYTES = 16 << 20
_ALL = View()
_RECORDS = "_dataplane/"
MANIFEST = f"{_RECORDS}dataset.manifest"
"""Other readers of a folder ignore names that begin with an underscore."""
_STORES = Stores()


class PackJob(Struct, frozen=True):
    """Parts to write, for any process. `manifest` is that of the whole dataset, with the
    counts of the view; part k has the blocks of the view from starts[k] to starts[k + 1].
    """

    manifest: bytes
    view: View
    columns: tuple[str, ...]
    map: str
    format: str
    dest: str
    starts: tuple[int, ...]
    digest: str

    @property
    def part_count(self) -> int:
        """The number of parts."""
        return len(self.starts) - 1

    def url(self, part: int) -> str:
        """Return the url of a part's shard."""
        name = f"part-{part:05d}-of-{self.part_count:05d}.{self.format}"
        return f"{self.dest}{name}"


class PackedPart(Struct, frozen=True):
    """A part that is written: its number, and the rows, bytes and SHA-256 of its shard. A part
    without rows has no shard.
    """

    part: int
    rows: int
    size_bytes: int
    sha256: str

    @property
    def record(self) -> str:
        """The name of the part's record."""
        return f"{_RECORDS}{self.part:05d}.{self.rows}.{self.size_bytes}.{self.sha256}"

    @classmethod
    def of_record(cls, name: str) -> PackedPart:
        """Parse the name of a record."""
        part, rows, size, digest = name.removeprefix(_RECORDS).split(".")
        return cls(int(part), int(rows), int(size), digest)


Run = Callable[[PackJob, Sequence[int]], Iterable[PackedPart]]
"""Has the parts with these numbers written by `write_part`, and yields its results in any order."""


def pack_shards(
    urls: Sequence[str],
    dest: str,
    config: NodeConfig,
    *,
    format_name: str = "parquet",
    view: View = _ALL,
    columns: Sequence[str] = (),
    map_name: str = "",
    shard_bytes: int = 0,
    run: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
    source: Manifest | None = None,
) -> tuple[Manifest, list[PackedPart]]:
    """Write a dataset as shards below `dest`, a local folder or one of a bucket, with checksums and
    a manifest. If an earlier call was interrupted, only what is missing is written. Return the
    manifest of the shards, and all parts. `run` has the parts written: by default here, one after
    the other. `progress` gets their number, done and in all. `source` is the manifest of `urls`,
    if it is known.

    Raises:  ConfigError: the arguments are wrong, or `dest` has other objects.  FunctionError: the
    map fails.  Errors of the source and of the stores.
    """
    whole = source or open_manifest(config, _STORES, DatasetSource(tuple(urls)))
    job = _job(
        whole, dest, config, format_name, view, tuple(columns), map_name, shard_bytes or SHARD_BYTES
    )
    _check_apart(urls, job.dest)
    with _alone(job):
        return _packed(job, config, run or in_processes(1), progress or (lambda *_: None))


def _check_apart(urls: Sequence[str], dest: str) -> None:
    """Refuse a destination whose shards the source's urls name, too.

    Raises:  ConfigError.
    """
    for url in urls:
        folder, is_deep, _ = normalise(url).partition("**")
        folder = folder if is_deep else folder.rstrip("/") + "/"
        below = dest.removeprefix(folder)
        if below != dest and not is_hidden(f"{below}part"):
            twice = f"{dest} is a part of the source {url}, which would then have each row twice"
            raise ConfigError(f"{twice}: pass a folder beside it", field="dest")


@contextlib.contextmanager
def _alone(job: PackJob) -> Iterator[None]:
    """Keep other packs out of a local folder meanwhile.

    Raises:  ConfigError: there is one, or the folder cannot be made.
    """
    path = local_path(job.dest)
    if path is None:
        yield
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as fault:
        raise ConfigError(f"{path} cannot be written: {fault.strerror or fault}") from fault
    try:
        with contextlib.suppress(OSError):  # a file system may have no locks of folders
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as fault:
                raise ConfigError(
                    f"another pack writes to {path}: wait for its end, or pass another folder",
                    field="dest",
                ) from fault
        yield
    finally:
        os.close(fd)


def _packed(
    job: PackJob, config: NodeConfig, run: Run, report: Callable[[int, int], None]
) -> tuple[Manifest, list[PackedPart]]:
    """Write the parts that are missing, and what all have in common."""
    done = _done(job)
    todo = [part for part in range(job.part_count) if part not in done]
    report(len(done), job.part_count)
    if todo and not done:
        put(f"{job.dest}{_RECORDS}job.{job.digest}", b"\n")
        _done(job)  # another pack of the bucket may have begun meanwhile
    for packed in run(job, todo):
        done[packed.part] = packed
        report(len(done), job.part_count)
    _done(job)
    parts = [done[part] for part in range(job.part_count)]
    sums = "".join(f"{p.sha256}  {job.url(p.part)[len(job.dest) :]}\n" for p in parts if p.rows)
    put(f"{job.dest}{_RECORDS}sha256sums", sums.encode() or b"\n")
    if not sums:
        raise ConfigError(f"map={job.map!r} leaves no rows: nothing is written", field="map")
    manifest = open_manifest(config, _STORES, DatasetSource((job.dest,), job.format))
    rows = sum(packed.rows for packed in parts)
    if manifest.sample_count != rows:
        raise DatasetChangedError(
            f"{job.dest} has {manifest.sample_count} rows, and {rows} were written: another "
            "process changes its files. Empty it, and pack again",
            shard=job.dest,
            expected=rows,
            found=manifest.sample_count,
        )
    put(f"{job.dest}{MANIFEST}", manifest.to_bytes())
    return manifest, parts


def _job(
    whole: Manifest,
    dest: str,
    config: NodeConfig,
    format_name: str,
    view: View,
    columns: tuple[str, ...],
    map_name: str,
    shard_bytes: int,
) -> PackJob:
    if format_name not in _WRITERS:
        way = "if it is that of the source, run `dataplane index` with it, and pack the manifest"
        if name := _NAMES.get(format_name.lower()):
            way = f"did you mean {name!r}?"
        raise ConfigError(
            f"shards of format {format_name!r} cannot be written: pass one of "
            f"{', '.join(_WRITERS)}; {way}",
            field="format",
        )
    folder = normalise(dest).rstrip("/") + "/"
    if scheme_of(folder) not in {"file", *OBSTORE_SCHEMES} - {"http", "https"}:
        raise ConfigError(f"{dest}: pass a local folder, or one of a bucket", field="dest")
    columns = tuple(dict.fromkeys(columns))
    view, name = canonical_view(view), function_name(map_name or None, "map")
    rows = viewed(whole, view, _STORES.connect, config)
    if filters(view):
        everything = structs.replace(view, limit=0)
        unlimited = viewed(whole, everything, _STORES.connect, config) if view.limit else rows
        whole = with_view(whole, unlimited, everything)
    schema = pa.ipc.read_schema(pa.py_buffer(whole.schema))
    read, code = columns or tuple(supported_names(schema)), ""
    if name:
        code, read = _function(name).code, _function(name).reads or tuple(supported_names(schema))
    refuse_unknown(schema.names, read)
    refuse_differing(schema, read, whole.shards.urls.__getitem__)
    starts = _starts(rows.block_decoded.tolist(), shard_bytes)
    facts = (whole.fingerprint, repr(view), columns, name, code, format_name, starts)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    content = whole.to_bytes()
    return PackJob(content, view, columns, name, format_name, folder, tuple(starts), digest)


def _starts(sizes: Sequence[int], most: int) -> list[int]:
    """Divide blocks into parts of at most so many bytes, or of a single block; return where each
    begins, and the end.
    """
    starts, size = [0], 0
    for at, more in enumerate(sizes):
        if size and size + more > most:
            starts.append(at)
            size = 0
        size += more
    return [*starts, len(sizes)]


def _done(job: PackJob) -> dict[int, PackedPart]:
    """Return the parts that are written.

    Raises:  ConfigError: the folder has objects that are not of this job.
    """
    names = [info.url[len(job.dest) :] for info in _STORES.connect(job.dest).list(job.dest)]
    marks = [name for name in names if name.startswith(f"{_RECORDS}job.")]
    if names and marks != [f"{_RECORDS}job.{job.digest}"]:
        why = "the shards of another pack" if marks else f"other objects, such as {names[0]}"
        raise ConfigError(
            f"{job.dest} has {why}: pass an empty folder. (The same command goes on where it "
            "stopped, if neither its source nor its options have changed)",
            field="dest",
        )
    others = (*marks, f"{_RECORDS}sha256sums", MANIFEST)
    records = [name for name in names if name.startswith(_RECORDS) and name not in others]
    done = {packed.part: packed for packed in map(PackedPart.of_record, records)}
    if len(done) < len(records):
        raise ConfigError(
            f"two packs wrote to {job.dest} at once, and their shards differ: empty it, and pack "
            "again",
            field="dest",
        )
    return done


def in_processes(count: int) -> Run:
    """Return a function that writes parts in so many processes, or here if one is enough."""

    def run(job: PackJob, parts: Sequence[int]) -> Iterator[PackedPart]:
        if min(count, len(parts)) < 2:
            yield from (write_part(job, part) for part in parts)
            return
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(count, len(parts)), spawn, _begin, (job, os.getpid()))
        try:
            for future in as_completed([pool.submit(_write_begun, part) for part in parts]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    return run


_begun: list[PackJob] = []
"""The job of a process of `in_processes`."""


def _begin(job: PackJob, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its processes
    set_process("dataplane pack", dies_with_parent=True)
    if os.getppid() != parent:  # it ended before this process could ask to end with it
        os._exit(1)
    _begun.append(job)


def _write_begun(part: int) -> PackedPart:
    return write_part(_begun[0], part)


def write_part(job: PackJob, part: int) -> PackedPart:
    """Write one part, then its record; callable in any process that can import the map.

    Raises:  FunctionError: the map fails.  Errors of the source and of the stores.
    """
    source = _source(job)
    batches = [source.batch(block) for block in range(job.starts[part], job.starts[part + 1])]
    table = pa.Table.from_batches(batches).combine_chunks()
    content = b""
    if table.num_rows:
        if job.format == "tar" and source.format == FILES:
            table = _as_members(table, source.categories)
        content = _WRITERS[job.format](table, job.url(part))
        put(job.url(part), content)
    digest = hashlib.sha256(content).hexdigest()
    packed = PackedPart(part, table.num_rows, memoryview(content).nbytes, digest)
    put(f"{job.dest}{packed.record}", b"\n")
    return packed


def put(url: str, content: bytes | pa.Buffer) -> None:
    """Write a whole object, in place of any other. Nobody sees a part of it.

    Raises:  ConfigError: a local file cannot be written.  Errors of the store.
    """
    path = local_path(url)
    if path is None:
        _STORES.connect(url).put(url, content)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, content, 0o666)
    except OSError as fault:
        raise ConfigError(f"{path} cannot be written: {fault.strerror or fault}") from fault


# -- reading -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _source(job: PackJob) -> _Source:
    return _Source(job)


class _Source:
    """Reads the blocks of a job's source, with its view and map."""

    def __init__(self, job: PackJob) -> None:
        from dataplane.settings import default_node_config

        whole = Manifest.from_bytes(job.manifest)
        self._job, self._connect = job, _STORES.connect
        self._manifest = viewed(whole, job.view, self._connect, default_node_config())
        self._schema = pa.ipc.read_schema(pa.py_buffer(whole.schema))
        self._stored = StoredRows.of(self._manifest, job.view)
        self._counts = stored_rows(self._manifest)
        self._rows = RowFilter.of(job.view, self._schema)
        self._function = _function(job.map) if job.map else None
        reads = None if self._function is None else self._function.reads
        given = job.columns if self._function is None else reads
        self._columns = tuple(given or supported_names(self._schema))
        self.format, self.categories = whole.format, whole.categories
        self._made: pa.Schema | None = None
        if self._function is not None:
            self._made = self._mapped(0).schema

    def batch(self, block: int) -> pa.RecordBatch:
        """Return the rows of a block that the pack has."""
        if self._function is None:
            return self._read(block)
        made = self._mapped(block)
        refuse_unknown(made.schema.names, self._job.columns)
        return made.select(list(self._job.columns)) if self._job.columns else made

    def _read(self, block: int) -> pa.RecordBatch:
        manifest = self._manifest
        raw = raw_block(manifest, block, self._connect, int(self._counts[block]))
        needed = reads_columns(self._job.view, self._schema, self._columns)
        format_ = registry.by_name(manifest.format)
        batch = folders.decoded(format_, raw, self._schema, needed)
        if self._rows is not None:
            batch = self._rows.left(batch, self._stored.of_filter(self._rows, block))
        return batch.select(list(self._columns)).slice(0, int(manifest.block_rows[block]))

    def _mapped(self, block: int) -> pa.RecordBatch:
        assert self._function is not None
        manifest, shard = self._manifest, int(self._manifest.block_shard[block])
        number = manifest.block_in_shard(block)
        at = CalledAt("map", self._job.map, manifest.shards.urls[shard], number)
        return mapped_block(self._function, self._read(block), 0, shard, at, self._made)


def _function(name: str) -> UserFunction:
    """Import the function of this name, also from the working directory."""
    here = os.getcwd()  # noqa: PTH109 - a text
    if here not in sys.path:
        sys.path.insert(0, here)
    return loaded("map", name)


def raw_block(manifest: Manifest, block: int, connect: Connect, rows: int) -> RawBlock:
    """Read the bytes of a block, which stores so many rows.

    Raises:  DatasetChangedError.  StoreError and its subclasses.
    """
    shard = manifest.shards[int(manifest.block_shard[block])]
    store = connect(shard.url)
    place = Region(int(manifest.block_offset[block]), int(manifest.block_length[block]))

    def read(region: Region) -> memoryview:
        place = (region.offset, region.length, shard.etag)
        return memoryview(store.read(shard.url, *place) if region.length else b"")

    return RawBlock(
        url=shard.url,
        index=manifest.block_in_shard(block),
        rows=rows,
        place=place,
        shard_bytes=shard.size_bytes,
        preamble_place=shard.preamble,
        preamble=read(shard.preamble),
        body=read(place),
    )


# -- writing -----------------------------------------------------------------------------------


def _parquet(table: pa.Table, _: str) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, table.schema, compression="zstd", write_page_checksum=True, store_schema=True
    ) as writer:
        writer.write_table(table, _block_rows(table))
    return sink.getvalue()


def _arrow(table: pa.Table, _: str) -> pa.Buffer:
    sink, table = pa.BufferOutputStream(), table.unify_dictionaries()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, _block_rows(table))
    return sink.getvalue()


def _block_rows(table: pa.Table) -> int:
    """Return how many rows a row group or record batch has."""
    return int(max(1, min(table.num_rows, table.num_rows * BLOCK_BYTES // max(table.nbytes, 1))))


def _tar(table: pa.Table, url: str) -> bytes:
    """Write each row as files: texts and bytes as they are, other values as JSON.

    Raises:  ConfigError: the rows would not be read back.
    """
    names = [name for name in table.column_names if name != KEY]
    odd = next((name for name in names if name != name.lower() or {"/", "\0"} & {*name}), None)
    if odd is not None:
        raise ConfigError(
            f"column {odd!r} cannot be the extension of a file in a tar: write Parquet, or rename "
            "it in a map",
            field=odd,
        )
    _check_images(table, names)
    stem = url.rpartition("/")[2].partition(".")[0].removeprefix("part-")
    keys = [f"{stem}-{row:07d}" for row in range(table.num_rows)]
    if KEY in table.column_names:
        has_images = not {IMAGE, "jpg"}.isdisjoint(names)
        keys = _tar_keys(table.column(KEY).to_pylist(), has_images=has_images)
    fields = {name: tar.fields_of(table.schema.field(name)) for name in names}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for key, row in zip(keys, table.select(names).to_pylist(), strict=True):
            values = {name: value for name, value in row.items() if value is not None}
            if not values:
                raise ConfigError(
                    f"the row with the key {key!r} has only nulls, and a tar has no files for it: "
                    "write Parquet, or leave such rows out with --where",
                    field=KEY,
                )
            for name, value in values.items():
                body = _as_file(name, value)
                member = tarfile.TarInfo(f"{key}.{tar.field_of(body, fields[name])}")
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
    return content.getvalue()


def _as_members(table: pa.Table, categories: Mapping[str, pa.Array]) -> pa.Table:
    """Name images, and number the labels that folders have, as other readers of tars expect it."""
    names = table.column_names
    if IMAGE in names and pa.types.is_binary(table.field(IMAGE).type) and "jpg" not in names:
        suffixes = [suffix[1:] for suffix in BY_FORMAT[FILES]]
        fields = {"jpg": ("jpg",) if {*suffixes}.intersection(names) else suffixes}
        table = table.rename_columns(["jpg" if name == IMAGE else name for name in names])
        table = table.cast(tar.with_fields(table.schema, fields))
    if LABEL in names and LABEL in categories and "cls" not in names:
        labels = table.column(LABEL)  # a map may have made them
        if pa.types.is_dictionary(labels.type):
            labels = labels.cast(labels.type.value_type)
        if pa.types.is_string(labels.type) or pa.types.is_large_string(labels.type):
            values = categories[LABEL].cast(labels.type)
            table = table.append_column("cls", pc.index_in(labels, values))
    return table


def _check_images(table: pa.Table, names: Sequence[str]) -> None:
    """Refuse images of several extensions that a tar's reader would take for one column."""
    for group in tar.image_groups(names):
        columns = [table.column(name).is_valid() for name in group]
        if not pc.any(functools.reduce(pc.and_, columns)).as_py():
            raise ConfigError(
                f"columns {' and '.join(group)} would be read as one column from a tar in which "
                "no row has them all: write Parquet, or rename them in a map",
                field=group[0],
            )


def _tar_keys(values: Iterable[object], *, has_images: bool) -> list[str]:
    """Return the keys of rows as a tar has them: without the suffix of an image.

    Raises:  ConfigError: a key that would be read back as another, or leave the folder into which
    somebody extracts the tar; or two rows with one key.
    """
    keys = dict[str, None]()
    for value in values:
        key = str(value) if isinstance(value, str | int) else ""
        base, dot, suffix = key.rpartition(".")
        if has_images and f"{dot}{suffix}".lower() in BY_FORMAT[FILES]:
            key = base
        if {"", ".", ".."} & {*key.split("/")} or "\0" in key or tar.key_of(f"{key}.x") != key:
            why = "keys are paths whose last part has no dots, and no double underscores around it"
        else:
            why = "two rows have it" if key in keys else ""
        if why:
            raise ConfigError(
                f"{value!r:.200} cannot be a key of a tar ({why}): write Parquet, make other keys "
                "in a map, or leave __key__ out with --columns, which numbers the rows",
                field=KEY,
            )
        keys[key] = None
    return [*keys]


def _as_file(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return (value if isinstance(value, str) else json.dumps(value)).encode()
    except TypeError as fault:
        raise ConfigError(
            f"column {name!r} has values that JSON lacks ({fault}): write Parquet, or leave it out",
            field=name,
        ) from fault


_WRITERS = {"parquet": _parquet, "arrow": _arrow, "tar": _tar}
_NAMES = {"webdataset": "tar", "wds": "tar", "feather": "arrow", "ipc": "arrow"}
