"""`dataplane trace`: the rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dataplane.commands import output
from dataplane.commands.interrupt import interruptible
from dataplane.commands.options import Settings
from dataplane.commands.traced import COUNT, StepAsked, step_options, traced, traced_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dataplane.commands.traced import Traced
    from dataplane.plan.trail import StepRows


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
    **asked: Any,
) -> None:
    """Show the rows of a step: shard, row in the shard, and the rank that gets it.

    Only the plan is computed, and no sample is read. Of a job whose samples are packs, the
    documents of each pack are shown, for which the tokens of its block are read. The job is one
    over URLs with the given options, that of a LEDGER file, or the JOB of this name at the
    coordinator. A step is one of the plan: step 7 has the positions from 7 global batches on,
    wherever the run was resumed. Steps that the job skips are shown as such, and where a row was
    taken out, the one that stands in its place, as the launch has it that read the step, or will.

    \b
    Examples:
      dataplane trace s3://bucket/train/ --global-batch 1024 --step 7
      dataplane trace checkpoints/ledger.jsonl --epoch 2 --step 7 --dp-rank 3
      dataplane trace pretrain-7 --step 12000 --join head:7077 --data s3://bucket/train/ --json
    """
    job = traced(settings, asked)
    epoch, step = which.of(job)
    rows = step_rows(job, step, epoch, dp_rank, asked["cursor"])
    if job.is_packed:
        _show_documents(job, rows, step, epoch, as_json=as_json)
        return
    found = [
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
        output.write_json(found)
        return
    title = f"{output.counted(len(found), 'row')} of step {step} of epoch {epoch}"
    cells = [(*(f"{row[name]}" for name in list(row)[:-3]), _about(row)) for row in found]
    source = ("source",) if job.spec.mixture is not None else ()
    headings = ("position", "dp rank", *source, "shard", "row", "")
    output.write_table(headings, cells, title)


def _about(row: Mapping[str, Any]) -> str:
    found = [name for name in ("padding", "skipped") if row[f"is_{name}"]]
    if row["instead_of"] is not None:
        found.append(f"instead of row {row['instead_of']}")
    return ", ".join(found)


def _show_documents(job: Traced, rows: StepRows, step: int, epoch: int, *, as_json: bool) -> None:
    from dataplane.commands.packed_rows import documents_of

    found = documents_of(job, rows, epoch)
    if as_json:
        output.write_json(found)
        return
    skipped = ", which is skipped" if rows.is_skipped.any() else ""
    title = (
        f"{output.counted(len(rows.positions), 'pack')} of step {step} of epoch {epoch}{skipped}"
    )
    source = ("source",) if job.spec.mixture is not None else ()
    headings = ("position", "dp rank", *source, "shard", "row", "first token", "tokens", "place",
                "padding", "instead of row")  # fmt: skip
    output.write_table(headings, [tuple(one.values()) for one in found], title)


def step_rows(job: Traced, step: int, epoch: int, dp_rank: int | None, cursor: int) -> StepRows:
    """The rows of a step of a job, or those of one rank.

    Raises:  ConfigError: there is no such step or rank.
    """
    from msgspec.structs import asdict

    from dataplane.commands.datasets import row_names
    from dataplane.commands.left_out import LeftOut
    from dataplane.errors import ConfigError
    from dataplane.plan.trail import RowNames, StepRows, rows_of_step

    if dp_rank is not None and dp_rank >= job.dp_size:
        raise ConfigError(
            f"--dp-rank {dp_rank}: ranks run from 0 to {job.dp_size - 1}; --dp-size says how many "
            "there are",
            field="dp_rank",
        )
    order, left_out = job.order(epoch), LeftOut(job)
    # A pack is named by its documents alone: its number says nothing of the rows that are left.
    names = [
        RowNames(source.manifest) if job.is_packed else row_names(source.manifest, source.view)
        for source in job.sources
    ]
    changes = left_out.changes(epoch, cursor + step * job.spec.global_batch)
    gaps, rows_for = changes.gaps(epoch), left_out.rows_for(changes)
    steps = job.steps(order, epoch, cursor)
    rows = rows_of_step(steps, order, names, step, gaps=gaps, rows_for=rows_for)
    if dp_rank is None:
        return rows
    own = rows.dp_ranks == dp_rank
    return StepRows(**{name: values[own] for name, values in asdict(rows).items()})
