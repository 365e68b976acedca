"""The shards of a manifest as columns: a million shards are a few arrays instead of objects.

1. Operations over all shards take a few passes over arrays; a `Shard` object is made only on
   request.
2. A manifest is read into memory, not mapped. Any process that may write to the cache folder could
   truncate a mapped file, and SIGBUS would then kill the node. Manifests are compressed, so they
   must be read in any case; this is as fast as verifying an uncompressed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.base.units import some_of
from dataplane.model.errors import ConfigError
from dataplane.model.records import ObjectInfo, Region
from dataplane.plan.texts import Bools, Int64, Texts, fixed

# -- shard -------------------------------------------------------------------------------------
#
# One shard: as indexing reports it, and as the manifest stores it.


class BlockExtent(Protocol):
    """One block as reported by a format's index."""

    @property
    def rows(self) -> int: ...
    @property
    def place(self) -> Region: ...
    @property
    def decoded_bytes(self) -> int: ...
    @property
    def columns(self) -> Sequence[int]: ...


LEFT_OUT = "left out: "
"""The beginning of the etag of a shard that cannot be indexed; the reason follows."""


class IndexedShard(Struct, frozen=True):
    """One shard as it was listed, with the results of indexing it. `nulls` has the count of each
    field node of the dataset's schema, as in NullCounts; empty if nothing is known.
    """

    listed: ObjectInfo
    blocks: Sequence[BlockExtent]
    preamble: Region
    zero_copy: bool
    nulls: Sequence[int] = ()


class Shard(Struct, frozen=True):
    """One shard. `block_count` counts its blocks with samples. `empty_blocks` are the ascending
    indices of its blocks without samples, which the manifest leaves out.
    """

    url: str
    size_bytes: int
    etag: str
    block_count: int
    preamble: Region
    zero_copy: bool
    empty_blocks: tuple[int, ...] = ()


def block_table(shard: IndexedShard) -> NDArray[np.int64]:
    """Return rows, offset, length and decoded bytes of each block.

    Raises:  ConfigError: a number that no block can have.
    """
    try:
        rows = [
            (block.rows, block.place.offset, block.place.length, block.decoded_bytes)
            for block in shard.blocks
        ]
        return np.array(rows, np.int64).reshape(-1, 4)
    except OverflowError as error:
        url = shard.listed.url
        raise ConfigError(f"{url} has a block with a number above 2**63", shard=url) from error


def no_samples(urls: Sequence[str]) -> ConfigError:
    """Return the error for a dataset whose shards are valid but have no samples."""
    return ConfigError(
        f"the dataset has no samples: no rows in {some_of(urls)}. Add shards that have rows",
        field="samples",
    )


def check_shard(shard: Shard) -> None:
    """Raises:  ConfigError: numbers or names that are not valid for a shard."""
    empty = shard.empty_blocks
    places = (shard.size_bytes, shard.preamble.offset, shard.preamble.length, *empty)
    if min(places) < 0 or max(places) >= 1 << 63:
        raise ConfigError(
            f"{shard.url} has a size or an offset that is negative or too large", shard=shard.url
        )
    if list(empty) != sorted(set(empty)):
        raise ConfigError(f"{shard.url} has empty blocks that are not ascending", shard=shard.url)
    try:
        _ = shard.url.encode(), shard.etag.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{shard.url!r} is not valid Unicode: rename the shard", shard=repr(shard.url)
        ) from error


_OUTSIDE = "a size or a place that is negative or too large"
_SPREAD = 1 << 12
_NUMBERS = ("size_bytes", "preamble_offset", "preamble_length")


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """n shards. The arrays are read-only.

    Shapes:  urls, etags: n texts.   size_bytes, preamble_offset, preamble_length: int64[n].
             zero_copy: bool[n].   block_starts: int64[n + 1], ascending from 0: the blocks of shard
             i are those from block_starts[i] to block_starts[i + 1] of the manifest.
             empty, empty_starts: int64[m], int64[n + 1]: Shard.empty_blocks of shard i is
             empty[empty_starts[i]:empty_starts[i + 1]].
    Raises:  ConfigError: numbers that are not valid for a shard; names the shard.
    """

    urls: Texts
    etags: Texts
    size_bytes: Int64
    preamble_offset: Int64
    preamble_length: Int64
    zero_copy: Bools
    block_starts: Int64
    empty: Int64
    empty_starts: Int64
    _filled_before_empty: Int64 = field(init=False)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            self._refuse(getattr(self, name) < 0, _OUTSIDE)
        self._refuse(np.diff(self.block_starts) < 0, "a negative number of blocks")
        shard = spread(np.arange(len(self)), self.empty_starts)
        first = np.ones(len(shard), np.bool_)
        first[1:] = shard[1:] != shard[:-1]
        before = np.concatenate([[-1], self.empty[:-1]])[: len(shard)]
        falls = self.empty <= np.where(first, -1, before)
        self._refuse(np.bincount(shard[falls], minlength=len(self)) > 0,
                     "empty blocks that do not rise")  # fmt: skip
        own = np.arange(len(shard)) - self.empty_starts[shard]
        object.__setattr__(self, "_filled_before_empty", fixed(self.empty - own))
        for name in self.__dataclass_fields__:
            if not isinstance(getattr(self, name), Texts):
                object.__setattr__(self, name, fixed(getattr(self, name)))

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> Self:
        """Raises:  ConfigError: numbers or names that no shard can have."""
        shards = list(shards)
        for shard in shards:
            check_shard(shard)
        return cls(
            Texts.of(s.url for s in shards),
            Texts.of(s.etag for s in shards),
            np.array([s.size_bytes for s in shards], np.int64),
            np.array([s.preamble.offset for s in shards], np.int64),
            np.array([s.preamble.length for s in shards], np.int64),
            zero_copy=np.array([s.zero_copy for s in shards], np.bool_),
            block_starts=starts_of([s.block_count for s in shards]),
            empty=np.array([at for s in shards for at in s.empty_blocks], np.int64),
            empty_starts=starts_of([len(s.empty_blocks) for s in shards]),
        )

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> Shard:
        """Raises:  IndexError: there is no such shard."""
        url, index = self.urls[index], index % len(self)
        first, stop = self.empty_starts[index : index + 2]
        return Shard(
            url,
            int(self.size_bytes[index]),
            self.etags[index],
            int(self.block_starts[index + 1] - self.block_starts[index]),
            self.preamble(index),
            bool(self.zero_copy[index]),
            tuple(self.empty[first:stop].tolist()),
        )

    def __iter__(self) -> Iterator[Shard]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardTable) and all(
            np.array_equal(mine, its) if isinstance(mine, np.ndarray) else mine == its
            for mine, its in (
                (getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__
            )
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def block_counts(self) -> Int64:
        """The number of blocks with samples of each shard.

        Shapes:  result: int64[n].
        """
        return np.diff(self.block_starts)

    @property
    def empty_counts(self) -> Int64:
        """The number of blocks without samples of each shard.

        Shapes:  result: int64[n].
        """
        return np.diff(self.empty_starts)

    def preamble(self, index: int) -> Region:
        """Return the bytes of this shard that every block needs besides its own."""
        return Region(self.preamble_offset.item(index), self.preamble_length.item(index))

    def block_in_shard(self, index: int, block: int) -> int:
        """Return the index of the manifest's block `block` within shard `index`, counting blocks
        without samples.
        """
        filled = block - self.block_starts.item(index)
        first, stop = self.empty_starts.item(index), self.empty_starts.item(index + 1)
        if first == stop:
            return filled
        before = self._filled_before_empty[first:stop]
        return filled + int(before.searchsorted(np.int64(filled), side="right"))

    def keeping(self, blocks: Int64) -> ShardTable:
        """Return the same shards with only these of their blocks; the others count as blocks
        without samples.

        Shapes:  blocks: int64[k], numbers of the manifest's blocks, rising.
        """
        starts = starts_of(self.block_counts + self.empty_counts)
        is_empty = np.zeros(int(starts[-1]), np.bool_)
        is_empty[self.empty + spread(starts[:-1], self.empty_starts)] = True
        is_left = np.zeros(len(is_empty), np.bool_)
        is_left[np.flatnonzero(~is_empty)[blocks]] = True
        shard = spread(np.arange(len(self)), starts)
        empty, counts = np.flatnonzero(~is_left), np.bincount(shard[is_left], minlength=len(self))
        return replace(
            self,
            block_starts=starts_of(counts),
            empty=empty - starts[shard[empty]],
            empty_starts=starts_of(np.diff(starts) - counts),
        )

    def _refuse(self, wrong: Bools, what: str) -> None:
        if wrong.any():
            url = self.urls[int(wrong.argmax())]
            raise ConfigError(f"{url} has {what}", shard=url)


def starts_of(counts: Any) -> Int64:
    """Return the offset at which each of these groups begins, and the end of the last one.

    Shapes:  counts: integer[n].   result: int64[n + 1].
    """
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def spread(values: NDArray[Any], starts: Int64) -> NDArray[Any]:
    """Repeat values[i] at all places from starts[i] to starts[i + 1], in steps, since numpy holds
    the GIL while it repeats.

    Shapes:  values: any[n].   starts: int64[n + 1], rising from 0.   result: any[starts[n]].
    """
    found = np.empty(starts[-1], values.dtype)
    for begin in range(0, len(values), _SPREAD):
        some = starts[begin : begin + _SPREAD + 1]
        found[some[0] : some[-1]] = np.repeat(values[begin : begin + _SPREAD], np.diff(some))
    return found
