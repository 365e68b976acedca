"""Changes that people make to an existing job: skipped steps, removed rows, and the weights of a
mixture.

1. Changes are entries of the job's ledger. A launch has those that existed when it began, so that
   all of its ranks have the same; changed weights come into force while it reads, at a place that
   no rank has passed.
2. A skip applies to one order of rows, and a tombstone to one layout of the dataset and one view of
   its rows: they say nothing about others.
3. Positions are never renumbered. All ranks pass over a skipped position at the same place.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import LedgerEntry, LedgerPosition, canonical
from dataplane.model.records import DatasetIdentity, End, MixHistory, ShareChange, Unsigned

SKIP, TOMBSTONE, MIX = "skip", "tombstone", "mix"
WEIGHTS = "weights"
"""The kind of entries that say with which weights members read; no change, but what came of it."""
QUARANTINE = "quarantine"
"""The kind of entries that name rows whose images cannot be decoded; likewise."""

Range = tuple[int, int]


class Gaps(Struct, frozen=True):
    """The skipped positions of one epoch, as ranges (begin, end) that rise and do not touch. All
    other positions are *live*, and counted from 0 by their live index.
    """

    ranges: tuple[Range, ...] = ()

    def live(self, position: int) -> int:
        """How many live positions are before this one."""
        return position - sum(min(position, end) - begin for begin, end in self._before(position))

    def place(self, live: int) -> int:
        """The position with this live index."""
        for begin, end in self.ranges:
            if live < begin:
                break
            live += end - begin
        return live

    def after(self, position: int, count: int) -> int:
        """Where the next `count` live positions end, from this one on."""
        return self.place(self.live(position) + count - 1) + 1 if count else position

    def pieces(self, first: int, stop: int) -> list[Range]:
        """The positions with the live indices from `first` up to `stop`, as ranges."""
        found: list[Range] = []
        while first < stop:
            begin = self.place(first)
            gap = next((gap for gap, _ in self.ranges if gap > begin), None)
            end = begin + stop - first if gap is None else min(begin + stop - first, gap)
            found.append((begin, end))
            first += end - begin
        return found

    def _before(self, position: int) -> Iterator[Range]:
        return (each for each in self.ranges if each[0] < position)


NO_GAPS = Gaps()


def step_count(rows: int, global_batch: int, end: End) -> int:
    """How many steps so many rows make on one rank."""
    return rows // global_batch if end is End.DROP else -(-rows // global_batch)


class EpochSteps(Struct, frozen=True):
    """The steps of an epoch from a cursor on, as all ranks count them.

    If `joins`, a ragged last step with fewer rows than there are ranks joins the step before, so
    that no rank has an empty batch. It does not if that step begins before `weights_from`, the last
    position of the epoch at which the weights of a mixture change: some ranks may have read it
    before the present end of the epoch was known.
    """

    sample_count: int
    cursor: int
    global_batch: int
    end: End
    dp_size: int = 1
    gaps: Gaps = NO_GAPS
    weights_from: int = 0
    joins: bool = True

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        sample_count: int,
        epoch: int = 0,
        *,
        cursor: int = 0,
        dp_size: int = 1,
        gaps: Gaps = NO_GAPS,
        mix: MixHistory | None = None,
    ) -> EpochSteps:
        """The steps of a job's epoch, with the weights of `mix`. Two padded batches cannot be
        joined, so of these some ranks get an empty one.
        """
        return cls(
            sample_count, cursor, spec.global_batch, spec.end, dp_size, gaps,
            0 if mix is None else mix.last_change(epoch), not spec.pads,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """How many samples come after the cursor."""
        return self.gaps.live(self.sample_count) - self.gaps.live(self.cursor)

    @property
    def count(self) -> int:
        """Steps from the cursor to the end of the epoch."""
        left, live = self.left, self.gaps.live
        count = step_count(left, self.global_batch, self.end)
        may_join = self.joins and self.end is End.RAGGED and count > 1
        if not (may_join and 0 < left % self.global_batch < self.dp_size):
            return count
        begin = live(self.cursor) + (count - 2) * self.global_batch
        return count - (begin >= live(self.weights_from))

    def live_count(self, steps: int) -> int:
        """How many live positions these many steps have, padding included."""
        whole, left = steps * self.global_batch, self.left
        may_join = self.end is End.RAGGED and left - self.dp_size < whole < left
        return left if may_join and steps >= self.count else whole

    def begin(self, step: int) -> int:
        """Where a step begins in the epoch; also of a step beyond the last one."""
        return self.gaps.place(self.gaps.live(self.cursor) + self.live_count(step))

    def after(self, steps: int) -> int:
        """The cursor after so many steps."""
        return self.gaps.after(self.cursor, min(self.left, self.live_count(steps)))

    def check_ranks(self, epoch: int) -> None:
        """Check that each rank gets a row.

        Raises:  ConfigError: fewer rows are left than there are ranks, and `end` adds none.
        """
        left, ranks = self.left, self.dp_size
        if self.end is not End.RAGGED or not self.joins or not 0 < left < ranks:
            return
        if self.cursor:
            state = f"behind position {self.cursor}, epoch {epoch} has"
            remedy = f"resume on fewer ranks, or begin the next epoch with set_epoch({epoch + 1})"
        else:
            state = f"epoch {epoch} has"
            remedy = 'use fewer ranks, or end="pad", which fills the step with repeated samples'
        raise ConfigError(
            f"{state} fewer samples ({left}) than there are data-parallel ranks ({ranks}), so some"
            f" would get an empty batch, whose mean is NaN: {remedy}",
            field="dp_size",
        )


class Skip(Struct, frozen=True, order=True):
    """The positions from `begin` up to `end` of an epoch are skipped."""

    epoch: int
    begin: int
    end: int


class Tombstone(Struct, frozen=True, order=True):
    """A row of a shard of a source that was taken out; all count from 0. `of_view` is the row's
    number among those of its block that the view of the job leaves; None if it leaves the first.
    """

    shard: Unsigned
    row: Unsigned
    source: Unsigned = 0
    of_view: Unsigned | None = None

    @property
    def numbers(self) -> list[int]:
        """The form that ledgers have: shard and row, and every other field with another value than
        its default.
        """
        if self.of_view is not None:
            return [self.shard, self.row, self.source, self.of_view]
        return [self.shard, self.row, *([self.source] if self.source else [])]


class TakenDocument(Struct, frozen=True, order=True):
    """A row of a block whose rows are packed, if it was taken out, and the key with which another
    one is found to stand in its place.
    """

    row: Unsigned
    key: Unsigned


class Changes(Struct, frozen=True):
    """All changes of a launch, sorted."""

    skips: tuple[Skip, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()

    def gaps(self, epoch: int) -> Gaps:
        """The skipped positions of an epoch."""
        found: list[Range] = []
        for skip in self.skips:
            if skip.epoch != epoch or skip.begin >= skip.end:
                continue
            if found and skip.begin <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], skip.end)
            else:
                found.append((skip.begin, skip.end))
        return Gaps(tuple(found))

    def rows_digest(self, digest: str) -> str:
        """16 hex digits over what decides which rows stand where: `digest` if no row was taken out.
        Skips do not count, since a digest covers the ranges that were read.
        """
        if not self.tombstones:
            return digest
        rows = canonical([one.numbers for one in self.tombstones])
        return hashlib.blake2b(f"{digest}:{rows}".encode(), digest_size=8).hexdigest()

    def job_digest(self, digest: str) -> str:
        """A name for a job with this digest and these changes; `digest` without any."""
        if not self.skips and not self.tombstones:
            return digest
        skips = canonical([[one.epoch, one.begin, one.end] for one in self.skips])
        text = f"{digest}:{skips}:{self.rows_digest('')}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class ReplacedRow(Struct, frozen=True):
    """A row that has an image that cannot be decoded, and the row of the same block that was
    gathered in its place. Both are counted in the shard, or in what a view has of it.
    """

    url: str
    shard: Unsigned
    row: Unsigned
    instead: Unsigned
    reason: str


class MixAt(Struct, frozen=True):
    """Other weights of a mixture's sources, by name, from this place on: entry `seq` says so."""

    seq: int
    position: LedgerPosition
    weights: tuple[tuple[str, float], ...]


def order_key(spec: JobSpec, dataset: DatasetIdentity) -> str:
    """The name of the order that a skip holds for: what decides which row is at each position."""
    return structs.replace(spec, global_batch=1).rows_digest(dataset.layout)


def dataset_of(spec: JobSpec, identity: DatasetIdentity | None) -> DatasetIdentity:
    """The dataset of a job whose coordinator may have been told only its fingerprint."""
    return identity or DatasetIdentity(spec.fingerprint, spec.fingerprint)


def rows_layout(spec: JobSpec, dataset: DatasetIdentity) -> str:
    """A name for the rows that tombstones hold for: of the layout of the dataset, the names of
    sources, and the rows of their views. A condition may find other rows in a shard that was
    changed in place, so that rows of a view have other numbers there: with one, also of the content
    of the dataset.
    """
    sources = [("", spec.view)]
    if spec.mixture is not None:
        sources = [(source.name, source.view) for source in spec.mixture.sources]
    rows = [
        [name, view.where, view.sample, view.split_from, view.split_to, view.limit]
        for name, view in sources
    ]
    if rows == [["", "", 0, 0, 0, 0]]:
        return dataset.layout
    has_where = any(view.where for _, view in sources)
    shards = dataset.content if has_where else dataset.layout
    return hashlib.blake2b(f"{shards}:{canonical(rows)}".encode(), digest_size=16).hexdigest()


def skip_payload(skip: Skip, spec: JobSpec, dataset: DatasetIdentity) -> str:
    """The payload of a skip's entry."""
    first, stop = skip.begin // spec.global_batch, -(-skip.end // spec.global_batch)
    facts = {"begin": skip.begin, "end": skip.end, "order": order_key(spec, dataset)}
    return canonical({**facts, "steps": f"{first}:{stop}", "global_batch": spec.global_batch})


def tombstone_payload(rows: Iterable[Tombstone], spec: JobSpec, dataset: DatasetIdentity) -> str:
    """The payload of an entry that takes these rows out."""
    facts: dict[str, Any] = {"rows": [one.numbers for one in rows]}
    if spec.mixture is not None:
        facts["sources"] = [source.name for source in spec.mixture.sources]
    return canonical({**facts, "layout": rows_layout(spec, dataset)})


def quarantine_payload(rows: Iterable[ReplacedRow]) -> str:
    """The payload of an entry that names rows which cannot be decoded."""
    return canonical({"rows": [msgspec.to_builtins(one) for one in rows]})


def quarantined_rows(entry: LedgerEntry) -> list[tuple[str, int]]:
    """The shard and the row of each row that such an entry names.

    Raises:  ConfigError: it is damaged.
    """
    try:
        return [(str(one["url"]), int(one["row"])) for one in facts_of(entry)["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(entry) from error


def mix_payload(
    request: str, weights: dict[str, float], spec: JobSpec, dataset: DatasetIdentity
) -> str:
    """The payload of an entry of other weights."""
    facts = {"request": request, "weights": weights, "order": order_key(spec, dataset)}
    return canonical({**facts, "global_batch": spec.global_batch})


def weights_entry(
    before: MixHistory, after: MixHistory, names: Sequence[str]
) -> tuple[LedgerPosition, str]:
    """The place from which on the weights of a job are others than before, or its start if they are
    not, and the payload of an entry that says them: shares by name, from there on.
    """
    pairs = itertools.zip_longest(before.changes, after.changes)
    differing = next((pair for pair in pairs if pair[0] != pair[1]), after.changes[:1])
    place = min(each.place for each in differing if each is not None)
    changes = [
        [*change.place, _shares_by_name(change, names)]
        for change in after.changes
        if change.place >= place
    ]
    return LedgerPosition(*place), canonical({"changes": changes, "digest": after.digest})


def _shares_by_name(change: ShareChange, names: Sequence[str]) -> dict[str, float]:
    whole = sum(change.shares)
    pairs = zip(names, change.shares, strict=True)
    return {name: round(share / whole, 9) for name, share in pairs}


def in_force(
    entries: Iterable[LedgerEntry], spec: JobSpec, dataset: DatasetIdentity, last: int | None = None
) -> tuple[LedgerEntry, ...]:
    """The changes among these entries that a launch of this job has; with `last`, those up to the
    entry with this number.
    """
    return _holding([one for one in entries if one.kind in (SKIP, TOMBSTONE)], spec, dataset, last)


def mixes_in_force(
    entries: Iterable[LedgerEntry], spec: JobSpec, dataset: DatasetIdentity
) -> tuple[LedgerEntry, ...]:
    """The entries of other weights among these that hold for this job."""
    return _holding([one for one in entries if one.kind == MIX], spec, dataset)


def _holding(
    some: Sequence[LedgerEntry], spec: JobSpec, dataset: DatasetIdentity, last: int | None = None
) -> tuple[LedgerEntry, ...]:
    if not some:
        return ()
    key = order_key(spec, dataset)
    rows = rows_layout(spec, dataset)
    holds_for = {SKIP: ("order", key), MIX: ("order", key), TOMBSTONE: ("layout", rows)}

    def holds(entry: LedgerEntry) -> bool:
        name, value = holds_for[entry.kind]
        return bool(facts_of(entry).get(name) == value)

    return tuple(one for one in some if (last is None or one.seq <= last) and holds(one))


def changes_at(
    entries: Sequence[LedgerEntry],
    spec: JobSpec,
    dataset: DatasetIdentity,
    reached: LedgerPosition,
    place: LedgerPosition,
) -> Changes:
    """The changes of the launch that read this place last, or that will read it: the present one
    of a running job, or else the next one. `reached` is how far the job is.
    """
    launches = [one for one in entries if one.kind in ("start", "end")]
    is_running = bool(launches) and launches[-1].kind == "start"
    last: int | None = None
    if launches and (is_running or place < reached):
        starts = [one for one in launches if one.kind == "start" and one.position <= place]
        last = last_change_of(starts[-1]) if starts else 0
    return changes_of(in_force(entries, spec, dataset, last))


def check_unchanged(
    job_id: str, known: tuple[LedgerEntry, ...], found: tuple[LedgerEntry, ...]
) -> None:
    """Check that a member that joins again finds the changes that it had.

    Raises:  ConfigError: it began before a change that its job has now.
    """
    if changes_of(known) != changes_of(found):
        raise ConfigError(
            f"steps or rows of job {job_id!r} were taken out (`dataplane ledger show`) while this "
            "rank was away, and it has begun without knowing: stop this launch, and resume the job "
            "from its checkpoint",
            job=job_id,
        )


@functools.lru_cache(64)
def changes_of(entries: tuple[LedgerEntry, ...]) -> Changes:
    """The changes that these entries say.

    Raises:  ConfigError: an entry is damaged.
    """
    skips: list[Skip] = []
    tombstones: set[Tombstone] = set()
    for entry in entries:
        facts = facts_of(entry)
        try:
            if entry.kind == SKIP:
                skips.append(Skip(entry.position.epoch, int(facts["begin"]), int(facts["end"])))
            elif entry.kind == TOMBSTONE:
                tombstones |= {Tombstone(*map(int, numbers)) for numbers in facts["rows"]}
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(entry) from error
    return Changes(tuple(sorted(skips)), tuple(sorted(tombstones)))


def mix_of_entry(entry: LedgerEntry) -> MixAt:
    """The weights that an entry says.

    Raises:  ConfigError: it is damaged.
    """
    try:
        weights = {str(name): float(one) for name, one in facts_of(entry)["weights"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(entry) from error
    return MixAt(entry.seq, entry.position, tuple(weights.items()))


def last_of(entries: Sequence[LedgerEntry], kind: str) -> int:
    """The number of the last entry of this kind, 0 if there is none."""
    return next((one.seq for one in reversed(entries) if one.kind == kind), 0)


def last_change_of(start: LedgerEntry) -> int:
    """The number of the last change that a launch has, from the entry of its start."""
    return number_of(start, "last_change", 0)


def number_of(entry: LedgerEntry, name: str, least: int) -> int:
    """A number that an entry says, which has to be at least this; this, if it does not say it.

    Raises:  ConfigError: the entry is damaged.
    """
    found = facts_of(entry).get(name, least)
    if not isinstance(found, int) or found < least:
        raise _damaged(entry)
    return found


def facts_of(entry: LedgerEntry) -> dict[str, Any]:
    """The facts in an entry's payload.

    Raises:  ConfigError: it is damaged.
    """
    facts = json.loads(entry.payload)
    if not isinstance(facts, dict):
        raise _damaged(entry)
    return facts


def _damaged(entry: LedgerEntry) -> ConfigError:
    return ConfigError(
        f"entry {entry.seq} of the ledger ({entry.kind}) is damaged: {entry.payload:.160}: "
        "`dataplane ledger verify` checks all of them",
        field="entries",
    )
