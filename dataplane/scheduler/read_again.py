"""Report blocks that are read more than once in an epoch because the block arena cannot hold all
open windows. This costs only bandwidth and time, so it is logged, less and less often.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from dataplane.scheduler.block import CachedBlock
from dataplane.scheduler.events import Note

_FIRST_S = 10.0
_PERIOD_S_MAX = 3600.0


class _Count(Struct):
    """The count of one dataset, since it was last logged."""

    since: float
    period_s: float = _FIRST_S
    blocks: int = 0
    bytes: int = 0


class ReadAgain:
    """Counts blocks that are evicted although their windows are open, and logs a line now
    and then.
    """

    def __init__(self, arena_bytes: int, do: Callable[[Note], None]) -> None:
        self._arena_bytes = arena_bytes
        self._do = do
        self._counts: dict[int, _Count] = {}

    def note(self, block: CachedBlock, now: float) -> None:
        """Note the eviction of a block whose window is open."""
        dataset = block.dataset
        count = self._counts.setdefault(dataset.dataset_id, _Count(now))
        count.blocks += 1
        count.bytes += int(dataset.stored[block.index])
        if now - count.since >= count.period_s:
            self._tell(dataset.name, count, now)

    def forget(self, dataset_id: int) -> None:
        """Forget a dataset that has no readers left."""
        self._counts.pop(dataset_id, None)

    def _tell(self, dataset: str, count: _Count, now: float) -> None:
        facts = {
            "dataset": dataset,
            "blocks": count.blocks,
            "bytes": count.bytes,
            "seconds": round(now - count.since),
            "block_arena_bytes": self._arena_bytes,
        }
        event = "blocks are read again: block_arena_bytes is too small for all open windows"
        self._do(Note(event, facts, is_failure=True))
        count.since, count.blocks, count.bytes = now, 0, 0
        count.period_s = min(_PERIOD_S_MAX, max(60.0, 2 * count.period_s))
