"""The coordinator's state on disk: SQLite, one connection, one writer.

SQLite before 3.51.3 can corrupt a WAL database with two connections, so the store uses one
connection and a rollback journal. The file is locked as long as it is open: a second coordinator on
the same file is refused. After a SIGKILL, the kernel drops the lock and SQLite rolls back
incomplete writes.

Calls block, so front.py makes them from a thread.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from dataplane.base.machine import lock_holder
from dataplane.coordinator.records import (
    Forget,
    Incarnation,
    Job,
    Keep,
    LedgerRecord,
    Member,
    Record,
    Write,
    key_of,
)
from dataplane.model.errors import ConfigError, DataplaneError, NotWrittenError
from dataplane.model.typed import complete

SCHEMA_VERSION = 1
MEMORY = ":memory:"
_APPLICATION_ID = 0x44504C43  # "DPLC": distinguishes our files from other SQLite databases
_LOCK_TIMEOUT_S = 3.0
_SHOWN_MAX = 200
_REMEDY = (
    "restore it from a copy, or move it away: then every job starts at generation 1, and running "
    "ranks join again"
)
# Errors that may be repaired while the coordinator runs: a full disk, or one that fails.
_PASSING = ("SQLITE_FULL", "SQLITE_IOERR")
_TABLE = (
    "CREATE TABLE IF NOT EXISTS {} (job TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL, "
    "PRIMARY KEY (job, name)) WITHOUT ROWID"
)
_TABLES: dict[type[Record], str] = {
    Job: "jobs",
    Member: "members",
    Incarnation: "incarnations",
    LedgerRecord: "ledger",
}


class JobStore:
    """One database file, or ":memory:" for a coordinator inside a node."""

    def __init__(self, path: str) -> None:
        """Open or create the database, and lock it.

        Raises:  ConfigError: the database cannot be written, is locked, damaged, of another
        program, or of a newer version.
        """
        self.path = path
        if path != MEMORY:
            _make_private(Path(path))
        try:
            self._db = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
        except sqlite3.Error as error:
            raise self._refusal(error) from error
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._db.close()
            raise self._refusal(error) from error
        except ConfigError:
            self._db.close()
            raise

    def load(self) -> list[Record]:
        """Return all stored records.

        Raises:  ConfigError: the database is damaged, or a newer version has written to it.
        """
        records: list[Record] = []
        try:
            for cls, table in _TABLES.items():
                rows = self._db.execute(f"SELECT job, body FROM {table}")  # noqa: S608 - ours
                records += [self._record(cls, table, str(job), body) for job, body in rows]
        except sqlite3.Error as error:
            raise self._refusal(error) from error
        return records

    def _record(self, cls: type[Record], table: str, name: str, body: Any) -> Record:
        """Decode a stored record.

        Raises:  ConfigError: the record cannot be read.
        """
        try:
            return _read(cls, body)
        except Exception as error:  # stored bytes may be invalid in any way
            raise ConfigError(
                f"{self.path}: the record {name[:_SHOWN_MAX]!r} of {table} cannot be read "
                f"({type(error).__name__}: {str(error)[:_SHOWN_MAX]}). Another version of "
                f"Dataplane has written it: use that version; or it is damaged: {_REMEDY}",
                path=self.path,
            ) from error

    def write(self, writes: Iterable[Write]) -> None:
        """Write all of these or none; they are on disk when this returns.

        Raises:  NotWrittenError: the disk is full or failed; nothing was changed.  ConfigError.
        """
        try:
            with self._transaction():
                for write in writes:
                    self._apply(write)
        except sqlite3.Error as error:
            raise self._not_written(error) from error

    def close(self) -> None:
        """Unlock and close; may be called twice."""
        self._db.close()

    def _apply(self, write: Write) -> None:
        cls, job_id, name = key_of(write)
        table = _TABLES[cls]
        if isinstance(write, Forget):
            where = (job_id, name)
            self._db.execute(f"DELETE FROM {table} WHERE job = ? AND name = ?", where)  # noqa: S608
        else:
            row = (job_id, name, _body(write))
            self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", row)  # noqa: S608

    def _prepare(self) -> None:
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = TRUNCATE")
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            version = self._pragma("user_version")
            application = self._pragma("application_id")
            if version == 0 and application == 0 and self._is_empty():
                self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif application != _APPLICATION_ID:
                raise ConfigError(
                    f"{self.path} is the database of another program: use another file",
                    path=self.path,
                )
            elif version != SCHEMA_VERSION:
                raise ConfigError(
                    f"{self.path} was written by another version of Dataplane (schema {version}; "
                    f"this one has {SCHEMA_VERSION}): use that version, or use another file",
                    path=self.path,
                    expected=SCHEMA_VERSION,
                    found=version,
                )
            for table in _TABLES.values():
                self._db.execute(_TABLE.format(table))
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self._damaged(str(verdict))

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)

    def _pragma(self, name: str) -> int:
        (value,) = self._db.execute(f"PRAGMA {name}").fetchone()
        return int(value)

    def _is_empty(self) -> bool:
        (count,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return int(count) == 0

    def _not_written(self, error: sqlite3.Error) -> DataplaneError:
        if not _errorname(error).startswith(_PASSING):
            return self._refusal(error)
        return NotWrittenError(
            f"the coordinator cannot write {self.path}: {error}. Nothing is lost, and it tries "
            "again with every request: make room on that disk"
        )

    def _refusal(self, error: sqlite3.Error) -> ConfigError:
        name = _errorname(error)
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            pid = lock_holder(Path(self.path))
            who = "another coordinator" + (f" (process {pid})" if pid else "")
            return ConfigError(
                f"{self.path} is locked: {who} uses it. Stop that process, or use another folder "
                "(--state-dir, DATAPLANE_STATE_DIR)",
                path=self.path,
            )
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return self._damaged(str(error))
        return ConfigError(
            f"{self.path} cannot be used: {error}. It needs a local disk with free space, and "
            "write permission for file and folder",
            path=self.path,
        )

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path} is damaged: {why}. {_REMEDY[0].upper()}{_REMEDY[1:]}", path=self.path
        )


def _errorname(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "")


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK if anything fails."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self._db.execute("COMMIT")
            except sqlite3.Error:
                self._roll_back()
                raise
        else:
            self._roll_back()

    def _roll_back(self) -> None:
        # Some failures (such as a full disk) have already rolled back.
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")


def _make_private(path: Path) -> None:
    """Create the file for this user alone, since SQLite would follow the umask."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened: {error.strerror}. The coordinator's database needs write "
            "permission for file and folder",
            path=str(path),
        ) from error


def _body(write: Keep) -> str:
    plain = msgspec.to_builtins(write.record)
    plain.pop("deadline", None)
    return json.dumps(plain, separators=(",", ":"))


def _read(cls: type[Record], body: str) -> Record:
    plain = json.loads(body)
    record: Record = msgspec.convert(plain, complete(cls))
    if not _has_all(plain, msgspec.to_builtins(record)):
        raise ValueError("it has a field that this version does not know")
    return record


def _has_all(plain: Any, known: Any) -> bool:
    """Return whether all keys of nested values are among those of `known`."""
    if isinstance(plain, dict):
        return all(name in known and _has_all(part, known[name]) for name, part in plain.items())
    return not isinstance(plain, list) or all(map(_has_all, plain, known))
