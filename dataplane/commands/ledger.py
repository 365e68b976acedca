"""`dataplane ledger`: what a job was given to train on."""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from dataplane.changes import facts_of
from dataplane.commands import output
from dataplane.commands.options import (
    CLIENT_SETTINGS,
    Settings,
    json_option,
    setting_options,
)
from dataplane.commands.targets import is_a_ledger
from dataplane.commands.traced import live_ledger
from dataplane.errors import ConfigError
from dataplane.ledger import Ledger, LedgerEntry, text_faults


@click.group("ledger")
def ledger() -> None:
    """Show what a job was given to train on: an append-only list of its launches and changes."""


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
    """Write the ledger of a job to stdout, as JSON lines to be kept beside its checkpoints.

    The first line describes the job, each other one is an entry. A line's BLAKE2b hash, of 16
    bytes, is in the next line, and the last one's in the first.

    \b
    Examples:
      dataplane ledger export pretrain-7 --join head:7077 > checkpoints/ledger.jsonl
    """
    sys.stdout.write(_text(settings, job))


@ledger.command("show")
@_of_job
@json_option
def show(settings: Settings, *, job: str, as_json: bool) -> None:
    """Show the entries of a ledger: launches with where they began and ended.

    \b
    Examples:
      dataplane ledger show pretrain-7 --join head:7077
      dataplane ledger show checkpoints/ledger.jsonl --json
    """
    found = Ledger.from_lines(_text(settings, job), job)
    if as_json:
        lines = [json.loads(entry.line) for entry in found.entries]
        output.write_json(lines)
        return
    headings = ("entry", "when", "by", "what", "epoch", "cursor", "about")
    output.write_table(headings, map(_row, found.entries), f"job {found.job_id}")


@ledger.command("verify")
@_of_job
@json_option
def verify(settings: Settings, *, job: str, as_json: bool) -> int:
    """Check that no line of a ledger was changed, added or taken out.

    \b
    Examples:
      dataplane ledger verify checkpoints/ledger.jsonl
    """
    text = _text(settings, job)
    found = Ledger.from_lines(text, job)
    own_hash, wrong = text_faults(text, found)
    shown_hash = "" if wrong else own_hash
    count, last = len(found.entries), found.entries[-1].seq if found.entries else 0
    if as_json:
        state = {"ok": not wrong, "entries": count, "left_out": last - count, "head": found.head}
        output.write_json({**state, "hash": shown_hash, "errors": wrong})
    else:
        left_out = f", {last - count:,} old ones were left out" if last > count else ""
        for one in wrong:
            output.stdout().print(one, markup=False, soft_wrap=True)
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
    """Name the first step at which two runs had other rows or batches, and what made them differ.

    What decides which rows stand in which global batches is compared: dataset, options of the
    order and of views and packs, weights, batches of each launch, skipped steps, rows that were
    taken out. The form of the columns and the number of ranks do not count. The exit status is 1
    if they differ.

    \b
    Examples:
      dataplane ledger diff checkpoints/a.jsonl checkpoints/b.jsonl
      dataplane ledger diff pretrain-7 checkpoints/ledger.jsonl --join head:7077 --json
    """
    from dataplane.ledger_diff import ledger_differences

    ledgers = [Ledger.from_lines(_text(settings, one), one) for one in (job, second)]
    found = ledger_differences(ledgers[0], ledgers[1])
    reached = [{"epoch": one.epoch, "cursor": one.cursor} for one in ledgers]
    if as_json:
        told = [msgspec.to_builtins(one) for one in found]
        output.write_json({"equal": not found, "differences": told, "reached": reached})
    elif not found:
        output.stdout().print("no difference: every step has the same rows in both")
    else:
        at = found[0]
        title = f"first difference: epoch {at.epoch}, step {at.step} (position {at.position})"
        cells = [
            (f"{one.epoch}", f"{one.step}", f"{one.position}", one.what, one.first, one.second)
            for one in found
        ]
        output.write_table(("epoch", "step", "position", "what", job, second), cells, title)
        if any((one.epoch, one.cursor) <= (at.epoch, at.position) for one in ledgers):
            output.stdout().print("not both runs have come so far")
    return output.EXIT_BAD_DATA if found else output.EXIT_OK


def _text(settings: Settings, job: str) -> str:
    """The ledger as JSON lines, from its file or from the job's coordinator.

    Raises:  ConfigError: it is another file.
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
    except (ValueError, OverflowError, OSError):  # somebody has changed it
        when = f"{entry.at}"
    about = ", ".join(f"{name}={value}" for name, value in facts_of(entry).items())
    at = entry.position
    return (f"{entry.seq}", when, entry.by, entry.kind, f"{at.epoch}", f"{at.cursor}", about)
