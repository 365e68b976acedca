"""The rows of each step of a job, and the rows that replace those removed from the job.

1. At the position of a removed row, another row of the same block and of the job's view is read. So
   no other position changes and no other block is read. docs/order.md specifies which row.
2. The choice depends on the seed, the shard, the row, and the other rows removed from the block;
   not on the epoch, nor on ranks.
3. Rows of a removed shard are replaced by rows of other blocks, by the rule for blocks that cannot
   be read.
4. If samples are packs, the tokens of a document are replaced: see plan/packs.py. This module gives
   only the document's key, and the number of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.changes import (
    ALL_ROWS,
    LOADER,
    NO_GAPS,
    TOMBSTONE,
    EpochSteps,
    Gaps,
    TakenDocument,
    TakenOut,
    tombstone_payload,
)
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import LedgerEntry, LedgerPosition
from dataplane.model.records import DatasetIdentity, End, Tombstone, View
from dataplane.model.redact import unsigned
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import SampleOrder, TracedOrder
from dataplane.plan.packed_blocks import row_counts
from dataplane.plan.permute import GAMMA, Domain, key, mix
from dataplane.plan.shards import starts_of
from dataplane.plan.slices import Slice
from dataplane.plan.views import filters
from dataplane.plan.windows import Int64

# -- trail -------------------------------------------------------------------------------------
#
# Find the rows of a step of a job, and the steps that contain a row.
#
# 1. A row is named by its shard and its number in the shard, both 0-based, as in augmentations, and
#    not by its block.
# 2. Step s of an epoch begins at position s * G, as in the plan, wherever a run was resumed.
#    `cursor` moves the first step, for runs that were resumed within a step.
# 3. `places_of` is the inverse of `rows_of_step`.

RowsLeft = Callable[[int], Int64]
RowsFor = Callable[[Int64, Int64], tuple[Int64, Int64]]

_SHOWN_MAX = 5
_DIGITS_MAX = 18


class StepRows(Struct, frozen=True):
    """The rows of one global batch, in its order. Blocks and shards are numbered in the dataset of
    their source; a job without a mixture has source 0. Where a row was removed from the job, the
    row that replaces it is listed, and `taken_rows` has the removed one's number in its shard; it
    is -1 elsewhere, and where a whole shard was removed.

    Shapes:  positions, dp_ranks, sources, blocks, block_rows, shards, shard_rows, taken_rows:
    int64[rows].   is_padding, is_skipped: bool[rows].
    """

    positions: Int64
    is_padding: NDArray[np.bool_]
    dp_ranks: Int64
    sources: Int64
    blocks: Int64
    block_rows: Int64
    shards: Int64
    shard_rows: Int64
    taken_rows: Int64
    is_skipped: NDArray[np.bool_]


class Place(Struct, frozen=True):
    """A row's place in an epoch. `step` is None if it is in the dropped end of the epoch."""

    position: int
    step: int | None
    dp_rank: int
    is_padding: bool = False


class RowNames:
    """Translates between a manifest's (block, row) and (shard, row in the shard).

    If the manifest is that of a view, `rows_left` returns for each block the rows that the view
    keeps, counted in the block, ascending; None if the view keeps the first rows of each block. The
    rows that a map makes are numbered as if their shard had only these.
    """

    def __init__(self, manifest: Manifest, rows_left: RowsLeft | None = None) -> None:
        self._of_view, self._rows_left = manifest, rows_left
        self._kept = manifest.kept if manifest.given is None else None
        self._manifest = manifest if manifest.given is not None else manifest.whole or manifest
        self._starts = starts_of(self._manifest.block_rows)

    def of(self, blocks: Int64, rows: Int64) -> tuple[Int64, Int64]:
        """Return the shard of each row, and its row in the shard.

        Shapes:  blocks, rows, both results: int64[n].
        """
        kept, stored = self._kept, rows
        if self._rows_left is not None:
            stored = np.empty_like(rows)
            for block in np.unique(blocks).tolist():
                own = blocks == block
                stored[own] = self._rows_left(block)[rows[own]]
        numbers = blocks if kept is None else kept[blocks]
        shards = self._manifest.block_shard[numbers].astype(np.int64)
        first = self._manifest.shards.block_starts[shards]
        return shards, self._starts[numbers] - self._starts[first] + stored

    @property
    def block_count(self) -> int:
        """The number of blocks of the manifest."""
        return self._of_view.block_count

    def row_count(self, shard: int) -> int:
        """Return how many rows a shard has."""
        first, last = self._manifest.shards.block_starts[shard : shard + 2]
        return int(self._starts[last] - self._starts[first])

    def block_of(self, shard: int, row: int) -> tuple[int, int]:
        """Return the block of a row of a shard, and its row in the block.

        Raises:  ConfigError: there is no such shard or row, or it is not in the view.
        """
        place = self.find(shard, row)
        if place is None:
            url = self._manifest.shards.urls[shard]
            raise ConfigError(f"row {row} of {url} is not in the view of this job", shard=url)
        return place

    def find(self, shard: int, row: int, of_view: int | None = None) -> tuple[int, int] | None:
        """Return `block_of`, or None if the row is not in the view. `of_view` is the row's number
        among the view's rows of its block, if the caller knows it.

        Raises:  ConfigError: there is no such shard or row.
        """
        count = len(self._manifest.shards)
        if not 0 <= shard < count:
            raise ConfigError(f"there is no shard {shard}: they run from 0 to {count - 1}")
        rows, url = self.row_count(shard), self._manifest.shards.urls[shard]
        if not 0 <= row < rows:
            raise ConfigError(f"{url} has no row {row}: it has {rows}, counted from 0", shard=url)
        sample = int(self._starts[self._manifest.shards.block_starts[shard]]) + row
        block = int(self._starts.searchsorted(sample, side="right")) - 1
        return self._in_view(block, sample - int(self._starts[block]), of_view)

    def _in_view(self, block: int, row: int, of_view: int | None) -> tuple[int, int] | None:
        """Return the block, and the row's number among the view's rows of the block; None if the
        view does not contain the row.
        """
        kept = self._kept
        if kept is not None:
            at = int(kept.searchsorted(block))
            if at == len(kept) or kept[at] != block:
                return None
            block = at
        if of_view is not None:
            row = of_view
        elif self._rows_left is not None:
            left = self._rows_left(block)
            at = int(left.searchsorted(row))
            if at == len(left) or left[at] != row:
                return None
            row = at
        return (block, row) if row < row_counts(self._of_view)[block] else None


def shard_named(manifest: Manifest, name: str) -> int:
    """Return the shard with this number, this url, or a url that ends with this name.

    Raises:  ConfigError: no shard matches, or several do.
    """
    urls = manifest.shards.urls
    if name.isdecimal() and len(name) <= _DIGITS_MAX and int(name) < len(urls):
        return int(name)
    ending = f"/{name.lstrip('/')}"
    shards = [at for at, url in enumerate(urls) if url == name or url.endswith(ending)]
    if len(shards) == 1:
        return shards[0]
    if not shards:
        raise ConfigError(
            f"the dataset has no shard {name!r}: give its number (0 to {len(urls) - 1}), its url, "
            "or the end of its url",
            shard=name,
        )
    some = ", ".join(urls[at] for at in shards[:_SHOWN_MAX])
    raise ConfigError(f"{len(shards)} shards match {name!r}: {some}. Give a longer part of the url")


def own_entries(
    gone: Sequence[TakenOut],
    spec: JobSpec,
    dataset: DatasetIdentity,
    manifests: Sequence[Manifest],
    before: Sequence[LedgerEntry] = (),
) -> tuple[tuple[TakenOut, ...], tuple[LedgerEntry, ...]]:
    """Return what a loader removed from a job, without the urls that its datasets do not have; and
    the entries for it, after those `before`.

    Raises:  ConfigError: a name names no row or shard, or a row of a view.
    """
    known, places = [], dict[tuple[int, int], set[Tombstone]]()
    for taken in gone:
        named = _named(taken.name, spec, manifests)
        if named is not None:
            name, tombstone = named
            known.append(TakenOut(name, taken.epoch, taken.cursor, tombstone.shard))
            places.setdefault((taken.epoch, taken.cursor), set()).add(tombstone)
    entries = list(before)
    for place, rows in places.items():
        seq, previous = (entries[-1].seq + 1, entries[-1].hash) if entries else (1, "")
        payload = tombstone_payload(sorted(rows), spec, dataset)
        at = LedgerPosition(*place)
        entries.append(LedgerEntry(seq, TOMBSTONE, at, payload, LOADER, 0.0, previous))
    return tuple(known), tuple(entries[len(before) :])


def _named(name: str, spec: JobSpec, manifests: Sequence[Manifest]) -> tuple[str, Tombstone] | None:
    """Return the full name of a row or a shard, and its tombstone; None for a url that the dataset
    does not have.

    Raises:  ConfigError: as `own_entries`.
    """
    source, rest, prefix = 0, name, ""
    if spec.mixture is not None:
        names = [source.name for source in spec.mixture.sources]
        prefix = max((f"{n}:" for n in names if name.startswith(f"{n}:")), key=len, default="")
        if not prefix:
            raise ConfigError(
                f"{name!r:.200} does not begin with a source of the mixture: give {names[0]}:SHARD "
                f"or {names[0]}:SHARD:ROW",
                field="tombstone",
            )
        source, rest = names.index(prefix[:-1]), name.removeprefix(prefix)
    shard_name, _, row = rest.rpartition(":")
    if not shard_name or not row.isdecimal() or len(row) > _DIGITS_MAX:
        shard_name, row = rest, ""
    manifest, view = manifests[source], _sources(spec)[source][0]
    urls = manifest.shards.urls
    if "://" in shard_name and shard_name not in urls:
        return None
    shard = shard_named(manifest, shard_name)
    full = f"{prefix}{unsigned(urls[shard])}"
    if not row:
        return full, Tombstone(shard, ALL_ROWS, source)
    if filters(view):
        raise ConfigError(
            f"{name!r:.200}: single rows cannot be taken out of a view (where=, sample=, split=): "
            "leave them out with where= on a column that names them, or take out the shard",
            field="tombstone",
        )
    RowNames(manifest).find(shard, int(row))
    return f"{full}:{row}", Tombstone(shard, int(row), source)


def rows_of_step(
    steps: EpochSteps,
    order: SampleOrder,
    names: Sequence[RowNames],
    step: int,
    *,
    gaps: Gaps = NO_GAPS,
    rows_for: RowsFor | None = None,
) -> StepRows:
    """Return the global batch of a step, and the rank that reads each of its rows. `names` has an
    entry for each source. `gaps` are skipped, but count in `steps`; `rows_for` returns the rows
    that replace removed ones, if there are any.

    Raises:  ConfigError: the epoch has no such step; an impossible cursor or dp_size.
    """
    count = order.sample_count
    Slice(steps).check_steps(step, 1, 1)
    begin, end = steps.begin(step), steps.begin(step + 1)
    positions = np.arange(begin, end if steps.end is End.PAD else min(end, count), dtype=np.int64)
    blocks, rows = order.locate(positions % count)
    first = starts_of([row_names.block_count for row_names in names])
    sources = first.searchsorted(blocks, side="right") - 1
    planned, stood = blocks, rows
    if rows_for is not None:
        blocks, rows = rows_for(blocks, rows)
        stood = np.where(blocks == planned, stood, rows)
    blocks = blocks - first[sources]
    shards, shard_rows, taken = (np.empty_like(blocks) for _ in range(3))
    for at in np.unique(sources).tolist():
        own = sources == at
        shards[own], shard_rows[own] = names[at].of(blocks[own], rows[own])
        if rows_for is not None:
            taken[own] = names[at].of(blocks[own], stood[own])[1]
    taken[rows == stood] = -1
    is_skipped = np.zeros(len(positions), bool)
    for gap, stop in gaps.ranges:
        is_skipped |= (gap <= positions) & (positions < stop)
    return StepRows(
        positions, positions >= count, positions % steps.dp_size, sources, blocks, rows, shards,
        shard_rows, taken, is_skipped,
    )  # fmt: skip


def places_of(steps: EpochSteps, order: TracedOrder, block: int, row: int) -> tuple[Place, ...]:
    """Return the places of a row of a block in an epoch: one for each pass over its source, and one
    for each time that it pads the last step. A position before the cursor has no step.

    Raises:  ConfigError: there is no such row; an impossible cursor or dp_size.
    """
    Slice(steps)  # raises if the steps are invalid
    count, cursor = order.sample_count, steps.cursor
    positions, last = order.positions_of(block, row).tolist(), steps.count - 1
    stop = steps.begin(steps.count)
    padded = [at for position in positions for at in range(position + count, stop, count)]
    return tuple(
        Place(
            at,
            min((at - cursor) // steps.global_batch, last) if cursor <= at < stop else None,
            at % steps.dp_size,
            at >= count,
        )
        for at in (*positions, *(sorted(padded) if steps.end is End.PAD else ()))
    )


_WORD = (1 << 64) - 1
_ROW_BITS = 32


class Substitutes:
    """The rows that were removed from the datasets of a job, and the rows that replace them. Blocks
    are numbered as in the job's order.
    """

    def __init__(
        self, spec: JobSpec, manifests: Sequence[Manifest], tombstones: Sequence[Tombstone]
    ) -> None:
        """Raises:  ConfigError: there is no such row, or a block has no row left."""
        sources, first = _sources(spec), starts_of([manifest.block_count for manifest in manifests])
        names = {source: RowNames(manifests[source]) for source in _used(tombstones, manifests)}
        gone = dict[tuple[int, int], dict[int, Tombstone]]()
        for tombstone in tombstones:
            if tombstone.row == ALL_ROWS:
                continue
            view = sources[tombstone.source][0]
            if tombstone.of_view is None and filters(view) and not view.resizes:
                raise _without_number(tombstone)
            place = names[tombstone.source].find(tombstone.shard, tombstone.row, tombstone.of_view)
            if place is not None:  # otherwise the row's block has no packs
                gone.setdefault((tombstone.source, place[0]), {})[place[1]] = tombstone
        self.gone: dict[int, tuple[int, ...]] = {}
        """The removed rows of each block that has any."""
        self._documents: dict[int, tuple[TakenDocument, ...]] = {}
        places: list[tuple[int, int]] = []
        for (source, block), rows in gone.items():
            manifest, number = manifests[source], int(first[source]) + block
            count = int(row_counts(manifest)[block])
            if len(rows) == count:
                raise _block_is_gone(manifest, rows, is_whole=manifest.whole is None)
            self.gone[number] = tuple(sorted(rows))
            seed = sources[source][1]
            keys = {
                row: substitute_key(seed, tombstone.shard, tombstone.row)
                for row, tombstone in rows.items()
            }
            self._documents[number] = tuple(
                TakenDocument(*row_and_key) for row_and_key in sorted(keys.items())
            )
            if manifest.documents is not None:
                continue
            for row, keyed in keys.items():
                places.append((number << _ROW_BITS | row, substitute(keyed, count, rows)))
        self._places, self._rows = np.array(sorted(places), np.int64).reshape(-1, 2).T
        lost = [(int(first[source]), source) for source in names]
        replaced = [
            (begin + block, begin + other, int(manifests[source].block_rows[other]))
            for begin, source in lost
            for block, other in _lost_blocks(manifests[source], source, tombstones, sources)
        ]
        self.lost, self.instead, self._instead_rows = np.array(replaced, np.int64).reshape(-1, 3).T
        """The blocks of removed shards, ascending; those whose rows replace theirs; and how many
        rows these have.
        """

    def of(self, blocks: Int64, rows: Int64) -> tuple[Int64, Int64]:
        """Return the rows that replace these, and their blocks.

        Shapes:  blocks, rows, results: int64[n].
        """
        if len(self.lost):
            at = np.minimum(self.lost.searchsorted(blocks), len(self.lost) - 1)
            is_lost = self.lost[at] == blocks
            blocks = np.where(is_lost, self.instead[at], blocks)
            rows = np.where(is_lost, rows % self._instead_rows[at], rows)
        if len(self._places):
            places = blocks << _ROW_BITS | rows
            at = np.minimum(self._places.searchsorted(places), len(self._places) - 1)
            rows = np.where(self._places[at] == places, self._rows[at], rows)
        return blocks, rows

    def replaced_by(self, block: int, row: int, counts: Int64) -> list[tuple[int, int]]:
        """Return the rows of removed shards that are replaced by this row of a block, given the
        number of rows of each block.
        """
        blocks = np.flatnonzero(self.instead == block)
        return [
            (int(self.lost[at]), other)
            for at in blocks.tolist()
            for other in range(row, int(counts[self.lost[at]]), int(self._instead_rows[at]))
        ]

    def documents(self, block: int) -> tuple[TakenDocument, ...]:
        """Return the rows that were removed from a block; if samples are packs, these are
        documents.
        """
        return self._documents.get(block, ())


def _lost_blocks(
    manifest: Manifest,
    source: int,
    tombstones: Sequence[Tombstone],
    sources: Sequence[tuple[View, int]],
) -> list[tuple[int, int]]:
    """Return the blocks of a source's removed shards, each with the block whose rows replace its.

    Raises:  ConfigError: there is no such shard, or none is left.
    """
    shards = {t.shard for t in tombstones if t.source == source and t.row == ALL_ROWS}
    whole = manifest.whole or manifest
    if shards and max(shards) >= len(whole.shards):
        raise ConfigError(f"there is no shard {max(shards)}: the dataset has {len(whole.shards)}")
    kept = np.arange(manifest.block_count) if manifest.kept is None else manifest.kept
    of_block = whole.block_shard[kept].astype(np.int64)
    lost = np.flatnonzero(np.isin(of_block, list(shards)))
    if 0 < len(lost) == manifest.block_count:
        raise ConfigError(
            "all shards that the job reads would be taken out, and none is left to replace them:"
            " start a job over other shards",
            field="shard",
        )
    starts, among = starts_of(whole.block_rows), set(lost.tolist())
    firsts = starts[kept[lost]] - starts[whole.shards.block_starts[of_block[lost]]]
    keys = [
        substitute_key(sources[source][1], shard, row)
        for shard, row in zip(of_block[lost].tolist(), firsts.tolist(), strict=True)
    ]
    return [
        (block, substitute(keyed, manifest.block_count, among))
        for block, keyed in zip(lost.tolist(), keys, strict=True)
    ]


def substitute_key(seed: int, shard: int, row: int) -> int:
    """Return the key by which a row of a shard is replaced, in a dataset with this seed."""
    return int(key(seed, Domain.TOMBSTONE, shard, row))


def substitute(keyed: int, row_count: int, gone: Container[int]) -> int:
    """Return the row of a block with `row_count` rows that replaces a removed row with this key.
    `gone` contains all rows of the block that must not be used; at least one must be left.
    """
    while True:
        row = mix(keyed) % row_count
        if row not in gone:
            return row
        keyed = (keyed + GAMMA) & _WORD


def check_tombstones(
    spec: JobSpec, manifests: Sequence[Manifest], tombstones: Sequence[Tombstone]
) -> None:
    """Check that these rows can be removed from a job over these datasets.

    Raises:  ConfigError: a row cannot be removed; the message says why, and what to do.
    """
    if tombstones:
        Substitutes(spec, manifests, tombstones)


def _sources(spec: JobSpec) -> list[tuple[View, int]]:
    """Return the view and the seed of each dataset of a job."""
    if spec.mixture is None:
        return [(spec.view, spec.seed)]
    views = [source.view for source in spec.mixture.sources]
    return [(view, key(spec.seed, Domain.SOURCE, at)) for at, view in enumerate(views)]


def _used(tombstones: Sequence[Tombstone], manifests: Sequence[Manifest]) -> list[int]:
    """Return the sources of these rows.

    Raises:  ConfigError: there is no such source.
    """
    used = sorted({tombstone.source for tombstone in tombstones})
    if used and not 0 <= used[0] <= used[-1] < len(manifests):
        raise ConfigError(f"there is no source {used[-1]}: the job has {len(manifests)} sources")
    return used


def _without_number(tombstone: Tombstone) -> ConfigError:
    return ConfigError(
        f"row {tombstone.row} of shard {tombstone.shard} was taken out, but the ledger does not "
        "say which row of the job's view it is: run `dataplane ledger verify` to check the ledger"
    )


def _block_is_gone(
    manifest: Manifest, rows: dict[int, Tombstone], *, is_whole: bool
) -> ConfigError:
    first_row = next(iter(rows.values()))
    url = manifest.shards.urls[first_row.shard]
    first, last = (
        min(taken.row for taken in rows.values()),
        max(taken.row for taken in rows.values()),
    )
    what = f"rows {first} to {last} of {url}, a whole block,"
    if not is_whole:
        what = f"all rows that the view has of a block of {url}, between rows {first} and {last},"
    return ConfigError(
        f"{what} would be taken out, and no row of it is left to replace them: start a job with "
        "another name that leaves them out with where= on a column that names them, or write the "
        "shard again without them",
        shard=url,
    )
