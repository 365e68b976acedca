"""Several objects that are read as one shard.

Such a shard has no object of its own. Its bytes are a head and then the bytes of its members, one
after the other. The head is the shard's etag, which lists the members: names, sizes and etags. The
shard's url and etag are therefore enough to read it (`store/reads.py`): a manifest needs no further
table, and equal etags mean equal bytes, as for any shard.

Invariants:
1. An etag is compressed, and names members relative to the shard's url: a file takes 10 to 45 bytes
   in a manifest, and a copy of a folder elsewhere has equal lists of names.
2. A member may lie in another store than the shard's url says.
"""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Self

import msgspec
from msgspec import Struct

from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.records import ObjectInfo, Unsigned
from dataplane.model.typed import complete

FILES, MARK, MISSING = "files", "joined:", "missing"
"""A format's name, the beginning of the etags of joined shards, and the etag of a member that was
not there when the shard was joined: it has no bytes."""
KEY, LABEL, IMAGE = "__key__", "label", "image"
"""The columns of files that are rows."""
ROWS = b"dataplane.rows"
"""The metadata of a schema in which the rows of a table of paths are sent."""
_LENGTH = struct.Struct("<Q")
_LIST_BYTES_MAX, _BYTES_MAX = 64 << 20, (1 << 62) - 1
"""The most bytes of a list of members before it is compressed, and of the members."""


class _Members(Struct, frozen=True, array_like=True):
    """The members as they are stored. The url of each is that of the one before, without its last
    `dropped` characters, and with `added`; the first one follows the url of the shard.
    """

    dropped: list[Unsigned]
    added: list[str]
    sizes: list[Unsigned]
    etags: list[str]
    key_chars: int
    rows: bytes
    starts: list[Unsigned] = []


class Joined(Struct, frozen=True):
    """The members of a shard, in order. `root` is the folder to which their names are relative; ""
    if they have no common one. `rows` is further data of the format that reads the shard. Members
    may be parts of objects, which begin at `starts` in these.
    """

    members: Sequence[ObjectInfo]
    root: str = ""
    rows: bytes = b""
    starts: Sequence[int] = ()

    def listed(self, url: str) -> ObjectInfo:
        """Return the shard as an object with this url, which must be unique in its dataset."""
        dropped, added, last = [], [], url
        for member in self.members:
            folder = member.url[: without_query(member.url).rfind("/") + 1]
            is_near = last.startswith(folder)
            dropped.append(len(last) - len(folder) if is_near else len(last))
            added.append(member.url[len(folder) :] if is_near else member.url)
            last = member.url
        is_below = self.root and self.members[0].url.startswith(self.root)
        stored = _Members(
            dropped,
            added,
            [member.size_bytes for member in self.members],
            [member.etag for member in self.members],
            len(self.members[0].url) - len(self.root) if is_below else -1,
            self.rows,
            [*self.starts],
        )
        plain = msgspec.msgpack.encode(stored)
        if len(plain) > _LIST_BYTES_MAX:
            raise ConfigError(
                f"{url}: the rows of {len(self.members)} files have more than "
                f"{_LIST_BYTES_MAX >> 20} MiB in the table: leave their large columns out of it",
                shard=url,
            )
        packed = zlib.compress(plain)
        etag = f"{MARK}{base64.b64encode(packed).decode()}"
        return ObjectInfo(url, len(head_of(etag)) + sum(stored.sizes), etag)

    @classmethod
    def of(cls, url: str, etag: str) -> Self:
        """Invert `listed`.   Raises:  CorruptShard: the etag is damaged."""
        try:
            packed = base64.b64decode(etag.removeprefix(MARK), validate=True)
            unpacking = zlib.decompressobj()
            plain = unpacking.decompress(packed, _LIST_BYTES_MAX)
            if not unpacking.eof:
                raise _damaged(url)
            stored = msgspec.msgpack.decode(plain, type=complete(_Members))
        except (ValueError, zlib.error, msgspec.DecodeError) as error:
            raise _damaged(url) from error
        count = len(stored.added)
        if (
            {len(stored.dropped), len(stored.sizes), len(stored.etags)} != {count}
            or len(stored.starts) not in {0, count}
            or not count
            or any(map(is_joined, stored.etags))  # such a read would wait for itself
            or sum(stored.sizes) > _BYTES_MAX
        ):
            raise _damaged(url)
        urls, last = [], url
        for dropped, text in zip(stored.dropped, stored.added, strict=True):
            if dropped > len(last):
                raise _damaged(url)
            last = last[: len(last) - dropped] + text
            urls.append(last)
        if not -1 <= stored.key_chars <= len(urls[0]):
            raise _damaged(url)
        members = [*map(ObjectInfo, urls, stored.sizes, stored.etags)]
        root = urls[0][: len(urls[0]) - stored.key_chars] if stored.key_chars >= 0 else ""
        return cls(members, root, stored.rows, stored.starts)

    @classmethod
    def of_head(cls, url: str, head: bytes | memoryview) -> Self:
        """Return the members that the head of the shard lists."""
        return cls.of(url, bytes(head[_LENGTH.size :]).decode())

    def missing(self) -> dict[int, str]:
        """Return the number and the url of each member that was not there."""
        return {at: one.url for at, one in enumerate(self.members) if one.etag == MISSING}

    def keys(self) -> list[str]:
        """Return the names of the members below the root."""
        return [without_query(member.url).removeprefix(self.root) for member in self.members]

    def names(self) -> list[str]:
        """Return the names of the members below the root, or else below the longest folder that
        all of them share. A copy of the folder elsewhere has the same.
        """
        keys = self.keys()
        shared = 0 if self.root else os.path.commonprefix(keys).rfind("/") + 1  # noqa: RUF071
        return [key[shared:] for key in keys]

    def labels(self) -> list[str]:
        """Return the label of each member: the first folder of its name, or else its folder."""
        return [
            key.partition("/")[0] if "/" in key else without_query(member.url).rsplit("/", 2)[-2]
            for key, member in zip(self.keys(), self.members, strict=True)
        ]

    def parts(self, head_bytes: int, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (member, offset in it, length) for each part of a range of the shard that lies
        behind the head.
        """
        ends = accumulate((member.size_bytes for member in self.members), initial=head_bytes)
        start, stop = offset, offset + length
        at = next(ends)
        for number, end in enumerate(ends):
            first, last = max(start, at), min(stop, end)
            if first < last:
                skipped = self.starts[number] if self.starts else 0
                yield number, skipped + first - at, last - first
            at = end


def without_query(url: str) -> str:
    """Return a web address without its query, which may have a signature: a secret that changes.
    All other urls are unchanged.
    """
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url


def _damaged(url: str) -> CorruptShard:
    return CorruptShard(
        f"{url}: the list of its files in the manifest is damaged: index the dataset again",
        shard=url,
    )


def is_joined(etag: str) -> bool:
    """Return whether a shard with this etag is joined from several objects."""
    return etag.startswith(MARK)


def head_of(etag: str) -> bytes:
    """Return the head of a joined shard: the length of its etag, and the etag."""
    return _LENGTH.pack(len(etag)) + etag.encode()


def head_bytes(start: bytes | memoryview) -> int:
    """Return the length of a head that starts with these bytes; 0 if no head does."""
    is_head = start[_LENGTH.size :][: len(MARK)] == MARK.encode()
    return _LENGTH.size + int(_LENGTH.unpack_from(start)[0]) if is_head else 0


def runs(
    members: Iterable[ObjectInfo], bytes_max: int, count_max: int
) -> Iterator[list[ObjectInfo]]:
    """Divide members into runs of at most this size and number; a larger member is alone."""
    run: list[ObjectInfo] = []
    size = 0
    for member in members:
        if run and (size + member.size_bytes > bytes_max or len(run) == count_max):
            yield run
            run, size = [], 0
        run.append(member)
        size += member.size_bytes
    if run:
        yield run


def with_files(format_name: str, column: str) -> str:
    """Return the name of the format that reads the files whose paths are in this column of tables
    of another format; "" if the format of the tables shows in their names.
    """
    return f"{FILES}:{format_name}:{column}"


def files_of(format_name: str) -> tuple[str, str]:
    """Invert `with_files`. The column is "" in the name of any other format."""
    family, _, parameters = format_name.partition(":")
    table_format, _, column = parameters.rpartition(":")
    return (table_format, column) if family == FILES and column else (format_name, "")
