"""Shared by commands over a dataset: index it with progress, read a block, and print values.

Import this module late: it imports Arrow and the formats.
"""

from __future__ import annotations

import datetime as dt
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from rich.markup import escape
from rich.progress import TaskID

from dataplane.commands import output
from dataplane.formats import folders, registry
from dataplane.formats.arrays import decoded
from dataplane.index.indexing import Connect, IndexProgress, Progress, open_manifest
from dataplane.index.viewing import viewed
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.model.records import Kind, View
from dataplane.model.redact import hub_parts
from dataplane.node.dataset import StoredRows, stored_rows
from dataplane.pack import raw_block
from dataplane.plan.manifest import Int64, Manifest
from dataplane.plan.packed_blocks import given_counts
from dataplane.plan.tombstones import RowNames
from dataplane.plan.views import filters
from dataplane.rpc.messages import DatasetSource
from dataplane.store.connect import Stores
from dataplane.store.outage import Outage, Outages
from dataplane.store.reads import etag_of_size
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.row_filter import RowFilter, reads_columns
from dataplane.worker import salvaging

# -- stores ------------------------------------------------------------------------------------
#
# The stores that commands read. If one does not answer, the command waits and says so.

WAIT_S = 60.0
"""How long a command waits for a store. A run waits longer; here a person watches, and can run the
command again.
"""


def _tell(outage: Outage) -> None:
    if outage.is_over:
        away_s = outage.until - outage.since
        said = f"{escape(outage.store)} answers again, after {away_s:.0f} s"
    else:
        said = (
            f"[yellow]waiting for {escape(outage.store)}:[/] {escape(outage.error)}. "
            f"Trying again for up to {WAIT_S:g} s; Ctrl-C stops"
        )
    output.stderr().print(said, soft_wrap=True)


STORES = Stores(WAIT_S, observe=Outages(_tell).note)


_ALL = View()
_BLOCKS_KEPT = 1024


def opened(
    urls: Sequence[str],
    format_name: str,
    workers: int,
    config: NodeConfig,
    view: View = _ALL,
    *,
    leaves_out: bool = False,
) -> Manifest:
    """Return the manifest of a dataset, or of a view of it; show progress bars while it is made.
    With `leaves_out`, shards that cannot be indexed are left out, as a node does.

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

        whole = open_manifest(
            # Allow all urls, as in an embedded node: users may open the urls that they name.
            structs.replace(config, embedded=True),
            STORES,
            DatasetSource(tuple(urls), format_name),
            progress=shown(bar.add_task("indexing", total=None, note=""), "shards"),
            workers=workers,
            leaves_out=leaves_out,
        )
        if not view.where:
            return viewed(whole, view, STORES.connect, config)
        told = shown(bar.add_task("counting rows", total=None, note=""), "groups of blocks")
        return viewed(whole, view, STORES.connect, config, told)


def schema_of(manifest: Manifest) -> pa.Schema:
    """Return the dataset's schema."""
    return pa.ipc.read_schema(pa.py_buffer(manifest.schema))


def read_block(
    manifest: Manifest,
    block: int,
    schema: pa.Schema,
    columns: Sequence[str],
    connect_to: Connect = STORES.connect,
    view: View = _ALL,
) -> pa.RecordBatch:
    """Read one block of the manifest through the store and the format. If the manifest is that of a
    view, only the rows of the view are returned.

    Raises:  CorruptShard.  DatasetChangedError.  StoreError and its subclasses.
    """
    raw = raw_block(manifest, block, connect_to, int(stored_rows(manifest)[block]))
    needed = reads_columns(view, schema, columns)
    batch = folders.decoded(registry.by_name(manifest.format), raw, schema, needed)
    rows = RowFilter.of(view, schema)
    if rows is not None:
        batch = rows.left(batch, StoredRows.of(manifest, view).of_filter(rows, block))
    return batch.select(list(columns)).slice(0, int(given_counts(manifest)[block]))


def salvaged_block(
    manifest: Manifest, block: int, schema: pa.Schema, columns: Sequence[str]
) -> tuple[pa.RecordBatch, Mapping[int, str]]:
    """Read one block as `read_block` does. Return also its rows that are bad, and why; these have
    the values of other rows.

    Raises:  as `read_block`; CorruptShard only if the whole block is bad.
    """
    raw = raw_block(manifest, block, STORES.connect, int(stored_rows(manifest)[block]))
    return salvaging.decoded(registry.by_name(manifest.format), raw, schema, columns)


def row_names(manifest: Manifest, view: View) -> RowNames:
    """Return the names of a manifest's rows, or of the rows of this view. For each block that is
    looked up, the columns of the view's condition are read.
    """
    if manifest.whole is None or manifest.given is not None or not filters(view):
        return RowNames(manifest)
    schema, stored = schema_of(manifest), StoredRows.of(manifest, view)
    rows = RowFilter.of(view, schema)
    assert rows is not None

    @functools.lru_cache(maxsize=_BLOCKS_KEPT)
    def rows_left(block: int) -> Int64:
        assert rows is not None
        of_block = stored.of_filter(rows, block)
        batch = pa.record_batch([pa.nulls(of_block.count)], ["nothing"])
        if rows.columns:
            assert manifest.whole is not None
            assert manifest.kept is not None
            batch = read_block(manifest.whole, int(manifest.kept[block]), schema, rows.columns)
        return np.flatnonzero(rows.mask(batch, of_block))[: manifest.block_rows[block]]

    return RowNames(manifest, rows_left)


def facts(manifest: Manifest) -> dict[str, object]:
    """Summarize a manifest in a few numbers."""
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
    """Return the commits at which shards are read, and how many shards are identified only by their
    size.
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


# -- values ------------------------------------------------------------------------------------
#
# Convert values of any Arrow type to JSON without loss.
#
# Timestamps, dates, times and durations ("PT1.5S") are ISO 8601 with all digits of their unit;
# values outside the years 1 to 9999 are an integer and a unit. A timestamp with a time zone is
# shown in UTC, since its zone is in the schema. Floats that JSON lacks are "NaN", "Infinity" and
# "-Infinity".

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY_S = 86_400
_DAY_ZERO = dt.date(1970, 1, 1).toordinal()
_BYTES_SHOWN = 16
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def shown(array: pa.Array) -> list[object]:
    """Return each value in its JSON form."""
    if pa.types.is_run_end_encoded(array.type):
        array = decoded(array)  # some run-end encoded arrays have no scalars
    return [_shown(scalar) for scalar in array]


def _shown(scalar: pa.Scalar) -> object:
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if isinstance(scalar, pa.UuidScalar):
        return str(scalar.as_py())
    is_wrapped = pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind)
    if isinstance(kind, pa.BaseExtensionType) or is_wrapped or pa.types.is_union(kind):
        return _shown(scalar.value)
    if pa.types.is_temporal(kind):
        return _time(scalar)
    if pa.types.is_struct(kind):
        names = [field.name for field in kind.fields]
        values = [_shown(scalar[i]) for i in range(len(names))]
        pairs = list(zip(names, values, strict=True))
        return dict(pairs) if len(set(names)) == len(names) else [list(pair) for pair in pairs]
    if pa.types.is_map(kind):
        keys, values = shown(scalar.values.field(0)), shown(scalar.values.field(1))
        return [list(pair) for pair in zip(keys, values, strict=True)]
    if pa.types.is_nested(kind):
        return shown(scalar.values)
    value = scalar.as_py()
    if isinstance(value, bytes):
        return _bytes(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE[str(value)]
    return value


def _bytes(value: bytes) -> object:
    """Return text if the bytes are UTF-8, otherwise their length and the first ones."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"bytes": len(value), "hex": value[:_BYTES_SHOWN].hex()}


def _time(scalar: pa.Scalar) -> object:
    kind = scalar.type
    if kind.equals(pa.month_day_nano_interval()):
        found = scalar.as_py()
        return {"months": found.months, "days": found.days, "nanoseconds": found.nanoseconds}
    value = int(scalar.value)
    for is_kind, told in _TIMES.items():
        if is_kind(kind):
            return told(value, kind)
    return str(value)


def _timestamp(value: int, kind: pa.DataType) -> str:
    second, fraction = divmod(value, _PER_SECOND[kind.unit])
    day, second = divmod(second, _DAY_S)
    date = _iso_date(day)
    if date is None:
        return f"{value} {kind.unit}"
    return f"{date}T{_clock(second, fraction, kind.unit)}{'Z' if kind.tz else ''}"


def _date(value: int, kind: pa.DataType) -> str:
    if pa.types.is_date32(kind):
        return _iso_date(value) or f"{value} days"
    day, rest = divmod(value, 1000 * _DAY_S)
    date = _iso_date(day)
    if date is None:
        return f"{value} ms"
    return date if not rest else f"{date}T{_clock(*divmod(rest, 1000), 'ms')}"


def _time_of_day(value: int, kind: pa.DataType) -> str:
    second, fraction = divmod(value, _PER_SECOND[kind.unit])
    if not 0 <= second < _DAY_S:
        return f"{value} {kind.unit}"
    return _clock(second, fraction, kind.unit)


def _duration(value: int, kind: pa.DataType) -> str:
    second, fraction = divmod(abs(value), _PER_SECOND[kind.unit])
    return f"{'-' if value < 0 else ''}PT{second}{_fraction(fraction, kind.unit)}S"


def _iso_date(day: int) -> str | None:
    """Format a day, counted from 1970, as ISO 8601; None outside the range of Python's calendar."""
    ordinal = _DAY_ZERO + day
    if not 1 <= ordinal <= dt.date.max.toordinal():
        return None
    return dt.date.fromordinal(ordinal).isoformat()


def _clock(second: int, fraction: int, unit: str) -> str:
    minute, second = divmod(second, 60)
    hour, minute = divmod(minute, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{_fraction(fraction, unit)}"


def _fraction(fraction: int, unit: str) -> str:
    digits = len(str(_PER_SECOND[unit])) - 1
    return f".{fraction:0{digits}d}" if digits else ""


_TIMES: Mapping[Callable[[pa.DataType], bool], Callable[[int, pa.DataType], str]] = {
    pa.types.is_timestamp: _timestamp,
    pa.types.is_date: _date,
    pa.types.is_time: _time_of_day,
    pa.types.is_duration: _duration,
}


def column_facts(name: str, column: pa.ChunkedArray) -> dict[str, Any]:
    """Return the type of a column, its dtype and shape in a batch, and figures about its values."""
    facts: dict[str, Any] = {"column": name, "stored": str(column.type), "dtype": "", "shape": ""}
    try:
        specs = plan_columns(pa.schema([pa.field(name, column.type)])).specs
        facts["dtype"] = ", ".join(spec.dtype or spec.kind.value for spec in specs)
        facts["shape"] = ", ".join(
            str(list(spec.shape)) if spec.kind is Kind.FIXED else spec.kind.value for spec in specs
        )
    except ConfigError:
        facts["dtype"] = "not in batches"
    facts |= {"nulls": column.null_count, "min": None, "max": None, "mean": None}
    values = column
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        values, facts["of"] = pc.list_value_length(column), "lengths"
    elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        values, facts["of"] = pc.utf8_length(column), "characters"
    elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        values, facts["of"] = pc.binary_length(column), "bytes"
    else:
        facts["of"] = "values"
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        if pa.types.is_float16(values.type):  # Arrow has no figures of it
            values = values.cast(pa.float32())
        low, high = pc.min_max(values).values()
        (facts["min"],), (facts["max"],), (facts["mean"],) = (
            shown(pa.array([figure.as_py()], figure.type))
            for figure in (low, high, pc.mean(values))
        )
    return facts
