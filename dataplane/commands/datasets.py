"""Shared by commands over a dataset: index it with progress, and read a block.

Import this module late: it imports Arrow and the formats.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from rich.progress import TaskID

from dataplane.commands import output
from dataplane.commands.stores import STORES
from dataplane.config import NodeConfig
from dataplane.formats import registry
from dataplane.formats.base import RawBlock
from dataplane.index.indexing import open_dataset
from dataplane.index.processes import IndexProcesses
from dataplane.index.run import Connect, IndexProgress, Progress
from dataplane.index.viewing import viewed
from dataplane.model import Region, View
from dataplane.node.stored_rows import StoredRows, stored_rows
from dataplane.plan.manifest import Int64, Manifest
from dataplane.plan.trail import RowNames
from dataplane.plan.views import filters
from dataplane.redact import hub_parts
from dataplane.store.pieces import etag_of_size
from dataplane.transforms.row_filter import BlockRows, RowFilter, reads_columns

_ALL = View()
_BLOCKS_KEPT = 1024


def opened(
    urls: Sequence[str],
    format_name: str,
    workers: int,
    config: NodeConfig,
    view: View = _ALL,
) -> Manifest:
    """Return the manifest of a dataset, or of a view of it; show progress bars while it is made.

    Shards are indexed, and rows counted, as in a node: in processes with a memory limit and a
    deadline, so that no shard can crash the command.
    """
    with output.progress() as bar:

        def shown(task: TaskID, of: str) -> Progress:
            def show(done: IndexProgress) -> None:
                bar.update(
                    task,
                    total=done.bytes_total,
                    completed=done.bytes_done,
                    note=f"{done.shards_done:,}/{done.shard_count:,} {of}",
                )

            return show

        with IndexProcesses.of(config, pauses=STORES.pauses) as processes:
            whole = open_dataset(
                urls,
                format_name=format_name,
                cache_dir=config.cache_dir,
                workers=workers,
                progress=shown(bar.add_task("indexing", total=None, note=""), "shards"),
                connect=STORES.connect,
                index_shard=processes.index,
                begin_batches=processes.begin_batches,
            )
        if not view.where:
            return viewed(whole, view, STORES.connect, config)
        told = shown(bar.add_task("counting rows", total=None, note=""), "groups of blocks")
        return viewed(whole, view, STORES.connect, config, told)


def schema_of(manifest: Manifest) -> pa.Schema:
    """The dataset's schema."""
    return pa.ipc.read_schema(pa.py_buffer(manifest.schema))


def read_block(
    manifest: Manifest,
    block: int,
    schema: pa.Schema,
    columns: Sequence[str],
    connect_to: Connect = STORES.connect,
    view: View = _ALL,
) -> pa.RecordBatch:
    """Read one block of the manifest through the store and the format. Of a view's manifest, only
    the rows that the view has are returned.

    Raises:  CorruptShard.  DatasetChangedError.  The StoreError family.
    """
    shard = manifest.shards[int(manifest.block_shard[block])]
    store = connect_to(shard.url)
    place = Region(int(manifest.block_offset[block]), int(manifest.block_length[block]))

    def read(region: Region) -> memoryview:
        if not region.length:
            return memoryview(b"")
        return memoryview(store.read(shard.url, region.offset, region.length, shard.etag))

    raw = RawBlock(
        url=shard.url,
        index=manifest.block_in_shard(block),
        rows=int(stored_rows(manifest)[block]),
        place=place,
        shard_bytes=shard.size_bytes,
        preamble_place=shard.preamble,
        preamble=read(shard.preamble),
        body=read(place),
    )
    needed = reads_columns(view, schema, columns)
    batch = registry.by_name(manifest.format).decode(raw, schema, needed)
    rows = RowFilter.of(view, schema)
    if rows is not None:
        stored = StoredRows.of(manifest, view).of_block(block)
        batch = rows.left(batch, BlockRows(raw.rows, stored["first_row"], stored["shard_word"]))
    return batch.select(list(columns)).slice(0, int(manifest.block_rows[block]))


def row_names(manifest: Manifest, view: View) -> RowNames:
    """Return the names of a manifest's rows, or of the rows of this view. It reads the columns of
    the view's condition of each block that is looked up.
    """
    if manifest.whole is None or not filters(view):
        return RowNames(manifest)
    schema, stored = schema_of(manifest), StoredRows.of(manifest, view)
    rows, counts = RowFilter.of(view, schema), stored_rows(manifest)
    assert rows is not None

    @functools.lru_cache(maxsize=_BLOCKS_KEPT)
    def rows_left(block: int) -> Int64:
        assert rows is not None
        told = stored.of_block(block)
        of_block = BlockRows(int(counts[block]), told["first_row"], told["shard_word"])
        batch = pa.record_batch([pa.nulls(of_block.count)], ["nothing"])
        if rows.columns:
            assert manifest.whole is not None
            assert manifest.kept is not None
            batch = read_block(manifest.whole, int(manifest.kept[block]), schema, rows.columns)
        return np.flatnonzero(rows.mask(batch, of_block))[: manifest.block_rows[block]]

    return RowNames(manifest, rows_left)


def facts(manifest: Manifest) -> dict[str, object]:
    """A manifest in a few numbers."""
    return {
        "format": manifest.format,
        "shards": len(manifest.shards),
        "blocks": manifest.block_count,
        "samples": manifest.sample_count,
        **({} if manifest.whole is None else {"of": manifest.whole.sample_count}),
        "bytes": int(manifest.shards.size_bytes.sum()),
        "fingerprint": manifest.fingerprint,
        **_versions(manifest),
    }


def _versions(manifest: Manifest) -> dict[str, object]:
    """Return the commits at which shards are read, and the number of shards that only their size
    identifies.
    """
    shards = manifest.shards
    hubs = [hub for url in shards.urls if (hub := hub_parts(url)) is not None]
    commits = sorted({f"{repository}@{revision}" for repository, revision, _ in hubs})
    sizes = shards.size_bytes.tolist()
    by_size = sum(map(operator.eq, shards.etags, map(etag_of_size, sizes)))
    return {
        **({"commits": ", ".join(commits)} if commits else {}),
        **({"identified only by size": by_size} if by_size else {}),
    }
