"""An iterable dataset for torch's DataLoader that reads the files of memmaps.py from S3 by ranges.

A block is some whole batches of rows that lie together. Each epoch the blocks are permuted and
dealt to ranks and their workers; a worker fetches a window of blocks at once, shuffles its rows,
and fetches the next windows meanwhile. The first windows are small, so that batches come soon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import obstore
import s3fs
import torch
from numpy.typing import NDArray
from obstore.store import from_url
from torch.utils.data import IterableDataset, get_worker_info

from dataplane_bench.model import DatasetPlace, TrialTask
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.base import SHUFFLE_BUFFER
from dataplane_bench.peers.memmaps import MappedRows, Packed

BLOCK_BYTES = 4 << 20
"""About: large enough that a request costs little beside it."""
_AHEAD = 2
_AT_ONCE = 16
_DEALT_MIN = 4
"""Blocks of each worker, at least, where there are so many batches."""

State = dict[str, Any]
Range = tuple[str, int, int]
Read = Callable[[Sequence[Range]], list[Any]]
"""Reads ranges (file, first byte, byte behind the last) of a place; bytes-like objects."""


class Streamed(IterableDataset[Packed]):
    """Batches of one rank. `epoch` is for the next pass, in workers that are there already too."""

    def __init__(self, task: TrialTask) -> None:
        self.task = task
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._files: Files | None = None

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch.fill_(number)

    def __iter__(self) -> _Pass:
        # Each process has its own client: clients do not survive a fork.
        if self._files is None:
            self._files = Files(self.task)
        return _Pass(self.task, self._files, self.epoch)


class _Pass:
    """A worker's batches of one epoch; StatefulDataLoader asks it for its state."""

    def __init__(self, task: TrialTask, files: Files, epoch: int) -> None:
        self._task, self._files, self._epoch = task, files, epoch
        self._done = 0
        self._batches: Iterator[Packed] | None = None

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Packed:
        if self._batches is None:
            self._batches = self._read(self._done)
        batch = next(self._batches)
        self._done += 1
        return batch

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._done, self._batches = state["epoch"], state["done"], None

    def _read(self, skipped: int) -> Iterator[Packed]:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        task, size = self._task, self._task.workload.batch_size
        dealt = self._files.blocks(task, self._epoch, count)[index::count]
        windows = []
        for number, window in enumerate(windowed(dealt, math.ceil(SHUFFLE_BUFFER / count))):
            batches = sum(-(-(end - start) // size) for start, end in window)
            if skipped < batches:
                windows.append((number, window, skipped))
            skipped = max(skipped - batches, 0)
        random = np.random.default_rng((task.seed, self._epoch, task.rank, index))
        for number, rows, first in _ahead(self._files.rows, windows):
            rows.random = random
            own = np.random.default_rng((task.seed, self._epoch, task.rank, index, number))
            order = own.permutation(rows.count)
            for start in range(first * size, rows.count, size):
                yield rows.gather(order[start : start + size])


Block = tuple[int, int]
Window = Sequence[Block]


def windowed(blocks: Sequence[Block], row_count: int) -> Iterator[Window]:
    """Blocks to be shuffled together: one, twice as many, and so on, up to `row_count` rows."""
    at, count = 0, 1
    while at < len(blocks):
        window = list(blocks[at : at + count])
        yield window
        at += len(window)
        if sum(end - start for start, end in window) < row_count:
            count *= 2


def _ahead(
    fetch: Callable[[Window], MappedRows], windows: Sequence[tuple[int, Window, int]]
) -> Iterator[tuple[int, MappedRows, int]]:
    """The rows of windows in turn, the next ones on their way meanwhile."""
    with ThreadPoolExecutor(_AHEAD) as threads:
        coming: list[Future[MappedRows]] = []
        for at, (number, _, first) in enumerate(windows):
            while len(coming) <= _AHEAD and at + len(coming) < len(windows):
                coming.append(threads.submit(fetch, windows[at + len(coming)][1]))
            yield number, coming.pop(0).result(), first


class Files:
    """The files of a workload in S3."""

    def __init__(self, task: TrialTask) -> None:
        self._workload = task.workload
        # Settings that were found with local files name no client.
        self._read = CLIENTS[task.settings.get("client", "obstore")](task.place)
        width = np.dtype(np.int64).itemsize * (task.workload.sample_count + 1)
        names = [column.name for column in memmaps.listed(task.workload)]
        contents = self._read([(f"{name}.offsets", 0, width) for name in names]) if names else []
        self._offsets: dict[str, NDArray[np.int64]] = {
            name: np.frombuffer(content, np.int64)
            for name, content in zip(names, contents, strict=True)
        }

    def blocks(self, task: TrialTask, epoch: int, workers: int) -> list[Block]:
        """Where this rank's blocks of an epoch begin and end, in rows; the smaller one is last."""
        count, size = task.workload.sample_count, task.workload.batch_size
        row_bytes = sum(dense.row_bytes for dense in memmaps.dense_files(self._workload))
        for column in memmaps.listed(self._workload):
            total = int(self._offsets[column.name][-1])
            row_bytes += total * memmaps.values_dtype(column).itemsize // count
        batches = max(BLOCK_BYTES // (row_bytes * size), 1)
        batches = min(batches, max(count // size // (task.size * workers * _DEALT_MIN), 1))
        step = batches * size
        random = np.random.default_rng((task.seed, epoch))
        starts = [int(number) * step for number in random.permutation(count // step)]
        blocks = [(start, start + step) for start in starts]
        if count % step:
            blocks.append((count - count % step, count))
        return blocks[task.rank :: task.size]

    def rows(self, window: Window) -> MappedRows:
        """The rows of a window."""
        dense = memmaps.dense_files(self._workload)
        lists = memmaps.listed(self._workload)
        wanted: list[Range] = []
        for table in dense:
            wanted += [(table.file, a * table.row_bytes, b * table.row_bytes) for a, b in window]
        for column in lists:
            offsets, width = self._offsets[column.name], memmaps.values_dtype(column).itemsize
            bounds = [(int(offsets[a]) * width, int(offsets[b]) * width) for a, b in window]
            wanted += [(f"{column.name}.values", a, b) for a, b in bounds]
        contents = self._read(wanted)
        parts = iter(
            [contents[at : at + len(window)] for at in range(0, len(contents), len(window))]
        )
        tensors = {
            table.file: torch.from_numpy(
                _joined(next(parts), np.dtype(table.dtype)).reshape(-1, *table.shape)
            )
            for table in dense
        }
        arrays = {}
        for column in lists:
            offsets = self._offsets[column.name]
            lengths = np.concatenate([np.diff(offsets[a : b + 1]) for a, b in window])
            values = _joined(next(parts), memmaps.values_dtype(column))
            arrays[column.name] = (values, np.concatenate([[0], np.cumsum(lengths)]))
        return MappedRows(self._workload, sum(b - a for a, b in window), tensors, arrays)


def _joined(parts: Sequence[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate([np.frombuffer(part, dtype) for part in parts])


def _s3fs(place: DatasetPlace) -> Read:
    store = s3fs.S3FileSystem(
        key=place.access_key,
        secret=place.secret_key,
        endpoint_url=place.endpoint or None,
        skip_instance_cache=True,
    )

    def read(ranges: Sequence[Range]) -> list[Any]:
        paths = [f"{place.url}/{name}" for name, _, _ in ranges]
        starts, ends = [start for _, start, _ in ranges], [end for _, _, end in ranges]
        contents: list[Any] = store.cat_ranges(
            paths, starts, ends, batch_size=_AT_ONCE, on_error="raise"
        )
        return contents

    return read


def _obstore(place: DatasetPlace) -> Read:
    options: dict[str, Any] = {}
    if place.endpoint:
        options = {
            "endpoint": place.endpoint,
            "access_key_id": place.access_key,
            "secret_access_key": place.secret_key,
            "client_options": {"allow_http": True},
        }
    store = from_url(place.url, **options)
    threads = ThreadPoolExecutor(_AT_ONCE)

    def read(ranges: Sequence[Range]) -> list[Any]:
        def get(wanted: Range) -> Any:
            name, start, end = wanted
            return obstore.get_range(store, name, start=start, end=end)

        return list(threads.map(get, ranges))

    return read


CLIENTS: dict[str, Callable[[DatasetPlace], Read]] = {"s3fs": _s3fs, "obstore": _obstore}
