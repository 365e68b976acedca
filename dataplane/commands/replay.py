"""`dataplane trace` and `dataplane replay`: the rows of a step, and their values, read only from
the blocks that contain them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from dataplane.commands import output
from dataplane.commands.inspect import short
from dataplane.commands.options import Settings, interruptible
from dataplane.commands.traced import COUNT, StepAsked, Traced, step_options, traced, traced_options
from dataplane.model.changes import QUARANTINE, quarantined_rows
from dataplane.model.errors import ConfigError
from dataplane.settings import node_config

if TYPE_CHECKING:
    import pyarrow as pa

    from dataplane.plan.tombstones import StepRows
    from dataplane.plan.windows import Int64


# -- trace -------------------------------------------------------------------------------------
#
# `dataplane trace`: the rows of a step.


@click.command("trace")
@step_options
@click.option("--dp-rank", type=COUNT, help="Only the rows of this data-parallel rank.")
@traced_options
@interruptible
def trace(
    settings: Settings,
    *,
    which: StepAsked,
    dp_rank: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the rows of a step, with shard, row in the shard, and rank.

    The command computes the rows, and reads no samples. If samples are packs, it reads the tokens
    of their blocks, and shows the documents of each pack. Name the job by URLs and options, by a
    LEDGER file, or by a JOB's name at a coordinator. Steps count from the start of the epoch, even
    if the run resumed in the middle: 7 global batches precede step 7. The command marks steps that
    the job skips. If a row was taken out, the command shows the row that replaces it.

    \b
    Examples:
      dataplane trace s3://bucket/train/ --global-batch 1024 --step 7
      dataplane trace checkpoints/ledger.jsonl --epoch 2 --step 7 --dp-rank 3
      dataplane trace pretrain-7 --step 12000 --join head:7077 --data s3://bucket/train/ --json
    """
    job = traced(settings, options)
    epoch, step = which.of(job)
    job = job.at(epoch)
    rows = step_rows(job, step, epoch, dp_rank, options["cursor"])
    _warn_of_bad(job, rows)
    if job.is_packed:
        _show_documents(job, rows, step, epoch, as_json=as_json)
        return
    documents = [
        {
            "position": int(rows.positions[at]),
            "dp_rank": int(rows.dp_ranks[at]),
            **job.place_of(int(rows.sources[at]), int(rows.shards[at])),
            "row": int(rows.shard_rows[at]),
            "is_padding": bool(rows.is_padding[at]),
            "is_skipped": bool(rows.is_skipped[at]),
            "instead_of": int(rows.taken_rows[at]) if rows.taken_rows[at] >= 0 else None,
        }
        for at in range(len(rows.positions))
    ]
    if as_json:
        output.write_json(documents)
        return
    title = f"{output.counted(len(documents), 'row')} of step {step} of epoch {epoch}"
    cells = [(*(f"{row[name]}" for name in list(row)[:-3]), _about(row)) for row in documents]
    source = ("source",) if job.spec.mixture is not None else ()
    headings = ("position", "dp rank", *source, "shard", "row", "")
    output.write_table(headings, cells, title)


def _warn_of_bad(job: Traced, rows: StepRows) -> None:
    """Warn that other rows were delivered for rows of this step that could not be read."""
    entries = () if job.ledger is None else job.ledger.entries
    bad = {row for entry in entries if entry.kind == QUARANTINE for row in quarantined_rows(entry)}
    places = zip(rows.sources.tolist(), rows.shards.tolist(), rows.shard_rows.tolist(), strict=True)
    urls = [source.manifest.shards.urls for source in job.sources]
    count = sum((urls[source][shard], row) in bad for source, shard, row in places)
    if count:
        output.warn(
            f"{output.counted(count, 'row')} of this step could not be read. These are the planned"
            " rows; `dataplane ledger show` lists the rows that were delivered in their place"
        )
    elif job.spec.bad_max or job.spec.replaces_images:
        output.warn(
            "these are the planned rows: the job replaces rows that cannot be read, and only a"
            " coordinator's ledger lists them"
        )


def _about(row: Mapping[str, Any]) -> str:
    remarks = [name for name in ("padding", "skipped") if row[f"is_{name}"]]
    if row["instead_of"] is not None:
        remarks.append(f"instead of row {row['instead_of']}")
    return ", ".join(remarks)


def _show_documents(job: Traced, rows: StepRows, step: int, epoch: int, *, as_json: bool) -> None:
    from dataplane.commands.documents import documents_of

    documents = documents_of(job, rows, epoch)
    if as_json:
        output.write_json(documents)
        return
    skipped = ", which is skipped" if rows.is_skipped.any() else ""
    title = (
        f"{output.counted(len(rows.positions), 'pack')} of step {step} of epoch {epoch}{skipped}"
    )
    source = ("source",) if job.spec.mixture is not None else ()
    headings = ("position", "dp rank", *source, "shard", "row", "first token", "tokens", "place",
                "padding", "instead of row")  # fmt: skip
    output.write_table(headings, [tuple(row.values()) for row in documents], title)


def step_rows(job: Traced, step: int, epoch: int, dp_rank: int | None, cursor: int) -> StepRows:
    """Return the rows of a step of a job, or those of one rank.

    Raises:  ConfigError: there is no such step or rank.
    """
    from dataplane.commands.datasets import row_names
    from dataplane.commands.documents import LeftOut
    from dataplane.plan.tombstones import RowNames, StepRows, rows_of_step

    if dp_rank is not None and dp_rank >= job.dp_size:
        raise ConfigError(
            f"--dp-rank {dp_rank}: ranks run from 0 to {job.dp_size - 1}; give one of them, or the "
            "number of ranks with --dp-size",
            field="dp_rank",
        )
    order, left_out = job.order(epoch), LeftOut(job)
    steps = job.steps(order, epoch, cursor)
    if step >= steps.count:
        raise ConfigError(
            f"--step {step}: epoch {epoch} has {output.counted(steps.count, 'step')}, counted from"
            " 0. `dataplane trace --global-step` counts them over all epochs",
            field="step",
        )
    # The rows of a view need not be found for packs, which are named by their documents alone.
    names = [
        RowNames(source.manifest) if job.is_packed else row_names(source.manifest, source.view)
        for source in job.sources
    ]
    changes = left_out.changes(epoch, cursor + step * job.spec.global_batch)
    gaps, rows_for = changes.gaps(epoch), left_out.rows_for(changes)
    rows = rows_of_step(steps, order, names, step, gaps=gaps, rows_for=rows_for)
    if dp_rank is None:
        return rows
    own = rows.dp_ranks == dp_rank
    return StepRows(**{name: values[own] for name, values in asdict(rows).items()})


_PREFIX = "dataplane."


@click.command("replay")
@step_options
@click.option("--dp-rank", type=COUNT, help="Only the rows of this data-parallel rank.")
@click.option("--columns", metavar="A,B,…", help="Only these columns. Default: the job's.")
@click.option("--out", metavar="FILE", help="Write the samples to this Arrow file instead.")
@traced_options
@interruptible
def replay(
    settings: Settings,
    *,
    which: StepAsked,
    dp_rank: int | None,
    columns: str | None,
    out: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the samples of a step, in the order of the global batch.

    The command reads only the blocks with rows of the step. It shows stored columns or, if
    --allowed-functions allows the job's map=, the columns that the map returns. Image steps,
    padding, collate= and other options have no effect. Name the job as for `dataplane trace`.

    With --out, each row also has the columns dataplane.position, .dp_rank, .shard and .row, and in
    a mixture .source. If samples are packs, each row is a part of a document: .first_token, .tokens
    and .place are the part's first token, number of tokens and place in the pack.

    \b
    Examples:
      dataplane replay s3://bucket/train/ --global-batch 1024 --step 7 --columns text
      dataplane replay checkpoints/ledger.jsonl --step 7 --dp-rank 3 --json
      dataplane replay checkpoints/ledger.jsonl --step 7 --out step-7.arrow
    """
    job = traced(settings, options)
    epoch, step = which.of(job)
    job = job.at(epoch)
    rows = step_rows(job, step, epoch, dp_rank, options["cursor"])
    _warn_of_bad(job, rows)
    names = None if columns is None else _listed(columns)
    if job.is_packed:
        from dataplane.commands.documents import replayed_documents

        table = replayed_documents(job, rows, epoch, names, _PREFIX)
    else:
        mapped_in = epoch if may_map(settings, job) else None
        table = values_of(job, rows, names, options["workers"], mapped_in)
    if out is not None:
        _write(table, out)
        what = output.counted(table.num_rows, "document" if job.is_packed else "row")
        output.stdout().print(f"{what} of step {step} of epoch {epoch} in {out}")
        return
    from dataplane.commands.datasets import shown

    cells = zip(*(shown(column.combine_chunks()) for column in table.columns), strict=True)
    if as_json:
        place = [name for name in table.column_names if name.startswith(_PREFIX)]
        own = table.column_names[len(place) :]
        place = [name.removeprefix(_PREFIX) for name in place]
        output.write_json([
            {**dict(zip(place, row, strict=False)),
             "values": dict(zip(own, row[len(place) :], strict=True))}
            for row in cells
        ])  # fmt: skip
        return
    headings = [name.removeprefix(_PREFIX) for name in table.column_names]
    title = f"step {step} of epoch {epoch}"
    output.write_table(headings, [[short(cell) for cell in row] for row in cells], title)


def _listed(columns: str) -> list[str]:
    return [*dict.fromkeys(name.strip() for name in columns.split(",") if name.strip())]


def may_map(settings: Settings, job: Traced) -> bool:
    """Return whether the job has a map that may be called here; warn if it may not."""
    maps = dict.fromkeys(source.view.map for source in job.sources if source.view.map)
    config = node_config(settings)
    if refused := [name for name in maps if not config.allows_function(name)]:
        if any(source.view.resizes for source in job.sources):
            raise ConfigError(
                "the rows of this job are made by its map, which this command may not call: pass "
                f"--allowed-functions {shlex.quote(' '.join(refused))}",
                field="map",
            )
        output.warn(
            f"these are the stored columns: batches have those that {' and '.join(refused)} made "
            f"of them. To call it here, pass --allowed-functions {shlex.quote(' '.join(refused))}"
        )
    return bool(maps) and not refused


def values_of(
    job: Traced, rows: StepRows, names: Sequence[str] | None, workers: int, epoch: int | None
) -> pa.Table:
    """Read the samples in this order, with their places in the first columns. Without `names`, they
    have the columns that the job reads. The job's maps are applied as in this epoch; None: they are
    not.

    Raises:  CorruptShard.  DatasetChangedError.  StoreError and its subclasses.  ConfigError: there
             is no such column.  FunctionError.
    """
    import numpy as np
    import pyarrow as pa

    from dataplane.commands.datasets import read_block, schema_of
    from dataplane.commands.own_node import read_mapped
    from dataplane.formats.unsupported import supported_names
    from dataplane.plan.views import rows_only

    is_mapped, schemas = epoch is not None, [schema_of(source.manifest) for source in job.sources]
    numbers = rows.blocks + job.first_blocks[rows.sources]
    supported = [supported_names(schema) for schema in schemas]
    chosen = None if is_mapped else _chosen(job, names, supported)

    def read(at: int) -> pa.Table:
        source, own = int(rows.sources[at]), numbers == numbers[at]
        of, block = job.sources[source], int(rows.blocks[at])
        if epoch is not None and of.view.map:
            batch = read_mapped(of.manifest, block, of.view, job.spec.seed, epoch)
            picked = _chosen(job, names, [batch.schema.names])
        else:
            # Choose the columns of each source if only some sources have a map: they may differ.
            picked = chosen or _chosen(job, names, [supported[source]])
            view = rows_only(of.view)
            batch = read_block(of.manifest, block, schemas[source], picked, view=view)
        return _taken(pa.table(batch), rows.block_rows[own]).select(picked)

    _, first = np.unique(numbers, return_index=True)
    # A user's function is called by one thread only.
    with ThreadPoolExecutor(1 if is_mapped else workers) as threads:
        tables = list(threads.map(read, first.tolist()))
    place = np.empty(len(numbers), np.int64)
    place[np.argsort(numbers, kind="stable")] = np.arange(len(place))
    if tables:
        table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        table = _taken(table, place)
    else:  # the rank has no rows
        table = pa.table({name: pa.nulls(0) for name in chosen or names or ()})
    places = [
        job.place_of(source, shard)
        for source, shard in zip(rows.sources.tolist(), rows.shards.tolist(), strict=True)
    ]
    before: dict[str, object] = {"position": rows.positions, "dp_rank": rows.dp_ranks}
    for name in ("shard",) if job.spec.mixture is None else ("source", "shard"):
        before[name] = pa.array([place_of_row[name] for place_of_row in places], pa.string())
    before["row"] = rows.shard_rows
    for at, (name, values) in enumerate(before.items()):
        table = table.add_column(at, f"{_PREFIX}{name}", pa.array(values))
    return table


def _taken(table: pa.Table, rows: Int64) -> pa.Table:
    """Select rows of a table."""
    import pyarrow as pa

    from dataplane.formats.arrays import take_rows

    columns = [take_rows(column.combine_chunks(), rows) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _chosen(
    job: Traced, names: Sequence[str] | None, available: Sequence[Sequence[str]]
) -> Sequence[str]:
    """Return the requested columns, or those that the job reads. `available` has the columns of
    each source, and every source must have the requested ones.

    Raises:  ConfigError: there is no such column.
    """
    known = [name for name in available[0] if all(name in others for others in available)]
    options = job.spec.column_options
    if names is not None:
        missing = [name for name in names if name not in known]
        if missing or not names:
            raise ConfigError(f"no column {missing}: there are {', '.join(known)}", field="columns")
        return names
    leaves = [*options.columns, *(name for stack in options.stack for name in stack.columns)]
    if not options.columns:
        return known
    return [name for name in known if any(f"{leaf}.".startswith(f"{name}.") for leaf in leaves)]


def _write(table: pa.Table, out: str) -> None:
    import pyarrow as pa

    try:
        with pa.OSFile(out, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error}. Give another --out FILE", path=out
        ) from error
