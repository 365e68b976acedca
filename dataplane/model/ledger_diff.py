"""How two ledgers differ: from which step on two runs had other rows or other batches, and why.

1. Only what decides which rows are in which global batches is compared; not the form of their
   columns, where the dataset is, or how many ranks a run had.
2. A run that went back to an earlier position has read the steps after it again: for each position,
   the launch that read it last counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec import Struct

from dataplane.model.changes import (
    ALL_ROWS,
    TOMBSTONE,
    Changes,
    changes_of,
    dataset_of,
    in_force,
    is_midway,
    launch_entries,
    number_of,
    taken_by,
)
from dataplane.model.config import JobSpec
from dataplane.model.ledger import Ledger, LedgerPosition
from dataplane.model.records import ColumnOptions, Tombstone

_START = LedgerPosition(0, 0)
_FORM = {
    *ColumnOptions.__struct_fields__,
    *("transforms", "bad_images", "map", "collate", "fingerprint", "weights", "schedule"),
}
"""Options that do not decide rows, or that are compared separately."""

T = TypeVar("T")


class Difference(Struct, frozen=True):
    """An input in which two runs differ, and the place from which on it changes rows or batches.
    `step` is 0-based in the epoch, and counts batches of the first run.
    """

    what: str
    epoch: int
    position: int
    step: int
    first: str
    second: str


class _Launch(Struct, frozen=True):
    """The reads of a launch, from a place to the beginning of the next launch."""

    at: LedgerPosition
    global_batch: int
    changes: Changes


def ledger_differences(first: Ledger, second: Ledger) -> tuple[Difference, ...]:
    """Return all differences, in the order of the steps that they change.

    Raises:  ConfigError: an entry is damaged.
    """
    both = _launches(first), _launches(second)
    differing = [
        *_of_options(first, second),
        *_of_weights(first, second),
        *_of_batches(*both),
        *_of_skips(*both),
        *_of_rows(both, (first.spec, second.spec)),
    ]
    differences = []
    for what, place, values in differing:
        at = _read_from(both, place)
        step = at.cursor // _launch_at(both[0], at).global_batch
        differences.append(Difference(what, at.epoch, at.cursor, step, *values))
    return tuple(
        sorted(differences, key=lambda difference: (difference.epoch, difference.position))
    )


_Found = tuple[str, LedgerPosition, tuple[str, str]]


def _of_options(first: Ledger, second: Ledger) -> Iterator[_Found]:
    layouts = [dataset_of(ledger.spec, ledger.dataset).layout for ledger in (first, second)]
    if layouts[0] != layouts[1]:
        yield "dataset", _START, (layouts[0], layouts[1])
    if _rows_of(first.spec) == _rows_of(second.spec):
        return
    for name, value, other in first.spec.differences(second.spec):
        if name not in _FORM:
            yield name, _START, (value, other)


def _rows_of(spec: JobSpec) -> str:
    """Return everything that decides the rows, besides the dataset and the batches."""
    return spec.rows_digest("")


def _of_weights(first: Ledger, second: Ledger) -> Iterator[_Found]:
    mixed = [ledger.spec.mixture for ledger in (first, second)]
    if mixed[0] is None or mixed[1] is None:
        return
    names = [
        [source.name for source in mixture.sources] for mixture in mixed if mixture is not None
    ]
    if names[0] != names[1]:
        return  # the mixtures already differ in an option
    histories = [
        [(LedgerPosition(*change.place), change.shares) for change in mixture.history.changes]
        for mixture in mixed
        if mixture is not None
    ]
    at = _parting(*histories)
    if at is not None:
        shown = [_shares_at(history, names[0], at) for history in histories]
        yield "weights", at, (shown[0], shown[1])


def _shares_at(
    history: Sequence[tuple[LedgerPosition, tuple[int, ...]]],
    names: Sequence[str],
    at: LedgerPosition,
) -> str:
    shares = next(shares for place, shares in reversed(history) if place <= at)
    return ", ".join(
        f"{name} {share / sum(shares):.4g}" for name, share in zip(names, shares, strict=True)
    )


def _of_batches(first: Sequence[_Launch], second: Sequence[_Launch]) -> Iterator[_Found]:
    at = _parting(_phases(first), _phases(second))
    if at is not None:
        shown = [
            f"{launch.global_batch} from epoch {launch.at.epoch}, position {launch.at.cursor}"
            for launch in (_launch_at(first, at), _launch_at(second, at))
        ]
        yield "global_batch", at, (shown[0], shown[1])


def _phases(launches: Sequence[_Launch]) -> list[tuple[LedgerPosition, int]]:
    """Return the places from which steps are counted, and the batch from there on. A launch that
    continues at the beginning of a step, with the same batch, adds no place.
    """
    phases: list[tuple[LedgerPosition, int]] = []
    for launch in launches:
        if phases:
            at, batch = phases[-1]
            begun = at.cursor if at.epoch == launch.at.epoch else 0
            if batch == launch.global_batch and (launch.at.cursor - begun) % batch == 0:
                continue
        phases.append((launch.at, launch.global_batch))
    return phases


def _of_skips(first: Sequence[_Launch], second: Sequence[_Launch]) -> Iterator[_Found]:
    skips = [_skipped(launches) for launches in (first, second)]
    differing = sorted(set(skips[0]) ^ set(skips[1]))
    if not differing:
        return
    epoch = differing[0][0]
    mine = [[skip[1:] for skip in of_history if skip[0] == epoch] for of_history in skips]
    pair = next(pair for pair in itertools.zip_longest(*mine) if pair[0] != pair[1])
    begins = [range_[0] for range_ in pair if range_ is not None]
    ends = [range_[1] for range_ in pair if range_ is not None]
    cursor = min(ends) if len(set(begins)) == 1 and len(begins) > 1 else min(begins)
    shown = ["no" if range_ is None else f"positions {range_[0]}:{range_[1]}" for range_ in pair]
    yield "skip", LedgerPosition(epoch, cursor), (shown[0], shown[1])


def _skipped(launches: Sequence[_Launch]) -> list[tuple[int, int, int]]:
    """Return (epoch, begin, end) of the positions that a run skipped. Each launch counts from where
    it began to where the next one began.
    """
    ranges: list[tuple[int, int, int]] = []
    for at, launch in enumerate(launches):
        until = launches[at + 1].at if at + 1 < len(launches) else None
        for epoch in sorted({skip.epoch for skip in launch.changes.skips}):
            for begin, end in launch.changes.gaps(epoch).ranges:
                low = launch.at.cursor if epoch == launch.at.epoch else 0
                if epoch < launch.at.epoch or (until is not None and epoch > until.epoch):
                    continue
                # A launch that begins after skipped positions counts them as skipped, too.
                high = until.cursor if until is not None and epoch == until.epoch else end
                if max(begin, low) < min(end, high):
                    ranges.append((epoch, max(begin, low), min(end, high)))
    return ranges


def _of_rows(both: Sequence[Sequence[_Launch]], specs: tuple[JobSpec, JobSpec]) -> Iterator[_Found]:
    rows = [[(launch.at, launch.changes.tombstones) for launch in launches] for launches in both]
    at = _parting(*(_merged(of_run) for of_run in rows))
    if at is not None:
        shown = [
            ", ".join(_row_named(row, spec) for row in _launch_at(launches, at).changes.tombstones)
            for launches, spec in zip(both, specs, strict=True)
        ]
        yield "tombstone", at, (shown[0] or "no row", shown[1] or "no row")


def _row_named(row: Tombstone, spec: JobSpec) -> str:
    """Return a row's name in the form of `dataplane tombstone`."""
    source = "" if spec.mixture is None else f"{spec.mixture.sources[row.source].name}:"
    return f"{source}{row.shard}" + (f":{row.row}" if row.row != ALL_ROWS else "")


def _merged(pairs: Sequence[tuple[LedgerPosition, T]]) -> list[tuple[LedgerPosition, T]]:
    """Leave out each pair whose value equals that of the pair before."""
    return [pair for at, pair in enumerate(pairs) if at == 0 or pairs[at - 1][1] != pair[1]]


def _parting(
    first: Sequence[tuple[LedgerPosition, T]], second: Sequence[tuple[LedgerPosition, T]]
) -> LedgerPosition | None:
    """Return where two lists of places and values begin to differ; None if they are equal."""
    for pair in itertools.zip_longest(first, second):
        if pair[0] != pair[1]:
            return min(entry[0] for entry in pair if entry is not None)
    return None


def _launches(ledger: Ledger) -> list[_Launch]:
    """Return the launches whose reads count, by place. The first known launch counts from the
    beginning of the run.
    """
    dataset = dataset_of(ledger.spec, ledger.dataset)
    starts = [entry for entry in ledger.entries if entry.kind == "start"]
    if not starts:  # saved by a loader: it has changes, but no launches
        batch, launches = ledger.spec.global_batch, list[_Launch]()
        taken = (entry.position for entry in ledger.entries if entry.kind == TOMBSTONE)
        for at in sorted({_START, ledger.begin or _START, *taken}):
            own = taken_by(ledger.entries, ledger.generation, at, ledger.begin)
            launches.append(_Launch(at, batch, changes_of(in_force(own, ledger.spec, dataset))))
        return launches
    launches = [_Launch(_START, number_of(starts[0], "global_batch", 1), Changes())]
    for entry in starts:
        while launches and launches[-1].at >= entry.position:
            launches.pop()
        generation, batch = number_of(entry, "generation", 0), number_of(entry, "global_batch", 1)
        later = [other for other in ledger.entries if is_midway(other, generation)]
        places = {other.position for other in later if other.kind == TOMBSTONE}
        for at in sorted({entry.position, *(place for place in places if place > entry.position)}):
            some = launch_entries(ledger.entries, entry, at)
            launches.append(_Launch(at, batch, changes_of(in_force(some, ledger.spec, dataset))))
    return launches


def _launch_at(launches: Sequence[_Launch], at: LedgerPosition) -> _Launch:
    return next(launch for launch in reversed(launches) if launch.at <= at)


def _read_from(both: Sequence[Sequence[_Launch]], at: LedgerPosition) -> LedgerPosition:
    """Return the place, or if both runs skipped it, the first place that one of them has read."""
    skipped = [_skipped(launches) for launches in both]
    while True:
        ends = [
            [end for epoch, begin, end in of_run if epoch == at.epoch and begin <= at.cursor < end]
            for of_run in skipped
        ]
        if not all(ends):
            return at
        at = LedgerPosition(at.epoch, min(end for of_run in ends for end in of_run))
