"""The shards of a manifest: what indexing reports, and what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.errors import ConfigError
from dataplane.model import ObjectInfo, Region

_URLS_SHOWN = 10


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
    """One shard. `block_count` counts its blocks with samples; `empty_blocks` are the indices,
    rising, of those without, which the manifest leaves out.
    """

    url: str
    size_bytes: int
    etag: str
    block_count: int
    preamble: Region
    zero_copy: bool
    empty_blocks: tuple[int, ...] = ()


def block_table(shard: IndexedShard) -> NDArray[np.int64]:
    """Rows, offset, length and decoded bytes of each block.

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
    """The error if all shards are empty: each is valid, but together they have no samples."""
    return ConfigError(
        f"the dataset has no samples: no rows in {named(urls)}. Name shards that have some",
        field="samples",
    )


def named(urls: Sequence[str]) -> str:
    """The first of these urls, and how many more there are: for an error."""
    more = len(urls) - _URLS_SHOWN
    return ", ".join(urls[:_URLS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_shard(shard: Shard) -> None:
    """Raises:  ConfigError: numbers or names that are not valid for a shard."""
    empty = shard.empty_blocks
    places = (shard.size_bytes, shard.preamble.offset, shard.preamble.length, *empty)
    if min(places) < 0 or max(places) >= 1 << 63:
        raise ConfigError(
            f"{shard.url} has a size or a place that is negative or too large", shard=shard.url
        )
    if list(empty) != sorted(set(empty)):
        raise ConfigError(f"{shard.url} has empty blocks that do not rise", shard=shard.url)
    try:
        _ = shard.url.encode(), shard.etag.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{shard.url!r} is not valid Unicode: rename the shard", shard=repr(shard.url)
        ) from error
