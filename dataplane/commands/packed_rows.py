"""`dataplane trace` and `where` of a job whose samples are packs: the documents in each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataplane.commands.datasets import read_block, row_names, schema_of
from dataplane.errors import ConfigError
from dataplane.node.pack_counts import counted_before
from dataplane.plan.packed_blocks import counts_name, packed
from dataplane.plan.packs import Int64, Packs, packs_of
from dataplane.plan.trail import places_of
from dataplane.plan.views import rows_only
from dataplane.worker.functions import CalledAt, UserFunction, loaded, mapped_block

if TYPE_CHECKING:
    from dataplane.commands.traced import Traced, TracedSource
    from dataplane.config import NodeConfig
    from dataplane.model import View
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.order import TracedOrder
    from dataplane.plan.trail import Place, StepRows


def packs_in(rows: Manifest, view: View, seed: int, config: NodeConfig) -> Manifest:
    """The manifest of the packs of a view, from that of its rows.

    Raises:  ConfigError: nobody has counted them here, or a map makes the tokens that may not be
    called or cannot be imported.
    """
    pack = view.pack
    assert pack is not None
    code = _allowed(view.map, config).code if view.map else ""
    name = counts_name(rows, view, seed, code)
    counts = counted_before(rows, name, config.cache_dir)
    if counts is not None:
        return packed(rows, np.ascontiguousarray(counts[:, 1]))
    if view.map:
        raise ConfigError(
            f"the packs of this job were not counted on this machine with {view.map!r} as it is"
            " now: open the job here once, or set --cache-dir to the folder of the node that did",
            field="pack",
        )
    raise ConfigError(
        "the packs of this job were not counted on this machine: give --data a manifest that"
        f" has them (dataplane index … --pack {pack.column},length={pack.length} -o FILE)",
        field="pack",
    )


def _allowed(name: str, config: NodeConfig) -> UserFunction:
    """The function of a map, imported.

    Raises:  ConfigError: the command line does not allow it, or it cannot be imported.
    """
    if not config.allows_function(name):
        raise ConfigError(
            f"the tokens of this job's packs are made by {name!r}. To import and call it here, pass"
            f" --allowed-functions {name}",
            field="map",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # where a training script would find it
    return loaded("map", name)


def documents_of(job: Traced, step: StepRows, epoch: int) -> list[dict[str, object]]:
    """The documents of these packs, in the order in which they lie there: position and rank, shard
    and row, the first token, how many, and where they lie in their pack. Reads the blocks' tokens.

    Raises:  CorruptShard.  DatasetChangedError.  The StoreError family.
    """
    order = job.order(epoch)
    numbers = step.blocks + job.first_blocks[step.sources]
    keys: list[int | None] = [None] * len(numbers)
    if job.spec.shuffle:
        keys = order.pack_keys(step.positions % order.sample_count, numbers).tolist()
    names = [row_names(one.of_rows, rows_only(one.view)) for one in job.sources]
    packs: dict[tuple[int, int | None], Packs] = {}
    found: list[dict[str, object]] = []
    for at, (number, source, block, pack) in enumerate(
        zip(numbers.tolist(), step.sources.tolist(), step.blocks.tolist(),
            step.block_rows.tolist(), strict=True)
    ):  # fmt: skip
        of = job.sources[source]
        of_rows = _block_of_rows(of, block)
        if (number, keys[at]) not in packs:
            packs[number, keys[at]] = _packs(job, of, of_rows, keys[at])
        own = packs[number, keys[at]]
        pieces = own.pieces[:, own.starts[pack] : own.starts[pack + 1]]
        blocks = np.full(pieces.shape[1], of_rows)
        shards, shard_rows = names[source].of(blocks, pieces[0].astype(np.int64))
        for piece, shard, row in zip(
            pieces.T.tolist(), shards.tolist(), shard_rows.tolist(), strict=True
        ):
            found.append({
                "position": int(step.positions[at]),
                "dp_rank": int(step.dp_ranks[at]),
                **job.place_of(source, shard),
                "row": row,
                "first_token": piece[1],
                "tokens": piece[2],
                "place": piece[3],
                "is_padding": bool(step.is_padding[at]),
            })  # fmt: skip
    return found


def _block_of_rows(source: TracedSource, block: int) -> int:
    """The number of a block among those that have rows."""
    assert source.rows is not None
    assert source.manifest.kept is not None
    kept = int(source.manifest.kept[block])
    return kept if source.rows.kept is None else int(source.rows.kept.searchsorted(kept))


def packs_with(
    job: Traced,
    source: int,
    at: tuple[int, int],
    epochs: Iterable[int],
    cursor: int,
) -> Iterator[tuple[int, Place, dict[str, object]]]:
    """Where the packs that have tokens of a row stand, epoch after epoch, and which tokens lie
    where in each. `at` is a block of those that have rows, and a row of it. Reads the block's
    tokens.

    Raises:  CorruptShard.  DatasetChangedError.  The StoreError family.
    """
    of, (block, row) = job.sources[source], at
    assert of.rows is not None
    assert of.view.pack is not None
    assert of.manifest.kept is not None
    kept = block if of.rows.kept is None else int(of.rows.kept[block])
    of_packs = int(of.manifest.kept.searchsorted(kept))
    if of_packs == of.manifest.block_count or of.manifest.kept[of_packs] != kept:
        return  # it fills no pack
    lengths, number = _lengths(job, of, block), int(job.first_blocks[source]) + of_packs
    for epoch in epochs:
        order = job.order(epoch)
        for keyed in order.keys_of_packs(number) if job.spec.shuffle else [None]:
            packs = packs_of(lengths, of.view.pack, keyed)
            for piece in np.flatnonzero(packs.pieces[0] == row).tolist():
                pack = int(packs.starts.searchsorted(piece, side="right")) - 1
                _, begin, tokens, offset = packs.pieces[:, piece].tolist()
                more: dict[str, object] = {"first_token": begin, "tokens": tokens, "place": offset}
                for place in places_of(
                    job.spec, order, number, pack, cursor=cursor, dp_size=job.dp_size
                ):
                    if keyed in (None, _key_at(order, place, number)):
                        yield epoch, place, more


def _key_at(order: TracedOrder, place: Place, block: int) -> int:
    """With which key the packs of the block at this place are drawn."""
    position = place.position % order.sample_count
    return int(order.pack_keys(np.array([position]), np.array([block]))[0])


def _packs(job: Traced, source: TracedSource, block: int, keyed: int | None) -> Packs:
    """The packs of a block of rows."""
    assert source.view.pack is not None
    return packs_of(_lengths(job, source, block), source.view.pack, keyed)


def _lengths(job: Traced, source: TracedSource, block: int) -> Int64:
    """How many tokens each row of a block has."""
    view, rows = source.view, source.rows
    assert view.pack is not None
    assert rows is not None
    schema, column = schema_of(rows), view.pack.column
    if not view.map:
        batch = read_block(rows, block, schema, [column], view=rows_only(view))
    else:
        function, shard = loaded("map", view.map), int(rows.block_shard[block])
        names = schema.names if function.reads is None else function.reads
        batch = read_block(rows, block, schema, names, view=rows_only(view))
        at = CalledAt("map", view.map, rows.shards.urls[shard], rows.block_in_shard(block))
        batch = mapped_block(function, batch, job.spec.seed, shard, at)
    lengths = pc.fill_null(pc.list_value_length(batch.column(column)), 0).cast(pa.int64())
    found: Int64 = lengths.to_numpy(zero_copy_only=False)
    return found
