"""The shards of every system, each in its own format: made once, kept for later runs.

A folder is complete or absent: it is written under another name and then renamed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataplane_bench.model import BenchCase, DatasetPlace, StorageKind, Workload
from dataplane_bench.peers.registry import adapter
from dataplane_bench.trial.launch import Contestant, run_order

PREPARE_TIMEOUT_S = 1800.0


class Prepared:
    """Places by system, workload and store. `storage` starts the S3 server when first called."""

    def __init__(
        self, root: Path, trials: Path, storage: Callable[[], Any], say: Callable[[str], None]
    ) -> None:
        self._root, self._trials = root, trials
        self._storage, self._say = storage, say
        self._uploaded: set[Path] = set()

    def place(self, system: str, python: str, workload: Workload, case: BenchCase) -> DatasetPlace:
        """The place of a system's shards in this case; converts and uploads them if necessary.

        Raises:  TrialFailed: the conversion failed.
        """
        layout = adapter(system).layout(workload)
        folder = self._root / workload.fingerprint / layout
        if not folder.exists():
            self._convert(system, python, workload, folder)
        return self._at(folder, case)

    def source(self, workload: Workload, case: BenchCase) -> DatasetPlace:
        """The source shards in this case, for measurements of the server."""
        return self._at(workload.source, case)

    def server_cpu_s(self) -> float:
        """CPU seconds that the S3 server and the delay before it have used so far."""
        return float(self._storage().cpu_s())

    def _at(self, folder: Path, case: BenchCase) -> DatasetPlace:
        if case.store is StorageKind.LOCAL:
            return DatasetPlace(folder, str(folder))
        if folder not in self._uploaded:
            self._say(f"uploading {folder.name}")
            self._uploaded.add(folder)
        found: DatasetPlace = self._storage().place(folder, case)
        return found

    def _convert(self, system: str, python: str, workload: Workload, folder: Path) -> None:
        self._say(f"{workload.name}: writing {folder.name} for {system}")
        new = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            case = BenchCase("prepare", workload.name)
            who = Contestant(system, python, DatasetPlace(new, str(new)), {})
            run_order("prepare", who, case, workload, self._trials, PREPARE_TIMEOUT_S)
            # If another run has made the folder meanwhile, use that one.
            with contextlib.suppress(OSError):
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
