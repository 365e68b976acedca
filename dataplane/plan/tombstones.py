"""Rows that were removed from a job, and the rows that replace them.

1. The position of a removed row gives a remaining row of the same block, one that the job's view
   has. So no other position changes and no other block is read. docs/order.md specifies which row.
2. The choice depends on the seed, the shard, the row, and the other rows removed from the block;
   not on the epoch, nor on ranks.
3. Where samples are packs, the tokens of a document are replaced: see plan/taken_documents.py. This
   module gives only its key, and the number of its row.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from dataplane.changes import TakenDocument, Tombstone
from dataplane.config import JobSpec
from dataplane.errors import ConfigError
from dataplane.model import View
from dataplane.plan.manifest import Manifest
from dataplane.plan.packed_blocks import row_counts
from dataplane.plan.permute import GAMMA, Domain, key, mix
from dataplane.plan.shards import starts_of
from dataplane.plan.trail import RowNames
from dataplane.plan.views import filters
from dataplane.plan.windows import Int64

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
        sources, first = _sources(spec), starts_of([each.block_count for each in manifests])
        names = {source: RowNames(manifests[source]) for source in _used(tombstones, manifests)}
        gone = dict[tuple[int, int], dict[int, Tombstone]]()
        for one in tombstones:
            if one.of_view is None and filters(sources[one.source][0]):
                raise _without_number(one)
            found = names[one.source].find(one.shard, one.row, one.of_view)
            if found is not None:  # otherwise its block makes no packs
                gone.setdefault((one.source, found[0]), {})[found[1]] = one
        self.gone: dict[int, tuple[int, ...]] = {}
        """The rows of each block that were taken out of it, if any were."""
        self._documents: dict[int, tuple[TakenDocument, ...]] = {}
        places: list[tuple[int, int]] = []
        for (source, block), rows in gone.items():
            manifest, number = manifests[source], int(first[source]) + block
            count = int(row_counts(manifest)[block])
            if len(rows) == count:
                raise _block_is_gone(manifest, rows, is_whole=manifest.whole is None)
            self.gone[number] = tuple(sorted(rows))
            seed = sources[source][1]
            keys = {row: substitute_key(seed, one.shard, one.row) for row, one in rows.items()}
            self._documents[number] = tuple(TakenDocument(*one) for one in sorted(keys.items()))
            if manifest.documents is not None:
                continue
            for row, keyed in keys.items():
                places.append((number << _ROW_BITS | row, substitute(keyed, count, rows)))
        self._places, self._rows = np.array(sorted(places), np.int64).reshape(-1, 2).T

    def of(self, blocks: Int64, rows: Int64) -> Int64:
        """Return the rows that replace these.

        Shapes:  blocks, rows, result: int64[n].
        """
        if not len(self._places):
            return rows
        places = blocks << _ROW_BITS | rows
        at = np.minimum(self._places.searchsorted(places), len(self._places) - 1)
        return np.where(self._places[at] == places, self._rows[at], rows)

    def documents(self, block: int) -> tuple[TakenDocument, ...]:
        """Return the rows that were removed from a block; if samples are packs, these are
        documents.
        """
        return self._documents.get(block, ())


def substitute_key(seed: int, shard: int, row: int) -> int:
    """Return the key with which a row of a shard is replaced, in a dataset with this seed."""
    return int(key(seed, Domain.TOMBSTONE, shard, row))


def substitute(keyed: int, row_count: int, gone: Container[int]) -> int:
    """Return the row of a block with `row_count` rows that replaces a removed row with this key.
    `gone` contains all rows of the block that cannot, and must leave one.
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

    Raises:  ConfigError: says why they cannot, and what to do.
    """
    if tombstones:
        Substitutes(spec, manifests, tombstones)


def _sources(spec: JobSpec) -> list[tuple[View, int]]:
    """The view and the seed of each dataset of a job."""
    if spec.mixture is None:
        return [(spec.view, spec.seed)]
    views = [source.view for source in spec.mixture.sources]
    return [(view, key(spec.seed, Domain.SOURCE, at)) for at, view in enumerate(views)]


def _used(tombstones: Sequence[Tombstone], manifests: Sequence[Manifest]) -> list[int]:
    """The sources of these rows.

    Raises:  ConfigError: there is no such source.
    """
    found = sorted({one.source for one in tombstones})
    if found and not 0 <= found[0] <= found[-1] < len(manifests):
        raise ConfigError(f"there is no source {found[-1]}: the job has {len(manifests)}")
    return found


def _without_number(one: Tombstone) -> ConfigError:
    return ConfigError(
        f"row {one.row} of shard {one.shard} was taken out, and the ledger does not say which row "
        "of the job's view it is: `dataplane ledger verify` checks the ledger"
    )


def _block_is_gone(
    manifest: Manifest, rows: dict[int, Tombstone], *, is_whole: bool
) -> ConfigError:
    one = next(iter(rows.values()))
    url = manifest.shards.urls[one.shard]
    first, last = min(each.row for each in rows.values()), max(each.row for each in rows.values())
    what = f"rows {first} to {last} of {url}, a whole block,"
    if not is_whole:
        what = f"all rows that the view has of a block of {url}, between rows {first} and {last},"
    return ConfigError(
        f"{what} would be taken out, and no row of it is left to stand for them: in a job of "
        "another name, leave them out with where= on a column that names them, or write the shard "
        "anew",
        shard=url,
    )
