"""`dataplane ledger` shows what a job was given to train on. `dataplane skip`, `mix` and
`tombstone` change that: each sends a request to the coordinator, and prints the answer.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import getpass
import json
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dataplane.base.trace import printable
from dataplane.base.units import some_of
from dataplane.commands import output
from dataplane.commands.options import (
    CLIENT_SETTINGS,
    Settings,
    interruptible,
    json_option,
    setting_options,
    workers_option,
)
from dataplane.commands.traced import (
    COUNT,
    DIGITS_MAX,
    Traced,
    asked_coordinator,
    is_a_ledger,
    live_ledger,
    of_ledger,
    split_row,
)
from dataplane.model.changes import (
    ALL_ROWS,
    TOMBSTONE,
    changes_of,
    dataset_of,
    facts_of,
    in_force,
    is_midway,
    last_of,
    rows_layout,
)
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import Ledger, LedgerEntry, text_faults
from dataplane.model.records import Tombstone
from dataplane.rpc.bounds import NAME_LENGTH_MAX

if TYPE_CHECKING:
    from dataplane.rpc.calls import CoordinatorClient
    from dataplane.rpc.membership import ChangeRequest, ChangeResponse


# -- changes -----------------------------------------------------------------------------------

_PAUSE_S, _SILENT_S, _AWAY_S = 0.25, 5.0, 60.0


def changed(settings: Settings, request: ChangeRequest) -> tuple[LedgerEntry, ChangeResponse]:
    """Send a change to the coordinator, until the ranks of the job have agreed: see `decided`."""
    return asked_coordinator(settings, lambda client: decided(client, request), _AWAY_S)


async def decided(
    client: CoordinatorClient, request: ChangeRequest
) -> tuple[LedgerEntry, ChangeResponse]:
    """Send a change again and again until the coordinator has made its entry. Return the entry, and
    the last answer. The coordinator may restart meanwhile, before or after it makes the entry. If
    this takes long, print which ranks the coordinator waits for.

    Raises:  ConfigError: the change is not possible.  PeerLost, AccessDenied: as the call.
    """
    shown, since = tuple[int, ...](), time.monotonic()
    while (answer := await client.change(request)).entry is None:
        awaited = answer.awaited_ranks
        if awaited != shown and time.monotonic() - since >= _SILENT_S:
            shown = awaited
            named = some_of([*map(str, awaited)])
            output.warn(
                f"waiting up to a minute for {output.counted(len(awaited), 'rank')} ({named}):"
                " not begun to read, or without an answer from the node"
            )
        await asyncio.sleep(_PAUSE_S)
    return answer.entry, answer


def who() -> str:
    """Return the user who runs this command, for the ledger."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "unknown"
    return printable(f"{name}@{socket.gethostname()}")[:NAME_LENGTH_MAX]


def told_as_json(job: str, entry: LedgerEntry, answer: ChangeResponse) -> None:
    """Print the change as JSON."""
    output.write_json({
        "job": job,
        "entry": json.loads(entry.line),
        "is_running": answer.is_running,
        "epoch": answer.epoch,
        "cursor": answer.cursor,
    })  # fmt: skip


def tell(
    job: str, what: str, entry: LedgerEntry, answer: ChangeResponse, *, as_json: bool
) -> None:  # fmt: skip
    """Print the change, and when it takes effect."""
    if as_json:
        told_as_json(job, entry, answer)
        return
    say = output.stdout().print
    said = printable(f"job {job}: {what} (entry {entry.seq})")
    say(said, markup=False, soft_wrap=True)
    step = -(-answer.cursor // answer.global_batch)
    at, begin = f"epoch {answer.epoch}, step {step}", entry.position
    when = "when it is started the next time"
    if is_midway(entry, None):
        step = -(-begin.cursor // answer.global_batch)
        text = f"this takes effect at step {step} of epoch {begin.epoch}, without a restart"
    elif answer.is_running:
        text = f"it runs, at {at}, and goes on as it is: this takes effect {when}"
    else:
        text = f"this takes effect {when}; it had come to {at}"
    say(text, markup=False, soft_wrap=True)


@click.command("skip")
@click.argument("job", metavar="JOB")
@click.option(
    "--steps",
    required=True,
    metavar="FIRST:STOP",
    help="Steps counted from 0 within their epoch. STOP is not skipped.",
)
@click.option("--epoch", type=COUNT, help="The epoch. Default: the job's present epoch.")
@setting_options(*CLIENT_SETTINGS)
@json_option
def skip(
    settings: Settings, *, job: str, steps: str, epoch: int | None, as_json: bool
) -> None:  # fmt: skip
    """Leave out steps of a job, from its next start on, for example after a spike of the loss.

    Step STOP then follows step FIRST - 1 on all ranks. Nodes do not read the rows of the
    skipped steps. Other steps keep their numbers. A running job goes on unchanged, and you cannot
    skip steps that it has begun. To skip such steps, stop the job, skip the steps, and resume the
    job from an older checkpoint.

    The job needs a coordinator (`dataplane serve`), which records the skip in the job's ledger. If
    trainers start their own node, call loader.skip() instead.

    \b
    Examples:
      dataplane skip pretrain-7 --steps 12000:12150 --join head:7077
      dataplane skip pretrain-7 --steps 0:50 --epoch 2 --join head:7077
    """
    from dataplane.rpc.membership import ChangeRequest, StepsSkipped

    first, _, stop = steps.partition(":")
    if not all(text.isdecimal() and len(text) <= DIGITS_MAX for text in (first, stop)):
        raise ConfigError(f"--steps {steps}: give FIRST:STOP, such as 120:150", field="steps")
    skipped = StepsSkipped(int(first), int(stop), epoch)
    entry, answer = changed(settings, ChangeRequest(job, who(), skip=skipped))
    count = output.counted(skipped.stop - skipped.first, "step")
    steps = f"{skipped.first} to {skipped.stop - 1}"
    what = f"{count} of epoch {entry.position.epoch} will be skipped, {steps}"
    tell(job, what, entry, answer, as_json=as_json)


@click.command("mix")
@click.argument("job", metavar="JOB")
@click.argument("weights", metavar="NAME=WEIGHT...", nargs=-1, required=True)
@click.option(
    "--at-step",
    type=COUNT,
    metavar="STEP",
    help="From this step on, counted from 0 within its epoch. Default: as soon as possible.",
)
@click.option(
    "--epoch", type=COUNT, help="The epoch of this step. Default: the job's present epoch."
)
@setting_options(*CLIENT_SETTINGS)
@json_option
def mix(
    settings: Settings,
    *,
    job: str,
    weights: tuple[str, ...],
    at_step: int | None,
    epoch: int | None,
    as_json: bool,
) -> None:
    """Change the weights of a mixture while the job runs.

    The command has the effect of loader.set_weights() on all ranks after the same step. Give each
    source of the mixture a weight: 0 means that the source is not read. First, the ranks agree on a
    step that no rank has reached, which takes a few seconds. The weights apply from the next round
    of the mixture on (a round has 1,024 samples of each lane). Later states and the job's ledger
    contain the weights. If the run resumes from an earlier step, the weights change again at the
    same step.

    The job needs a coordinator (`dataplane serve`). If the job is not running, the weights apply
    from the step that it has reached, or from --at-step.

    \b
    Examples:
      dataplane mix pretrain-7 web=0.6 code=0.4 --join head:7077
      dataplane mix pretrain-7 web=0.5 code=0.3 math=0.2 --at-step 120000 --join head:7077
    """
    from dataplane.rpc.membership import ChangeRequest, MixAsked

    given = weights_in(weights)
    if epoch is not None and at_step is None:
        raise ConfigError(
            "--epoch without --at-step: --epoch is the epoch of that step, so give both",
            field="epoch",
        )
    request = MixAsked(uuid.uuid4().hex, tuple(given), tuple(given.values()), at_step, epoch)
    entry, answer = changed(settings, ChangeRequest(job, who(), mix=request))
    if as_json:
        told_as_json(job, entry, answer)
        return
    at, batch = entry.position, answer.global_batch
    shown = ", ".join(f"{name} {weight:g}" for name, weight in given.items())
    text = f"job {job}: {shown} from step {-(-at.cursor // batch)} of epoch {at.epoch} on"
    say = output.stdout().print
    say(f"{text} (entry {entry.seq})", markup=False, soft_wrap=True)
    now = f"epoch {answer.epoch}, step {-(-answer.cursor // batch)}"
    text = f"it runs, at {now}: the first round that begins there or later has these weights"
    if not answer.is_running:
        text = f"nobody reads it now, and it had come to {now}: the run that passes that step next"
        text += " has these weights from there on"
    say(text, markup=False, soft_wrap=True)


def weights_in(texts: Sequence[str]) -> dict[str, float]:
    """Parse NAME=WEIGHT for each source.

    Raises:  ConfigError: a text has another form, or a source is named twice.
    """
    given = dict(map(_weight, texts))
    if len(given) < len(texts):
        raise ConfigError(
            f"{' '.join(texts)}: a source is named twice; give each source one weight",
            field="weights",
        )
    return given


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        if name:
            return name, float(weight)
    except ValueError:
        pass
    raise ConfigError(f"{text}: give NAME=WEIGHT, such as web=0.6", field="weights")


@click.command("tombstone")
@click.argument("job", metavar="JOB")
@click.option(
    "--row",
    "row_names",
    multiple=True,
    metavar="SHARD:ROW",
    help="The shard's number, url, or end of its url, and the row in it, from 0; in a mixture "
    "SOURCE:SHARD:ROW.",
)
@click.option(
    "--shard",
    "shard_names",
    multiple=True,
    metavar="SHARD",
    help="A whole shard, such as a lost one: its number, url, or end of its url; in a "
    "mixture SOURCE:SHARD.",
)
@click.option(
    "--data",
    "places",
    multiple=True,
    metavar="URL",
    help="Where the job's dataset is now: a URL or manifest; NAME=URL for a source of a mixture.",
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
    shard_names: tuple[str, ...],
    places: tuple[str, ...],
    dataset_moved: bool,
    workers: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Take rows out of a job, also while it runs, for example rows that you may not use.

    Another row of the same block replaces each of these rows. All epochs and ranks get the same
    replacement. All other rows keep their positions, so the number of steps stays the same.
    `dataplane trace` and `where` show the replacing row. The command does not change shards.

    The ranks of a running job agree on a step from which on they leave the rows out. If the ranks
    have not begun to read, or use torch's own DataLoader, they leave the rows out from the job's
    next start on.

    Rows of other blocks replace the rows of a whole shard. If the shard is lost, pass the dataset's
    old manifest as --data, and to the loader of the next launch. If samples are packs, the command
    reads the block of a removed document, and chooses another document whose tokens replace it.

    The job needs a coordinator (`dataplane serve`), which records the change in the job's ledger.

    \b
    Examples:
      dataplane tombstone pretrain-7 --row part-00017.parquet:4 --join head:7077
      dataplane tombstone pretrain-7 --row 17:4 --row 17:9 --join head:7077
      dataplane tombstone pretrain-7 --shard part-00017.parquet --data train.manifest
      dataplane tombstone pretrain-7 --row web:part-00017.parquet:4 --data web=s3://bucket/web/
    """
    from dataplane.plan.tombstones import Substitutes
    from dataplane.rpc.membership import ChangeRequest, RowsTaken

    if not row_names and not shard_names:
        raise ConfigError("name rows with --row, or shards with --shard", field="row")
    ledger = live_ledger(settings, job, _AWAY_S)
    dataset = dataset_of(ledger.spec, ledger.dataset)
    options = {
        "data": places, "dataset_moved": dataset_moved, "workers": workers, "format_name": "",
        "dp_size": None,
    }  # fmt: skip
    traced = of_ledger(settings, options, ledger)
    rows = _rows(traced, row_names, workers) | _whole_shards(traced, shard_names)
    gone = changes_of(in_force(ledger.entries, ledger.spec, dataset)).tombstones
    manifests = [source.manifest for source in traced.sources]
    left = Substitutes(ledger.spec, manifests, sorted({*gone, *rows.values()}))
    if traced.is_packed:
        from dataplane.commands.documents import check_documents

        check_documents(traced, left, workers)
    layout, known = rows_layout(ledger.spec, dataset), last_of(ledger.entries, TOMBSTONE)
    taken = RowsTaken(tuple(rows.values()), layout, known)
    entry, answer = changed(settings, ChangeRequest(job, who(), tombstones=taken))
    count = output.counted(len(set(rows.values())), "shard" if not row_names else "row")
    what = f"{count} will be taken out: {', '.join(rows)}"
    tell(job, what, entry, answer, as_json=as_json)


def _whole_shards(job: Traced, names: Sequence[str]) -> dict[str, Tombstone]:
    """Return the shards with these names.

    Raises:  ConfigError: a shard does not exist.
    """
    from dataplane.plan.tombstones import shard_named

    named = {name: _source(job, f"{name}:0") for name in names}
    return {
        name: Tombstone(shard_named(job.sources[at].manifest, shard), ALL_ROWS, at)
        for name, (at, (shard, _)) in named.items()
    }


def _rows(job: Traced, names: Sequence[str], workers: int) -> dict[str, Tombstone]:
    """Return the rows with these names that are in the job's view. For others, print that the job
    never reads them.

    Raises:  ConfigError: a row does not exist, or no row is in the view.
    """
    from dataplane.commands.datasets import row_names
    from dataplane.plan.tombstones import shard_named
    from dataplane.plan.views import filters

    parsed = {name: _source(job, name) for name in names}
    if not names:
        return {}
    used = {number for number, _ in parsed.values()}
    names_of = {at: row_names(job.sources[at].of_rows, job.sources[at].view) for at in used}

    def row_named(name: str) -> Tombstone | None:
        number, (shard_name, row) = parsed[name]
        source = job.sources[number]
        shard = shard_named(source.manifest, shard_name)
        place = names_of[number].find(shard, row)
        if place is None:
            return None
        return Tombstone(shard, row, number, place[1] if filters(source.view) else None)

    with ThreadPoolExecutor(workers) as threads:
        rows = dict(zip(parsed, threads.map(row_named, parsed), strict=True))
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

    Raises:  ConfigError: the name does not begin with a source of the mixture, or the rest is not
    SHARD:ROW.
    """
    if job.spec.mixture is None:
        return 0, split_row(name)
    sources = [source.name for source in job.sources]
    named = [source for source in sources if name.startswith(f"{source}:")]
    if not named:
        raise ConfigError(
            f"--row {name}: the job mixes {', '.join(sources)}; give SOURCE:SHARD:ROW, such as "
            f"{sources[0]}:17:4",
            field="row",
        )
    source = max(named, key=len)
    return sources.index(source), split_row(name.removeprefix(f"{source}:"))


@click.group("ledger")
def ledger() -> None:
    """Show a job's ledger, an append-only list of its launches and changes."""


def _of_job(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        setting_options(*CLIENT_SETTINGS),
        click.argument("job", metavar="JOB|LEDGER"),
    ):
        command = option(command)
    return command


@ledger.command("export")
@_of_job
def export(settings: Settings, *, job: str) -> None:
    """Write the ledger of a job to stdout, as JSON lines. Save it beside the checkpoints.

    The first line describes the job, and contains the BLAKE2b hash (16 bytes) of the last entry.
    Each other line is an entry, and contains the hash of the previous entry.

    \b
    Examples:
      dataplane ledger export pretrain-7 --join head:7077 > checkpoints/ledger.jsonl
    """
    sys.stdout.write(_text(settings, job))


@ledger.command("show")
@_of_job
@json_option
def show(settings: Settings, *, job: str, as_json: bool) -> None:
    """Show the entries of a ledger: launches with their first and last positions, and changes.

    \b
    Examples:
      dataplane ledger show pretrain-7 --join head:7077
      dataplane ledger show checkpoints/ledger.jsonl --json
    """
    parsed = Ledger.from_lines(_text(settings, job), job)
    if as_json:
        lines = [json.loads(entry.line) for entry in parsed.entries]
        output.write_json(lines)
        return
    if stages := parsed.spec.stages:
        output.write_table(
            ("stage", "ended in epoch", "cursor", "samples", "next began with", "digest of rows"),
            [
                (f"{number}", f"{stage.epoch}", f"{stage.cursor}", f"{stage.sample_count}",
                 "what was unread" if stage.unread else "everything", stage.rows)
                for number, stage in enumerate(stages, 1)
            ],
            f"former stages of job {parsed.job_id}",
        )  # fmt: skip
    headings = ("entry", "when", "by", "what", "epoch", "cursor", "about")
    output.write_table(headings, map(_row, parsed.entries), f"job {parsed.job_id}")


@ledger.command("verify")
@_of_job
@json_option
def verify(settings: Settings, *, job: str, as_json: bool) -> int:
    """Check that nobody changed, added or removed a line of a ledger.

    \b
    Examples:
      dataplane ledger verify checkpoints/ledger.jsonl
    """
    text = _text(settings, job)
    parsed = Ledger.from_lines(text, job)
    own_hash, wrong = text_faults(text, parsed)
    shown_hash = "" if wrong else own_hash
    count, last = len(parsed.entries), parsed.entries[-1].seq if parsed.entries else 0
    if as_json:
        state = {"ok": not wrong, "entries": count, "left_out": last - count, "head": parsed.head}
        output.write_json({**state, "hash": shown_hash, "errors": wrong})
    else:
        left_out = f", {last - count:,} old ones were left out" if last > count else ""
        for problem in wrong:
            output.stdout().print(problem, markup=False, soft_wrap=True)
        verdict = "DAMAGED" if wrong else "OK"
        noun = "entry" if count == 1 else "entries"
        with_hash = f", hash {shown_hash}" if shown_hash else ""
        output.stdout().print(f"{verdict}: {count:,} {noun}{left_out}{with_hash}")
    return output.EXIT_BAD_DATA if wrong else output.EXIT_OK


@ledger.command("diff")
@_of_job
@click.argument("second", metavar="JOB|LEDGER")
@json_option
def diff(settings: Settings, *, job: str, second: str, as_json: bool) -> int:
    """Find the first step at which the rows or batches of two runs differ, and the reason.

    The command compares what decides the rows of each global batch: dataset, options of order,
    views and packs, weights, batch sizes of each launch, skipped steps, and rows that were taken
    out. Options of columns and the number of ranks may differ. The exit status is 1 if the rows or
    batches differ.

    \b
    Examples:
      dataplane ledger diff checkpoints/a.jsonl checkpoints/b.jsonl
      dataplane ledger diff pretrain-7 checkpoints/ledger.jsonl --join head:7077 --json
    """
    from dataplane.model.ledger_diff import ledger_differences

    ledgers = [Ledger.from_lines(_text(settings, name), name) for name in (job, second)]
    differences = ledger_differences(ledgers[0], ledgers[1])
    reached = [{"epoch": ledger.epoch, "cursor": ledger.cursor} for ledger in ledgers]
    if as_json:
        as_dicts = [msgspec.to_builtins(difference) for difference in differences]
        output.write_json({"equal": not differences, "differences": as_dicts, "reached": reached})
    elif not differences:
        output.stdout().print("no difference: every step has the same rows in both")
    else:
        at = differences[0]
        title = f"first difference: epoch {at.epoch}, step {at.step} (position {at.position})"
        cells = [
            (f"{row.epoch}", f"{row.step}", f"{row.position}", row.what, row.first, row.second)
            for row in differences
        ]
        output.write_table(("epoch", "step", "position", "what", job, second), cells, title)
        if any((ledger.epoch, ledger.cursor) <= (at.epoch, at.position) for ledger in ledgers):
            output.stdout().print("not both runs have come so far")
    return output.EXIT_BAD_DATA if differences else output.EXIT_OK


def _text(settings: Settings, job: str) -> str:
    """Return the ledger as JSON lines, from its file or from the job's coordinator.

    Raises:  ConfigError: the file is not a ledger.
    """
    if is_a_ledger((job,)):
        return Path(job).read_text()
    if not {".", "/"}.isdisjoint(job) and Path(job).is_file():
        raise ConfigError(
            f"{job} is not a ledger: `dataplane ledger export JOB` writes the ledger of a job, and"
            " loader.ledger() that of a run without a service",
            path=job,
        )
    return live_ledger(settings, job).to_lines()


def _row(entry: LedgerEntry) -> tuple[object, ...]:
    try:
        when = dt.datetime.fromtimestamp(entry.at, dt.UTC).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):  # the entry was changed by hand
        when = f"{entry.at}"
    about = ", ".join(f"{name}={value}" for name, value in facts_of(entry).items())
    at = entry.position
    return (f"{entry.seq}", when, entry.by, entry.kind, f"{at.epoch}", f"{at.cursor}", about)
