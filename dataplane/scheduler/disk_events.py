"""The scheduler's events and effects about the node's disk.

The caller answers each KeepBlock with one KeepingEnded. Before anything is written to the disk, it
reports the blocks that it finds there, and again after each ScanDisk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from dataplane.model import Region
from dataplane.scheduler.dataset import DatasetBlocks


class DiskName(NamedTuple):
    """A block on disk: the digest of its dataset, and its number there."""

    digest: bytes
    block: int


class DiskFound(Struct, frozen=True):
    """Report blocks on disk from an earlier run, with their sizes. Datasets that were written last
    come last.
    """

    digest: bytes
    blocks: Sequence[int]
    disk_bytes: Sequence[int]


class DiskScanned(Struct, frozen=True):
    """Report the end of a scan: all blocks on disk were reported, or `trouble` says why they cannot
    be.
    """

    trouble: str = ""


class DiskMissed(Struct, frozen=True):
    """Report that a Fetch did not get a block from the disk, and continues elsewhere: the file is
    missing, or `trouble` says why the disk cannot be read.
    """

    dataset: DatasetBlocks
    block: int
    trouble: str = ""


class KeepingEnded(Struct, frozen=True):
    """Report the end of a KeepBlock: it is done, or `trouble` says why not. Its memory is no longer
    read.
    """

    number: int
    trouble: str = ""


DiskEvent = DiskFound | DiskScanned | DiskMissed | KeepingEnded


class KeepBlock(Struct, frozen=True):
    """Remove blocks from the disk, then write this part of the block arena as this block; nothing
    if it is empty.
    """

    number: int
    name: DiskName
    region: Region
    instead_of: Sequence[DiskName] = ()


class ScanDisk(Struct, frozen=True):
    """Report the blocks on disk again, since the last scan failed."""
