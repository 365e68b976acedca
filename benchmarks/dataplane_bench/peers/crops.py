"""Encoded images of a loader's batches become crops, in the trainer's own threads."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import CROP, Kind, Task
from dataplane_bench.peers.base import Batch, Resumable
from dataplane_bench.peers.images import random_resized_crop_flip

_BATCHES_AHEAD = 1


class Cropped:
    """A loader whose IMAGE columns are lists of encoded images, with crops in their place. Its
    state is that of the last batch that was given, not of those under way.
    """

    def __init__(self, loader: Resumable, task: Task) -> None:
        self._loader = loader
        self._names = [column.name for column in task.workload.of_kind(Kind.IMAGE)]
        threads = max(len(os.sched_getaffinity(0)) // task.case.process_count, 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="crop")
        self._seeds = np.random.SeedSequence((task.seed, task.rank))
        self._own = threading.local()
        self._state: Any = None

    def epoch(self, number: int) -> Iterator[Batch]:
        return self._cropped(self._loader.epoch(number))

    def state(self) -> Any:
        return self._state

    def resume(self, state: Any) -> Iterator[Batch]:
        return self._cropped(self._loader.resume(state))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._loader.close()

    def _cropped(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        under_way: deque[tuple[dict[str, Any], list[Future[None]], Any]] = deque()
        for batch in itertools.chain(batches, itertools.repeat(None)):
            if batch is not None:
                under_way.append((*self._begun(batch), self._loader.state()))
                if len(under_way) <= _BATCHES_AHEAD:
                    continue
            if not under_way:
                return
            done, crops, self._state = under_way.popleft()
            for crop in crops:
                crop.result()
            yield done

    def _begun(self, batch: Batch) -> tuple[dict[str, Any], list[Future[None]]]:
        import torch

        new, crops = dict(batch), []
        for name in self._names:
            out = np.empty((len(batch[name]), CROP, CROP, 3), np.uint8)
            new[name] = torch.from_numpy(out)
            crops += [
                self._pool.submit(self._crop, encoded, out[index])
                for index, encoded in enumerate(batch[name])
            ]
        return new, crops

    def _crop(self, encoded: bytes, out: NDArray[np.uint8]) -> None:
        out[:] = random_resized_crop_flip(encoded, self._random())

    def _random(self) -> np.random.Generator:
        """One a thread: generators are no two threads' at a time."""
        if not hasattr(self._own, "random"):
            self._own.random = np.random.default_rng(self._seeds.spawn(1)[0])
        found: np.random.Generator = self._own.random
        return found
