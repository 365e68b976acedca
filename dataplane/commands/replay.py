"""`dataplane replay`: the values of a step, read from its blocks alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dataplane.commands import output
from dataplane.commands.inspect import short
from dataplane.commands.interrupt import interruptible
from dataplane.commands.options import Settings
from dataplane.commands.trace import step_rows
from dataplane.commands.traced import COUNT, traced, traced_options
from dataplane.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from dataplane.commands.traced import Traced
    from dataplane.plan.trail import StepRows
    from dataplane.plan.windows import Int64

_PREFIX = "dataplane."


@click.command("replay")
@click.option("--step", type=COUNT, required=True, help="The step, counted from 0 in its epoch.")
@click.option("--epoch", type=COUNT, help="Default: the job's; 0 for urls.")
@click.option("--dp-rank", type=COUNT, help="Only the rows of this data-parallel rank.")
@click.option("--columns", metavar="NAMES", help="With commas between them. Default: the job's.")
@click.option("--out", metavar="FILE", help="Write them to this Arrow file instead.")
@traced_options
@interruptible
def replay(
    settings: Settings,
    *,
    step: int,
    epoch: int | None,
    dp_rank: int | None,
    columns: str | None,
    out: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Show the samples of a step as they are stored, in the order of the global batch.

    Only the blocks with rows of the step are read. Image steps, padding and other options of the
    job are not applied. A job is named as for `dataplane trace`. With --out, each row has the
    columns dataplane.position, .dp_rank, .shard and .row beside its own, and .source in a mixture.
    Of packs, each row is a document with the tokens, and the values carried along, that lie in its
    pack, and .first_token, .tokens and .place say which these are.

    \b
    Examples:
      dataplane replay s3://bucket/train/ --global-batch 1024 --step 7 --columns text
      dataplane replay checkpoints/ledger.jsonl --step 7 --dp-rank 3 --json
      dataplane replay checkpoints/ledger.jsonl --step 7 --out step-7.arrow
    """
    job = traced(settings, asked)
    rows = step_rows(job, step, epoch, dp_rank, asked["cursor"])
    if job.is_packed:
        from dataplane.commands.packed_rows import replayed_documents

        names = None if columns is None else _listed(columns)
        of = job.epoch if epoch is None else epoch
        table = replayed_documents(job, rows, of, names, _PREFIX)
    else:
        table = values_of(job, rows, _names(job, columns), asked["workers"])
    if out is not None:
        _write(table, out)
        what = "document" if job.is_packed else "row"
        output.stdout().print(f"{output.counted(table.num_rows, what)} of step {step} in {out}")
        return
    from dataplane.commands.values import shown

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
    output.write_table(headings, [[short(cell) for cell in row] for row in cells], f"step {step}")


def _listed(columns: str) -> list[str]:
    return [*dict.fromkeys(name.strip() for name in columns.split(",") if name.strip())]


def values_of(job: Traced, rows: StepRows, names: Sequence[str], workers: int) -> pa.Table:
    """The samples in this order, with their places in front.

    Raises:  CorruptShard.  DatasetChangedError.  The StoreError family.
    """
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import pyarrow as pa

    from dataplane.commands.datasets import read_block, schema_of
    from dataplane.plan.views import rows_only

    schemas = [schema_of(source.manifest) for source in job.sources]
    numbers = rows.blocks + job.first_blocks[rows.sources]

    def read(at: int) -> pa.Table:
        source, own = int(rows.sources[at]), numbers == numbers[at]
        of, block = job.sources[source], int(rows.blocks[at])
        batch = read_block(of.manifest, block, schemas[source], names, view=rows_only(of.view))
        return _taken(pa.table(batch), rows.block_rows[own]).select(names)

    _, first = np.unique(numbers, return_index=True)
    with ThreadPoolExecutor(workers) as threads:
        tables = list(threads.map(read, first.tolist()))
    place = np.empty(len(numbers), np.int64)
    place[np.argsort(numbers, kind="stable")] = np.arange(len(place))
    if tables:
        found = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        found = _taken(found, place)
    else:  # the rank has none
        found = pa.table({name: pa.nulls(0) for name in names})
    places = [
        job.place_of(source, shard)
        for source, shard in zip(rows.sources.tolist(), rows.shards.tolist(), strict=True)
    ]
    before: dict[str, object] = {"position": rows.positions, "dp_rank": rows.dp_ranks}
    for name in _place_names(job)[2:-1]:
        before[name] = pa.array([one[name] for one in places], pa.string())
    before["row"] = rows.shard_rows
    for at, (name, values) in enumerate(before.items()):
        found = found.add_column(at, f"{_PREFIX}{name}", pa.array(values))
    return found


def _taken(table: pa.Table, rows: Int64) -> pa.Table:
    """These rows of a table, one at least. Arrow cannot take rows of views or of run ends."""
    import pyarrow as pa

    try:
        return table.take(pa.array(rows))
    except pa.ArrowNotImplementedError:
        found = pa.concat_tables([table.slice(row, 1) for row in rows.tolist()])
        return found.combine_chunks()


def _place_names(job: Traced) -> list[str]:
    """What is said of each row before its columns."""
    source = [] if job.spec.mixture is None else ["source"]
    return ["position", "dp_rank", *source, "shard", "row"]


def _names(job: Traced, columns: str | None) -> list[str]:
    """The asked columns of the dataset, or those that the job reads.

    Raises:  ConfigError: there is no such column.
    """
    from dataplane.commands.datasets import schema_of
    from dataplane.formats.unsupported import supported_names

    each = [supported_names(schema_of(source.manifest)) for source in job.sources]
    known = [name for name in each[0] if all(name in names for names in each)]
    options = job.spec.column_options
    if columns is not None:
        asked = _listed(columns)
        missing = [name for name in asked if name not in known]
        if missing or not asked:
            raise ConfigError(f"no column {missing}: there are {', '.join(known)}", field="columns")
        return asked
    leaves = [*options.columns, *(name for one in options.stack for name in one.columns)]
    if not options.columns:
        return known
    return [one for one in known if any(f"{leaf}.".startswith(f"{one}.") for leaf in leaves)]


def _write(table: pa.Table, out: str) -> None:
    import pyarrow as pa

    try:
        with pa.OSFile(out, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}", path=out) from error
