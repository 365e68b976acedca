"""`dataplane where`: the steps at which a row stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from dataplane.commands import output
from dataplane.commands.interrupt import interruptible
from dataplane.commands.options import Settings
from dataplane.commands.traced import traced, traced_options
from dataplane.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dataplane.commands.traced import Traced
    from dataplane.plan.trail import Place

EPOCHS_MAX = 1000


@click.command("where")
@click.option(
    "--row",
    "row_name",
    required=True,
    metavar="SHARD:ROW",
    help="The shard's number, url, or end of its url, and the row in it, from 0.",
)
@click.option(
    "--epochs",
    metavar="FIRST:STOP",
    help="Default: all until the one after the job's; 0:1 for urls.",
)
@traced_options
@interruptible
def where(
    settings: Settings, *, row_name: str, epochs: str | None, as_json: bool, **asked: Any
) -> None:
    """Show at which steps of which epochs a row was seen, and will be, and by which rank.

    Only the plan is computed, backwards; no sample is read, except for packs the tokens of the
    row's block. A job is named as for `dataplane trace`.

    \b
    Examples:
      dataplane where s3://bucket/train/ --global-batch 1024 --row 17:4 --epochs 0:3
      dataplane where checkpoints/ledger.jsonl --row part-00017.parquet:4
    """  # fmt: skip
    from dataplane.commands.datasets import row_names
    from dataplane.plan.trail import shard_named

    shard_name, _, row = row_name.rpartition(":")
    if not shard_name or not row.isdecimal():
        raise ConfigError(f"--row {row_name}: give SHARD:ROW, such as 17:4 or part-17.parquet:4")
    job = traced(settings, asked)
    first, stop = _epochs(epochs, job)
    shard = shard_named(job.manifest, shard_name)
    manifest = job.manifest if job.rows is None else job.rows
    at = row_names(manifest, job.spec.view).block_of(shard, int(row))
    found = [
        {"epoch": epoch, **msgspec.structs.asdict(place), "seen": _seen(job, epoch, place), **more}
        for epoch, block, sample, more in _samples(job, *at, range(first, stop))
        for place in _places(job, epoch, block, sample, asked["cursor"])
    ]
    if as_json:
        output.write_json(found)
        return
    said = {True: "yes", False: "no", None: None}
    cells = [
        (f"{one['epoch']}", None if one["step"] is None else f"{one['step']}", f"{one['dp_rank']}",
         f"{one['position']}", said[one["seen"]],
         "padding" if one["is_padding"] else "not in any step" if one["step"] is None else "",
         f"{one['first_token']}+{one['tokens']}" if "tokens" in one else "")
        for one in found
    ]  # fmt: skip
    title = f"row {row} of {job.manifest.shards.urls[shard]}"
    output.write_table(("epoch", "step", "dp rank", "position", "seen", "", "tokens"), cells, title)


def _samples(
    job: Traced, block: int, row: int, epochs: Iterable[int]
) -> Iterable[tuple[int, int, int, dict[str, object]]]:
    """The samples that have this row of a block, by epoch: itself, or the packs that have it, with
    which of its tokens they have.
    """
    if job.rows is not None:
        from dataplane.commands.packed_rows import packs_with

        return packs_with(job, block, row, epochs)
    return ((epoch, block, row, {}) for epoch in epochs)


def _places(job: Traced, epoch: int, block: int, row: int, cursor: int) -> tuple[Place, ...]:
    from dataplane.plan.orders import order_of
    from dataplane.plan.trail import places_of

    order = order_of(job.spec, job.manifest, epoch)
    return places_of(job.spec, order, block, row, cursor=cursor, dp_size=job.dp_size)


def _seen(job: Traced, epoch: int, place: Place) -> bool | None:
    """Whether the run has consumed it; None without a run."""
    if job.reached is None:
        return None
    return place.step is not None and (epoch, place.position) < job.reached


def _epochs(text: str | None, job: Traced) -> tuple[int, int]:
    if text is None:
        return (
            (0, 1) if job.reached is None else (max(0, job.epoch + 2 - EPOCHS_MAX), job.epoch + 2)
        )
    first, mark, stop = text.partition(":")
    if first.isdecimal() and (not mark or stop.isdecimal()):
        found = int(first), int(stop) if mark else int(first) + 1
        if 0 < found[1] - found[0] <= EPOCHS_MAX:
            return found
    raise ConfigError(
        f"--epochs {text}: give FIRST:STOP, such as 0:3, of up to {EPOCHS_MAX} epochs"
    )
