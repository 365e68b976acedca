"""The ledger of a job: what it was given to train on, as an append-only list.

1. Entries are inputs, never rows: with the dataset's manifest they say every row of every step.
2. Each entry names the hash of the one before, so that none can be changed, or taken out of the
   middle, unnoticed. The hash of an entry is that of its line, as it is written.
3. Saved as JSON lines, the first line describes the job, and says the hash of the last entry, and
   its own without that.

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
MARK = b'{"ledger":'
"""How a ledger begins: no other JSON lines do."""


PLACE_MAX = 1 << 62
"""Epochs and positions are below it: sums of two fit into 64 bits."""
_RANKS_MAX = 1 << 20


class LedgerPosition(Struct, frozen=True, order=True):
    """A place in a job: an epoch, and the positions of it that are consumed."""

    epoch: Unsigned
    cursor: Unsigned


class LedgerEntry(Struct, frozen=True):
    """One entry. `payload` is a JSON object, as `canonical` writes it.

    start    a launch began to read at `position`: launch, generation, ranks, global batch
    end      its last member went; the job had consumed everything up to `position`
    weights  members read with these shares of a mixture's sources from `position` on
    quarantine    rows have images that cannot be decoded; others were delivered in their places
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
        """The entry as a line of JSON."""
        plain = msgspec.to_builtins(self)
        return canonical({**plain, "payload": json.loads(self.payload)})

    @property
    def hash(self) -> str:
        """32 hex digits."""
        return hashlib.blake2b(self.line.encode(), digest_size=16).hexdigest()

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> LedgerEntry:
        """The entry of a line.

        Raises:  TypeError, msgspec.ValidationError: it is none.
        """
        return msgspec.convert({**plain, "payload": canonical(plain.get("payload"))}, complete(cls))


class LedgerMark(Struct, frozen=True):
    """Names an entry, and so all before it, by the first 16 digits of its hash."""

    seq: Unsigned
    hash: str

    @classmethod
    def of(cls, entry: LedgerEntry) -> LedgerMark:
        """The mark of an entry."""
        return cls(entry.seq, entry.hash[:16])

    def is_in(self, marks: Sequence[LedgerMark]) -> bool:
        """Whether a ledger with these last entries has it. True if it may have had it: it may have
        left out old entries.
        """
        found = [one for one in marks if one.seq >= self.seq]
        return bool(found) and (found[0].seq > self.seq or found[0] == self)


class SourceUrls(Struct, frozen=True):
    """Where one source of a mixture is, and in which format ("" for the one that it looks like)."""

    name: str
    urls: tuple[str, ...]
    format: str = ""


class Ledger(Struct, frozen=True):
    """A job: its dataset, its spec, how far it was, and its entries. `dataset` is None if that is
    unknown. `urls` are those of all sources of a mixture, and `sources` says which one has which;
    it is empty if that is unknown.
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
    entries: tuple[LedgerEntry, ...] = ()

    @property
    def head(self) -> str:
        """The hash of the last entry; "" without entries."""
        return self.entries[-1].hash if self.entries else ""

    def to_lines(self) -> str:
        """The ledger as JSON lines."""
        about: dict[str, Any] = {"ledger": LEDGER_VERSION, "head": self.head}
        for name in self.__struct_fields__[:-1]:
            about[name] = msgspec.to_builtins(getattr(self, name))
        lines = (_first_line(about), *(entry.line for entry in self.entries))
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_lines(cls, text: str, name: str) -> Ledger:
        """The inverse of `to_lines`; `name` is what errors call it. Entries are read as they are:
        `faults` checks them.

        Raises:  ConfigError: it is not a ledger, or of a newer version.
        """
        try:
            first, *lines = map(json.loads, filter(None, text.split("\n")))
            _check_plain([first, lines])
            version = first.pop("ledger")
            if version == LEDGER_VERSION:
                known = {name: first[name] for name in cls.__struct_fields__[:-1]}
                entries = [LedgerEntry.of_plain(line) for line in lines]
                ledger = msgspec.convert({**known, "entries": entries}, complete(cls))
                ledger.check_places()
                return ledger
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{name} is not a ledger, or damaged: {error}", path=name) from error
        raise ConfigError(
            f"{name} is a ledger of version {version!r}, and this Dataplane knows version "
            f"{LEDGER_VERSION}: use the release that wrote it, or a newer one",
            path=name,
            expected=LEDGER_VERSION,
            found=version,
        )

    def check_places(self) -> None:
        """Raises:  ValueError: a place or a count that no job has."""
        places = [LedgerPosition(self.epoch, self.cursor), *(one.position for one in self.entries)]
        numbers = (self.sample_count, *(n for at in places for n in (at.epoch, at.cursor)))
        if wrong := [one for one in numbers if not 0 <= one < PLACE_MAX]:
            raise ValueError(f"epochs, positions and counts are 0 to 2**62 - 1, not {wrong[0]}")
        if not 1 <= self.dp_size <= _RANKS_MAX:
            raise ValueError(f"dp_size is 1 to {_RANKS_MAX:,}, not {self.dp_size}")


def text_faults(text: str, ledger: Ledger) -> tuple[str, list[str]]:
    """The hash in the first line of a saved ledger, which `from_lines` has read, and the faults of
    its entries, and of how it is written, since every line is as `to_lines` writes it.
    """
    lines = text.split("\n")
    about = json.loads(next(filter(None, lines)))
    own_hash, wrong = about.pop("hash", None), []
    if own_hash is None:
        wrong.append("the first line has no hash, which would show a change: export it again")
    wrong += faults(ledger.entries, str(about.get("head", "")))
    expected = (_first_line(about), *(entry.line for entry in ledger.entries), "")
    for number, pair in enumerate(itertools.zip_longest(lines, expected), 1):
        if pair[0] != pair[1]:
            wrong.append(f"line {number} is not as it was written")
            break
    return str(own_hash or ""), wrong


def faults(entries: Sequence[LedgerEntry], head: str) -> Iterator[str]:
    """The faults of these entries, whose last one has the hash `head`. A coordinator leaves out old
    ones of too many; this is told, but is no fault.
    """
    for before, after in itertools.pairwise(entries):
        if after.seq <= before.seq:
            yield f"entry {after.seq} comes after entry {before.seq}"
        elif after.seq == before.seq + 1 and after.previous != before.hash:
            yield f"entry {before.seq} is not the one that entry {after.seq} follows"
    last = entries[-1].hash if entries else ""
    if last != head:
        yield f"the last entry has the hash {last or '(none)'}, not {head or '(none)'}"


def _first_line(about: dict[str, Any]) -> str:
    own = hashlib.blake2b(canonical(about).encode(), digest_size=16).hexdigest()
    return json.dumps({**about, "hash": own}, separators=(",", ":"), ensure_ascii=False)


def _check_plain(value: Any) -> None:
    """Raises:  ValueError: a number that has no room in 64 bits, or a text that is none."""
    if isinstance(value, str):
        value.encode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{str(value)[:24]}… has no room in 64 bits")
    if isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_plain(inner)


def canonical(value: Any) -> str:
    """JSON that is the same for equal values.

    Raises:  ValueError: a number that JSON does not have.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
