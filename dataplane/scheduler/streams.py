"""The open streams of a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.events import NextOrderKnown
from dataplane.scheduler.records import Group, SlabPhase, SlabTask, StreamState


class StreamTable:
    """Every open stream, by number."""

    def __init__(self) -> None:
        self._streams: dict[int, StreamState] = {}

    def __iter__(self) -> Iterator[StreamState]:
        """The streams that are open now; the table may change during iteration."""
        return iter(list(self._streams.values()))

    def find(self, stream_id: int | None) -> StreamState | None:
        """The stream, unless it was closed."""
        return None if stream_id is None else self._streams.get(stream_id)

    def add(self, stream: StreamState) -> None:
        """Add an open stream."""
        self._streams[stream.stream_id] = stream
        stream.delivery.streams.append(stream)

    def remove(self, stream: StreamState) -> None:
        """Remove a closed stream."""
        stream.closed = True
        del self._streams[stream.stream_id]
        stream.delivery.streams.remove(stream)

    def expect_next(self, event: NextOrderKnown) -> None:
        """Note the order that a stream's consumer will read next; nothing if the stream
        was closed.
        """
        stream = self.find(event.stream_id)
        if stream is not None:
            stream.next_order = event.order

    def waiting_tasks(self) -> list[SlabTask]:
        """Return the tasks without a slab, in the order of need, and number them in this order."""
        ranked = [
            (depth, task.number, task)
            for stream in self._streams.values()
            for depth, task in enumerate(stream.tasks, stream.tasks_before)
            if task.phase is SlabPhase.WAITING
        ]
        ranked.sort(key=lambda rank: rank[:2])
        for depth, number, task in ranked:
            task.rank = depth, number
        return [task for _, _, task in ranked]

    def of_dataset(self, dataset: DatasetBlocks) -> list[StreamState]:
        """The streams that read this dataset."""
        return [s for s in self._streams.values() if dataset in s.delivery.datasets]

    def of_group(self, group: Group) -> list[StreamState]:
        """The streams that share slabs in this group."""
        return [s for s in self._streams.values() if s.delivery.group is group]

    def crops(self, dataset: DatasetBlocks) -> bool:
        """Whether a stream crops images of this dataset."""
        return any(stream.walk.crops for stream in self.of_dataset(dataset))

    @property
    def is_awaited(self) -> bool:
        """Whether a trainer has asked for a slab that is not ready."""
        return any(stream.requests for stream in self._streams.values())

    def to_read_now(self, lacking: Sequence[SlabTask]) -> Sequence[SlabTask]:
        """Select the ranked tasks whose blocks may be read. Until a trainer has got a slab, only
        the first awaited task counts: the others would share bandwidth and processors with it.
        """
        streams = self._streams.values()
        if not self.is_awaited or any(stream.delivery.has_lent for stream in streams):
            return lacking
        first = [task for task in lacking if not task.rank[0]]
        is_gathered = any(stream.tasks and _is_gathered(stream.tasks[0]) for stream in streams)
        return first if first or is_gathered else lacking


def _is_gathered(task: SlabTask) -> bool:
    """Whether the task's slab is being gathered, which takes only a moment: no image is rendered
    and no function called.
    """
    walk = task.stream.walk
    return task.phase is SlabPhase.ASSEMBLING and walk.render is None and walk.collate is None
