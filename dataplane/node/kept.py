"""Blocks on the node's disk: carry out the scheduler's decisions about them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dataplane.model.errors import NotKept
from dataplane.node.dataset import Dataset
from dataplane.node.fetch import Fetcher
from dataplane.rpc import fetches
from dataplane.rpc.fetches import Outcome
from dataplane.scheduler import events
from dataplane.scheduler.dataset import BlockName
from dataplane.scheduler.events import (
    DiskEvent,
    DiskFound,
    DiskMissed,
    DiskScanned,
    KeepBlock,
    KeepingEnded,
    ScanDisk,
)


class KeptBlocks:
    """The blocks on one node's disk. `tell` passes an event to the scheduler."""

    def __init__(self, fetcher: Fetcher, tell: Callable[[DiskEvent], None]) -> None:
        self._fetcher, self._tell = fetcher, tell
        self._asked: set[BlockName] = set()
        """Blocks that the disk was asked for, and has not refused."""

    def asked(self, dataset: Dataset, effect: events.Fetch) -> Callable[[Outcome], None] | None:
        """Return the function to call if the disk lacks a block; None if the disk is not tried."""
        if not effect.is_on_disk or effect.is_decoded:
            return None
        self._asked.add(BlockName(effect.dataset_id, effect.block))
        return partial(self._missed, dataset, effect.block)

    def has_read(self, name: BlockName) -> bool:
        """Note the end of a read of this block; return whether its bytes came from the disk."""
        is_read = name in self._asked
        self._asked.discard(name)
        return is_read

    def keep(self, effect: KeepBlock) -> None:
        """Write a block to the disk, and remove others."""
        going = tuple(fetches.KeptName(one.digest, one.block) for one in effect.instead_of)
        name, number = effect.name, effect.number
        order = fetches.WriteKept(0, name.digest, name.block, effect.region, going)
        self._fetcher.origin.read(
            order, lambda found: self._tell(KeepingEnded(number, _trouble(found)))
        )

    def scan(self, _effect: ScanDisk) -> None:
        """List the blocks on the disk."""
        self._fetcher.origin.read(fetches.ScanKept(0), self._scanned, self._found)

    def _missed(self, dataset: Dataset, block: int, found: Outcome) -> None:
        self._asked.discard(BlockName(dataset.dataset_id, block))
        self._tell(DiskMissed(dataset.blocks, block, _trouble(found)))

    def _found(self, found: fetches.KeptFound) -> None:
        self._tell(DiskFound(found.dataset, found.blocks, found.disk_bytes))

    def _scanned(self, found: Outcome) -> None:
        self._tell(DiskScanned(_trouble(found)))


def _trouble(found: Outcome) -> str:
    """Return why the disk failed; "" if it works, and only lacks the block."""
    if isinstance(found, NotKept):
        return str(found.trouble or "")
    return "" if found is None else str(found)
