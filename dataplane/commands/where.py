"""`dataplane where`: the steps that contain a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dataplane.commands import output
from dataplane.commands.options import Settings, interruptible
from dataplane.commands.traced import Traced, split_row, traced, traced_options
from dataplane.model.errors import ConfigError
from dataplane.model.redact import redacted

if TYPE_CHECKING:
    from dataplane.commands.documents import LeftOut
    from dataplane.plan.tombstones import Place, RowNames

EPOCHS_MAX = 1000


@click.command("where")
@click.option(
    "--row",
    "row_name",
    required=True,
    metavar="SHARD:ROW",
    help="The shard's number, url, or end of its url, and the row in the shard, from 0.",
)
@click.option("--source", "source_name", metavar="NAME", help="The row's source in a mixture.")
@click.option(
    "--epochs",
    metavar="FIRST:STOP",
    help="Default: the job's past and present epochs and the next one; 0:1 for URLs.",
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
    """Show the epochs, steps and ranks that get a row.

    The command computes the steps, and reads no samples. If samples are packs, it reads the tokens
    of the row's block. If the row was taken out, the command shows the row that replaces it. Name
    the job as for `dataplane trace`.

    \b
    Examples:
      dataplane where s3://bucket/train/ --global-batch 1024 --row 17:4 --epochs 0:3
      dataplane where checkpoints/ledger.jsonl --row part-00017.parquet:4
      dataplane where checkpoints/ledger.jsonl --source code --row 0:4
    """  # fmt: skip
    from dataplane.commands.datasets import row_names

    shard_name, row = split_row(row_name)
    job = traced(settings, asked)
    first, stop = _epochs(epochs, job)
    job = job.at(first)
    number, shard = _shard(job, source_name, shard_name)
    source = job.sources[number]
    names = row_names(source.of_rows, source.view)
    at = names.block_of(shard, row)
    spans = range(first, stop), asked["cursor"]
    found = [
        {"epoch": epoch, **msgspec.structs.asdict(place), "seen": _seen(job, epoch, place, more),
         **more}
        for epoch, place, more in _changed(job, number, at, names, *spans)
    ]  # fmt: skip
    if as_json:
        output.write_json(found)
        return
    said = {True: "yes", False: "no", None: None}
    cells = [
        (f"{one['epoch']}", None if one["step"] is None else f"{one['step']}", f"{one['dp_rank']}",
         f"{one['position']}", said[one["seen"]],
         _about(one),
         f"{one['first_token']}+{one['tokens']}" if "tokens" in one else "")
        for one in found
    ]  # fmt: skip
    title = f"row {row} of {redacted(source.manifest.shards.urls[shard])}"
    if not found:
        output.stdout().print(f"{title} is in no step of epochs {first} to {stop - 1}")
        return
    output.write_table(("epoch", "step", "dp rank", "position", "seen", "", "tokens"), cells, title)


def _shard(job: Traced, source_name: str | None, name: str) -> tuple[int, int]:
    """Return the numbers of the source and of the shard in it.

    Raises:  ConfigError: no shard matches, or several do.
    """
    from dataplane.plan.tombstones import shard_named

    names = [source.name for source in job.sources]
    if job.spec.mixture is None and source_name is None:
        return 0, shard_named(job.sources[0].manifest, name)
    if source_name not in names:
        what = "needs --source" if source_name is None else f"has no source {source_name!r}"
        known = ", ".join(names) if job.spec.mixture is not None else "none: leave out --source"
        raise ConfigError(f"this job {what}; its sources are {known}", field="source")
    number = names.index(source_name)
    return number, shard_named(job.sources[number].manifest, name)


def _about(found: Mapping[str, Any]) -> str:
    said = ["padding"] if found["is_padding"] else []
    if found["step"] is None:
        said = ["not in any step"]
    if found["is_skipped"]:
        said.append("skipped")
    if found.get("is_lost"):
        said.append("its shard is taken out")
    if found.get("for_lost"):
        said.append("instead of a row of a shard that is taken out")
    if found["instead_of"] is not None:
        said.append(f"instead of row {found['instead_of']}")
    if found["taken_out_for"] is not None:
        said.append(f"taken out: row {found['taken_out_for']} stands here")
    return ", ".join(said)


def _changed(
    job: Traced, source: int, at: tuple[int, int], names: RowNames, epochs: range, cursor: int
) -> Iterator[tuple[int, Place, dict[str, Any]]]:
    """Yield the places of a row of a block, epoch by epoch, and the changes of the job there. The
    places include those where the row replaces a removed row, or where the row would be if it had
    not been removed itself.
    """
    import numpy as np

    from dataplane.commands.documents import LeftOut

    def name(other: int) -> int | None:
        return None if other == row else int(names.of(np.array([block]), np.array([other]))[1][0])

    left_out, (block, row) = LeftOut(job), at
    for epoch, place, stood, given, more in _places(job, left_out, source, at, epochs, cursor):
        about = {
            "is_skipped": left_out.is_skipped(epoch, place.position),
            "instead_of": name(stood),
            "taken_out_for": name(given),
        }
        yield epoch, place, {**about, **more}


def _places(
    job: Traced,
    left_out: LeftOut,
    source: int,
    at: tuple[int, int],
    epochs: Iterable[int],
    cursor: int,
) -> Iterator[tuple[int, Place, int, int, dict[str, object]]]:
    """Yield the places of a row of a block: where the plan has it, or where it is delivered. Each
    comes with the row that the plan has there and the row that is delivered there, and, for packs,
    the range of the row's tokens.
    """
    from dataplane.plan.tombstones import places_of

    if job.is_packed:
        from dataplane.commands.documents import packs_with

        yield from packs_with(job, left_out, source, at, epochs, cursor)
        return
    number, row = int(job.first_blocks[source]) + at[0], at[1]
    for epoch in epochs:
        order = job.order(epoch)
        steps = job.steps(order, epoch, cursor)
        own = [(number, other) for other in dict.fromkeys((row, *left_out.taken_rows(number)))]
        for block, stood in [*own, *left_out.replaced_by(number, row)]:
            for place in places_of(steps, order, block, stood):
                given, given_row = left_out.given(epoch, place.position, block, stood)
                if given != block and number in (block, given):
                    is_own = block == number
                    yield epoch, place, row, row, {"is_lost": is_own, "for_lost": not is_own}
                elif block == number and row in (stood, given_row):
                    yield epoch, place, stood, given_row, {}


def _seen(job: Traced, epoch: int, place: Place, about: Mapping[str, Any]) -> bool | None:
    """Return whether the run has consumed the place; None without a run."""
    if job.reached is None:
        return None
    if about["is_skipped"] or about["taken_out_for"] is not None or about.get("is_lost"):
        return False
    return place.step is not None and (epoch, place.position) < job.reached


def _epochs(text: str | None, job: Traced) -> tuple[int, int]:
    if text is None:
        return (
            (0, 1)
            if job.reached is None
            else (max(job.spec.first_epoch, job.epoch + 2 - EPOCHS_MAX), job.epoch + 2)
        )
    first, mark, stop = text.partition(":")
    if first.isdecimal() and (not mark or stop.isdecimal()):
        found = int(first), int(stop) if mark else int(first) + 1
        borders = [stage.next_epoch for stage in job.spec.stages]
        if any(found[0] < border < found[1] for border in borders):
            raise ConfigError(
                f"--epochs {text}: the recipe of this run changed at epochs "
                f"{', '.join(map(str, borders))}, and a row may have another name since: give "
                "epochs of one stage"
            )
        if 0 < found[1] - found[0] <= EPOCHS_MAX:
            return found
    raise ConfigError(
        f"--epochs {text}: give one epoch, or FIRST:STOP such as 0:3, up to {EPOCHS_MAX} epochs"
    )
