"""The disk of a node, in the scheduler's tests: files that may get lost, and writes that may fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.arena.allocator import rounded
from dataplane.scheduler import events
from dataplane.scheduler.events import (
    DiskFound,
    DiskMissed,
    DiskName,
    DiskScanned,
    KeepBlock,
    KeepingEnded,
    ScanDisk,
)
from dataplane.scheduler.keeping import Keeping

if TYPE_CHECKING:
    from scheduler_run import Run

HEADER_BYTES = 64
FAILED = "it fails"


class Disk:
    """The disk of one run, with room for so many bytes."""

    def __init__(self, run: Run, limit_bytes: int) -> None:
        self._run, self._limit_bytes = run, limit_bytes
        self._files: dict[DiskName, int] = {}
        self._writing: dict[DiskName, int] = {}
        self._is_scanned = self._was_full = False
        self.lose = self.fail = 0.0
        """The shares of reads before which a file gets lost, and of orders that fail."""
        self.kept = self.read = self.missed = self.failed = 0

    def begin(self, chance: random.Random) -> None:
        """An earlier run has left some files, of these datasets and of others."""
        if not self._limit_bytes:
            return
        self.lose, self.fail = chance.choice([0.0, 0.1]), chance.choice([0.0, 0.0, 0.1])
        worlds = [*self._run.worlds.values()]
        for digest in (bytes(16), *(world.blocks.digest for world in worlds)):
            count = chance.choice([0, 0, 3])
            sizes = {block: chance.randint(HEADER_BYTES, 20_000) for block in range(count)}
            self._files |= {DiskName(digest, n): rounded(size) for n, size in sizes.items()}
        self._was_full = sum(self._files.values()) > self._limit_bytes
        self._run.tell(self._scanned(has_failed=bool(self.fail) and chance.random() < 0.5))

    def _scanned(self, *, has_failed: bool) -> DiskScanned:
        """The end of a scan, which has told of all files, or of one dataset's."""
        assert not self._is_scanned, "keeping 3: it is scanned again for nothing"
        digests = [*dict.fromkeys(name.digest for name in self._files)]
        for digest in digests[:1] if has_failed else digests:
            sizes = {n.block: size for n, size in self._files.items() if n.digest == digest}
            self._run.tell(DiskFound(digest, tuple(sizes), tuple(sizes.values())))
        self._is_scanned = not has_failed
        return DiskScanned(FAILED if has_failed else "")

    def ask(self, effect: events.Effect) -> None:
        """Have an effect carried out, by the disk or by others."""
        match effect:
            case KeepBlock():
                self._write(effect)
            case ScanDisk():
                has_failed = self._run.chance.random() < self.fail
                self._run.outside.later(effect, lambda: self._scanned(has_failed=has_failed))
            case events.Fetch(is_on_disk=True):
                self._fetch(effect)
            case _:
                self._run.outside.ask(effect)

    def _fetch(self, effect: events.Fetch) -> None:
        """Read a block, from here if it is here."""
        outside, chance = self._run.outside, self._run.chance
        world = self._run.worlds[effect.dataset_id]
        name = DiskName(world.blocks.digest, effect.block)
        if self._files and chance.random() < self.lose:
            del self._files[chance.choice([*self._files])]
        has_failed = chance.random() < self.fail
        if name in self._files and not has_failed:
            self.read += 1
            outside.ask(effect)
            return

        def missed() -> events.Event:
            self.missed += 1
            outside.ask(effect)
            if not has_failed:
                self._files.pop(name, None)
            return DiskMissed(world.blocks, effect.block, FAILED if has_failed else "")

        outside.later(effect, missed)

    def _write(self, effect: KeepBlock) -> None:
        """Write a block instead of others: disk 1, keeping 1."""
        assert self._is_scanned, "disk 4: something is written before all is known"
        assert effect.name not in self._writing, "disk: written twice at once"
        has_failed = self._run.chance.random() < self.fail
        before = bytes(self._run.outside.part(effect.region))
        self._run.traffic._busy["kept", effect.number] = [effect.region]
        self._writing[effect.name] = rounded(HEADER_BYTES + len(before)) if before else 0
        going = [name for name in effect.instead_of if self._run.chance.random() < 0.5]
        for name in going if has_failed else effect.instead_of:
            self._files.pop(name, None)
        assert len({*effect.instead_of}) == len(effect.instead_of)
        is_reducing = self._was_full and not before
        taken = sum(self._files.values()) + sum(self._writing.values())
        self._was_full = self._was_full and taken > self._limit_bytes
        assert is_reducing or taken <= self._limit_bytes or has_failed, "disk 1: it is too full"
        if before:
            mark = next(
                (world.dataset_id << 32) + effect.name.block + 1
                for world in self._run.worlds.values()
                if world.blocks.digest == effect.name.digest
            )
            assert len(before) < 8 or before[-8:] == mark.to_bytes(8, "little"), "another block"
        self._run.outside.later(effect, self._end(effect, before, has_failed=has_failed))

    def _end(
        self, effect: KeepBlock, before: bytes, *, has_failed: bool
    ) -> Callable[[], events.Event]:
        def ended() -> events.Event:
            assert self._run.outside.part(effect.region) == before, "borrowed 1: it was written"
            del self._run.traffic._busy["kept", effect.number]
            size = self._writing.pop(effect.name)
            if has_failed:
                self.failed += 1
                return KeepingEnded(effect.number, FAILED)
            if size:
                self.kept += 1
                self._files[effect.name] = size
            return KeepingEnded(effect.number)

        return ended

    def check_end(self) -> None:
        """Nothing is under way, and nothing is taken for read."""
        ended = self._run.scheduler._on[KeepingEnded]
        keeping: Keeping = ended.__self__  # type: ignore[attr-defined]
        tier = keeping._tier
        assert not keeping._writes
        assert not keeping._written_bytes
        assert not self._run.scheduler._borrowed.count
        assert not tier._changes
        assert not tier._read, "a dataset without readers is taken for read"
        sizes = {
            DiskName(shelf.digest, block): size
            for shelf in tier._unread.values()
            for block, size in zip(shelf.blocks, shelf.sizes, strict=True)
        }
        assert tier.used_bytes == sum(sizes.values())
        is_all = {*self._files} <= {*sizes}
        assert is_all or not self._is_scanned, "disk 1: a file that nobody counts"
