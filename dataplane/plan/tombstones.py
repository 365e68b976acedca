"""Rows that were taken out of a job, and the rows that stand in their places.

1. A position whose row was taken out gives a live row of the same block, so that no other position
   changes and no other block is read. docs/order.md specifies which.
2. Which row that is depends on the seed, the shard, the row, and what else is taken out of the
   block; not on the epoch, nor on ranks.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from dataplane.changes import Tombstone
from dataplane.config import JobSpec
from dataplane.errors import ConfigError
from dataplane.model import View
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import SampleOrder
from dataplane.plan.permute import GAMMA, Domain, key, mix
from dataplane.plan.shards import starts_of
from dataplane.plan.trail import RowNames
from dataplane.plan.windows import Int64

_WORD = (1 << 64) - 1


class Substitutes:
    """The rows that were taken out of a dataset, and which rows stand for them."""

    def __init__(self, manifest: Manifest, seed: int, tombstones: Sequence[Tombstone]) -> None:
        """Raises:  ConfigError: there is no such row, or a block has no row left."""
        names, gone = RowNames(manifest), dict[int, dict[int, Tombstone]]()
        for one in tombstones:
            block, row = names.block_of(one.shard, one.row)
            gone.setdefault(block, {})[row] = one
        self._starts = starts_of(manifest.block_rows)
        places: list[tuple[int, int]] = []
        for block, rows in gone.items():
            count = int(manifest.block_rows[block])
            if len(rows) == count:
                raise _block_is_gone(manifest, rows)
            for row, one in rows.items():
                other = substitute(seed, one, count, rows)
                places.append((int(self._starts[block]) + row, other))
        self._samples, self._rows = np.array(sorted(places), np.int64).reshape(-1, 2).T

    def of(self, blocks: Int64, rows: Int64) -> Int64:
        """The rows that stand in the places of these.

        Shapes:  blocks, rows, result: int64[n].
        """
        samples = self._starts[blocks] + rows
        at = np.minimum(self._samples.searchsorted(samples), len(self._samples) - 1)
        return np.where(self._samples[at] == samples, self._rows[at], rows)


def substitute(seed: int, gone: Tombstone, row_count: int, all_gone: Container[int]) -> int:
    """The row of a block of so many that stands for a row that was taken out of it, as others were:
    `all_gone` contains their numbers. It must leave a row.
    """
    keyed = int(key(seed, Domain.TOMBSTONE, gone.shard, gone.row))
    while True:
        row = mix(keyed) % row_count
        if row not in all_gone:
            return row
        keyed = (keyed + GAMMA) & _WORD


class TombstonedOrder:
    """An order of a dataset from which rows were taken out."""

    def __init__(self, order: SampleOrder, substitutes: Substitutes) -> None:
        self._order, self._substitutes = order, substitutes

    @property
    def sample_count(self) -> int:
        """How many positions there are: as many as without."""
        return self._order.sample_count

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """As `SampleOrder.locate`."""
        blocks, rows = self._order.locate(positions)
        return blocks, self._substitutes.of(blocks, rows)

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """As `SampleOrder.block_span`."""
        return self._order.block_span(blocks)


def check_tombstones(
    spec: JobSpec, manifests: Sequence[Manifest], tombstones: Sequence[Tombstone]
) -> None:
    """Check that these rows can be taken out of a job over these datasets.

    Raises:  ConfigError: says why they cannot, and what to do.
    """
    if tombstones:
        check_spec(spec)
        Substitutes(manifests[0], spec.seed, tombstones)


def check_spec(spec: JobSpec) -> None:
    """Check that rows can be taken out of a job with this spec.

    Raises:  ConfigError: says why they cannot, and what to do.
    """
    what = ""
    if spec.mixture is not None:
        what = "a mixture"
    elif spec.view.pack is not None:
        what = "packs"
    elif spec.view != View(map=spec.view.map, collate=spec.view.collate):
        what = "a view of the rows"
    if what:
        raise ConfigError(
            "`dataplane tombstone` takes rows out of jobs over all rows of one dataset, and this "
            f"one has {what}: leave the rows out with where= on a column that names them, or write "
            "their shards anew. If rows were taken out of it before, start it under another name",
            field="tombstones",
        )


def _block_is_gone(manifest: Manifest, rows: dict[int, Tombstone]) -> ConfigError:
    one = next(iter(rows.values()))
    url = manifest.shards.urls[one.shard]
    first, last = min(each.row for each in rows.values()), max(each.row for each in rows.values())
    return ConfigError(
        f"rows {first} to {last} of {url}, a whole block, would be taken out, and no row of it is "
        "left to stand for them: leave them out with where= on a column that names them, or write "
        "the shard anew",
        shard=url,
    )
