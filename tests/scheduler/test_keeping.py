"""A disk that fails, and what a node says and does about it."""

from __future__ import annotations

import numpy as np

from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import DatasetBlocks, Marks
from dataplane.scheduler.events import DiskFound, DiskMissed, DiskScanned, ScanDisk
from dataplane.scheduler.keeping import PAUSE_S
from dataplane.scheduler.scheduler import Scheduler

PAGE = 4096
DIGEST = bytes(16)


class Node:
    """A scheduler with blocks 0 to 8 of a dataset on disk."""

    def __init__(self, cache_bytes: int = 100 * PAGE, trouble: str = "") -> None:
        raw = np.full(9, PAGE, np.int64)
        marks = Marks.of(raw, np.zeros_like(raw), np.ones(9, np.bool_))
        self.dataset = DatasetBlocks(1, "made up", marks, raw, raw, url=str, digest=DIGEST)
        self._scheduler = Scheduler(64 * PAGE, 4, Autoscaler(1, 1, 1), 60.0, cache_bytes)
        self.tell(DiskFound(DIGEST, range(9), [PAGE] * 9))
        self.tell(DiskScanned(trouble))

    def tell(self, event: events.Event, now: float = 0.0) -> list[str]:
        """What is logged."""
        effects = self._scheduler.decide(event, now)
        return [effect.event for effect in effects if isinstance(effect, events.Note)]

    def scans(self, now: float) -> bool:
        """Whether the disk is scanned again at this time."""
        effects = self._scheduler.decide(events.Ticked(0.0, 0.0), now)
        return any(isinstance(effect, ScanDisk) for effect in effects)

    @property
    def is_known(self) -> bool:
        """Whether blocks may be written."""
        return self._scheduler._tier.is_known

    def asks(self, block: int, now: float) -> bool:
        """Whether the disk is asked for it."""
        self._scheduler.decide(events.Settled(), now)
        return self._scheduler._tier.may_have(self.dataset, block, now)


def test_a_disk_that_fails_is_left_alone_for_longer_each_time_and_told_once() -> None:
    node, now, pause_s = Node(), 0.0, PAUSE_S
    for _ in range(8):
        assert node.asks(0, now)
        failed = [node.tell(DiskMissed(node.dataset, n, "it burns"), now) for n in range(4)]
        assert failed == [["the disk is not read for a while"], [], [], []]
        assert not node.asks(0, now + pause_s - 1.0)
        now += pause_s
        pause_s = min(2 * pause_s, 3600.0)


def test_a_lost_file_is_asked_for_once_and_many_are_told_together() -> None:
    node = Node()
    told = [node.tell(DiskMissed(node.dataset, block), 1.0) for block in range(8)]
    assert [len(each) for each in told] == [1] + [0] * 7
    assert not any(node.asks(block, 2.0) for block in range(8))
    assert node.asks(8, 2.0)
    assert not node.tell(DiskMissed(node.dataset, 0), 1.0), "that it is gone is known"
    assert len(node.tell(DiskMissed(node.dataset, 8), 1.0 + PAUSE_S)) == 1


def test_a_node_without_a_disk_asks_none() -> None:
    assert not Node(0).asks(0, 1.0)


def test_a_scan_that_fails_is_made_again_later_until_one_ends_well() -> None:
    node, now, pause_s = Node(trouble="it burns"), 0.0, PAUSE_S
    for _ in range(3):
        assert not node.is_known
        assert not node.scans(now + pause_s - 1.0)
        now += pause_s
        assert node.scans(now)
        assert not node.scans(now + 4000.0), "one at a time"
        told = node.tell(DiskScanned("it burns"), now)
        assert told == ["the disk is not written for a while"]
        pause_s *= 2
    now += pause_s
    assert node.scans(now)
    node.tell(DiskFound(DIGEST, range(9), [PAGE] * 9), now)
    assert not node.tell(DiskScanned(), now)
    assert node.is_known
    assert not node.scans(now + 10_000.0)


def test_a_scan_that_ends_well_is_not_repeated() -> None:
    node = Node()
    assert node.is_known
    assert not node.scans(10_000.0)
