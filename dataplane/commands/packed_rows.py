"""`dataplane trace` and `where` of a job whose samples are packs: the documents in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataplane.commands.datasets import read_block, row_names, schema_of
from dataplane.errors import ConfigError
from dataplane.node.pack_counts import remembered_counts
from dataplane.plan.orders import order_of
from dataplane.plan.packed_blocks import counts_name, known_counts, packed
from dataplane.plan.packs import Int64, Packs, packs_of
from dataplane.plan.views import rows_only

if TYPE_CHECKING:
    from dataplane.commands.traced import Traced
    from dataplane.config import JobSpec
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.trail import StepRows


def packs_in(rows: Manifest, spec: JobSpec, cache_dir: str) -> Manifest:
    """The manifest of a job's packs, from that of its rows.

    Raises:  ConfigError: nobody has counted them here, or a map makes the tokens.
    """
    pack = spec.view.pack
    assert pack is not None
    if spec.view.map:
        raise ConfigError(
            f"the tokens of this job's packs are made by {spec.view.map!r}, which these commands do"
            " not call",
            field="map",
        )
    name = counts_name(rows, spec.view, spec.seed)
    counts = known_counts(rows, name)
    if counts is None:
        counts = remembered_counts(cache_dir, name, rows.block_count)
    if counts is None:
        raise ConfigError(
            "the packs of this job were not counted on this machine: give --data a manifest that"
            f" has them (dataplane index … --pack {pack.column},length={pack.length} -o FILE)",
            field="pack",
        )
    return packed(rows, np.ascontiguousarray(counts[:, 1]))


def documents_of(job: Traced, step: StepRows, epoch: int) -> list[dict[str, object]]:
    """The documents of these packs, in the order in which they lie there: position and rank, shard
    and row, the first token, how many, and where they lie in their pack. Reads the blocks' tokens.

    Raises:  CorruptShard.  DatasetChangedError.  The StoreError family.
    """
    rows, spec = job.rows, job.spec
    assert rows is not None
    order = order_of(spec, job.manifest, epoch)
    count = job.manifest.sample_count
    keys = order.pack_keys(step.positions % count, step.blocks).tolist() if spec.shuffle else []
    names, urls = row_names(rows, rows_only(spec.view)), job.manifest.shards.urls
    packs: dict[int, Packs] = {}
    found: list[dict[str, object]] = []
    for at, (block, pack) in enumerate(
        zip(step.blocks.tolist(), step.block_rows.tolist(), strict=True)
    ):
        of_rows = _block_of_rows(job, block)
        if block not in packs:
            packs[block] = _packs(job, of_rows, keys[at] if keys else None)
        own = packs[block]
        pieces = own.pieces[:, own.starts[pack] : own.starts[pack + 1]]
        shards, shard_rows = names.of(np.full(pieces.shape[1], of_rows), pieces[0].astype(np.int64))
        for piece, shard, row in zip(
            pieces.T.tolist(), shards.tolist(), shard_rows.tolist(), strict=True
        ):
            found.append({
                "position": int(step.positions[at]),
                "dp_rank": int(step.dp_ranks[at]),
                "shard": urls[shard],
                "row": row,
                "first_token": piece[1],
                "tokens": piece[2],
                "place": piece[3],
                "is_padding": bool(step.positions[at] >= count),
            })  # fmt: skip
    return found


def _block_of_rows(job: Traced, block: int) -> int:
    """The number of a block among those that have rows."""
    assert job.rows is not None
    assert job.manifest.kept is not None
    kept = int(job.manifest.kept[block])
    return kept if job.rows.kept is None else int(job.rows.kept.searchsorted(kept))


def packs_with(
    job: Traced, block: int, row: int, epochs: Iterable[int]
) -> Iterator[tuple[int, int, int, dict[str, object]]]:
    """The packs that have tokens of a row, epoch after epoch: the epoch, the block among those that
    have packs, its pack, and which tokens lie where in it. The block is one of those that have
    rows. Reads the block's tokens.

    Raises:  CorruptShard.  DatasetChangedError.  The StoreError family.
    """
    rows, spec, manifest = job.rows, job.spec, job.manifest
    assert rows is not None
    assert spec.view.pack is not None
    assert manifest.kept is not None
    kept = block if rows.kept is None else int(rows.kept[block])
    of_packs = int(manifest.kept.searchsorted(kept))
    if of_packs == manifest.block_count or manifest.kept[of_packs] != kept:
        return  # it fills no pack
    lengths, at = _lengths(job, block), np.array([of_packs])
    for epoch in epochs:
        keys = order_of(spec, manifest, epoch).pack_keys(at, at) if spec.shuffle else None
        packs = packs_of(lengths, spec.view.pack, None if keys is None else int(keys[0]))
        for piece in np.flatnonzero(packs.pieces[0] == row).tolist():
            pack = int(packs.starts.searchsorted(piece, side="right")) - 1
            _, begin, tokens, place = packs.pieces[:, piece].tolist()
            yield epoch, of_packs, pack, {"first_token": begin, "tokens": tokens, "place": place}


def _packs(job: Traced, block: int, keyed: int | None) -> Packs:
    """The packs of a block of rows."""
    assert job.spec.view.pack is not None
    return packs_of(_lengths(job, block), job.spec.view.pack, keyed)


def _lengths(job: Traced, block: int) -> Int64:
    """How many tokens each row of a block has."""
    pack, rows = job.spec.view.pack, job.rows
    assert pack is not None
    assert rows is not None
    view = rows_only(job.spec.view)
    batch = read_block(rows, block, schema_of(rows), [pack.column], view=view)
    lengths = pc.fill_null(pc.list_value_length(batch.column(0)), 0).cast(pa.int64())
    found: Int64 = lengths.to_numpy(zero_copy_only=False)
    return found
