"""The settings and the journals of the demo's trainers: plain JSON, one line per step."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of one launch of the demo's trainer; most are the same for all launches."""

    url: str
    service: str
    folder: str
    launch: str
    seed: int
    global_batch: int
    sample_count: int
    checkpoint_every: int
    context: int
    learning_rate: float
    resume: bool

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder, "checkpoint.pt")

    def journal(self, rank: int) -> Path:
        """The journal of one rank of this launch."""
        return Path(self.folder, f"{self.launch}-rank-{rank}.jsonl")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Run:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Step:
    """One step as one rank saw it. `loss` is the loss of the global batch before the step.

    `wait_s` is the part of `step_s` in which the rank waited for its batch; `saved` says whether a
    checkpoint was written after the step.
    """

    step: int
    loss: float
    ids: tuple[int, ...]
    batch_bytes: int
    step_s: float
    wait_s: float
    saved: bool


class JournalWriter:
    """Appends steps, line by line, so that others can read them even if this process dies."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8", buffering=1)

    def write(self, step: Step) -> None:
        self._file.write(json.dumps(dataclasses.asdict(step)) + "\n")

    def close(self) -> None:
        self._file.close()


class JournalReader:
    """Follows a journal that is being written."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[Step]:
        """The steps whose lines were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_step(line) for line in whole.splitlines()]


def _step(line: bytes) -> Step:
    fields = json.loads(line)
    return Step(**(fields | {"ids": tuple(fields["ids"])}))
