"""The ledger of one job at its coordinator. Pure; the roster keeps it.

Invariants:
1. Entries are only appended. Their number is bounded: of too many, the oldest starts and ends of
   launches are left out, and nothing else ever is.
2. A launch that reads has a start, and an end once its last member went, or a newer one took over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dataplane.coordinator.records import Forget, Job, Keep, LedgerRecord, Write
from dataplane.ledger import LedgerEntry, LedgerPosition, canonical
from dataplane.rpc.membership import MemberProgress

ENTRIES_MAX = 4096
_OF_LAUNCHES = ("start", "end")


class JobLedger:
    """The entries of a job, oldest first."""

    def __init__(self, job_id: str, entries: Iterable[LedgerEntry] = ()) -> None:
        self._job_id = job_id
        self.entries = sorted(entries, key=lambda entry: entry.seq)
        self._head = self.entries[-1].hash if self.entries else ""
        starts = [entry for entry in self.entries if entry.kind in _OF_LAUNCHES]
        self._open = starts[-1] if starts and starts[-1].kind == "start" else None

    def reading(self, job: Job, progress: MemberProgress, by: str, now: float) -> list[Write]:
        """A member of the job's present generation reads: note the start of its launch."""
        if progress.began is None or self._open is not None:
            return []
        at = progress.began
        if any(entry.payload == _launch(job) for entry in reversed(self.entries)):
            # The launch had ended, and its members are back.
            at = LedgerPosition(progress.epoch, progress.cursor)
        writes = self._append("start", at, _launch(job), by, now)
        self._open = self.entries[-1]
        return writes

    def ended(self, job: Job, why: str, now: float) -> list[Write]:
        """Nobody of the launch reads any more: note where the job is, if it ever began."""
        if self._open is None:
            return []
        begun, self._open = self._open.position, None
        at = max(begun, LedgerPosition(job.epoch, job.cursor))
        return self._append("end", at, canonical({"why": why}), "coordinator", now)

    def remove(self) -> list[Write]:
        """Forget the job."""
        return [Forget(LedgerRecord, self._job_id, str(entry.seq)) for entry in self.entries]

    def _append(
        self, kind: str, at: LedgerPosition, payload: str, by: str, now: float
    ) -> list[Write]:
        seq = self.entries[-1].seq + 1 if self.entries else 1
        entry = LedgerEntry(seq, kind, at, payload, by, now, self._head)
        self.entries.append(entry)
        self._head = entry.hash
        writes: list[Write] = [Keep(LedgerRecord(self._job_id, str(seq), entry))]
        if len(self.entries) > ENTRIES_MAX:
            old = next(i for i, one in enumerate(self.entries) if one.kind in _OF_LAUNCHES)
            writes.append(Forget(LedgerRecord, self._job_id, str(self.entries.pop(old).seq)))
        return writes


def _launch(job: Job) -> str:
    facts: Mapping[str, object] = {
        "dp_size": job.dp_size,
        "generation": job.generation,
        "global_batch": job.spec.global_batch,
        "launch": job.incarnation,
        "spec": job.spec.digest(),
    }
    return canonical(facts)
