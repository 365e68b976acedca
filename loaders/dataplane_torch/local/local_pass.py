"""One pass over a user's Dataset in this process.

The pass is built on torch's own iterator: loops, profilers and frameworks check for that class, and
datasets and samplers depend on the seeds that it draws, and on their order.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from dataplane_torch.device import Target
from dataplane_torch.local.beginning import Beginning, PassPlace
from dataplane_torch.local.progress import (
    PassState,
    WorkerState,
    load_state,
    skip_samples,
    state_of,
)
from dataplane_torch.sending import Sending
from dataplane_torch.torch_private.iteration import LocalPassBase


class LocalPass(LocalPassBase):
    """A pass whose samples this process loads, as with torch's num_workers=0. Threads take turns.

    Nothing is copied to a device ahead: the next batch would first have to be loaded in this
    thread, which would take longer than its copy.
    """

    def __init__(
        self,
        loader: Any,
        resume: PassState | None,
        loaded_in: Mapping[str, int],
        target: Target | None,
    ) -> None:
        self._lock = threading.RLock()
        self.beginning = begin = Beginning(loader, 0, resume, loaded_in)
        state = None if resume is None else resume.workers[0]
        if state is not None and state.dataset is not None:
            load_state(loader.dataset, state.dataset)
        with begin.drawing():
            super().__init__(loader)
            self._places = begin.places(self)
        if begin.goes_on is not None and state is not None and begin.place.is_iterable:
            self._go_on(begin.goes_on, state)
        begin.begun()
        self._copy_stream = None if target is None else target.copy_stream()
        self._is_started = False

    @property
    def place(self) -> PassPlace:
        """Return the position of the pass, with the present states of the dataset."""
        place, fetcher = self.beginning.place, self.fetcher
        place.step = self.yielded_count
        if self._places is not None and not place.is_finished:
            place.sampler = self._places.place()
        iterator = fetcher.dataset_iter if place.is_iterable else None
        state = WorkerState(
            dataset=None if iterator is self.dataset else copy.deepcopy(state_of(self.dataset)),
            iterator=copy.deepcopy(state_of(iterator)),
            is_ended=place.is_iterable and fetcher.ended,
            fetched=place.step,
        )
        skip = 0 if state.has_state or not place.is_iterable else place.step
        place.workers = [replace(state, skip=skip, fetched=place.step - skip)]
        return place

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def __del__(self) -> None:
        # Save the position, which outlives the pass: the dataset's iterator ends now.
        with contextlib.suppress(Exception):
            self.place  # noqa: B018 - updates the position

    def __next__(self) -> Any:
        with self._lock:
            return super().__next__()

    def next_batch(self) -> Any:
        """Make the next batch as torch does; with a target device, copy it there."""
        if not self._is_started:
            self._is_started = True
            if self.beginning.has_new_epoch():
                self.beginning.forget_resumed(self)
                self._places = self.beginning.places(self)
        try:
            batch = super().next_batch()
        except StopIteration:
            self.beginning.place.step = self.yielded_count
            self.beginning.finish()
            raise
        return batch if self._copy_stream is None else Sending(self._copy_stream, lambda: batch)()

    def _go_on(self, state: PassState, worker: WorkerState) -> None:
        fetcher = self.fetcher
        if worker.iterator is not None:
            fetcher.dataset_iter = load_state(fetcher.dataset_iter, worker.iterator)
        fetcher.ended = worker.is_ended
        skip_samples(fetcher, worker.skip * (state.batch_size or 1))
