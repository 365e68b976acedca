"""The cache of indexing between runs: one folder per dataset, under the node's cache folder.

1. A shard's index is used only for the same url, size, etag, format and version of our code: a
   changed shard is indexed again, but no other.
2. Each process appends to its own log, in frames with a checksum. A killed process leaves at most a
   torn last frame, which readers skip; two processes never write to one file.
3. Whole files (`shards-*.log`, `*.manifest`) appear complete or not at all, under a name derived
   from their content, and are never changed.
4. A finished run leaves one `shards-*.log` and the last few manifests, however often it was
   interrupted before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.base.units import ways_to_set
from dataplane.formats import registry
from dataplane.formats.base import Format, ShardIndex
from dataplane.formats.index_frames import IndexFrames, decode_indexes
from dataplane.model.errors import ConfigError, CorruptShard, DataplaneError
from dataplane.model.records import ObjectInfo
from dataplane.plan.manifest import Manifest, sealed, unsealed

MANIFESTS_KEPT = 4
STALE_S = 3600.0
_HASHED_AT_ONCE = 1 << 12
_FILES_KEPT = 256
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


def digest(*parts: object) -> str:
    """Return 32 hex digits that name these parts."""
    canonical = json.dumps(parts, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def dataset_name(version: Sequence[object], names: Sequence[str]) -> str:
    """Return the folder name of a dataset, that is, of one list of urls read as one format."""
    return digest(*version, *names)


def listing_key(format_: Sequence[object], keys: Sequence[str]) -> str:
    """Compute `digest(*format_, *keys)` in steps, so that other threads run in between."""
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(json.dumps(format_, separators=(",", ":"))[:-1].encode())
    for begin in range(0, len(keys), _HASHED_AT_ONCE):
        some = json.dumps(keys[begin : begin + _HASHED_AT_ONCE], separators=(",", ":"))
        hashed.update(f",{some[1:-1]}".encode())
    hashed.update(b"]")
    return hashed.hexdigest()


class RunLogs:
    """The logs of runs in one folder: each process appends to its own log, and may read the logs
    of earlier runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log: int | None = None
        self._path = folder / f"run-{secrets.token_hex(8)}.log"
        with cache_faults(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in folder.glob(".*.tmp"):  # left by a process that was killed while publishing
                if time.time() - written_at(path) > STALE_S:
                    path.unlink(missing_ok=True)
            self._former = sorted(folder.glob("*.log"))

    def former(self) -> Iterator[bytes]:
        """Yield the content of each log of earlier runs."""
        for path in self._former:
            with contextlib.suppress(FileNotFoundError):
                yield path.read_bytes()

    def append(self, frame: bytes) -> None:
        """Append to the log of this process."""
        with cache_faults(self._folder):
            if self._log is None:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
                self._log = os.open(self._path, flags, 0o600)
            write_all(self._log, frame)

    def replace(self, name: str, content: Buffer) -> None:
        """Publish one log of everything, and remove all others."""
        kept = self._folder / f"{name}.log"
        with cache_faults(self._folder):
            publish(kept, content)
            for path in {*self._former, self._path} - {kept}:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the log; its content stays for the next run. May be called twice."""
        if self._log is not None:
            os.close(self._log)
            self._log = None


class IndexJournal:
    """The cache of one dataset, that is, of one list of urls read as one format."""

    def __init__(self, cache_dir: str, dataset: str) -> None:
        self._folder = Path(cache_dir) / "index" / dataset
        self._logs, self._frames = RunLogs(self._folder), IndexFrames()
        self.close = self._logs.close

    def manifest(self, key: str) -> Manifest | None:
        """Return the finished manifest of this listing, if it exists and is intact."""
        path = self._folder / f"{key}.manifest"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return Manifest.from_bytes(content, str(path))
        except DataplaneError:
            path.unlink(missing_ok=True)
            return None

    def remembered(self) -> dict[str, ShardIndex]:
        """Return every shard index that earlier runs wrote, by shard key."""
        found: dict[str, ShardIndex] = {}
        for content in self._logs.former():
            found |= decode_indexes(content)
        return found

    def remember(self, key: str, index: ShardIndex) -> None:
        """Append one shard's index to this process's log."""
        self._logs.append(self._frames.of(key, index))

    def finish(
        self, key: str, manifest: Manifest, shards: Iterable[tuple[str, ShardIndex]]
    ) -> None:
        """Publish the manifest and one log of all its shards; remove the logs of other runs."""
        frames = IndexFrames()
        content = b"".join(frames.of(name, index) for name, index in shards)
        self._logs.replace(f"shards-{key}", content)
        self.keep(key, manifest.to_bytes())

    def keep(self, key: str, content: Buffer) -> None:
        """Publish the bytes of a manifest; only the last few manifests stay."""
        with cache_faults(self._folder):
            publish(self._folder / f"{key}.manifest", content)
            manifests = sorted(self._folder.glob("*.manifest"), key=written_at, reverse=True)
            for path in manifests[MANIFESTS_KEPT:]:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def cache_faults(folder: Path) -> Iterator[None]:
    """Convert an OSError about the cache folder to an error with advice.

    Raises:  ConfigError: instead of an OSError about the cache folder.
    """
    try:
        yield
    except OSError as fault:
        raise ConfigError(
            f"the cache folder {folder} cannot be used ({fault.strerror or fault}); choose "
            f"another one ({ways_to_set('cache_dir', 'FOLDER')})",
            field="cache_dir",
        ) from fault


def written_at(path: Path) -> float:
    """Return when a file was last written; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def write_all(fd: int, content: Buffer) -> None:
    """Write all bytes to a file, in as many calls as needed."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def publish(path: Path, content: Buffer, mode: int = 0o600) -> None:
    """Publish a file atomically. The file has no name until it is complete, so a kill leaves
    nothing behind. On file systems without unnamed files it has a temporary name, which a later run
    removes.
    """
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, mode)
    except OSError as fault:
        if fault.errno not in _NO_TMPFILE:
            raise
        return _publish_named(path, content, mode)
    try:
        write_all(fd, content)
        path.unlink(missing_ok=True)
        # Pass a directory (`src_dir_fd`), so that Python calls linkat: only linkat can follow the
        # link in /proc.
        with contextlib.suppress(FileExistsError):
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    finally:
        os.close(fd)
    return None


def _publish_named(path: Path, content: Buffer, mode: int = 0o600) -> None:
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
        try:
            write_all(fd, content)
        finally:
            os.close(fd)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class SealedFiles(Struct, frozen=True):
    """Files with a checksum in one folder below the cache folder. Of the files with this suffix,
    the last `kept` stay. A cache folder of "" keeps none.
    """

    cache_dir: str
    below: str
    suffix: str
    kept: int = _FILES_KEPT

    @property
    def _folder(self) -> Path:
        return Path(self.cache_dir, self.below)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{self.suffix}"

    def read(self, name: str) -> memoryview | None:
        """Return the content of a file; None if the file is missing or damaged."""
        if not self.cache_dir:
            return None
        path = self._path(name)
        try:
            return memoryview(unsealed(path.read_bytes(), str(path)))
        except FileNotFoundError:
            return None
        except (CorruptShard, OSError):
            path.unlink(missing_ok=True)
            return None

    def write(self, name: str, body: bytes) -> None:
        """Write a file.

        Raises:  ConfigError: the cache folder cannot be used.
        """
        if not self.cache_dir:
            return
        folder = self._folder
        with cache_faults(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            publish(self._path(name), sealed(body))
            for old in sorted(folder.glob(f"*{self.suffix}"), key=written_at)[: -self.kept]:
                old.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises:  ConfigError: the cache folder cannot be used.
        """
        if not self.cache_dir:
            return
        with cache_faults(self._folder):
            self._path(name).unlink(missing_ok=True)


def version_of(format_: Format) -> tuple[str, int, int]:
    """Return the parts with which the keys of shards begin."""
    index_version = int(getattr(format_, "index_version", 0))
    return format_.name, registry.INDEX_VERSION, index_version


def keep_given(cache_dir: str, manifest: Manifest, content: Buffer) -> None:
    """Store a manifest that another node has sent in our cache folder, for the next time that these
    shards are listed.

    Raises:  ConfigError: the folder cannot be used.
    """
    version, shards = version_of(registry.by_name(manifest.format)), manifest.shards
    listed = zip(shards.urls, shards.size_bytes.tolist(), shards.etags, strict=True)
    keys = shard_keys(version, (ObjectInfo(*each) for each in listed))
    journal = IndexJournal(cache_dir, dataset_name(version, manifest.urls))
    try:
        journal.keep(listing_key(version, keys), content)
    finally:
        journal.close()


def shard_keys(format_: Sequence[object], shards: Iterable[ObjectInfo]) -> list[str]:
    """Compute the cache key of each shard's index: `digest(*format_, url, size, etag)`."""
    head = json.dumps(format_, separators=(",", ":"))[:-1]
    found = []
    for shard in shards:
        canonical = f"{head},{json.dumps(shard.url)},{shard.size_bytes},{json.dumps(shard.etag)}]"
        found.append(hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest())
    return found
