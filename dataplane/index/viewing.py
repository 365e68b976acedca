"""Make the manifest of a view: the dataset's, with the number of rows of each block in the view."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
from msgspec import structs

from dataplane.formats.unsupported import refuse_differing
from dataplane.index.counting import CountRows, counted, shares_counted, view_name
from dataplane.index.folders import explaining_folders
from dataplane.index.processes import IndexProcesses
from dataplane.index.run import Connect, Progress
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.plan.columns import NullCounts
from dataplane.plan.manifest import Int64, Manifest
from dataplane.plan.shards import named
from dataplane.plan.views import check_shares, limited, rows_only
from dataplane.transforms.leaves import leaves_of
from dataplane.transforms.row_filter import reads_columns


def canonical_view(view: View) -> View:
    """Return the form of the view that all equal views share.

    Raises:  ConfigError: its condition or its shares are wrong.
    """
    check_shares(view)
    if not view.where:
        return structs.replace(view, where="")
    # Late imports, here and below: most views have no condition.
    from dataplane.transforms.where import canonical_where

    return structs.replace(view, where=canonical_where(view.where))


def viewed(
    manifest: Manifest,
    view: View,
    connect: Connect,
    config: NodeConfig,
    progress: Progress | None = None,
) -> Manifest:
    """Return the manifest with only the rows of the view. They are counted in processes, with the
    limits of this configuration, unless the manifest or its cache folder has the counts.

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
            f"none of the {manifest.sample_count} rows of {named(manifest.urls)} is left by"
            f" {_told(view)}: ask for others",
            field="where" if view.where else "view",
        )
    return dataclasses.replace(manifest.viewed(counts), nulls=_nulls(manifest, view))


def _nulls(manifest: Manifest, view: View) -> NullCounts | None:
    """Return what is known about nulls in the rows of the view: its condition excludes some."""
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
    """Describe the view in the words of an error."""
    parts = [f"where={view.where!r:.500}"] if view.where else []
    parts += [f"sample={view.sample / 2**32:.6g}"] if view.sample else []
    if view.split_to:
        parts += [f"the split from {view.split_from / 2**32:.6g} to {view.split_to / 2**32:.6g}"]
    return " and ".join(parts)
