"""Shared by commands over a dataset: indexing it with progress, and reading a block.

Imported late, since it imports Arrow and the formats.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from dataplane.commands import output
from dataplane.commands.stores import STORES
from dataplane.config import NodeConfig
from dataplane.formats import registry
from dataplane.formats.base import RawBlock
from dataplane.index.indexing import Connect, IndexProgress, open_dataset
from dataplane.index.processes import IndexProcesses
from dataplane.model import Region
from dataplane.plan.manifest import Manifest


def opened(urls: Sequence[str], format_name: str, workers: int, config: NodeConfig) -> Manifest:
    """The dataset's manifest, with a progress bar while it is made.

    Shards are indexed as in a node, in processes with a memory limit and a deadline, so that no
    shard can crash the command.
    """
    with output.progress() as bar, IndexProcesses.of(config) as processes:
        task = bar.add_task("indexing", total=None, note="")

        def show(done: IndexProgress) -> None:
            bar.update(
                task,
                total=done.bytes_total,
                completed=done.bytes_done,
                note=f"{done.shards_done:,}/{done.shard_count:,} shards",
            )

        return open_dataset(
            urls,
            format_name=format_name,
            cache_dir=config.cache_dir,
            workers=workers,
            progress=show,
            connect=STORES.connect,
            index_shard=processes.index,
        )


def schema_of(manifest: Manifest) -> pa.Schema:
    """The dataset's schema."""
    return pa.ipc.read_schema(pa.py_buffer(manifest.schema))


def read_block(
    manifest: Manifest,
    block: int,
    schema: pa.Schema,
    columns: Sequence[str],
    connect_to: Connect = STORES.connect,
) -> pa.RecordBatch:
    """One block of the manifest, through the store and the format.

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
        rows=int(manifest.block_rows[block]),
        place=place,
        shard_bytes=shard.size_bytes,
        preamble_place=shard.preamble,
        preamble=read(shard.preamble),
        body=read(place),
    )
    return registry.by_name(manifest.format).decode(raw, schema, columns)


def facts(manifest: Manifest) -> dict[str, object]:
    """A manifest in a few numbers."""
    return {
        "format": manifest.format,
        "shards": len(manifest.shards),
        "blocks": manifest.block_count,
        "samples": manifest.sample_count,
        "bytes": int(manifest.shards.size_bytes.sum()),
        "fingerprint": manifest.fingerprint,
    }
