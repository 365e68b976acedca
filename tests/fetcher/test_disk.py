"""Blocks on a node's disk: what is trusted, and what a disk that fails or hangs costs."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplane.arena.memfd import Arena
from dataplane.fetcher.disk import Disk
from dataplane.fetcher.kept_files import HEADER_BYTES, KeptFiles
from dataplane.model.records import Region
from dataplane.rpc.fetches import (
    DiskBody,
    KeptFound,
    KeptName,
    ReadEnded,
    ReadKept,
    ScanKept,
    WriteKept,
)

DATASET, OTHER = b"0123456789abcdef", bytes(range(16))
BODY = (bytes(range(251)) * 12_000)[:3_000_001]
SOURCE, INTO = Region(0, len(BODY)), Region(4 << 20, len(BODY))


class Node:
    """A disk, and what it has told."""

    def __init__(self, folder: Path, patience_s: float = 30.0) -> None:
        self.arena = Arena.create("blocks", 8 << 20)
        self.arena.reserve(0, self.arena.size_bytes)
        self.told: list[ReadEnded | KeptFound] = []
        self._changed = threading.Condition()
        self.disk = Disk(str(folder), self.arena, self._tell, patience_s)
        self._numbers = iter(range(1, 1000))

    def _tell(self, said: ReadEnded | KeptFound) -> None:
        with self._changed:
            self.told.append(said)
            self._changed.notify_all()

    def end_of(self, make: Callable[[int], DiskBody]) -> ReadEnded:
        number = next(self._numbers)
        self.disk.begin(make(number))

        def ended() -> bool:
            self.disk.look()
            return any(isinstance(e, ReadEnded) and e.number == number for e in self.told)

        deadline = time.monotonic() + 60
        with self._changed:
            while not ended():
                assert time.monotonic() < deadline
                self._changed.wait(0.01)
        return next(e for e in self.told if isinstance(e, ReadEnded) and e.number == number)

    def write(self, block: int, *instead_of: KeptName, dataset: bytes = DATASET) -> ReadEnded:
        self.arena.view(SOURCE.offset, SOURCE.length)[:] = BODY
        return self.end_of(lambda n: WriteKept(n, dataset, block, SOURCE, instead_of))

    def read(self, block: int, length: int = len(BODY)) -> ReadEnded:
        into = Region(INTO.offset, length)
        self.arena.view(into.offset, into.length)[:] = bytes(length)
        return self.end_of(lambda n: ReadKept(n, DATASET, block, into))

    def has(self, block: int) -> bool:
        """Whether the block is read, and is what was written."""
        end = self.read(block)
        if end.error is None:
            assert end.disk_bytes == len(BODY)
            assert bytes(self.arena.view(INTO.offset, INTO.length)) == BODY
        else:
            assert not end.disk_bytes
        return end.error is None

    def found(self) -> dict[KeptName, int]:
        """Return the blocks that a scan finds."""
        self.told.clear()
        assert self.end_of(ScanKept).error is None
        return {
            KeptName(each.dataset, block): size
            for each in self.told
            if isinstance(each, KeptFound)
            for block, size in zip(each.blocks, each.disk_bytes, strict=True)
        }


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.disk.close()
    made.arena.close()


def path(folder: Path, block: int, dataset: bytes = DATASET) -> Path:
    return KeptFiles(str(folder)).path(dataset, block)


def test_what_was_written_is_read_by_whoever_comes_later(node: Node, tmp_path: Path) -> None:
    for block in (0, 1023, 1024, 5_000_000):
        assert node.write(block).error is None
        assert node.has(block)
    modes = {each.stat().st_mode & 0o777 for each in tmp_path.rglob("*") if each.is_file()}
    assert modes == {0o600}
    assert {each.stat().st_mode & 0o777 for each in tmp_path.rglob("*") if each.is_dir()} == {0o700}
    assert path(tmp_path, 0).parent == path(tmp_path, 1023).parent != path(tmp_path, 1024).parent
    size = HEADER_BYTES + len(BODY)
    assert node.found() == {KeptName(DATASET, n): size for n in (0, 1023, 1024, 5_000_000)}


def cut_off(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(len(BODY) // 2)


def lengthened(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


def damaged(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(HEADER_BYTES + len(BODY) // 2)
        opened.write(b"?")


def of_another_version(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(8)
        opened.write(b"\2")


def of_another_block(file: Path) -> None:
    file.write_bytes(file.with_name("8").read_bytes())


def empty(file: Path) -> None:
    file.write_bytes(b"")


def gone(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    "spoil", [cut_off, lengthened, damaged, of_another_version, of_another_block, empty, gone]
)
def test_a_wrong_file_is_removed_and_counts_as_missing(
    node: Node, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    node.write(7)
    node.write(8)
    spoil(path(tmp_path, 7))
    end = node.read(7)
    assert end.error is not None
    assert not end.error.trouble, "the disk is well"
    assert not path(tmp_path, 7).exists()
    assert node.has(8)
    assert node.write(7).error is None
    assert node.has(7)


def test_a_block_read_with_other_options_has_another_length(node: Node) -> None:
    node.write(7)
    end = node.read(7, len(BODY) - 1)
    assert end.error is not None


def test_no_link_is_followed(node: Node, tmp_path: Path) -> None:
    node.write(7)
    real = path(tmp_path, 7).rename(tmp_path / "elsewhere")
    path(tmp_path, 7).symlink_to(real)
    end = node.read(7)
    assert end.error is not None
    assert real.exists()
    assert KeptName(DATASET, 7) not in node.found()


def test_blocks_are_removed_before_another_is_written(node: Node, tmp_path: Path) -> None:
    node.write(1)
    node.write(2, dataset=OTHER)
    going = KeptName(DATASET, 1), KeptName(OTHER, 2), KeptName(OTHER, 3)
    assert node.write(4, *going).error is None
    assert {*node.found()} == {KeptName(DATASET, 4)}
    only = node.end_of(lambda n: WriteKept(n, DATASET, 4, Region(0, 0), (KeptName(DATASET, 4),)))
    assert only.error is None
    assert not node.found()
    assert not [*tmp_path.iterdir()], "empty folders stay"


def test_a_scan_removes_what_a_crash_left_and_nothing_else(node: Node, tmp_path: Path) -> None:
    node.write(7)
    part = path(tmp_path, 7).with_name("9.17.part")
    part.write_bytes(b"half")
    for name in ("lock", "notes.txt", "0" * 31, "g" * 32):
        (tmp_path / name).write_text("of the user")
    assert {*node.found()} == {KeptName(DATASET, 7)}
    assert not part.exists()
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "lock").exists()


def test_what_vanishes_during_a_scan_is_left_out_and_the_rest_is_found(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read removes a damaged file, or a user a whole dataset, after its folder was listed."""
    for block in (7, 8, 1024):
        node.write(block)
    for digest in (OTHER, bytes(16)):
        node.write(1, dataset=digest)
    part = path(tmp_path, 7).with_name("9.17.part")
    part.write_bytes(b"half")
    vanishing = (path(tmp_path, 7), part, path(tmp_path, 1, OTHER).parents[1])
    listed, scandir = set[str](), os.scandir

    def then_gone(folder: str | Path) -> contextlib.AbstractContextManager[object]:
        with scandir(folder) as entries:
            found = [*entries]
        listed.update(entry.path for entry in found)
        for each in vanishing:
            if str(each) in listed and each.exists():
                each.rename(tmp_path / f"gone-{each.name}")
        return contextlib.nullcontext(iter(found))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", then_gone)
        found = node.found()
    assert {*found} == {KeptName(DATASET, 8), KeptName(DATASET, 1024), KeptName(bytes(16), 1)}
    assert {str(each) for each in vanishing} <= listed


def test_a_disk_that_cannot_be_written_says_why(node: Node, tmp_path: Path) -> None:
    path(tmp_path, 0).parent.parent.write_text("a file where a folder should be")
    end = node.write(7)
    assert end.error is not None
    assert end.error.trouble == os.strerror(errno.ENOTDIR)


def test_a_full_disk_says_so_and_keeps_nothing_of_the_block(tmp_path: Path) -> None:
    size = {"RLIMIT_FSIZE": 1 << 20}
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2]); from fetcher.test_disk import Node\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "node = Node(Path(sys.argv[1]))\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size['RLIMIT_FSIZE']},) * 2)\n"
        "print(node.write(7).error.trouble)\n"
    )
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), tests], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == os.strerror(errno.EFBIG)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_a_removed_folder_is_trouble_for_writes_and_a_miss_for_reads(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    node = Node(folder)
    folder.rmdir()
    written, read = node.write(7), node.read(7)
    assert written.error is not None
    assert written.error.trouble == os.strerror(errno.ENOENT)
    assert read.error is not None
    assert not read.error.trouble
    node.disk.close()
    node.arena.close()


def test_a_disk_that_hangs_ends_reads_at_their_deadline(tmp_path: Path) -> None:
    node = Node(tmp_path, patience_s=0.05)
    node.write(8)
    hanging = path(tmp_path, 7)
    os.mkfifo(hanging)  # to open it waits for somebody who writes
    before = bytes(1000)
    end = node.read(7, 1000)
    assert end.error is not None
    assert "in time" in str(end.error.trouble)
    # Now it answers, and finds that nobody waits.
    with hanging.open("wb"):
        node.disk.close()
    assert bytes(node.arena.view(INTO.offset, 1000)) == before
    assert sum(isinstance(each, ReadEnded) for each in node.told) == 2
    node.arena.close()


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_trusted(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2]); from fetcher.test_disk import Node\n"
        "node, block = Node(Path(sys.argv[1])), 0\n"
        "while True:\n"
        "    node.write(block % 5)\n"
        "    print(block, flush=True)\n"
        "    block += 1\n"
    )
    tests = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), tests], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(7):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    node = Node(tmp_path)
    found = node.found()
    assert found
    for name in found:
        assert node.has(name.block)
    assert not [*tmp_path.rglob("*.part")]
    node.disk.close()
    node.arena.close()


def test_a_write_that_hangs_ends_at_its_deadline_and_leaves_no_file(tmp_path: Path) -> None:
    node = Node(tmp_path, patience_s=0.05)
    node.write(7)
    node.disk.begin(WriteKept(100, DATASET, 7, Region(0, 0), (KeptName(DATASET, 7),)))
    part = path(tmp_path, 8).with_name("8.2.part")  # of this order's number
    os.mkfifo(part)  # to open it waits for somebody who reads
    end = node.write(8)
    assert end.error is not None
    assert "in time" in str(end.error.trouble)
    with part.open("rb"):
        node.disk.close()
    assert not part.exists()
    assert not path(tmp_path, 8).exists()
    node.arena.close()
