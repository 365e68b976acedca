"""What a trainer and its workers say to each other, one frame a message of their socket."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from dataplane_torch.local.parcel import Parcel, pickled_whole
from dataplane_torch.local.progress import WorkerState

Released = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Open the dataset for a pass, where `state` says; or, with `anew`, for the pass after that."""

    pass_id: int
    shared_seed: int | None
    state: WorkerState | None
    anew: bool
    given_back: Released = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Make the batch of a task."""

    pass_id: int
    task: int
    index: Any
    given_back: Released = ()


@dataclass(frozen=True, slots=True)
class End:
    """Nothing more will come."""

    given_back: Released = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """The dataset is open; `state` is where it stands, if it can tell."""

    pass_id: int
    state: WorkerState | None


@dataclass(frozen=True, slots=True)
class Made:
    """A task's batch, or with kind "error" the exception that it raised."""

    pass_id: int
    task: int
    kind: str
    parcel: Parcel
    state: WorkerState | None


@dataclass(frozen=True, slots=True)
class Ended:
    """An iterable dataset has no batch for this task, nor for later ones of this pass."""

    pass_id: int
    task: int
    state: WorkerState | None


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A descriptor of this many bytes follows."""

    segment_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OldSegment:
    """Not written again; the trainer has given all of its extents back."""

    segment_id: int


ToWorker = Begin | Fetch | End
FromWorker = Ready | Made | Ended | NewSegment | OldSegment


def encode(frame: ToWorker | FromWorker) -> bytes | memoryview:
    """A frame's bytes.

    Raises:  whatever the pickling of an index, or of a state, raises.
    """
    if isinstance(frame, Made):  # the frequent one, as small as can be
        fields = (frame.pass_id, frame.task, frame.kind, frame.parcel, frame.state)
        return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)
    return pickled_whole(frame)


def decode_for_worker(frame: bytes) -> ToWorker:
    """A frame of the trainer's."""
    return pickle.loads(frame)  # type: ignore[no-any-return]


def decode_for_trainer(frame: bytes) -> FromWorker:
    """A frame of a worker's."""
    decoded = pickle.loads(frame)
    return Made(*decoded) if isinstance(decoded, tuple) else decoded
