"""The open streams of a node."""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.records import Group, StreamState


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
