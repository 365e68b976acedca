"""`dataplane tombstone`: take rows out of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dataplane.commands import output
from dataplane.commands.changing import changed, tell, who
from dataplane.commands.interrupt import interruptible
from dataplane.commands.options import (
    SECURITY_SETTINGS,
    Settings,
    json_option,
    setting_options,
    workers_option,
)
from dataplane.commands.traced import live_ledger, of_ledger, split_row

if TYPE_CHECKING:
    from dataplane.changes import Tombstone
    from dataplane.commands.traced import Traced


@click.command("tombstone")
@click.argument("job", metavar="JOB")
@click.option(
    "--row",
    "row_names",
    required=True,
    multiple=True,
    metavar="SHARD:ROW",
    help="The shard's number, url, or end of its url, and the row in it, from 0.",
)
@click.option(
    "--data",
    "places",
    multiple=True,
    metavar="URL",
    help="Where the dataset of the job is now, or its manifest.",
)
@click.option(
    "--dataset-moved",
    is_flag=True,
    help="Accept a dataset whose ETags differ from those of the job.",
)
@workers_option
@setting_options("cache_dir", "join", "listen", "state_dir", *SECURITY_SETTINGS)
@json_option
@interruptible
def tombstone(
    settings: Settings,
    *,
    job: str,
    row_names: tuple[str, ...],
    places: tuple[str, ...],
    dataset_moved: bool,
    workers: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Take rows out of a job, from its next start on, such as those that must not be trained on.

    Another row of the same block stands in the place of each, the same in all epochs and on all
    ranks; no other row moves, and lengths and steps stay. `dataplane trace` and `where` name it. A
    running job goes on as it is. The rows stay in their shards.

    The job is one of a coordinator (`dataplane serve`), in whose ledger the rows are kept, and one
    over all rows of one dataset, with or without a map.

    \b
    Examples:
      dataplane tombstone pretrain-7 --row part-00017.parquet:4 --join head:7077
      dataplane tombstone pretrain-7 --row 17:4 --row 17:9 --join head:7077
    """
    from dataplane.changes import changes_of, in_force, layout_of
    from dataplane.plan.tombstones import check_spec, check_tombstones
    from dataplane.rpc.membership import ChangeRequest, RowsTaken

    ledger = live_ledger(settings, job)
    layout = layout_of(ledger.spec, ledger.dataset)
    check_spec(ledger.spec)
    asked = {
        "data": places,
        "dataset_moved": dataset_moved,
        "workers": workers,
        "format_name": "",
        "dp_size": None,
    }
    traced = of_ledger(settings, asked, ledger)
    rows = [_row(traced, name) for name in row_names]
    gone = changes_of(in_force(ledger.entries, ledger.spec, layout)).tombstones
    check_tombstones(ledger.spec, (traced.sources[0].manifest,), sorted({*gone, *rows}))
    request = ChangeRequest(job, who(), tombstones=RowsTaken(tuple(rows), layout))
    entry, answer = changed(settings, request)
    count = output.counted(len(set(rows)), "row")
    what = f"{count} will be taken out: {', '.join(row_names)}"
    tell(job, what, entry, answer, as_json=as_json)


def _row(job: Traced, name: str) -> Tombstone:
    from dataplane.changes import Tombstone
    from dataplane.plan.trail import RowNames, shard_named

    manifest, (shard_name, row) = job.sources[0].manifest, split_row(name)
    shard = shard_named(manifest, shard_name)
    RowNames(manifest).block_of(shard, row)
    return Tombstone(shard, row)
