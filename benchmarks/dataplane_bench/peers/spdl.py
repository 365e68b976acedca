"""SPDL: a pipeline of threads; its stages gather batches from arrays in mapped files.

A source of shuffled row numbers, a stage that makes batches of them in so many threads, a buffer.
Some batches pass through the pipeline at once, since each passage costs as much as gathering a
batch of small rows. Images are decoded by libjpeg-turbo and OpenCV, and, where the machine has
FFmpeg's libraries, by SPDL's own decoder, which needs them.

Source: https://facebookresearch.github.io/spdl, "Execution Models" (threads, where stages let go of
the interpreter's lock; a continuous source) and the docstring of PipelineBuilder.build.
"""

from __future__ import annotations

import ctypes.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import (
    CROP,
    BenchCase,
    ColumnType,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
)
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.base import SHUFFLE_BUFFER, Batch
from dataplane_bench.peers.samples import crop_box

_BUFFERED = 4
_Request = tuple[memmaps.MappedRows, NDArray[np.int64]]
_FETCHED_AT_ONCE = 3
"""Windows of rows that are on their way from S3."""


class Spdl:
    """Threads over mapped arrays; from S3, over ranges of the same files."""

    name = "spdl"
    title = "SPDL"
    requirements = ("spdl",)
    distribution = "spdl"

    def layout(self, workload: Workload) -> str:
        return memmaps.LAYOUT

    def describe(self, workload: Workload) -> str:
        return memmaps.DESCRIBES

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        share = max(cores // case.process_count, 1)
        client = {"client": "obstore"} if case.store is StorageKind.S3 else {}
        if workload.of_kind(ColumnType.IMAGE):
            decoders = ["simplejpeg"]
            if ctypes.util.find_library("avcodec") and ctypes.util.find_library("avfilter"):
                decoders.insert(0, "spdl.io")
            return tuple(
                {**client, "threads": threads, "batches": 1, "decoder": decoder}
                for decoder in decoders
                for threads in (share, 2 * share)
            )
        if case.store is StorageKind.S3:
            return ({**client, "threads": share, "batches": 8},)
        return (
            {"threads": share, "batches": 1},
            {"threads": 1, "batches": 8},
            {"threads": max(share, 2), "batches": 8},
        )

    def prepare(self, workload: Workload, folder: Path) -> None:
        memmaps.write(workload, folder)

    def open(self, task: TrialTask) -> _Opened:
        return _Opened(task)


class _Opened:
    """One pipeline whose source begins the next epoch as soon as one ends."""

    def __init__(self, task: TrialTask) -> None:
        import torch

        # Ranks of one host share its cores; the threads are SPDL's, not torch's.
        torch.set_num_threads(1)
        self._task = task
        self._pipeline: Any = None
        self._next = 0

    def epoch(self, number: int) -> Iterator[Batch]:
        if self._pipeline is None or number != self._next:
            self.close()
            self._pipeline = _pipeline(self._task, number)
            self._pipeline.start()
        self._next = -1
        for batches in self._pipeline:
            yield from batches
        self._next = number + 1

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()
        self._pipeline = None


def _pipeline(task: TrialTask, first: int) -> Any:
    """A pipeline of lists of batches, from an epoch on."""
    from spdl.pipeline import PipelineBuilder

    threads = task.settings["threads"]
    builder: Any = PipelineBuilder()
    if task.case.store is StorageKind.S3:
        from dataplane_bench.peers.torch_streams import Files, windowed

        files = Files(task)

        def windows(epoch: int) -> Iterator[Any]:
            return windowed(files.blocks(task, epoch, 1), SHUFFLE_BUFFER)

        builder.add_source(_Epochs(first, windows), continuous=True)
        builder.pipe(files.rows, concurrency=_FETCHED_AT_ONCE)
        builder.pipe(_Shuffle(task))
        busy = threads + _FETCHED_AT_ONCE + 1
    else:
        builder.add_source(_Epochs(first, _Order(task)), continuous=True)
        busy = threads
    builder.pipe(_Gather(task), concurrency=threads)
    builder.add_sink(_BUFFERED)
    return builder.build(num_threads=busy, use_thread_output_queue=True)


class _Epochs:
    """The source's items: each pass over it is the next epoch."""

    def __init__(self, first: int, of_epoch: Callable[[int], Iterable[Any]]) -> None:
        self._number, self._of_epoch = first, of_epoch

    def __iter__(self) -> Iterator[Any]:
        self._number += 1
        return iter(self._of_epoch(self._number - 1))


class _Order:
    """The row numbers of this rank, some batches at a time, with the rows that they are of."""

    def __init__(self, task: TrialTask) -> None:
        self._task = task
        random = np.random.default_rng((task.seed, task.rank))
        self._rows = memmaps.mapped(task.workload, task.place.folder, random)

    def __call__(self, epoch: int) -> Iterator[_Request]:
        task = self._task
        order = np.random.default_rng((task.seed, epoch)).permutation(task.workload.sample_count)
        mine = order[task.rank :: task.size]
        return _parts(self._rows, mine, task.workload.batch_size * task.settings["batches"])


class _Shuffle:
    """The rows of a window that came from S3, in random order, some batches at a time."""

    def __init__(self, task: TrialTask) -> None:
        self._step = task.workload.batch_size * task.settings["batches"]

    def __call__(self, rows: memmaps.MappedRows) -> Iterator[_Request]:
        yield from _parts(rows, rows.random.permutation(rows.count), self._step)


def _parts(rows: memmaps.MappedRows, ids: NDArray[np.int64], step: int) -> Iterator[_Request]:
    for start in range(0, len(ids), step):
        yield rows, ids[start : start + step]


class _Gather:
    """Batches of some row numbers."""

    def __init__(self, task: TrialTask) -> None:
        self._size = task.workload.batch_size
        self._matrices = [dense for dense in memmaps.dense_files(task.workload) if dense.is_matrix]
        self._crops = _crops if task.settings.get("decoder") == "spdl.io" else None

    def __call__(self, request: _Request) -> list[Batch]:
        rows, ids = request
        batches: list[Batch] = []
        for start in range(0, len(ids), self._size):
            part = ids[start : start + self._size]
            packed = rows.gather(part, self._crops)
            batches.append(memmaps.unpacked(self._matrices, packed))
        return batches


def _crops(encoded: Sequence[NDArray[np.uint8]], random: np.random.Generator) -> Any:
    """Images that SPDL decodes, crops and resizes.   Shapes:  result: uint8[B, CROP, CROP, 3]."""
    import simplejpeg  # type: ignore[import-untyped]
    import spdl.io

    frames = []
    for image in map(bytes, encoded):
        height, width, _, _ = simplejpeg.decode_jpeg_header(image)
        top, left, high, wide = crop_box(height, width, random)
        steps = [
            f"crop={wide}:{high}:{left}:{top}:exact=1",
            f"scale={CROP}:{CROP}:flags=bilinear",
            *(["hflip"] if random.random() < 0.5 else []),
            "format=pix_fmts=rgb24",
        ]
        packets = spdl.io.demux_image(image)
        frames.append(spdl.io.decode_packets(packets, filter_desc=",".join(steps)))
    return spdl.io.to_torch(spdl.io.convert_frames(frames))
