"""Make the manifest of a view: the dataset's manifest, with the rows of each block in the view.
Give advice about the folders of a dataset.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from msgspec import structs

from dataplane.base.suffixes import TABLE_PREFIXES
from dataplane.base.units import some_of
from dataplane.formats.folders import (
    checked_sizes,
    folder_columns,
    folder_of,
    folder_values,
    with_folders,
)
from dataplane.formats.unsupported import refuse_differing
from dataplane.index.counting import CountRows, counted, shares_counted, view_name
from dataplane.index.files import check_files, said_of_strays
from dataplane.index.journal import SealedFiles
from dataplane.index.processes import IndexProcesses
from dataplane.index.projection import Projection
from dataplane.index.run import Connect, Progress
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.joined import FILES, is_joined
from dataplane.model.records import View
from dataplane.plan.columns import NEVER, NullCounts
from dataplane.plan.manifest import Int64, Manifest
from dataplane.plan.packed_blocks import NUMBERS, known_counts
from dataplane.plan.shards import LEFT_OUT
from dataplane.plan.views import check_shares, limited, rows_only
from dataplane.store.layouts import series_together
from dataplane.store.tables import OpenTable
from dataplane.transforms.leaves import leaves_of
from dataplane.transforms.row_filter import reads_columns

__all__ = ["Projection", "check_files"]
_LISTED_MAX = 20


def check_left_out(manifest: Manifest, bad_max: float) -> None:
    """Refuse a manifest without shards that cannot be indexed, unless they have at most this share
    of its bytes.

    Raises:  CorruptShard: names the first of them.
    """
    bad = left_out(manifest)
    sizes = manifest.shards.size_bytes
    share = int(sizes[list(bad)].sum()) / max(int(sizes.sum()), 1)
    if not bad or (bad_max and share <= bad_max):  # an empty shard has no bytes
        return
    urls = manifest.shards.urls
    listed = "; ".join(f"{urls[shard]}: {why}" for shard, why in [*bad.items()][:_LISTED_MAX])
    more = "; …" if len(bad) > _LISTED_MAX else ""
    way = 'on_bad="replace"' if not bad_max else "a larger bad_max="
    raise CorruptShard(
        f"{listed}{more}. {len(bad)} of {len(urls)} shards, with {share:.2%} of the bytes, cannot "
        f"be indexed: repair them or leave them out (`dataplane verify` lists the damage), or pass "
        f"{way} to go on without them",
        shard=urls[next(iter(bad))],
    )


def left_out(manifest: Manifest) -> dict[int, str]:
    """Return the shards that are left out because they cannot be indexed, and why."""
    etags = manifest.shards.etags
    shards = np.flatnonzero(etags.starting_with(LEFT_OUT.encode())).tolist()
    return {shard: etags[shard].removeprefix(LEFT_OUT) for shard in shards}


def canonical_view(view: View) -> View:
    """Return the form of the view that all equal views share.

    Raises:  ConfigError: the view's condition or its shares are wrong.
    """
    check_shares(view)
    if not view.where:
        return structs.replace(view, where="")
    # Import this module late, as below: most views have no condition.
    from dataplane.transforms.where import canonical_where

    return structs.replace(view, where=canonical_where(view.where))


def viewed(
    manifest: Manifest,
    view: View,
    connect: Connect,
    config: NodeConfig,
    progress: Progress | None = None,
) -> Manifest:
    """Return the manifest with only the rows of the view. These rows are counted in processes, with
    the limits of this configuration, unless the manifest or the cache folder has the counts.

    Raises:  ConfigError: the view is wrong, or has no rows.  SchemaMismatch: shards differ in a
    column of its condition.  As `counted`.
    """
    view = canonical_view(rows_only(view))
    if view == View():
        return manifest
    with explaining_folders(manifest):
        if view.where:
            schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
            read = reads_columns(view, schema, ())
            refuse_differing(schema, read, manifest.shards.urls.__getitem__)
        counts = limited(_counts(manifest, view, connect, config, progress), view.limit)
    if not counts.any():
        raise ConfigError(
            f"none of the {manifest.sample_count} rows of {some_of(manifest.urls)} is left by"
            f" {_told(view)}: ask for others",
            field="where" if view.where else "view",
        )
    return dataclasses.replace(manifest.viewed(counts), nulls=_nulls(manifest, view))


def _nulls(manifest: Manifest, view: View) -> NullCounts | None:
    """Return the null counts for the rows of the view: its condition may exclude nulls."""
    if manifest.nulls is None or not view.where:
        return manifest.nulls
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    from dataplane.transforms.condition import Condition, Outcomes

    known = Condition.of(view.where, schema).known(Outcomes.TRUE)
    nodes = [leaf.row_nodes for leaf in leaves_of(schema) if leaf.name in known]
    return manifest.nulls.without([node for some in nodes for node in some])


def with_view(manifest: Manifest, of_view: Manifest, view: View) -> Manifest:
    """Return the manifest of a whole dataset, with the counts of a view of it, ignoring
    the limit.
    """
    counts = np.zeros(manifest.block_count, np.int64)
    counts[of_view.kept] = of_view.block_rows
    return manifest.with_view(view_name(canonical_view(view)), counts)


def _counts(
    manifest: Manifest,
    view: View,
    connect: Connect,
    config: NodeConfig,
    progress: Progress | None,
) -> Int64:
    """Count the rows of each block that belong to the view, ignoring its limit.

    Shapes:  result: int64[K].
    """
    found = manifest.view_counts.get(view_name(view))
    if found is not None:
        return found
    if not view.where:
        return shares_counted(manifest, view, config.cache_dir)
    with IndexProcesses.of(config) as processes:
        count: CountRows = processes.count
        return counted(manifest, view, connect, count, config.cache_dir, progress)


def _told(view: View) -> str:
    """Describe the view for an error message."""
    parts = [f"where={view.where!r:.500}"] if view.where else []
    parts += [f"sample={view.sample / 2**32:.6g}"] if view.sample else []
    if view.split_to:
        parts += [f"the split from {view.split_from / 2**32:.6g} to {view.split_to / 2**32:.6g}"]
    return " and ".join(parts)


# -- folders ---------------------------------------------------------------------------------------
#
# Add the keys of folders named "key=value" to the columns of a dataset, and advise about several
# series of shards in one folder, which other readers treat as splits.

_SERIES_SHOWN = 5


def with_folder_columns(manifest: Manifest, table: OpenTable | None = None) -> Manifest:
    """Return the manifest with the columns that its shards' folders have, or those that its `table`
    says they have. Its fingerprint covers them, since they also depend on the names that the user
    gave; its identity does not. Shards that are joined from several objects have none: their
    objects may lie in several folders.

    Raises:  ConfigError: the shards do not have the table's columns.  SchemaMismatch: a folder has
    not the value that the table says.
    """
    urls = manifest.shards.urls
    is_table = manifest.urls[0].startswith(TABLE_PREFIXES)
    if (
        manifest.stored_schema
        or (is_table and table is None)
        or is_joined(manifest.shards.etags[0])
    ):
        return manifest
    if table is None and b"=" not in urls.content.data.tobytes():
        return manifest
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    of_shard = [folder_of(url) for url in urls]
    if table is None:
        columns, sizes = folder_columns(dict.fromkeys(of_shard), manifest.urls, schema.names)
    else:
        table.check(_known_nulls(manifest, schema))
        columns = [column for column in table.columns if column.name not in schema.names]
        sizes = checked_sizes(columns, table.values)
    if not columns:
        return manifest
    return dataclasses.replace(
        manifest,
        schema=with_folders(schema, columns, sizes).serialize().to_pybytes(),
        stored_schema=manifest.schema,
        nulls=_with_folder_nulls(manifest, of_shard, [column.name for column in columns]),
    )


def _known_nulls(manifest: Manifest, schema: pa.Schema) -> dict[str, int]:
    """Return how many nulls each column is known to have, 0 for columns of structs."""
    known = dict.fromkeys(schema.names, 0)
    if manifest.nulls is not None:
        for leaf in leaves_of(schema):
            if len(leaf.row_nodes) == 1:
                known[leaf.name] = max(int(manifest.nulls.counts[leaf.row_nodes[0]]), 0)
    return known


def _with_folder_nulls(
    manifest: Manifest, of_shard: Sequence[str], names: Sequence[str]
) -> NullCounts | None:
    """Add the null counts of the columns that folders have."""
    if manifest.nulls is None:
        return None
    values = {folder: folder_values(folder) for folder in dict.fromkeys(of_shard)}
    counts, shards = [], []
    for name in names:
        lacking = np.array([values[folder].get(name) is None for folder in of_shard])
        is_null = lacking[manifest.block_shard]
        count = int(manifest.block_rows[is_null].sum())
        counts.append(count or NEVER)
        shards.append(int(manifest.block_shard[is_null][0]) if count else -1)
    return manifest.nulls.followed_by(counts, shards)


def said_of_folders(manifest: Manifest) -> str:
    """Return the advice to give when the dataset is opened; "" if there is none."""
    if manifest.format == FILES:
        return said_of_strays(manifest)
    urls = manifest.shards.urls
    if b"-of-" not in urls.content.data.tobytes():
        return ""
    together = series_together(list(urls), manifest.urls)
    if together is None:
        return ""
    folder, series = together
    every = [
        f"{folder}{start}* ({count} shard{'s' if count > 1 else ''})"
        for start, count in series.items()
    ]
    return (
        f"{len(series)} series of shards in one folder are read as one dataset: "
        f"{some_of(every, _SERIES_SHOWN)}. On the Hugging Face Hub, they are splits of their own: "
        "pass the pattern of the one that you want, or a list with the patterns of all that you "
        "want together"
    )


@contextlib.contextmanager
def explaining_folders(manifest: Manifest) -> Iterator[None]:
    """Explain, in an error about a missing column, that the column is a key of folder names.

    Raises:  ConfigError: raised by the code within.
    """
    try:
        yield
    except ConfigError as error:
        urls = manifest.shards.urls
        keys = {**folder_values(folder_of(urls[0])), **folder_values(folder_of(urls[-1]))}
        columns = pa.ipc.read_schema(pa.py_buffer(manifest.schema)).names  # may be suggested
        lacking = (key for key in keys if key not in columns)
        key = next((key for key in lacking if repr(key) in str(error)), None)
        if key is None:
            raise
        raise type(error)(
            f"{error}. The folder {key}={keys[key]} was named in full, so that its key is no "
            "column: pass the folder above it",
            **error.nouns,
        ) from None


# -- packs -----------------------------------------------------------------------------------------


def counted_packs(manifest: Manifest, name: str, cache_dir: str) -> Int64 | None:
    """Return the packs of this `counts_name` that the manifest has, or that a node with this cache
    folder has counted; None if there are none.

    Shapes:  result: int64[blocks, NUMBERS].
    """
    known = known_counts(manifest, name)
    if known is None:
        known = kept_packs(cache_dir, name)
    return known if known is not None and len(known) == manifest.block_count else None


def pack_files(cache_dir: str, suffix: str = ".counts") -> SealedFiles:
    """Return the files in which packs of blocks are kept."""
    return SealedFiles(cache_dir, "packs", suffix)


def kept_packs(cache_dir: str, name: str, suffix: str = ".counts") -> Int64 | None:
    """Return the packs of blocks that are kept under this name; None if there are none.

    Shapes:  result: int64[blocks, NUMBERS].
    """
    body = pack_files(cache_dir, suffix).read(name)
    if body is None or len(body) % (8 * NUMBERS):
        return None
    return np.frombuffer(body, "<i8").reshape(-1, NUMBERS)
