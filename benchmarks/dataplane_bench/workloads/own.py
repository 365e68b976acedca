"""The user's own samples: copies of some whole shards, on which every loader is measured.

Dataplane reads the copies as they are. From the same copies come the source shards that every other
loader converts: of the columns that all of them can take.
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
from pathlib import Path

from dataplane.base import suffixes
from dataplane.formats import registry
from dataplane.formats.base import Format
from dataplane.index.indexing import choose_shards, index_dataset
from dataplane.model.errors import ConfigError, DataplaneError, TruncatedRead, rebuild
from dataplane.model.records import ObjectInfo
from dataplane.store.connect import connect
from dataplane.store.expand import expand
from dataplane.store.urls import normalise
from dataplane_bench.model import Workload
from dataplane_bench.workloads.about import read_about, write_about
from dataplane_bench.workloads.generate import BATCHES_MIN, RECIPES
from dataplane_bench.workloads.usable import write_source

VERSION = 1
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
    about = read_about(folder)
    columns, count, notes = about.columns, about.sample_count, about.notes
    if len(taken) < len(listed):
        sizes = [sum(one.size_bytes for one in some) / (1 << 20) for some in (taken, listed)]
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
        listed = [ObjectInfo(one.url, one.size_bytes, one.etag) for one in manifest.shards]
        return registry.by_name(manifest.format), listed
    return choose_shards(expand(names, connect), names, "", connect)


def _first(listed: Sequence[ObjectInfo], byte_limit: int) -> list[ObjectInfo]:
    taken, size = list(listed[:1]), listed[0].size_bytes
    for one in listed[1:]:
        size += one.size_bytes
        if size > byte_limit:
            break
        taken.append(one)
    return taken


def _fingerprint(chosen: Format, taken: Sequence[ObjectInfo]) -> str:
    told = [VERSION, chosen.name, [[one.url, one.size_bytes, one.etag] for one in taken]]
    return "own-" + hashlib.blake2b(json.dumps(told).encode(), digest_size=8).hexdigest()


def _make(chosen: Format, taken: Sequence[ObjectInfo], folder: Path) -> None:
    """The folder: shards, source and what is known of them. It is complete or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (new / "source").mkdir()
        copies = _copied(chosen, taken, new / "shards")
        with _blaming(taken, copies):
            manifest = index_dataset(copies, format_name=chosen.name, workers=_COPIES_AT_ONCE)
            write_about(write_source(manifest, new / "source"), new)
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
        for one, copy in zip(taken, copies, strict=True):
            message = message.replace(f"file://{copy}", one.url)
            if nouns.get("shard") == f"file://{copy}":
                nouns["shard"] = one.url
        raise rebuild(type(error).__name__, message, nouns) from error


def _copied(chosen: Format, taken: Sequence[ObjectInfo], folder: Path) -> list[Path]:
    folder.mkdir()

    def copy(index: int) -> Path:
        one = taken[index]
        name = f"{index:05d}-{Path(one.url).name}"
        if registry.format_of_url(name) != chosen:
            name += chosen.suffixes[-1]  # a manifest knows the format, whatever the names
        with (folder / name).open("wb") as copied:
            for piece in connect(one.url).stream(one.url, one.etag):
                copied.write(piece)
            if copied.tell() != one.size_bytes:
                raise TruncatedRead(
                    f"{one.url} has {one.size_bytes} bytes, and {copied.tell()} came",
                    shard=one.url,
                    offset=0,
                    expected=one.size_bytes,
                    found=copied.tell(),
                )
        return folder / name

    with ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="bench-copy") as pool:
        return list(pool.map(copy, range(len(taken))))
