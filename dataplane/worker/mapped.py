"""Local shards, mapped for reading: each is checked against its etag whenever it is used.

Of a shard that is joined from parts of files (model/joined.py), only the last part is mapped, which
has all its blocks. The others are its preamble, which is read once.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from collections import OrderedDict

import numpy as np
from msgspec import Struct

from dataplane.arena.memfd import populate
from dataplane.model.errors import DatasetChangedError, ShardNotFound
from dataplane.model.joined import Joined, head_of, is_joined
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.store.local import LocalStore, local_etag
from dataplane.store.urls import FILE_PREFIX
from dataplane.worker.columns import BlockColumns

_OPEN_SHARDS_MAX = 256
_NO_DEVICE = 0
"""The major number of file systems that are not on a block device of this machine."""
_numbers = itertools.count(-1, -1)


class MappedShard(Struct, frozen=True, weakref=True, eq=False):
    """A mapped local file; its descriptor is closed when the last block of it is forgotten."""

    url: str
    etag: str
    fd: int
    mapping: mmap.mmap
    number: int
    """A negative number, unique to this mapping. The mapped bytes stay the same as long as the file
    is not written."""
    is_far: bool
    """Whether the file may be on a network file system."""
    start: int = 0
    """Where in the shard the mapping begins."""
    preamble: bytes = b""
    """The beginning of a joined shard, which is not mapped."""

    def view(self, place: Region) -> memoryview:
        """Return these bytes of the shard: its preamble, or a part of a block."""
        whole: mmap.mmap | bytes = self.mapping
        at = place.offset - self.start
        if place.offset < len(self.preamble):
            whole, at = self.preamble, place.offset
        return memoryview(whole)[at : at + place.length]

    def check(self) -> None:
        """Check that the file was not written since it was indexed.   Raises:
        DatasetChangedError.
        """
        _check_etag(self.url, self.etag, os.fstat(self.fd))

    def load(self, offset: int, length: int) -> None:
        """Have these bytes of the shard read, and map their pages."""
        offset -= self.start
        if self.is_far:
            # NFS, Lustre and others read little ahead of page faults, but all that they are told.
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):  # it is only advice
                self.mapping.madvise(mmap.MADV_WILLNEED, start, offset + length - start)
        populate(self.mapping, offset, length)

    def populate(self, columns: BlockColumns) -> None:
        """Load only those columns of a block that lie in the file."""
        start = np.frombuffer(self.mapping, np.uint8).ctypes.data
        for part in columns.values:
            if start <= part.address < start + len(self.mapping) and part.length:
                self.load(part.address - start + self.start, part.length)


class MappedShards:
    """The last few shards that were used."""

    def __init__(self) -> None:
        self._shards: OrderedDict[tuple[str, str], MappedShard] = OrderedDict()

    def of(self, raw: tasks.RawBlockRef) -> MappedShard:
        """Return the local file of a block, which is mapped if it is not yet.

        Raises:  ShardNotFound, DatasetChangedError.
        """
        key = (str(raw.path), raw.etag)
        shard = self._shards.get(key)
        if shard is None:
            shard = self._shards[key] = _map(str(raw.path), raw)
            if len(self._shards) > _OPEN_SHARDS_MAX:
                self._shards.popitem(last=False)
        self._shards.move_to_end(key)
        shard.check()
        return shard


def _map(path: str, raw: tasks.RawBlockRef) -> MappedShard:
    url, etag, length, at, preamble = raw.url, raw.etag, raw.shard_bytes, 0, b""
    if is_joined(etag):
        joined, store = Joined.of(url, etag), LocalStore()
        *firsts, last = zip(joined.members, joined.starts, strict=True)
        parts = (store.read(one.url, begin, one.size_bytes, one.etag) for one, begin in firsts)
        preamble = b"".join([head_of(etag), *parts])
        url, etag, length, at = last[0].url, last[0].etag, last[0].size_bytes, last[1]
        path = url.removeprefix(FILE_PREFIX)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ShardNotFound(
            f"{url}: {error.strerror}; it was there when the dataset was indexed: restore it,"
            ' or pass on_bad="replace", which reads other rows in its place',
            shard=url,
        ) from error
    try:
        status = os.fstat(fd)
        _check_etag(url, etag, status)  # includes the size: a shorter file cannot be mapped
        skipped = at % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(
            fd, length + skipped, mmap.MAP_SHARED, mmap.PROT_READ, offset=at - skipped
        )
    except BaseException:
        os.close(fd)
        raise
    is_far = os.major(status.st_dev) == _NO_DEVICE
    start = len(preamble) - skipped
    shard = MappedShard(url, etag, fd, mapping, next(_numbers), is_far, start, preamble)
    weakref.finalize(shard, os.close, fd)
    return shard


def _check_etag(url: str, etag: str, status: os.stat_result) -> None:
    found = local_etag(status)
    if found != etag:
        raise DatasetChangedError(
            f"{url} changed since it was indexed (etag {etag}, now {found}): "
            "index the dataset again",
            shard=url,
            expected=etag,
            found=found,
        )
