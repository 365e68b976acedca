"""The messages between a trainer and its workers: one frame per socket message."""

from __future__ import annotations

import pickle
from typing import Any

from msgspec import Struct

from dataplane_torch.local.parcel import Parcel, pickled_whole
from dataplane_torch.local.progress import WorkerState

_MADE, _MAKE = 0, 1


class Begin(Struct, frozen=True):
    """Open the dataset for a pass that continues at `state`; with `anew`, load `state` and begin
    the pass after it.
    """

    pass_id: int
    shared_seed: int | None
    state: WorkerState | None
    anew: bool


class Make(Struct, frozen=True):
    """Make the batch of a task."""

    pass_id: int
    task: int
    index: Any


class Stop(Struct, frozen=True):
    """No more frames follow."""


class Ready(Struct, frozen=True):
    """The dataset is open; `state` is its position, if it has a state_dict()."""

    pass_id: int
    state: WorkerState | None


class Made(Struct, frozen=True):
    """The batch of a task, or with kind "error" the exception that making it raised."""

    pass_id: int
    task: int
    kind: str
    parcel: Parcel
    state: WorkerState | None


class Ended(Struct, frozen=True):
    """An iterable dataset has no batch for this task, nor for later tasks of this pass."""

    pass_id: int
    task: int
    state: WorkerState | None


class NewSegment(Struct, frozen=True):
    """A new segment of this many bytes; its descriptor follows."""

    segment_id: int
    size_bytes: int


class OldSegment(Struct, frozen=True):
    """The worker no longer writes into a segment, all of whose extents were given back."""

    segment_id: int


ToWorker = Begin | Make | Stop
FromWorker = Ready | Made | Ended | NewSegment | OldSegment


def encode(frame: ToWorker | FromWorker) -> bytes:
    """Encode a frame. Tensors, as in a sampler's indices or a dataset's state, are sent by value.

    Raises:  whatever the pickling of an index or a state raises.
    """
    # Send the most frequent frames as tuples, whose pickles are shorter.
    if isinstance(frame, Made) and frame.state is None:
        fields: Any = (_MADE, frame.pass_id, frame.task, frame.kind, frame.parcel, None)
        return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)
    if isinstance(frame, Make) and _is_plain(frame.index):
        fields = (_MAKE, frame.pass_id, frame.task, frame.index)
        return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)
    return pickled_whole(frame)


def _is_plain(index: object) -> bool:
    first = index[0] if isinstance(index, list) and index else index
    return first is None or isinstance(first, int | str)


def decode(encoded: bytes) -> Any:
    """Return the frame that these bytes encode."""
    decoded = pickle.loads(encoded)
    if not isinstance(decoded, tuple):
        return decoded
    kind, *fields = decoded
    return Made(*fields) if kind == _MADE else Make(*fields)
