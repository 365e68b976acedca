"""The settings, the samples and the journals of the demo's trainers.

Samples are real text that every machine with Python has: the source of the standard library, as
bytes. Journals are plain JSON, one line a step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray


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


ROW_TOKENS = 513
"""512 tokens of input and the token that follows them, which is also the next row's first."""

_STRIDE = ROW_TOKENS - 1
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The text cut into samples; a sample's id is its row.

    Shapes:  tokens: int32[samples, ROW_TOKENS], bytes 0..255.
    """

    tokens: NDArray[np.int32]
    file_count: int

    @property
    def sample_count(self) -> int:
        return len(self.tokens)

    def sums(self) -> NDArray[np.int64]:
        """Every sample's checksum.   Shapes:  result: int64[samples]."""
        return row_sums(self.tokens)


def row_sums(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """A checksum of each row's bytes.   Shapes:  tokens: int32[n, k].   result: int64[n]."""
    return np.array([zlib.crc32(row.data) for row in np.ascontiguousarray(tokens)], np.int64)


def corpus(sample_count: int) -> Corpus:
    """The first samples of the standard library's *.py files, joined in sorted order.

    Raises:  ValueError: there is not enough text.
    """
    needed = sample_count * _STRIDE + 1
    parts: list[bytes] = []
    length = 0
    for source in _sources():
        parts.append(source.read_bytes())
        length += len(parts[-1])
        if length >= needed:
            break
    if length < needed:
        raise ValueError(f"the standard library has {length} bytes of source, not {needed}")
    text = np.frombuffer(b"".join(parts), np.uint8)
    rows = np.lib.stride_tricks.sliding_window_view(text, ROW_TOKENS)[::_STRIDE][:sample_count]
    return Corpus(rows.astype(np.int32), len(parts))


def parquet_shards(text: Corpus, shard_count: int, group_rows: int) -> dict[str, bytes]:
    """Name and content of each shard: columns `id` and `tokens`, several row groups each."""
    shards = {}
    pieces = np.array_split(np.arange(text.sample_count), shard_count)
    for index, ids in enumerate(pieces):
        values = pa.array(text.tokens[ids].reshape(-1), pa.int32())
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "tokens": pa.FixedSizeListArray.from_arrays(values, ROW_TOKENS),
            }
        )
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=group_rows, compression="zstd")
        shards[f"text-{index:05d}.parquet"] = sink.getvalue().to_pybytes()
    return shards


def _sources() -> Iterator[Path]:
    """Yield the library's modules in sorted order, without a look into folders of installed
    packages: they hold a hundred times as many files.
    """
    sources: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - _NOT_THE_LIBRARY
        sources += (Path(folder, name) for name in names if name.endswith(".py"))
    yield from sorted(sources)
