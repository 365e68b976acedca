"""`dataplane tombstone`: take rows out of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dataplane.commands import output
from dataplane.commands.changing import changed, tell, who
from dataplane.commands.interrupt import interruptible
from dataplane.commands.options import (
    CLIENT_SETTINGS,
    Settings,
    json_option,
    setting_options,
    workers_option,
)
from dataplane.commands.traced import live_ledger, of_ledger, split_row
from dataplane.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    help="The shard's number, url, or end of its url, and the row in it, from 0; of a mixture "
    "SOURCE:SHARD:ROW.",
)
@click.option(
    "--data",
    "places",
    multiple=True,
    metavar="URL",
    help="Where the dataset of the job is now, or its manifest; for a source of a mixture "
    "NAME=URL.",
)
@click.option(
    "--dataset-moved",
    is_flag=True,
    help="Accept a dataset whose ETags differ from those of the job.",
)
@workers_option
@setting_options("cache_dir", *CLIENT_SETTINGS, "allowed_functions")
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

    Another row of the same block, one that the job's view has, stands in the place of each, the
    same in all epochs and on all ranks; no other row moves, and lengths and steps stay. `dataplane
    trace` and `where` name it. A running job goes on as it is. The rows stay in their shards.

    Where samples are packs, tokens of another document of the block stand in the place of those
    that were taken out; all other documents stay where they are. Their block is read to check
    that one with tokens is left.

    The job is one of a coordinator (`dataplane serve`), in whose ledger the rows are kept.

    \b
    Examples:
      dataplane tombstone pretrain-7 --row part-00017.parquet:4 --join head:7077
      dataplane tombstone pretrain-7 --row 17:4 --row 17:9 --join head:7077
      dataplane tombstone pretrain-7 --row web:part-00017.parquet:4 --data web=s3://bucket/web/
    """
    from dataplane.changes import TOMBSTONE, changes_of, dataset_of, in_force, last_of, rows_layout
    from dataplane.plan.tombstones import Substitutes
    from dataplane.rpc.membership import ChangeRequest, RowsTaken

    ledger = live_ledger(settings, job)
    dataset = dataset_of(ledger.spec, ledger.dataset)
    asked = {
        "data": places,
        "dataset_moved": dataset_moved,
        "workers": workers,
        "format_name": "",
        "dp_size": None,
    }
    traced = of_ledger(settings, asked, ledger)
    rows = _rows(traced, row_names, workers)
    gone = changes_of(in_force(ledger.entries, ledger.spec, dataset)).tombstones
    manifests = [source.manifest for source in traced.sources]
    left = Substitutes(ledger.spec, manifests, sorted({*gone, *rows.values()}))
    if traced.is_packed:
        from dataplane.commands.packed_rows import check_documents

        check_documents(traced, left, workers)
    known = last_of(ledger.entries, TOMBSTONE)
    taken = RowsTaken(tuple(rows.values()), rows_layout(ledger.spec, dataset), known)
    entry, answer = changed(settings, ChangeRequest(job, who(), tombstones=taken))
    count = output.counted(len(set(rows.values())), "row")
    what = f"{count} will be taken out: {', '.join(rows)}"
    tell(job, what, entry, answer, as_json=as_json)


def _rows(job: Traced, names: Sequence[str], workers: int) -> dict[str, Tombstone]:
    """Return the rows with these names that the job's view has. For others, print that the job
    never reads them.

    Raises:  ConfigError: a row does not exist, or the view has none of them.
    """
    from concurrent.futures import ThreadPoolExecutor

    from dataplane.changes import Tombstone
    from dataplane.commands.datasets import row_names
    from dataplane.plan.trail import shard_named
    from dataplane.plan.views import filters

    asked = {name: _source(job, name) for name in names}
    used = {number for number, _ in asked.values()}
    names_of = {at: row_names(job.sources[at].of_rows, job.sources[at].view) for at in used}

    def found(name: str) -> Tombstone | None:
        number, (shard_name, row) = asked[name]
        source = job.sources[number]
        shard = shard_named(source.manifest, shard_name)
        place = names_of[number].find(shard, row)
        if place is None:
            return None
        return Tombstone(shard, row, number, place[1] if filters(source.view) else None)

    with ThreadPoolExecutor(workers) as threads:
        rows = dict(zip(asked, threads.map(found, asked), strict=True))
    missing = [name for name, row in rows.items() if row is None]
    if missing:
        count = output.counted(len(missing), "row")
        said = f"{count} not in the view of this job, so it never reads them: {', '.join(missing)}"
        if len(missing) == len(rows):
            raise ConfigError(said, field="row")
        output.warn(said)
    return {name: row for name, row in rows.items() if row is not None}


def _source(job: Traced, name: str) -> tuple[int, tuple[str, int]]:
    """Return the number of the source with which a row's name begins, and the rest of the name.

    Raises:  ConfigError: the name does not begin with a source of the mixture, or is no SHARD:ROW.
    """
    if job.spec.mixture is None:
        return 0, split_row(name)
    sources = [source.name for source in job.sources]
    named = [one for one in sources if name.startswith(f"{one}:")]
    if not named:
        raise ConfigError(
            f"--row {name}: the job mixes {', '.join(sources)}; give SOURCE:SHARD:ROW, such as "
            f"{sources[0]}:17:4",
            field="row",
        )
    source = max(named, key=len)
    return sources.index(source), split_row(name.removeprefix(f"{source}:"))
