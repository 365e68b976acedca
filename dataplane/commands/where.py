"""`dataplane where`: the steps at which a row stands."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dataplane.commands import output
from dataplane.commands.interrupt import interruptible
from dataplane.commands.options import Settings
from dataplane.commands.traced import traced, traced_options
from dataplane.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
@click.option("--source", "source_name", metavar="NAME", help="The row's source, of a mixture.")
@click.option(
    "--epochs",
    metavar="FIRST:STOP",
    help="Default: all until the one after the job's; 0:1 for urls.",
)
@traced_options
@interruptible
def where(
    settings: Settings,
    *,
    row_name: str,
    source_name: str | None,
    epochs: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Show at which steps of which epochs a row was seen, and will be, and by which rank.

    Only the plan is computed, backwards; no sample is read, except for packs the tokens of the
    row's block. A job is named as for `dataplane trace`.

    \b
    Examples:
      dataplane where s3://bucket/train/ --global-batch 1024 --row 17:4 --epochs 0:3
      dataplane where checkpoints/ledger.jsonl --row part-00017.parquet:4
      dataplane where checkpoints/ledger.jsonl --source code --row 0:4
    """  # fmt: skip
    from dataplane.commands.datasets import row_names

    shard_name, _, row = row_name.rpartition(":")
    if not shard_name or not row.isdecimal():
        raise ConfigError(f"--row {row_name}: give SHARD:ROW, such as 17:4 or part-17.parquet:4")
    job = traced(settings, asked)
    first, stop = _epochs(epochs, job)
    number, shard = _shard(job, source_name, shard_name)
    source = job.sources[number]
    at = row_names(source.of_rows, source.view).block_of(shard, int(row))
    found = [
        {"epoch": epoch, **msgspec.structs.asdict(place), "seen": _seen(job, epoch, place), **more}
        for epoch, place, more in _places(job, number, at, range(first, stop), asked["cursor"])
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
    title = f"row {row} of {source.manifest.shards.urls[shard]}"
    if not found:
        output.stdout().print(f"{title} is in no step of epochs {first} to {stop - 1}")
        return
    output.write_table(("epoch", "step", "dp rank", "position", "seen", "", "tokens"), cells, title)


def _shard(job: Traced, source_name: str | None, name: str) -> tuple[int, int]:
    """The number of the source, and that of the shard in it.

    Raises:  ConfigError: there is none, or several.
    """
    from dataplane.plan.trail import shard_named

    names = [source.name for source in job.sources]
    if job.spec.mixture is None and source_name is None:
        return 0, shard_named(job.sources[0].manifest, name)
    if source_name not in names:
        what = "needs --source" if source_name is None else f"has no source {source_name!r}"
        known = ", ".join(names) if job.spec.mixture is not None else "none: leave out --source"
        raise ConfigError(f"this job {what}; its sources are {known}", field="source")
    number = names.index(source_name)
    return number, shard_named(job.sources[number].manifest, name)


def _places(
    job: Traced, source: int, at: tuple[int, int], epochs: Iterable[int], cursor: int
) -> Iterator[tuple[int, Place, dict[str, object]]]:
    """Where the row `at` stands, a block and its row, epoch after epoch: itself, or the packs that
    have it, with which of its tokens they have.
    """
    from dataplane.plan.trail import places_of

    order = functools.lru_cache(maxsize=1)(job.order)
    if job.is_packed:
        from dataplane.commands.packed_rows import packs_with

        yield from packs_with(job, source, at, epochs, order, cursor)
        return
    block, row = int(job.first_blocks[source]) + at[0], at[1]
    for epoch in epochs:
        for place in places_of(
            job.spec, order(epoch), block, row, cursor=cursor, dp_size=job.dp_size
        ):
            yield epoch, place, {}


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
