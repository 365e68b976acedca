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
import functools
import hashlib
import json
import os
import secrets
import struct
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from typing_extensions import Buffer

from dataplane.formats import registry
from dataplane.formats.base import Block, Format, ShardIndex
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.records import ObjectInfo, Region
from dataplane.plan.manifest import Manifest

MANIFESTS_KEPT = 4
STALE_S = 3600.0
_HASHED_AT_ONCE = 1 << 12
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<I")
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


def digest(*parts: object) -> str:
    """32 hex digits that name these parts."""
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


class IndexJournal:
    """The cache of one dataset, that is, of one list of urls read as one format."""

    def __init__(self, cache_dir: str, dataset: str) -> None:
        self._folder = _folder(cache_dir, dataset)
        self._log: int | None = None
        self._log_path = self._folder / f"run-{secrets.token_hex(8)}.log"
        self._frames = IndexFrames()
        with cache_faults(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._sweep()
            self._found = sorted(self._folder.glob("*.log"))

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
        for path in self._found:
            with contextlib.suppress(FileNotFoundError):
                found |= decode_indexes(path.read_bytes())
        return found

    def remember(self, key: str, index: ShardIndex) -> None:
        """Append one shard's index to this process's log."""
        with cache_faults(self._folder):
            if self._log is None:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
                self._log = os.open(self._log_path, flags, 0o600)
            write_all(self._log, self._frames.of(key, index))

    def finish(
        self, key: str, manifest: Manifest, shards: Iterable[tuple[str, ShardIndex]]
    ) -> None:
        """Publish the manifest and one log of all its shards; remove the logs of other runs."""
        frames = IndexFrames()
        kept = self._folder / f"shards-{key}.log"
        with cache_faults(self._folder):
            publish(kept, b"".join(frames.of(name, index) for name, index in shards))
            self.keep(key, manifest.to_bytes())
            for path in {*self._found, self._log_path} - {kept}:
                path.unlink(missing_ok=True)

    def keep(self, key: str, content: Buffer) -> None:
        """Publish the bytes of a manifest; only the last few manifests stay."""
        with cache_faults(self._folder):
            publish(self._folder / f"{key}.manifest", content)
            manifests = sorted(self._folder.glob("*.manifest"), key=written_at, reverse=True)
            for path in manifests[MANIFESTS_KEPT:]:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the log; its content stays for the next run."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _sweep(self) -> None:
        """Remove files that a process killed during publishing may have left."""
        for path in self._folder.glob(".*.tmp"):
            if time.time() - written_at(path) > STALE_S:
                path.unlink(missing_ok=True)


def _folder(cache_dir: str, dataset: str) -> Path:
    return Path(cache_dir) / "index" / dataset


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
            "another one with cache_dir",
            field="cache_dir",
        ) from fault


def written_at(path: Path) -> float:
    """Return when a file was last written; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def encode_index(index: ShardIndex) -> bytes:
    """Serialise one shard's index for another process."""
    return IndexFrames().of("", index)


def decode_index(content: bytes) -> ShardIndex:
    """The inverse of `encode_index`."""
    return decode_indexes(content)[""]


class IndexFrames:
    """Makes the frames of one log, which `decode_indexes` reads in the same order."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._last: tuple[pa.Schema, str] | None = None

    def of(self, key: str, index: ShardIndex) -> bytes:
        """Make one shard's frame, after a frame of its schema if the log does not have it yet."""
        frames = b""
        # Shards that were indexed together share one schema object.
        if self._last is None or self._last[0] is not index.schema:
            schema = index.schema.serialize().to_pybytes()
            name = hashlib.blake2b(schema, digest_size=16).hexdigest()
            self._last = (index.schema, name)
            if name not in self._written:
                self._written.add(name)
                frames = frame({"schema": name}, schema)
        return frames + _shard_frame(key, index, self._last[1])


def _shard_frame(key: str, index: ShardIndex, schema_name: str) -> bytes:
    table = np.array(
        [(b.rows, b.place.offset, b.place.length, b.decoded_bytes) for b in index.blocks], "<i8"
    )
    facts = {
        "shard": key,
        "of": schema_name,
        "preamble": [index.preamble.offset, index.preamble.length],
        "zero_copy": index.zero_copy,
        "blocks": len(index.blocks),
        "nulls": len(index.nulls),
    }
    columns = b"".join(np.array(block.columns, "<i8").tobytes() for block in index.blocks)
    nulls = np.array(index.nulls, "<i8").tobytes()
    return frame(facts, table.tobytes() + columns + nulls)


def frame(facts: Mapping[str, object], body: bytes) -> bytes:
    """Make a frame of a log from facts, which are plain values, and bytes."""
    header = json.dumps(facts, separators=(",", ":")).encode()
    payload = _HEADER.pack(len(header)) + header + body
    return _FRAME.pack(len(payload), google_crc32c.value(payload)) + payload


def frames_in(content: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the facts and the bytes of each frame, up to the first that is torn or damaged."""
    at = 0
    while at + _FRAME.size <= len(content):
        length, crc = _FRAME.unpack_from(content, at)
        payload = content[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < length or google_crc32c.value(payload) != crc:
            return
        end = _HEADER.size + _HEADER.unpack_from(payload)[0]
        yield json.loads(payload[_HEADER.size : end]), payload[end:]
        at += _FRAME.size + length


@functools.lru_cache(maxsize=4)
def _schema(serialised: bytes) -> pa.Schema:
    """Return the same object for the same bytes, so that comparing shards with one schema costs
    nothing.
    """
    return pa.ipc.read_schema(pa.py_buffer(serialised))


def decode_indexes(content: bytes) -> dict[str, ShardIndex]:
    """The indexes of all shards in a log, by key."""
    schemas: dict[str, pa.Schema] = {}
    found: dict[str, ShardIndex] = {}
    for facts, body in frames_in(content):
        if "schema" in facts:
            schemas[facts["schema"]] = _schema(body)
            continue
        numbers, count = np.frombuffer(body, "<i8"), facts["blocks"]
        end = len(numbers) - facts["nulls"]
        table = numbers[: 4 * count].reshape(-1, 4).tolist()
        per_block = (count, -1) if count else (0, 0)
        columns = numbers[4 * count : end].reshape(per_block)
        found[facts["shard"]] = ShardIndex(
            schemas[facts["of"]],
            tuple(
                Block(rows, Region(at, length), size, array("q", places.tobytes()))
                for (rows, at, length, size), places in zip(table, columns, strict=True)
            ),
            Region(*facts["preamble"]),
            facts["zero_copy"],
            array("q", numbers[end:].tobytes()),
        )
    return found


def write_all(fd: int, content: Buffer) -> None:
    """Write all bytes to a file, in as many calls as needed."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def publish(path: Path, content: Buffer) -> None:
    """Publish a file atomically. The file has no name until it is complete, so a kill leaves
    nothing behind. On file systems without unnamed files it has a temporary name, which a later run
    removes.
    """
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        if fault.errno not in _NO_TMPFILE:
            raise
        return _publish_named(path, content)
    try:
        write_all(fd, content)
        path.unlink(missing_ok=True)
        # A directory makes Python call linkat, which alone can follow the link in /proc.
        with contextlib.suppress(FileExistsError):
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    finally:
        os.close(fd)
    return None


def _publish_named(path: Path, content: Buffer) -> None:
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, content)
        finally:
            os.close(fd)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def version_of(format_: Format) -> tuple[str, int, int]:
    """Return the parts with which the keys of shards begin."""
    index_version = int(getattr(format_, "index_version", 0))
    return format_.name, registry.INDEX_VERSION, index_version


def keep_given(cache_dir: str, manifest: Manifest, content: Buffer) -> None:
    """Keep a manifest that another node has sent in this cache folder, for the next time that these
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
