"""Changes that people make to an existing job: skipped steps, removed rows, and the weights of a
mixture.

1. Changes are entries of the job's ledger. A launch applies those that existed when it began, so
   that all of its ranks apply the same ones. Only changed weights, and rows that all ranks have
   agreed to leave out, take effect during a launch, at a position that no rank has passed.
2. A skip applies to one order of rows, and a tombstone to one layout of the dataset and one view of
   its rows. If the order or the layout differs, the change is ignored.
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

from dataplane.model.config import JobSpec, Stage
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import PLACE_MAX, Ledger, LedgerEntry, LedgerPosition, canonical
from dataplane.model.records import (
    DatasetIdentity,
    End,
    MixHistory,
    ShareChange,
    Tombstone,
    Unsigned,
)

SKIP, TOMBSTONE, MIX = "skip", "tombstone", "mix"
WEIGHTS = "weights"
"""Entries that record with which weights members read: the effect of a change, not a change."""
QUARANTINE = "quarantine"
"""Entries that record rows whose images cannot be decoded: a record, not a change."""

BY_BLOCK = "; replaced by a row of block "
"""A part of the reason of rows that were replaced because their whole block is bad."""

Range = tuple[int, int]
ALL_ROWS = PLACE_MAX - 1
"""The row of a tombstone that removes a whole shard."""
LOADER = "loader"
"""Who removes rows from a run without a coordinator."""


class Gaps(Struct, frozen=True):
    """The skipped positions of one epoch, as ranges (begin, end) in ascending order with at least
    one position between them. All other positions are *live*; a live index counts only these.
    """

    ranges: tuple[Range, ...] = ()

    def live(self, position: int) -> int:
        """Count the live positions before this one."""
        return position - sum(min(position, end) - begin for begin, end in self._before(position))

    def place(self, live: int) -> int:
        """Return the position with this live index."""
        for begin, end in self.ranges:
            if live < begin:
                break
            live += end - begin
        return live

    def after(self, position: int, count: int) -> int:
        """Return where the next `count` live positions end, counted from this position."""
        return self.place(self.live(position) + count - 1) + 1 if count else position

    def pieces(self, first: int, stop: int) -> list[Range]:
        """Return the positions with the live indices from `first` to `stop`, as ranges."""
        ranges: list[Range] = []
        while first < stop:
            begin = self.place(first)
            gap = next((gap for gap, _ in self.ranges if gap > begin), None)
            end = begin + stop - first if gap is None else min(begin + stop - first, gap)
            ranges.append((begin, end))
            first += end - begin
        return ranges

    def _before(self, position: int) -> Iterator[Range]:
        return (each for each in self.ranges if each[0] < position)


NO_GAPS = Gaps()


def step_count(rows: int, global_batch: int, end: End) -> int:
    """Count the steps that one rank makes of this many rows."""
    return rows // global_batch if end is End.DROP else -(-rows // global_batch)


class EpochSteps(Struct, frozen=True):
    """The steps of an epoch from a cursor on, as all ranks count them.

    If `joins`, a ragged last step with fewer rows than there are ranks is joined to the step before
    it, so that no rank has an empty batch. This is not done if that step begins before
    `weights_from`, the last position of the epoch at which the weights of a mixture change: some
    ranks may have read the step already, when the epoch still ended elsewhere.
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
        """Return the steps of a job's epoch, with the weights of `mix`. Padded batches cannot be
        joined, so some ranks may get an empty last batch.
        """
        return cls(
            sample_count, cursor, spec.global_batch, spec.end, dp_size, gaps,
            0 if mix is None else mix.last_change(epoch), not spec.pads,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """The number of samples after the cursor."""
        return self.gaps.live(self.sample_count) - self.gaps.live(self.cursor)

    @property
    def count(self) -> int:
        """The number of steps from the cursor to the end of the epoch."""
        left, live = self.left, self.gaps.live
        count = step_count(left, self.global_batch, self.end)
        may_join = self.joins and self.end is End.RAGGED and count > 1
        if not (may_join and 0 < left % self.global_batch < self.dp_size):
            return count
        begin = live(self.cursor) + (count - 2) * self.global_batch
        return count - (begin >= live(self.weights_from))

    def live_count(self, steps: int) -> int:
        """Count the live positions of this many steps, padding included."""
        whole, left = steps * self.global_batch, self.left
        may_join = self.end is End.RAGGED and left - self.dp_size < whole < left
        return left if may_join and steps >= self.count else whole

    def begin(self, step: int) -> int:
        """Return where a step begins in the epoch; also for a step beyond the last one."""
        return self.gaps.place(self.gaps.live(self.cursor) + self.live_count(step))

    def after(self, steps: int) -> int:
        """Return the cursor after this many steps."""
        return self.gaps.after(self.cursor, min(self.left, self.live_count(steps)))

    def check_ranks(self, epoch: int) -> None:
        """Check that each rank gets a row.

        Raises:  ConfigError: fewer rows are left than there are ranks, and `end` adds none.
        """
        left, ranks = self.left, self.dp_size
        if self.end is not End.RAGGED or not self.joins or not 0 < left < ranks:
            return
        if self.cursor:
            state = f"after position {self.cursor}, epoch {epoch} has"
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


class TakenOut(Struct, frozen=True):
    """A row or a shard that a loader removed at this place of its run, which has no coordinator:
    SHARD:ROW or SHARD, in a mixture after SOURCE:. Once the job is open, SHARD is a url, and
    `shard` its number in the dataset.
    """

    name: str
    epoch: Unsigned
    cursor: Unsigned
    shard: Unsigned | None = None

    @property
    def numbered(self) -> TakenOut:
        """Return the same with the shard's number instead of its url."""
        before, mark, path = self.name.partition("://")
        if not mark or self.shard is None:
            return self
        source, colon, _ = before.rpartition(":")
        _, _, row = path.rpartition(":")
        end = f":{row}" if row.isdecimal() else ""
        return structs.replace(self, name=f"{source}{colon}{self.shard}{end}")


class Ahead(Struct, frozen=True):
    """The recipe with which a run goes on when an epoch of a former one is finished: a hash, and
    the urls of the former datasets, by the names of sources, if the user gave them.
    """

    recipe: str
    before: tuple[tuple[str, tuple[str, ...]], ...] = ()


class TakenDocument(Struct, frozen=True, order=True):
    """A removed row of a block whose rows are packed, and the key of the hash that chooses the row
    that replaces it.
    """

    row: Unsigned
    key: Unsigned


class Changes(Struct, frozen=True):
    """All changes that one launch applies, sorted."""

    skips: tuple[Skip, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()

    def gaps(self, epoch: int) -> Gaps:
        """Return the skipped positions of an epoch."""
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
        """Return 16 hex digits over what decides which rows are at which positions: `digest` itself
        if no row was removed. Skips are not included, since a state's digest covers the ranges
        read.
        """
        if not self.tombstones:
            return digest
        rows = canonical([tombstone.numbers for tombstone in self.tombstones])
        return hashlib.blake2b(f"{digest}:{rows}".encode(), digest_size=8).hexdigest()

    def job_digest(self, digest: str) -> str:
        """Return a name for a job with this digest and these changes; `digest` if there are no
        changes.
        """
        if not self.skips and not self.tombstones:
            return digest
        skips = canonical([[skip.epoch, skip.begin, skip.end] for skip in self.skips])
        text = f"{digest}:{skips}:{self.rows_digest('')}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class ReplacedRow(Struct, frozen=True):
    """A row whose image cannot be decoded, and the row of the same block that was delivered in its
    place. Both numbers are relative to the shard, or to the shard's rows in the job's view.
    """

    url: str
    shard: Unsigned
    row: Unsigned
    instead: Unsigned
    reason: str


class MixAt(Struct, frozen=True):
    """New weights of a mixture's sources, by name, from this position on, as ledger entry `seq`
    sets them.
    """

    seq: int
    position: LedgerPosition
    weights: tuple[tuple[str, float], ...]


def order_key(spec: JobSpec, dataset: DatasetIdentity) -> str:
    """Return the name of the order that a skip applies to: what decides each position's row."""
    return structs.replace(spec, global_batch=1).rows_digest(dataset.layout)


def dataset_of(spec: JobSpec, identity: DatasetIdentity | None) -> DatasetIdentity:
    """Return the job's dataset; a coordinator may know nothing but its fingerprint."""
    return identity or DatasetIdentity(spec.fingerprint, spec.fingerprint)


def resizes(spec: JobSpec) -> bool:
    """Whether a map decides how many samples a dataset of this job has."""
    if spec.mixture is None:
        return spec.view.resizes
    return any(source.view.resizes for source in spec.mixture.sources)


def rows_layout(spec: JobSpec, dataset: DatasetIdentity) -> str:
    """Return a name for the numbering of rows that tombstones refer to. It covers the layout of the
    dataset, the names of sources, and their views. If a view has a condition, it also covers the
    dataset's content: in a shard that was changed in place, the condition may select other rows,
    and the rows of the view would have other numbers.
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
    """Return the payload of a skip's entry."""
    first, stop = skip.begin // spec.global_batch, -(-skip.end // spec.global_batch)
    facts = {"begin": skip.begin, "end": skip.end, "order": order_key(spec, dataset)}
    return canonical({**facts, "steps": f"{first}:{stop}", "global_batch": spec.global_batch})


def tombstone_payload(
    rows: Iterable[Tombstone], spec: JobSpec, dataset: DatasetIdentity, generation: int = 0
) -> str:
    """Return the payload of an entry that removes these rows: for the launch of this generation
    from the entry's position on, if given, and for later launches from their start on.
    """
    facts: dict[str, Any] = {"rows": [row.numbers for row in rows]}
    if generation:
        facts["generation"] = generation
    if spec.mixture is not None:
        facts["sources"] = [source.name for source in spec.mixture.sources]
    return canonical({**facts, "layout": rows_layout(spec, dataset)})


def quarantine_payload(rows: Iterable[ReplacedRow]) -> str:
    """Return the payload of an entry that names rows which cannot be decoded."""
    return canonical({"rows": [msgspec.to_builtins(row) for row in rows]})


def quarantined_rows(entry: LedgerEntry) -> list[tuple[str, int]]:
    """Return the shard and the row of each row that a quarantine entry names.

    Raises:  ConfigError: the entry is damaged.
    """
    try:
        return [(str(row["url"]), int(row["row"])) for row in facts_of(entry)["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(entry) from error


def mix_payload(
    request: str, weights: dict[str, float], spec: JobSpec, dataset: DatasetIdentity
) -> str:
    """Return the payload of an entry that sets new weights."""
    facts = {"request": request, "weights": weights, "order": order_key(spec, dataset)}
    return canonical({**facts, "global_batch": spec.global_batch})


def weights_entry(
    before: MixHistory, after: MixHistory, names: Sequence[str]
) -> tuple[LedgerPosition, str]:
    """Return the position from which the weights differ from `before` (the job's start if they do
    not), and the payload of the entry that records them: shares by name, from there on.
    """
    pairs = itertools.zip_longest(before.changes, after.changes)
    differing = next((pair for pair in pairs if pair[0] != pair[1]), after.changes[:1])
    place = min(change.place for change in differing if change is not None)
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
    """Return the entries that are changes and apply to a launch of this job; with `last`, only the
    entries up to this number.
    """
    return holding(
        [entry for entry in entries if entry.kind in (SKIP, TOMBSTONE)], spec, dataset, last
    )


def is_midway(entry: LedgerEntry, generation: int | None) -> bool:
    """Return whether an entry takes effect within the launch of this generation, or of any."""
    if entry.kind != TOMBSTONE:
        return entry.kind == MIX
    own = facts_of(entry).get("generation")
    return own is not None and generation in (None, own)


def apart(
    entries: Iterable[LedgerEntry], generation: int
) -> tuple[tuple[LedgerEntry, ...], tuple[LedgerEntry, ...]]:
    """Divide entries into those that hold for the whole launch of this generation, and those that
    take effect within it.
    """
    some = tuple(entries)
    midway = tuple(entry for entry in some if is_midway(entry, generation))
    return tuple(entry for entry in some if not is_midway(entry, generation)), midway


def taken_by(
    entries: Iterable[LedgerEntry],
    generation: int | None,
    place: LedgerPosition,
    begin: LedgerPosition | None = None,
) -> tuple[LedgerEntry, ...]:
    """Return these entries without the rows that a launch leaves out only behind this place. Former
    launches read what lies before its `begin`.
    """
    is_own = begin is None or place >= begin
    return tuple(
        entry
        for entry in entries
        if entry.kind != TOMBSTONE
        or entry.position <= place
        or (is_own and not is_midway(entry, generation))
    )


def holding(
    some: Sequence[LedgerEntry], spec: JobSpec, dataset: DatasetIdentity, last: int | None = None
) -> tuple[LedgerEntry, ...]:
    """Return those of these changes that are changes of this job."""
    if not some:
        return ()
    key = order_key(spec, dataset)
    rows = rows_layout(spec, dataset)
    holds_for = {SKIP: ("order", key), MIX: ("order", key), TOMBSTONE: ("layout", rows)}

    def holds(entry: LedgerEntry) -> bool:
        name, value = holds_for[entry.kind]
        return bool(facts_of(entry).get(name) == value)

    return tuple(entry for entry in some if (last is None or entry.seq <= last) and holds(entry))


def changes_at(ledger: Ledger, place: LedgerPosition) -> Changes:
    """Return the changes of the launch that reads this place: the present launch if the job is
    running and has not passed the place, otherwise the next one.
    """
    entries, reached = ledger.entries, LedgerPosition(ledger.epoch, ledger.cursor)
    launches = [entry for entry in entries if entry.kind in ("start", "end")]
    is_running = bool(launches) and launches[-1].kind == "start"
    if launches and (is_running or place < reached):
        starts = [
            launch for launch in launches if launch.kind == "start" and launch.position <= place
        ]
        entries = launch_entries(entries, starts[-1], place) if starts else ()
    elif not launches:  # saved by a loader
        entries = taken_by(entries, ledger.generation, place, ledger.begin)
    own = [entry for entry in entries if entry.by != LOADER or entry.position <= place]
    return changes_of(in_force(own, ledger.spec, dataset_of(ledger.spec, ledger.dataset)))


def launch_entries(
    entries: Iterable[LedgerEntry], start: LedgerEntry, place: LedgerPosition
) -> tuple[LedgerEntry, ...]:
    """Return the entries that a launch with this start applies when it reads this place."""
    last, generation = last_change_of(start), number_of(start, "generation", 0)
    return tuple(
        entry
        for entry in taken_by(entries, generation, place)
        if entry.seq <= last or is_midway(entry, generation)
    )


def check_unchanged(
    job_id: str, known: tuple[LedgerEntry, ...], now: tuple[LedgerEntry, ...]
) -> None:
    """Check that a member that joins again gets the changes that it had.

    Raises:  ConfigError: the job has a change now that was made after the member began.
    """
    if changes_of(known) != changes_of(now):
        raise ConfigError(
            f"steps or rows of job {job_id!r} were removed (`dataplane ledger show` lists them) "
            "while this rank was away, and the rank began without these changes: stop this launch, "
            "and resume the job from its checkpoint",
            job=job_id,
        )


@functools.lru_cache(64)
def changes_of(entries: tuple[LedgerEntry, ...]) -> Changes:
    """Parse the changes in these entries.

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
    """Parse the weights in an entry.

    Raises:  ConfigError: the entry is damaged.
    """
    try:
        weights = {str(name): float(weight) for name, weight in facts_of(entry)["weights"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(entry) from error
    return MixAt(entry.seq, entry.position, tuple(weights.items()))


def last_of(entries: Sequence[LedgerEntry], kind: str) -> int:
    """Return the number of the last entry of this kind, 0 if there is none."""
    return next((entry.seq for entry in reversed(entries) if entry.kind == kind), 0)


def last_change_of(start: LedgerEntry) -> int:
    """Return the number of the last change that a launch applies, from the entry of its start."""
    return number_of(start, "last_change", 0)


def number_of(entry: LedgerEntry, name: str, least: int) -> int:
    """Return the number with this name in an entry, which must be at least `least`; `least` if the
    entry does not have it.

    Raises:  ConfigError: the entry is damaged.
    """
    number = facts_of(entry).get(name, least)
    if not isinstance(number, int) or number < least:
        raise _damaged(entry)
    return number


def facts_of(entry: LedgerEntry) -> dict[str, Any]:
    """Parse the payload of an entry.

    Raises:  ConfigError: the entry is damaged.
    """
    facts = json.loads(entry.payload)
    if not isinstance(facts, dict):
        raise _damaged(entry)
    return facts


def _damaged(entry: LedgerEntry) -> ConfigError:
    return ConfigError(
        f"entry {entry.seq} of the ledger ({entry.kind}) is damaged: {entry.payload:.160}: run "
        "`dataplane ledger verify` to check all entries",
        field="entries",
    )


# -- former stages ---------------------------------------------------------------------------------


def first_counted(stages: Sequence[Stage]) -> int:
    """Return the number of the first stage whose samples the next epoch of a run leaves out; the
    number of stages if there is none. A stage that ended within its first epoch goes on with what
    the stage before it had left.
    """
    begin = len(stages)
    for number, stage in enumerate(stages):
        goes_on = begin < number and stage.epoch == stages[number - 1].next_epoch
        start = begin if goes_on else number
        begin = start if stage.unread and (stage.cursor or goes_on) else len(stages)
    return begin
