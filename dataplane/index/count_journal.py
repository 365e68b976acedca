"""The cache of counts between runs: one folder for each dataset and view.

1. Counts are used only for the same shard (url, size, etag) and the same blocks of it.
2. Each process appends to its own log, as in journal.py. A finished run leaves one log, and the
   counts of the last few manifests. Of all datasets and views together, the last few hundred stay.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dataplane.formats.index_frames import frame, frames_in
from dataplane.index.journal import (
    cache_faults,
    publish,
    write_all,
    written_at,
)
from dataplane.model.errors import CorruptShard
from dataplane.plan.manifest import Int64, sealed, unsealed

KEPT = 4
VIEWS_KEPT = 256
_SUFFIX = ".counts"


class CountJournal:
    """The cache of one dataset and view, under the folder name `name`."""

    def __init__(self, cache_dir: str, name: str) -> None:
        self._folder = Path(cache_dir) / "counts" / name
        self._log: int | None = None
        self._log_path = self._folder / f"run-{secrets.token_hex(8)}.log"
        with cache_faults(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._found = sorted(self._folder.glob("*.log"))

    def finished(self, fingerprint: str, block_count: int) -> Int64 | None:
        """Return a manifest's counts, if an earlier run has finished them and they are intact.

        Shapes:  result: int64[blocks].
        """
        path = self._folder / f"{fingerprint}{_SUFFIX}"
        try:
            body = unsealed(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        except CorruptShard:
            body = memoryview(b"")
        if len(body) != 8 * block_count:
            path.unlink(missing_ok=True)
            return None
        return np.frombuffer(body, "<i8").astype(np.int64)

    def remembered(self) -> dict[str, Int64]:
        """Return the counts of stretches of blocks that earlier runs wrote, by key."""
        found: dict[str, Int64] = {}
        for path in self._found:
            with contextlib.suppress(FileNotFoundError):
                for facts, body in frames_in(path.read_bytes()):
                    found[facts["blocks"]] = np.frombuffer(body, "<i8").astype(np.int64)
        return found

    def remember(self, key: str, counts: Int64) -> None:
        """Append the counts of a stretch to this process's log."""
        with cache_faults(self._folder):
            if self._log is None:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
                self._log = os.open(self._log_path, flags, 0o600)
            write_all(self._log, _stretch(key, counts))

    def finish(
        self, fingerprint: str, counts: Int64, stretches: Iterable[tuple[str, Int64]]
    ) -> None:
        """Publish the counts of a manifest and one log of its stretches; remove other logs."""
        kept = self._folder / f"stretches-{fingerprint}.log"
        with cache_faults(self._folder):
            publish(kept, b"".join(_stretch(*one) for one in stretches))
            publish(
                self._folder / f"{fingerprint}{_SUFFIX}", sealed(counts.astype("<i8").tobytes())
            )
            for path in {*self._found, self._log_path} - {kept}:
                path.unlink(missing_ok=True)
            finished = sorted(self._folder.glob(f"*{_SUFFIX}"), key=written_at, reverse=True)
            for path in finished[KEPT:]:
                path.unlink(missing_ok=True)
            views = sorted(self._folder.parent.iterdir(), key=written_at, reverse=True)
            for folder in views[VIEWS_KEPT:]:
                import shutil

                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Close the log; its content stays for the next run."""
        if self._log is not None:
            os.close(self._log)
            self._log = None


def _stretch(key: str, counts: Int64) -> bytes:
    return frame({"blocks": key}, counts.astype("<i8").tobytes())
