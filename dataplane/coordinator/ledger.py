"""The ledger of one job at its coordinator. Pure; the job's roster owns it.

Invariants:
1. Entries are only appended, and their number is bounded. Beyond the bound, the oldest entries
   about starts and ends of launches are removed, except those of the open launch, and the oldest
   entries about weights; nothing else is ever removed. Changes have a bound of their own, beyond
   which they are refused; so have rows that cannot be decoded, which are then no longer recorded.
2. A launch that reads has a start. It has an end once its last member is gone, or a newer launch
   has taken over.
3. The changes of a generation are those that existed when it began. Of later ones, it gets only
   weights, and rows that its members have agreed to leave out from a place on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable

from msgspec.structs import replace

from dataplane.coordinator.records import Forget, Job, Keep, LedgerRecord, Write
from dataplane.model.changes import (
    MIX,
    QUARANTINE,
    SKIP,
    TOMBSTONE,
    WEIGHTS,
    EpochSteps,
    ReplacedRow,
    Skip,
    changes_of,
    dataset_of,
    facts_of,
    holding,
    in_force,
    is_midway,
    last_of,
    mix_payload,
    quarantine_payload,
    quarantined_rows,
    rows_layout,
    skip_payload,
    tombstone_payload,
    weights_entry,
)
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import LedgerEntry, LedgerMark, LedgerPosition, canonical
from dataplane.model.records import DatasetIdentity, Tombstone
from dataplane.rpc.membership import REPLACED_MAX, MemberProgress, RowsTaken, StepsSkipped

ENTRIES_MAX = 4096
CHANGES_MAX = 512
WEIGHTS_MAX = 1024
MARKS_MAX = 64
_SAMPLES_MAX = 1 << 62
TOMBSTONES_MAX = 1024
QUARANTINED_MAX = 1024
_TEXT_MAX = 1024
_OF_LAUNCHES, _CHANGES = ("start", "end"), (SKIP, TOMBSTONE, MIX)
_MAY_GO = (*_OF_LAUNCHES, WEIGHTS)


class JobLedger:
    """The entries of a job, oldest first."""

    def __init__(self, job_id: str, entries: Iterable[LedgerEntry] = ()) -> None:
        self._job_id = job_id
        self.entries = sorted(entries, key=lambda entry: entry.seq)
        self._head = self.entries[-1].hash if self.entries else ""
        self.marks = tuple(map(LedgerMark.of, self.entries[-MARKS_MAX:]))
        """Marks of the last entries."""
        # Keep what takes effect within a launch in a list: every heartbeat of a member needs it.
        self._midway: list[LedgerEntry] = []
        for entry in self.entries:
            with contextlib.suppress(ConfigError):  # a damaged entry, as in `_rows_of`
                self._midway += [entry] if is_midway(entry, None) else []
        starts = [entry for entry in self.entries if entry.kind in _OF_LAUNCHES]
        self._open = starts[-1] if starts and starts[-1].kind == "start" else None
        self._quarantined = _rows_of([one for one in self.entries if one.kind == QUARANTINE])

    def reading(
        self, job: Job, progress: MemberProgress, known: LedgerPosition, by: str, now: float
    ) -> list[Write]:
        """Record the start of a launch when the first member of the present generation reads.
        `known` is the place that the member had reached before this report.
        """
        if progress.began is None or self._open is not None:
            return []
        at = progress.began
        is_back = any(entry.payload == _launch(job) for entry in reversed(self.entries))
        if is_back and known > at:
            # The launch had ended, and one of its members is back: record its present place. (For
            # a new member, whose loader was closed and opened again, record where it began.)
            at = LedgerPosition(progress.epoch, progress.cursor)
        writes = self._append("start", at, _launch(job), by, now)
        self._open = self.entries[-1]
        return writes

    def ended(self, job: Job, why: str, now: float) -> list[Write]:
        """Record where the job is when no member of the launch reads any more, if the launch ever
        began.
        """
        if self._open is None:
            return []
        begun, self._open = self._open.position, None
        at = max(begun, LedgerPosition(job.epoch, job.cursor))
        return self._append("end", at, canonical({"why": why}), "coordinator", now)

    def weighted(self, before: Job, job: Job, by: str, now: float) -> list[Write]:
        """Record the weights with which members read, unless they equal those recorded last."""
        mixture = job.spec.mixture
        if mixture is None or job.mix is None or before.mix == job.mix:
            return []
        some = (entry for entry in reversed(self.entries) if entry.kind == WEIGHTS)
        known = next((facts_of(entry).get("digest") for entry in some), mixture.history.digest)
        if known == job.mix.digest:
            return []
        names = [source.name for source in mixture.sources]
        at, payload = weights_entry(before.mix or mixture.history, job.mix, names)
        return self._append(WEIGHTS, at, payload, by, now)

    def quarantined(
        self, job: Job, rows: Iterable[ReplacedRow], by: str, now: float
    ) -> list[Write]:
        """Record rows that cannot be decoded, unless they are recorded already."""
        new: list[ReplacedRow] = []
        for each in itertools.islice(rows, REPLACED_MAX):
            row = replace(each, url=each.url[:_TEXT_MAX], reason=each.reason[:_TEXT_MAX])
            name = (row.url, row.row)
            if name not in self._quarantined and len(self._quarantined) < QUARANTINED_MAX:
                self._quarantined.add(name)
                new.append(row)
        if not new:
            return []
        at = LedgerPosition(job.epoch, job.cursor)
        return self._append(QUARANTINE, at, quarantine_payload(new), by, now)

    @property
    def is_read(self) -> bool:
        """Whether the job's present launch has begun to read."""
        return self._open is not None

    @property
    def last_change(self) -> int:
        """The number of the last change; 0 without any."""
        found = (entry.seq for entry in reversed(self.entries) if entry.kind in (SKIP, TOMBSTONE))
        return next(found, 0)

    def changes(self, job: Job) -> tuple[LedgerEntry, ...]:
        """Return the changes that apply to the job's present generation."""
        return in_force(self.entries, job.spec, dataset_of(job.spec, job.identity), job.last_change)

    def midway(self, job: Job, after: int = 0) -> tuple[LedgerEntry, ...]:
        """Return the entries that take effect within the job's present launch and come after the
        entry with the number `after`.
        """
        some = [entry for entry in self._midway if entry.seq > after]
        own = [entry for entry in some if is_midway(entry, job.generation)]
        return holding(own, job.spec, dataset_of(job.spec, job.identity))

    def mix_of_request(self, request: str) -> LedgerEntry | None:
        """Return the entry that was made for this request, if there is one."""
        some = reversed(self._midway)
        return next((one for one in some if facts_of(one).get("request") == request), None)

    def mix(
        self, job: Job, request: str, weights: dict[str, float], at: LedgerPosition,
        by: str, now: float,
    ) -> list[Write]:  # fmt: skip
        """Append a change of weights, from this place on."""
        dataset = dataset_of(job.spec, job.identity)
        return self._append(MIX, at, mix_payload(request, weights, job.spec, dataset), by, now)

    def check_may_change(self) -> None:
        """Check that the job may be changed once more.

        Raises:  ConfigError: there were too many changes.
        """
        count = sum(entry.kind in _CHANGES for entry in self.entries)
        if count >= CHANGES_MAX:
            raise ConfigError(
                f"job {self._job_id!r} was changed {count} times already, which is the most that is"
                " allowed: start it under another name, and write the shards again without rows"
                " that were taken out",
                job=self._job_id,
            )

    def check_layout(self, job: Job) -> None:
        """Check that removed rows stay removed in a new generation.

        Raises:  ConfigError: the job reads another dataset, in which these rows have other names or
        do not exist.
        """
        dataset = dataset_of(job.spec, job.identity)
        taken = [entry for entry in self.entries if entry.kind == TOMBSTONE]
        if len(in_force(taken, job.spec, dataset)) < len(taken):
            raise ConfigError(
                f"job {job.job_id!r} reads another dataset than the one of which rows were taken "
                "out (`dataplane ledger show`), or another view of it: other shards, sizes, blocks,"
                " sources, or another where=, sample=, split= or limit=; with where=, also shards "
                "that were changed in place (their ETags). Start it under another "
                "name, and take out the rows of this dataset",
                job=job.job_id,
            )

    def skip(
        self, job: Job, asked: StepsSkipped, by: str, now: float, *, is_idle: bool
    ) -> tuple[LedgerEntry, list[Write]]:
        """Append skipped steps, unless an equal entry exists; return the entry in either case.

        Raises:  ConfigError: the steps cannot be skipped, or no longer; says why.
        """
        skip = _skipped(job, asked, is_idle=is_idle)
        payload = skip_payload(skip, job.spec, dataset_of(job.spec, job.identity))
        at = LedgerPosition(skip.epoch, skip.begin)
        for entry in self.entries:
            if (entry.kind, entry.payload, entry.position) == (SKIP, payload, at):
                return entry, []
        self.check_may_change()
        writes = self._append(SKIP, at, payload, by, now)
        return self.entries[-1], writes

    def same_rows(self, job: Job, asked: RowsTaken) -> LedgerEntry | None:
        """Return the entry that removes these rows, if there is one.

        Raises:  ConfigError: these rows cannot be removed.
        """
        rows = self._taken(job, asked, dataset_of(job.spec, job.identity))
        numbers = [row.numbers for row in rows]
        for entry in self.entries:
            if entry.kind == TOMBSTONE:
                facts = facts_of(entry)
                if (facts.get("rows"), facts.get("layout")) == (numbers, asked.layout):
                    return entry
        if asked.known != last_of(self.entries, TOMBSTONE):
            raise ConfigError(
                f"other rows of job {job.job_id!r} were taken out meanwhile, and together they may "
                "be too many of a block: repeat the command",
                field="rows",
            )
        self.check_may_change()
        return None

    def take_out(
        self, job: Job, asked: RowsTaken, at: LedgerPosition, by: str, now: float,
        generation: int = 0,
    ) -> list[Write]:  # fmt: skip
        """Append an entry that removes these rows from the next launch; with a generation, also
        from this place on of that launch.
        """
        rows, dataset = sorted(set(asked.rows)), dataset_of(job.spec, job.identity)
        payload = tombstone_payload(rows, job.spec, dataset, generation)
        return self._append(TOMBSTONE, at, payload, by, now)

    def remove(self) -> list[Write]:
        """Forget the job."""
        return [Forget(LedgerRecord, self._job_id, str(entry.seq)) for entry in self.entries]

    def _taken(self, job: Job, asked: RowsTaken, dataset: DatasetIdentity) -> list[Tombstone]:
        """Return the rows of a request, sorted, if they may be removed.

        Raises:  ConfigError: there are too many rows, or they are rows of another dataset.
        """
        if asked.layout != rows_layout(job.spec, dataset):
            raise ConfigError(
                f"the rows to take out are of another dataset than that of job {job.job_id!r}, or "
                "of another view: other shards, sizes or blocks, or another launch has begun "
                "meanwhile. Pass its place with --data, or repeat the command",
                field="data",
            )
        gone = changes_of(in_force(self.entries, job.spec, dataset)).tombstones
        count = len({*gone, *asked.rows})
        if not asked.rows or count > TOMBSTONES_MAX:
            raise ConfigError(
                f"{count} rows would be taken out of job {job.job_id!r}, but a job may lack only 1 "
                f"to {TOMBSTONES_MAX}: leave them out with where= on a column that names them, or "
                "write the shards again without them",
                field="rows",
            )
        return sorted(set(asked.rows))

    def _append(
        self, kind: str, at: LedgerPosition, payload: str, by: str, now: float
    ) -> list[Write]:
        seq = self.entries[-1].seq + 1 if self.entries else 1
        entry = LedgerEntry(seq, kind, at, payload, by, now, self._head)
        self.entries.append(entry)
        self._midway += [entry] if is_midway(entry, None) else []
        self._head = entry.hash
        self.marks = (*self.marks[1 - MARKS_MAX :], LedgerMark.of(entry))
        writes: list[Write] = [Keep(LedgerRecord(self._job_id, str(seq), entry))]
        if kind == WEIGHTS and sum(one.kind == WEIGHTS for one in self.entries) > WEIGHTS_MAX:
            writes.append(self._forget_oldest((WEIGHTS,)))
        elif len(self.entries) > ENTRIES_MAX:
            writes.append(self._forget_oldest(_MAY_GO))
        return writes

    def _forget_oldest(self, kinds: tuple[str, ...]) -> Write:
        may_go = (
            at
            for at, entry in enumerate(self.entries)
            if entry.kind in kinds and entry is not self._open
        )
        return Forget(LedgerRecord, self._job_id, str(self.entries.pop(next(may_go)).seq))


def _rows_of(entries: Iterable[LedgerEntry]) -> set[tuple[str, int]]:
    """Return the rows that entries report as not decodable. A damaged entry is skipped, since it
    must not prevent a coordinator from starting.
    """
    rows = set[tuple[str, int]]()
    for entry in entries:
        with contextlib.suppress(ConfigError):
            rows.update(quarantined_rows(entry))
    return rows


def _launch(job: Job) -> str:
    facts: dict[str, object] = {
        "dp_size": job.dp_size,
        "generation": job.generation,
        "global_batch": job.spec.global_batch,
        "launch": job.incarnation,
        "spec": job.spec.digest(),
    }
    if job.last_change:
        facts["last_change"] = job.last_change
    return canonical(facts)


def _skipped(job: Job, asked: StepsSkipped, *, is_idle: bool) -> Skip:
    """Return the positions of these steps.

    Raises:  ConfigError: there are no such steps, or a running job has begun them.
    """
    batch, epoch = job.spec.global_batch, job.epoch if asked.epoch is None else asked.epoch
    mixture, samples = job.spec.mixture, job.sample_count
    if mixture is not None and not mixture.length:
        samples = _SAMPLES_MAX  # an epoch's number of samples depends on the weights
    count = EpochSteps.of(job.spec, samples).count
    if not 0 <= asked.first < asked.stop <= count:
        raise ConfigError(
            f"there are no steps {asked.first}:{asked.stop}: an epoch of job {job.job_id!r} has "
            f"steps 0:{count}, of {batch} samples each; the second number is the first step that "
            "is not skipped",
            field="steps",
        )
    # A member does not report the step that it is consuming, so that step cannot be skipped either.
    following = -(-job.cursor // batch) + 1
    read = EpochSteps.of(job.spec, samples, dp_size=job.dp_size).count
    free = (job.epoch, following) if following < read else (job.epoch + 1, 0)
    if not is_idle and (epoch, asked.first) < free:
        raise ConfigError(
            f"job {job.job_id!r} is running and has begun some of the steps "
            f"{asked.first}:{asked.stop} of epoch {epoch}: the first step that can be skipped is "
            f"step {free[1]} of epoch {free[0]}. To leave out steps that it has begun, stop it, "
            f"skip them, and resume it from a checkpoint at step {asked.first} or before",
            field="steps",
        )
    return Skip(epoch, asked.first * batch, min(asked.stop * batch, samples))
