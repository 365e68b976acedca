"""Make the manifest of a view: the dataset's manifest, with the rows of each block in the view.
Give advice about the folders of a dataset.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from msgspec import structs

from dataplane.formats.unsupported import refuse_differing
from dataplane.index.counting import CountRows, counted, shares_counted, view_name
from dataplane.index.journal import SealedFiles
from dataplane.index.processes import IndexProcesses
from dataplane.index.projection import Projection
from dataplane.index.run import Connect, Progress
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.plan.columns import NullCounts
from dataplane.plan.manifest import Int64, Manifest
from dataplane.plan.packed_blocks import NUMBERS, known_counts
from dataplane.plan.shards import named
from dataplane.plan.views import check_shares, limited, rows_only
from dataplane.store.layouts import hive_keys, series_together
from dataplane.transforms.leaves import leaves_of
from dataplane.transforms.row_filter import reads_columns

__all__ = ["Projection"]


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
            f"none of the {manifest.sample_count} rows of {named(manifest.urls)} is left by"
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
# Advise about a dataset's folders when it is opened: about folders named "key=value", whose keys
# are not read as columns, and about several series of shards in one folder, which other readers
# treat as splits.

_SERIES_SHOWN = 5


def folder_keys(manifest: Manifest) -> list[str]:
    """Return the keys of this dataset's folders that are not columns of the dataset. Since all
    shards lie in folders with the same keys, only the first and the last shard are examined.
    """
    return _without_columns(manifest, manifest.urls)


def _without_columns(manifest: Manifest, names: Sequence[str]) -> list[str]:
    urls = manifest.shards.urls
    keys = hive_keys((urls[0], urls[-1]), names)
    known = pa.ipc.read_schema(pa.py_buffer(manifest.schema)).names if keys else ()
    return [key for key in keys if key not in known]


def said_of_folders(manifest: Manifest) -> str:
    """Return the advice to give when the dataset is opened; "" if there is none."""
    return "; ".join(filter(None, (_said_of_keys(manifest), _said_of_series(manifest))))


def _said_of_keys(manifest: Manifest) -> str:
    keys = folder_keys(manifest)
    if not keys:
        return ""
    shown = " and ".join(f"{key}=…" for key in keys)
    is_one = len(keys) == 1
    return (
        f"the shards lie in folders {shown}, and {'this key is' if is_one else 'these keys are'} "
        f"not read as {'a column' if is_one else 'columns'}: if you need {_it(keys)}, write "
        f"{_it(keys)} into the shards"
    )


def _said_of_series(manifest: Manifest) -> str:
    urls = manifest.shards.urls
    if b"-of-" not in urls.content.data.tobytes():
        return ""
    together = series_together(list(urls), manifest.urls)
    if together is None:
        return ""
    folder, series = together
    shown = ", ".join(
        f"{folder}{start}* ({count} shard{'s' if count > 1 else ''})"
        for start, count in list(series.items())[:_SERIES_SHOWN]
    )
    more = f" and {len(series) - _SERIES_SHOWN} more" if len(series) > _SERIES_SHOWN else ""
    return (
        f"{len(series)} series of shards in one folder are read as one dataset: {shown}{more}. On "
        "the Hugging Face Hub, they are splits of their own: pass the pattern of the one that you "
        "want, or a list with the patterns of all that you want together"
    )


def _it(keys: list[str]) -> str:
    return "it" if len(keys) == 1 else "them"


@contextlib.contextmanager
def explaining_folders(manifest: Manifest) -> Iterator[None]:
    """Explain, in an error about a missing column, that the column is a key of folder names.

    Raises:  ConfigError: raised by the code within.
    """
    try:
        yield
    except ConfigError as error:
        keys = _without_columns(manifest, ())
        key = next((key for key in keys if repr(key) in str(error)), None)
        if key is None:
            raise
        raise type(error)(
            f"{error}. The shards lie in folders {key}=…, whose names are not read as columns: "
            f"write {key!r} into the shards, or pass the folders that you want",
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
    return SealedFiles(Path(cache_dir) / "packs", suffix)


def kept_packs(cache_dir: str, name: str, suffix: str = ".counts") -> Int64 | None:
    """Return the packs of blocks that are kept under this name; None if there are none.

    Shapes:  result: int64[blocks, NUMBERS].
    """
    body = pack_files(cache_dir, suffix).read(name)
    if body is None or len(body) % (8 * NUMBERS):
        return None
    return np.frombuffer(body, "<i8").reshape(-1, NUMBERS)
