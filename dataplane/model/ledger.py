"""The ledger of a job: an append-only list of the inputs that decide what it trains on.

1. Entries are inputs, never rows: together with the dataset's manifest, they determine every row of
   every step.
2. Each entry contains the hash of the entry before it, so that no entry can be changed or removed
   unnoticed. The hash of an entry is the hash of its line of JSON.
3. A ledger is saved as JSON lines. The first line describes the job; it contains the hash of the
   last entry, and its own hash over everything else in the line.

`dataplane trace`, `where`, `replay` and `ledger` read such a file without a coordinator.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import DatasetIdentity, Unsigned
from dataplane.model.typed import complete

LEDGER_VERSION = 1
_OPTIONAL = {"schedule", "generation", "begin"}
MARK = b'{"ledger":'
"""The first bytes of a saved ledger, by which it is recognised."""


PLACE_MAX = 1 << 62
"""Epochs and positions are less than this, so that the sum of two fits into 64 bits."""
_RANKS_MAX = 1 << 20


class LedgerPosition(Struct, frozen=True, order=True):
    """A place in a job: an epoch, and how many of its positions are consumed."""

    epoch: Unsigned
    cursor: Unsigned


class LedgerEntry(Struct, frozen=True):
    """One entry. `payload` is a JSON object, as `canonical` writes it. By kind:

    start       a launch began to read at `position`: launch, generation, ranks, global batch
    end         the launch's last member left; the job had consumed everything up to `position`
    weights     members read with these shares of a mixture's sources from `position` on
    quarantine  these rows cannot be read; other rows were delivered in their places
    skip, tombstone, mix    people changed the job: see changes.py
    """

    seq: Unsigned
    kind: str
    position: LedgerPosition
    payload: str
    by: str
    at: float
    previous: str = ""

    @property
    def line(self) -> str:
        """Return the entry as a line of JSON."""
        plain = msgspec.to_builtins(self)
        return canonical({**plain, "payload": json.loads(self.payload)})

    @property
    def hash(self) -> str:
        """Return the hash as 32 hex digits."""
        return hashlib.blake2b(self.line.encode(), digest_size=16).hexdigest()

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> LedgerEntry:
        """Build an entry from a parsed line.

        Raises:  TypeError, msgspec.ValidationError: the line is not an entry.
        """
        return msgspec.convert({**plain, "payload": canonical(plain.get("payload"))}, complete(cls))


class LedgerMark(Struct, frozen=True):
    """Identifies an entry, and so all entries before it, by the first 16 digits of its hash."""

    seq: Unsigned
    hash: str

    @classmethod
    def of(cls, entry: LedgerEntry) -> LedgerMark:
        """Return the mark of an entry."""
        return cls(entry.seq, entry.hash[:16])

    def is_in(self, marks: Sequence[LedgerMark]) -> bool:
        """Return whether a ledger with these last entries contains the marked entry, or may have
        contained the entry before it dropped its oldest ones.
        """
        found = [mark for mark in marks if mark.seq >= self.seq]
        return bool(found) and (found[0].seq > self.seq or found[0] == self)


class SourceUrls(Struct, frozen=True):
    """The urls of one source of a mixture, and its format; "" to detect it from the suffix."""

    name: str
    urls: tuple[str, ...]
    format: str = ""


class PlannedStage(Struct, frozen=True):
    """A stage of a run's schedule. It lasts some steps or epochs, to the run's end if both are 0.
    `change` is how it begins within an epoch, and `options` names its options, for people.
    """

    steps: Unsigned = 0
    epochs: Unsigned = 0
    change: str = ""
    options: str = ""


class Schedule(Struct, frozen=True):
    """The rest of a run's schedule: the present stage and the stages after it. `made` counts the
    steps of the present stage that are over. `over` has a hash of each stage before it.
    """

    made: Unsigned
    stages: tuple[PlannedStage, ...]
    over: tuple[str, ...] = ()


class Ledger(Struct, frozen=True):
    """A job: its dataset, its spec, its progress, and its entries. `dataset` is None if it is
    unknown. `urls` are the urls of all sources of a mixture; `sources` lists them by source, and is
    empty if it is unknown which source has which urls. `schedule` is what is left of a schedule.
    `generation` is that of the loader's launch if rows were taken out of the running job, else 0;
    `begin` is where the launch began to read, if rows were taken out at all.
    """

    job_id: str
    urls: tuple[str, ...]
    spec: JobSpec
    sample_count: int
    dp_size: int
    format: str = ""
    epoch: int = 0
    cursor: int = 0
    dataset: DatasetIdentity | None = None
    sources: tuple[SourceUrls, ...] = ()
    schedule: Schedule | None = None
    generation: int = 0
    begin: LedgerPosition | None = None
    entries: tuple[LedgerEntry, ...] = ()

    @property
    def head(self) -> str:
        """The hash of the last entry; "" without entries."""
        return self.entries[-1].hash if self.entries else ""

    def to_lines(self) -> str:
        """Return the ledger as JSON lines."""
        about: dict[str, Any] = {"ledger": LEDGER_VERSION, "head": self.head}
        for name in self.__struct_fields__[:-1]:
            about[name] = msgspec.to_builtins(getattr(self, name))
        for name in _OPTIONAL:
            if not about[name]:
                del about[name]
        lines = (_first_line(about), *(entry.line for entry in self.entries))
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_lines(cls, text: str, name: str) -> Ledger:
        """Parse a text that `to_lines` wrote; errors call it `name`. Entries are not verified here,
        but by `faults`.

        Raises:  ConfigError: the text is not a ledger, or a newer version wrote it.
        """
        try:
            first, *lines = map(json.loads, filter(None, text.split("\n")))
            _check_plain([first, lines])
            version = first.pop("ledger")
            if version == LEDGER_VERSION:
                names = set(cls.__struct_fields__[:-1]) - (_OPTIONAL - first.keys())
                known = {name: first[name] for name in names}
                entries = [LedgerEntry.of_plain(line) for line in lines]
                ledger = msgspec.convert({**known, "entries": entries}, complete(cls))
                ledger.check_places()
                return ledger
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{name} is not a ledger, or damaged: {error}", path=name) from error
        raise ConfigError(
            f"{name} is a ledger of version {version!r}, but this Dataplane reads version "
            f"{LEDGER_VERSION}: use the release that wrote it, or a newer one",
            path=name,
            expected=LEDGER_VERSION,
            found=version,
        )

    def check_places(self) -> None:
        """Check the positions and counts.

        Raises:  ValueError: a position or a count is out of range.
        """
        places = [
            LedgerPosition(self.epoch, self.cursor),
            *(entry.position for entry in self.entries),
            *(() if self.begin is None else (self.begin,)),
        ]
        numbers = (self.sample_count, *(n for at in places for n in (at.epoch, at.cursor)))
        if wrong := [number for number in numbers if not 0 <= number < PLACE_MAX]:
            raise ValueError(f"epochs, positions and counts must be 0 to 2**62 - 1, not {wrong[0]}")
        if not 1 <= self.dp_size <= _RANKS_MAX:
            raise ValueError(f"dp_size must be 1 to {_RANKS_MAX:,}, not {self.dp_size}")


def text_faults(text: str, ledger: Ledger) -> tuple[str, list[str]]:
    """Return the hash in the first line of a saved ledger, and a text for each fault of its entries
    and of each line that differs from what `to_lines` would write. `ledger` is the parsed `text`.
    """
    lines = text.split("\n")
    about = json.loads(next(filter(None, lines)))
    own_hash, wrong = about.pop("hash", None), []
    if own_hash is None:
        wrong.append("the first line has no hash, which is needed to detect a change: export again")
    wrong += faults(ledger.entries, str(about.get("head", "")))
    expected = (_first_line(about), *(entry.line for entry in ledger.entries), "")
    for number, pair in enumerate(itertools.zip_longest(lines, expected), 1):
        if pair[0] != pair[1]:
            wrong.append(f"line {number} was changed after it was written")
            break
    return str(own_hash or ""), wrong


def faults(entries: Sequence[LedgerEntry], head: str) -> Iterator[str]:
    """Yield a text for each fault of these entries, whose last one must have the hash `head`. A
    coordinator drops the oldest of too many entries, so a gap between numbers is not a fault.
    """
    for before, after in itertools.pairwise(entries):
        if after.seq <= before.seq:
            yield f"entry {before.seq} is followed by entry {after.seq}, which is no later one"
        elif after.seq == before.seq + 1 and after.previous != before.hash:
            yield f"entry {after.seq} contains the hash of another entry than {before.seq}"
    last = entries[-1].hash if entries else ""
    if last != head:
        yield f"the last entry has the hash {last or '(none)'}, expected {head or '(none)'}"


def _first_line(about: dict[str, Any]) -> str:
    own = hashlib.blake2b(canonical(about).encode(), digest_size=16).hexdigest()
    return json.dumps({**about, "hash": own}, separators=(",", ":"), ensure_ascii=False)


def _check_plain(value: Any) -> None:
    """Check the numbers and texts of a parsed document.

    Raises:  ValueError: a number does not fit into 64 bits, or a text is not valid Unicode.
    """
    if isinstance(value, str):
        value.encode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{str(value)[:24]}… does not fit into 64 bits")
    if isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_plain(inner)


def canonical(value: Any) -> str:
    """Return JSON text that is the same for equal values.

    Raises:  ValueError: a number that JSON cannot represent.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
