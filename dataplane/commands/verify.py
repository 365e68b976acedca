"""`dataplane verify`: read and check every sample once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypeVar

import click
from rich.progress import Progress, TaskID

from dataplane.base import suffixes
from dataplane.base.trace import printable
from dataplane.commands import output
from dataplane.commands.options import (
    format_option,
    interruptible,
    json_option,
    urls_argument,
    workers_option,
)
from dataplane.model.errors import CorruptShard, DataplaneError, ImageError
from dataplane.model.redact import redacted
from dataplane.store.faults import UNREACHABLE

if TYPE_CHECKING:
    import pyarrow as pa

    from dataplane.plan.manifest import Manifest

ERRORS_SHOWN = 50
EMPTY_SHOWN = 10
UNDECODABLE_MAX = 10_000

T = TypeVar("T")
Task = tuple[str, Callable[[], T]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: the error's class, where it is, and what is wrong."""

    kind: str
    shard: str
    message: str


@dataclass(slots=True)
class Findings:
    """Counts of the shards, blocks, samples and bytes that were read; the shards without samples;
    the columns of bytes that are not decoded; how many images were decoded, and how many cannot be;
    and the faults, with the first UNDECODABLE_MAX of these images.
    """

    shards: int = 0
    blocks: int = 0
    samples: int = 0
    bytes: int = 0
    empty: list[str] = field(default_factory=list)
    not_decoded: list[str] = field(default_factory=list)
    images: int = 0
    undecodable: int = 0
    errors: list[Fault] = field(default_factory=list)

    def note(self, shard: str, error: DataplaneError) -> None:
        """Record an error, under the shard that it names, or else under this one."""
        named = str(error.nouns.get("shard") or shard)
        self.errors.append(Fault(type(error).__name__, redacted(named), str(error)))


@click.command("verify")
@urls_argument
@format_option
@workers_option
@click.option("--decode", is_flag=True, help="Also decode the images in columns of bytes.")
@json_option
@click.pass_context
@interruptible
def verify(
    context: click.Context,
    /,
    urls: tuple[str, ...],
    *,
    format_name: str,
    workers: int,
    decode: bool,
    as_json: bool,
) -> None:
    """Read and check every sample of a dataset once.

    The command indexes every shard again, reads and decodes every block, and checks checksums,
    lengths, counts and schemas. It continues after an error, and lists all errors. The exit status
    is 1 if there are errors. If you pass a manifest, the command compares it with the present
    shards. With --decode, the command also decodes images in columns of bytes, and lists damaged
    images by shard and row.

    Without checksums, damage may go undetected. TFRecord has a checksum for every record. Most
    writers of Parquet leave checksums out. JSON lines and plain Arrow have none.

    \b
    Examples:
      dataplane verify s3://bucket/train/
      dataplane verify train.manifest --workers 32
      dataplane verify 'shards/*.tar' --decode --json
    """
    with output.progress() as bar:
        findings = verified(urls, format_name, workers, bar, decode=decode)
    if as_json:
        output.write_json({"ok": not findings.errors, **asdict(findings)})
    else:
        _report(findings)
    context.exit(output.EXIT_BAD_DATA if findings.errors else output.EXIT_OK)


def verified(
    urls: Sequence[str], format_name: str, workers: int, bar: Progress, *, decode: bool = False
) -> Findings:
    """Check everything that `urls` name; with `decode`, also decode images.

    Raises:  ConfigError, StoreError: there are no shards to check.
    """
    from dataplane.plan.shards import no_samples

    findings = Findings()
    manifests = list(_manifests(urls, format_name, workers, bar, findings))
    if not manifests and not findings.errors:
        raise no_samples(findings.empty)
    if manifests:
        agreeing, schema = _agreeing(manifests, findings)
        _note_unsupported(schema, manifests[0].shards[0].url, findings)
        findings.not_decoded = [field.name for field in schema if _has_bytes(field.type)]
        findings.shards = sum(len(one.shards) for one in agreeing)
        total = sum(int(one.block_length.sum()) for one in agreeing)
        task = bar.add_task("reading", total=total, note="")
        images: dict[str, Images] = {}
        reading = _side_by_side(_reads(agreeing, schema, decode=decode), workers)
        for url, result in reading:
            if isinstance(result, DataplaneError):
                findings.note(url, result)
            else:
                findings.blocks += 1
                findings.samples += result.rows - len(result.bad)
                for row, why in result.bad.items():
                    findings.note(url, CorruptShard(f"{url}: row {row}: {why}", shard=url))
                findings.bytes += result.size_bytes
                for column, some in result.images.items():
                    images.setdefault(column, Images()).add(some)
                note = f"{findings.samples:,} samples"
                bad = sum(some.undecodable for some in images.values() if some.decoded)
                note += f", {bad:,} undecodable images" if bad else ""
                bar.update(task, advance=result.size_bytes, note=note)
        _note_images(images, findings)
    return findings


def _note_images(images: Mapping[str, Images], findings: Findings) -> None:
    for column, some in images.items():
        if not some.decoded:  # the bytes are not images
            continue
        findings.images += some.decoded
        findings.undecodable += some.undecodable
        for name in (column, column.partition(".")[0]):
            if name in findings.not_decoded:
                findings.not_decoded.remove(name)
        room = max(
            0, UNDECODABLE_MAX - sum(fault.kind == "ImageError" for fault in findings.errors)
        )
        for url, row, reason in sorted(some.faults)[:room]:
            error = ImageError(f"{url}: row {row}, column {column!r}: {reason}", shard=url)
            findings.note(url, error)


def _manifests(
    urls: Sequence[str], format_name: str, workers: int, bar: Progress, findings: Findings
) -> Iterator[Manifest]:
    """Yield one manifest per shard, so that a bad shard hides no other; or the saved manifest, or
    one of a folder of images, whose shards are runs of files.
    """
    from dataplane.commands.datasets import STORES
    from dataplane.index.indexing import index_dataset

    if any(url.endswith(suffixes.MANIFEST) for url in urls):
        yield index_dataset(urls, format_name=format_name, connect=STORES.connect)
        return
    name, shards = _shards(urls, format_name)
    if name == suffixes.FILES:  # images: the listing alone says what is in each shard
        yield index_dataset(urls, format_name=name, connect=STORES.connect)
        return
    task: TaskID = bar.add_task("indexing", total=len(shards), note="")

    def indexing(url: str) -> Callable[[], Manifest]:
        return lambda: index_dataset([url], format_name=name, workers=1, connect=STORES.connect)

    found = {}
    for url, result in _side_by_side(((url, indexing(url)) for url in shards), workers):
        bar.update(task, advance=1)
        if not isinstance(result, DataplaneError):
            found[url] = result
        elif result.nouns.get("field") == "samples":  # allowed if others have samples
            findings.empty.append(url)
        else:
            findings.note(url, result)
    findings.empty.sort()
    yield from (found[url] for url in shards if url in found)


def _shards(urls: Sequence[str], format_name: str) -> tuple[str, list[str]]:
    """Return the format's name, and the shards that `urls` name."""
    from dataplane.commands.datasets import STORES
    from dataplane.index.indexing import choose_shards
    from dataplane.model.joined import Joined, is_joined
    from dataplane.store.expand import expand
    from dataplane.store.tables import open_table
    from dataplane.store.urls import normalise

    names = [normalise(url) for url in urls]
    table = open_table(names, STORES.connect)
    found = expand(names, STORES.connect) if table is None else list(table.files)
    chosen, listed = choose_shards(found, names, format_name, STORES.connect)
    # A joined shard has no object of its own: its last object names the others.
    own = [Joined.of(i.url, i.etag).members[-1] if is_joined(i.etag) else i for i in listed]
    return chosen.name, [*dict.fromkeys(info.url for info in own)]


def _agreeing(
    manifests: Sequence[Manifest], findings: Findings
) -> tuple[list[Manifest], pa.Schema]:
    """Return the manifests whose schemas fit those before them, and their common schema."""
    from dataplane.commands.datasets import schema_of
    from dataplane.formats.unsupported import refuse_differing

    schema, agreeing = schema_of(manifests[0]), []
    kept: list[tuple[str, pa.Schema]] = []
    fitting: set[bytes] = set()
    for manifest in manifests:
        url = manifest.shards.urls[0]
        try:
            if len(manifests) == 1:  # perhaps the saved manifest of a whole dataset
                refuse_differing(schema, schema.names, manifest.shards.urls.__getitem__)
            elif manifest.schema not in fitting:
                some = [*kept, (url, schema_of(manifest))]
                schema = _shared_schema(some)
                kept = some
        except DataplaneError as error:
            findings.note(url, error)
            if len(manifests) > 1:
                continue
        fitting.add(manifest.schema)
        agreeing.append(manifest)
    return agreeing, schema


def _shared_schema(shards: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Merge the schemas of these shards, given with their urls. Every column must be readable from
    each shard.

    Raises:  SchemaMismatch: the types of a column differ too much.
    """
    from dataplane.formats.unsupported import refuse_differing
    from dataplane.index.indexing import SharedSchema

    def url_of(shard: int) -> str:
        return shards[shard][0]

    shared = SharedSchema(url_of)
    for shard, (_, own) in enumerate(shards):
        shared.note(shard, own, has_rows=True)
    schema = shared.merged()
    refuse_differing(schema, schema.names, url_of)
    return schema


def _has_bytes(kind: pa.DataType) -> bool:
    """Return whether values of this type are or contain bytes, which verify does not decode."""
    import pyarrow as pa

    from dataplane.formats.arrays import BYTES

    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    fields = range(kind.num_fields)
    return kind.id in BYTES or any(_has_bytes(kind.field(at).type) for at in fields)


def _note_unsupported(schema: pa.Schema, url: str, findings: Findings) -> None:
    """Note columns that cannot be read, which are not checked: a job must leave them out."""
    from dataplane.formats.unsupported import differing, refusal, supported_names, unsupported

    alike = [field for field in schema if differing(field) is None]
    reasons = {field.name: why for field in alike if (why := unsupported(field))}
    if reasons:
        findings.note(url, refusal(reasons, supported_names(schema), url))


@dataclass(slots=True)
class Images:
    """The values of a column of bytes: how many are images that can be decoded, how many cannot be
    decoded, and the shard, row and reason of the first of these.
    """

    decoded: int = 0
    undecodable: int = 0
    faults: list[tuple[str, int, str]] = field(default_factory=list)

    def add(self, other: Images) -> None:
        """Add the values of another block."""
        self.decoded += other.decoded
        self.undecodable += other.undecodable
        self.faults += other.faults[: UNDECODABLE_MAX - len(self.faults)]


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A block that was read, its rows that are bad, by number in the shard, and its images by
    column.
    """

    rows: int
    bad: Mapping[int, str]
    size_bytes: int
    images: Mapping[str, Images]


def _reads(
    manifests: Iterable[Manifest], schema: pa.Schema, *, decode: bool
) -> Iterator[Task[BlockRead]]:
    from dataplane.commands.datasets import salvaged_block
    from dataplane.formats.unsupported import supported_names
    from dataplane.plan.views import first_rows

    names = supported_names(schema)

    def reading(manifest: Manifest, block: int, url: str, row: int) -> Callable[[], BlockRead]:
        def read() -> BlockRead:
            batch, bad = salvaged_block(manifest, block, schema, names)
            images = dict(_images_of(batch, url, row, bad)) if decode else {}
            numbered = {row + at: why for at, why in bad.items()}
            size = int(manifest.block_length[block])
            return BlockRead(batch.num_rows, numbered, size, images)

        return read

    for manifest in manifests:
        first = first_rows(manifest)
        for block in range(manifest.block_count):
            url = manifest.shards[int(manifest.block_shard[block])].url
            yield url, reading(manifest, block, url, int(first[block]))


def _images_of(
    batch: pa.RecordBatch, url: str, first_row: int, bad: Collection[int]
) -> Iterator[tuple[str, Images]]:
    """Yield each column of bytes, with its values decoded as a trainer's images are, except those
    of bad rows.
    """
    import pyarrow as pa

    from dataplane.formats.arrays import BYTES, read_as
    from dataplane.model.joined import KEY

    columns = list(zip(batch.schema.names, batch.columns, strict=True))
    keys = batch.column(KEY) if KEY in batch.schema.names else None
    for name, array in columns:
        plain = array.storage if isinstance(array, pa.ExtensionArray) else array
        if pa.types.is_struct(plain.type):
            parts = zip(plain.type.fields, plain.flatten(), strict=True)
            columns += [(f"{name}.{part.name}", values) for part, values in parts]
        elif plain.type.id in BYTES:
            yield name, _decoded(read_as(plain, pa.large_binary()), url, first_row, keys, bad)


def _decoded(
    values: pa.Array, url: str, first_row: int, keys: pa.Array | None, bad: Collection[int]
) -> Images:
    import numpy as np

    from dataplane.model.joined import KEY
    from dataplane.transforms import pixels
    from dataplane.transforms.view import PixelView

    images, view = Images(), PixelView(8, 8, "HWC", "uint8", None, None)
    out, flips = np.empty(view.bytes, np.uint8), np.zeros(1, np.uint8)
    for row, value in enumerate(values):
        if not value.is_valid or row in bad:
            continue
        buffer = value.as_buffer()
        place = np.array([[buffer.address, buffer.size]])
        try:
            box = np.concatenate([[(0, 0)], pixels.sizes(place)], axis=1).astype(np.float64)
            pixels.render(place, box, flips, view, out)
        except ImageError as error:
            images.undecodable += 1
            if len(images.faults) < UNDECODABLE_MAX:
                named = "" if keys is None else f" ({KEY} {keys[row].as_py()!r})"
                images.faults.append((url, first_row + row, f"{error}{named}"))
        else:
            images.decoded += 1
    return images


def _give_up() -> None:
    """Stop waiting for stores whose results are no longer needed."""
    from dataplane.commands.datasets import STORES

    STORES.close()


def _side_by_side(
    tasks: Iterable[Task[T]], workers: int
) -> Iterator[tuple[str, T | DataplaneError]]:
    """Yield each task's result, or its error, in the order of completion; at most twice `workers`
    run at once.

    Raises:  StoreUnavailable, StoreThrottled: the store failed, so nothing is known about the data.
    """
    waiting = iter(tasks)
    running: dict[Future[T], str] = {}
    pool = ThreadPoolExecutor(workers, thread_name_prefix="dataplane-verify")
    try:
        while True:
            while len(running) < 2 * workers:
                task = next(waiting, None)
                if task is None:
                    break
                running[pool.submit(task[1])] = task[0]
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                name = running.pop(future)
                try:
                    yield name, future.result()
                except UNREACHABLE:
                    _give_up()
                    raise
                except DataplaneError as error:
                    yield name, error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _report(findings: Findings) -> None:
    read = (
        f"{output.counted(findings.samples, 'sample')} in "
        f"{output.counted(findings.blocks, 'block')}"
    )
    size = output.approximate_bytes(findings.bytes)
    if findings.empty:
        shown = ", ".join(findings.empty[:EMPTY_SHOWN])
        more = "" if len(findings.empty) <= EMPTY_SHOWN else ", …"
        output.warn(
            f"{output.counted(len(findings.empty), 'shard')} without samples: {shown}{more}"
        )
    if not findings.errors:
        shards = output.counted(findings.shards, "shard")
        images = f", {output.counted(findings.images, 'image')} decoded" if findings.images else ""
        output.stdout().print(f"[green]OK[/]: {read} of {shards}, {size}{images}, no damage found")
        if findings.not_decoded:
            names = ", ".join(findings.not_decoded)
            output.stdout().print(
                f"Bytes, such as images, were read and not decoded: {names}", markup=False
            )
        return
    faults = sorted(findings.errors, key=lambda fault: (fault.shard, fault.message))
    console = output.stdout()
    for fault in faults[:ERRORS_SHOWN]:
        console.print(printable(f"{fault.kind}: {fault.message}"), markup=False, soft_wrap=True)
    if len(faults) > ERRORS_SHOWN:
        console.print(f"… and {len(faults) - ERRORS_SHOWN:,} more; --json has all of them")
    bad = len({fault.shard for fault in faults})
    if findings.undecodable:
        every = output.counted(findings.images + findings.undecodable, "image")
        console.print(f"{findings.undecodable:,} of {every} cannot be decoded", markup=False)
    state = "were read" if findings.undecodable else "are undamaged"
    console.print(
        f"[red]{output.counted(len(faults), 'error')}[/] in {output.counted(bad, 'shard')}; "
        f"{read} ({size}) {state}"
    )
