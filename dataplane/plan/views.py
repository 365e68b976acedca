"""Views of a dataset: the dataset's identity, the rows in a keyed share, and the number of rows of
each block if it can be computed without reading the dataset.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from dataplane.model.errors import ConfigError
from dataplane.model.joined import FILES, MARK, Joined, head_of, without_query
from dataplane.model.records import DatasetIdentity, View
from dataplane.model.redact import unpinned
from dataplane.plan.manifest import Manifest
from dataplane.plan.permute import Domain, Words, extended, key
from dataplane.plan.shards import ShardTable, spread, starts_of
from dataplane.plan.texts import Bools, Int64, Piece, Texts, records

# -- identity ----------------------------------------------------------------------------------
#
# Compute the identity of a dataset, which does not depend on its location. A run that resumes
# compares it with the identity in the saved state.
#
# A manifest's fingerprint is not suitable: nodes share blocks by it, so it covers urls, and sizes
# that our code estimates. In the identity, shards are named relative to their longest common
# folder, so that a dataset keeps its identity in another bucket or folder.


def identity_of_job(manifests: Sequence[Manifest], *, is_mixture: bool) -> DatasetIdentity:
    """Return the identity of a job's datasets, from the manifests of its samples."""
    identities = [identity_of_samples(manifest) for manifest in manifests]
    return mixed_identity(identities) if is_mixture else identities[0]


def mixed_identity(identities: Sequence[DatasetIdentity]) -> DatasetIdentity:
    """Return the identity of several datasets, in this order."""
    return DatasetIdentity(
        content=joined_hash(identity.content for identity in identities),
        layout=joined_hash(identity.layout for identity in identities),
    )


def joined_hash(parts: Iterable[str]) -> str:
    """Return a hash of these texts, in this order: 32 hex digits."""
    hashed = hashlib.blake2b(digest_size=16, person=b"dp-mixture-1")
    for part in parts:
        hashed.update(f"{part}\n".encode())
    return hashed.hexdigest()


def identity_of(manifest: Manifest) -> DatasetIdentity:
    """Compute a dataset's identity. Linear in shards and blocks: about 0.5 s for 10^6 shards with
    3 * 10^6 blocks.
    """
    layout, etags = _hash(), _hash()
    for text in (manifest.format.encode(), manifest.stored_schema or manifest.schema):
        layout.update(struct.pack("<q", len(text)) + text)
    shards = manifest.shards
    layout.update(struct.pack("<qq", len(shards), manifest.block_count))
    names, tags = relative_names(shards.urls), shards.etags.piece()
    lengths, sizes, offsets = names.stops - names.starts, shards.size_bytes, manifest.block_offset
    are_joined = bool(shards.etags.starting_with(MARK.encode()).all())
    if are_joined:
        # The bytes of a list of files vary with their etags, and are part of no identity.
        heads = len(head_of("")) + shards.etags.lengths
        sizes, offsets = sizes - heads, offsets - heads[manifest.block_shard]
        _note_joined(shards, layout, etags)
    for some in records((lengths, sizes, shards.block_counts), (names,)):
        layout.update(some.data)
    for some in records((shards.etags.lengths,), (tags,)) if not are_joined else ():
        etags.update(some.data)
    for numbers in (manifest.block_rows, offsets, manifest.block_length):
        layout.update(numbers.astype("<i8", copy=False).data)
    etags.update(layout.digest())
    return DatasetIdentity(content=etags.hexdigest(), layout=layout.hexdigest())


def identity_of_samples(manifest: Manifest) -> DatasetIdentity:
    """Return the identity of the dataset whose samples these are. If a map that resizes has made
    them, it covers how many it has made of each block: if the map is changed, a position in the
    epoch is another sample.
    """
    identity = identity_of(manifest.whole or manifest)
    if manifest.given is None:
        return identity
    made = _hash()
    for numbers in (manifest.kept, manifest.block_rows):
        made.update(np.asarray(numbers, "<i8").data)
    return DatasetIdentity(
        joined_hash((identity.content, made.hexdigest())),
        joined_hash((identity.layout, made.hexdigest())),
    )


def _note_joined(shards: ShardTable, layout: hashlib.blake2b, etags: hashlib.blake2b) -> None:
    """Add the names, sizes and etags of the objects from which these shards are joined."""
    for url, etag in zip(shards.urls, shards.etags, strict=True):
        joined = Joined.of(url, etag)
        sizes = [member.size_bytes for member in joined.members]
        layout.update(msgspec.msgpack.encode([joined.names(), sizes, joined.starts, joined.rows]))
        etags.update(msgspec.msgpack.encode([member.etag for member in joined.members]))


def relative_names(urls: Texts) -> Piece:
    """Return each url without the longest common folder. If shards are in several buckets or
    stores, the names contain the bucket. Parts of a url that change are left out: the query of a
    web address, since a presigned url has a new one every day, and the commit of a Hub repository.
    """
    paths = urls.changed(lambda url: without_query(unpinned(url)), b"?@")
    shared = paths.content[: paths.shared_prefix_bytes()].tobytes()
    return paths.piece(shared.rfind(b"/") + 1)


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16, person=b"dp-identity-1")


# -- subsets -----------------------------------------------------------------------------------
#
# Choose the rows in a keyed share of a dataset, such as a split: "Shares of rows" in
# docs/order.md.
#
# 1. Whether a row is in a share depends only on the name of its shard and on its number there, or
#    on the name of the file that it is: adding shards or files changes nothing, and neither do
#    seeds, epochs or ranks.
# 2. Shares of one kind whose ranges are disjoint have no row in common.

WHOLE = 1 << 32
"""All rows, in units of a share."""
_SPLIT, _SAMPLE = range(2)
_TOGETHER = 1 << 15
_HALF = np.uint64(32)


class _Share(NamedTuple):
    """The rows whose hash for this purpose is in [lower, upper), in units of 2**-32."""

    use: int
    lower: int
    upper: int


def has_shares(view: View) -> bool:
    """Return whether the view restricts the rows to a keyed share."""
    return bool(_shares(view))


def shard_words(urls: Texts) -> Words:
    """Return the word that represents each shard in the keys of its rows.

    Shapes:  result: uint64[shards].
    """
    names = relative_names(urls)
    content = names.content.tobytes()
    places = zip(names.starts.tolist(), names.stops.tolist(), strict=True)
    return _words(content[start:stop] for start, stop in places)


def _words(names: Iterable[bytes]) -> Words:
    found = [hashlib.blake2b(name, digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(found), "<u8").astype(np.uint64)


@lru_cache(maxsize=64)
def file_words(format_name: str, url: str, etag: str) -> Words | None:
    """Return the words that represent the files of a shard, by their names below its root; None if
    its rows are no files of folders.

    Shapes:  result: uint64[rows].
    """
    joined = Joined.of(url, etag) if format_name == FILES else None
    if joined is None or joined.rows:
        return None
    names = joined.keys()
    return _words(name.encode() for name in names)


def chosen(view: View, word: int | Words, first_row: int, count: int) -> Bools:
    """Return which of `count` consecutive rows of a shard, from `first_row` on, are in the view's
    shares. If each row is a file, each has a word of its own.

    Shapes:  word: uint64[count].   result: bool[count].
    """
    rows = np.arange(first_row, first_row + count, dtype=np.uint64)
    found = np.ones(count, np.bool_)
    for share in _shares(view):
        if isinstance(word, int):
            hashes = extended(key(0, Domain.SHARE, share.use, word), rows)
        else:
            hashes = extended(extended(key(0, Domain.SHARE, share.use), word), 0 * rows)
        found &= _within(share, hashes)
    return found


def chosen_counts(view: View, words: Words, first_rows: Int64, rows: Int64) -> Int64:
    """Return how many rows of each block are in the view's shares.

    Shapes:  words: uint64[K], of the shard of each block.   first_rows, rows: int64[K], where the
    block begins in its shard, and its rows.   result: int64[K].
    """
    starts, counts = starts_of(rows), np.zeros(len(rows), np.int64)
    shares = _shares(view)
    keys = [extended(key(0, Domain.SHARE, share.use), words) for share in shares]
    begin = 0
    while begin < len(rows):
        # Process several blocks together, but a long one by itself.
        end = max(int(starts.searchsorted(starts[begin] + _TOGETHER, side="right")) - 1, begin + 1)
        some = slice(begin, end)
        counts[some] = _counts(shares, [one[some] for one in keys], first_rows[some], rows[some])
        begin = end
    return counts


def _counts(
    shares: Sequence[_Share], keys: Sequence[Words], first_rows: Int64, rows: Int64
) -> Int64:
    if len(rows) == 1:
        return np.array([_count_alone(shares, keys, int(first_rows[0]), int(rows[0]))])
    starts = starts_of(rows)
    block = spread(np.arange(len(rows)), starts)
    number = np.arange(starts[-1]) - (starts[:-1] - first_rows)[block]
    found = np.ones(len(block), np.bool_)
    for share, own in zip(shares, keys, strict=True):
        found &= _within(share, extended(own[block], number))
    return np.bincount(block, found, len(rows)).astype(np.int64)


def _count_alone(shares: Sequence[_Share], keys: Sequence[Words], first: int, count: int) -> int:
    total = 0
    for begin in range(first, first + count, _TOGETHER):
        number = np.arange(begin, min(begin + _TOGETHER, first + count), dtype=np.uint64)
        found = np.ones(len(number), np.bool_)
        for share, own in zip(shares, keys, strict=True):
            found &= _within(share, extended(own, number))
        total += int(np.count_nonzero(found))
    return total


def _within(share: _Share, words: Words) -> Bools:
    # One comparison checks both ends: for a hash below the range, the difference wraps to a large
    # number.
    found: NDArray[np.bool_] = (words >> _HALF) - np.uint64(share.lower) < np.uint64(
        share.upper - share.lower
    )
    return found


def _shares(view: View) -> tuple[_Share, ...]:
    found = []
    if view.split_to:
        found.append(_Share(_SPLIT, view.split_from, view.split_to))
    if view.sample:
        found.append(_Share(_SAMPLE, 0, view.sample))
    return tuple(found)


LIMIT_MAX = (1 << 62) - 1


def rows_only(view: View) -> View:
    """Return only the part of the view that decides which rows it contains."""
    bad_max = view.bad_max if view.where else 0.0  # without a condition, bad rows count as rows
    return replace(
        view, map="", collate="", pack=None, bad_max=bad_max, resizes=False, per_epoch=False
    )


def samples_of(view: View, seed: int) -> tuple[View, int]:
    """Return only the part of the view that decides how many samples it has, and its seed, or 0 if
    the seed has no effect: their number depends on what a map makes, and on the rows that replace
    bad ones.
    """
    if not view.is_counted:
        return rows_only(view), 0
    return replace(view, collate=""), seed if view.map or view.bad_max else 0


def check_shares(view: View) -> None:
    """Raises:  ConfigError: the shares or the limit are out of range."""
    split = (view.split_from, view.split_to)
    is_split = 0 <= view.split_from < view.split_to <= WHOLE or split == (0, 0)
    if not (0 <= view.sample <= WHOLE and is_split and 0 <= view.limit <= LIMIT_MAX):
        raise ConfigError(f"these are no shares of rows: {view}", field="view")


def filters(view: View) -> bool:
    """Return whether the view selects rows within blocks; a limit alone takes the first rows."""
    return bool(view.where) or has_shares(view)


def first_rows(manifest: Manifest) -> Int64:
    """Return where each block of a whole dataset begins in its shard.

    Shapes:  result: int64[K], rows.
    """
    starts, blocks = starts_of(manifest.block_rows), manifest.shards.block_starts
    first: Int64 = starts[:-1] - spread(starts[blocks[:-1]], blocks)
    return first


def shared_counts(manifest: Manifest, view: View) -> Int64:
    """Return the number of rows of each block that are in the shares of a view.

    Shapes:  result: int64[K].
    """
    if not has_shares(view):
        return manifest.block_rows
    shards = manifest.shards
    if file_words(manifest.format, shards.urls[0], shards.etags[0]) is not None:
        found = []
        for url, etag in zip(shards.urls, shards.etags, strict=True):  # each is one block
            words = file_words(manifest.format, url, etag)
            assert words is not None
            found.append(np.count_nonzero(chosen(view, words, 0, len(words))))
        return np.array(found, np.int64)
    words = shard_words(shards.urls)[manifest.block_shard]
    return chosen_counts(view, words, first_rows(manifest), manifest.block_rows)


def limited(counts: Int64, limit: int) -> Int64:
    """Reduce the counts so that only the first `limit` rows are counted; 0 means no limit.

    Shapes:  counts, result: int64[K].
    """
    if not limit:
        return counts
    before = starts_of(counts)[:-1]
    return np.clip(limit - before, 0, counts)
