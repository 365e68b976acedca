"""Blocks that are read more than once in an epoch, since the block arena cannot hold all open
windows. That costs bandwidth and time and nothing else, so it is told, less and less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dataplane.node.block import Block
from dataplane.redact import redacted
from dataplane.trace import Trace

_trace = Trace("node")

_FIRST_S = 10.0
_PERIOD_S_MAX = 3600.0


@dataclass(slots=True)
class _Count:
    """Of one dataset, since it was told last."""

    since: float
    period_s: float = _FIRST_S
    blocks: int = 0
    bytes: int = 0


class ReadAgain:
    """Counts what was evicted although it is still needed, and writes a line now and then."""

    def __init__(self, arena_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._arena_bytes = arena_bytes
        self._clock = clock
        self._counts: dict[int, _Count] = {}

    def note(self, evicted: Iterable[Block]) -> None:
        """These blocks were evicted while their windows are open."""
        now = self._clock()
        for block in evicted:
            dataset = block.dataset
            count = self._counts.setdefault(dataset.dataset_id, _Count(now))
            count.blocks += 1
            count.bytes += int(dataset.manifest.block_length[block.index])
            if now - count.since >= count.period_s:
                self._tell(block, count, now)

    def forget(self, dataset_id: int) -> None:
        """Nobody reads this dataset any more."""
        self._counts.pop(dataset_id, None)

    def _tell(self, block: Block, count: _Count, now: float) -> None:
        _trace.failed(
            "blocks are read again: block_arena_bytes is too small for all open windows",
            dataset=redacted(block.dataset.manifest.urls[0]),
            blocks=count.blocks,
            bytes=count.bytes,
            seconds=round(now - count.since),
            block_arena_bytes=self._arena_bytes,
        )
        count.since, count.blocks, count.bytes = now, 0, 0
        count.period_s = min(_PERIOD_S_MAX, max(60.0, 2 * count.period_s))
