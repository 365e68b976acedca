"""The numbered invariants of arena/memfd.py."""

import errno
import mmap
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arena import pages
from dataplane.arena.memfd import Arena
from dataplane.model.errors import BudgetTooSmall, ClosedError

SIZE = 1 << 20


def test_an_arena_cannot_change_its_size_or_be_unsealed():
    arena = Arena.create("test", SIZE)
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()


def test_memory_is_used_only_once_reserved_and_two_mappings_share_it():
    arena = Arena.create("test", SIZE)
    assert os.fstat(arena.fd).st_blocks == 0
    arena.reserve(0, SIZE // 2)
    arena.reserve(0, SIZE // 4)
    assert os.fstat(arena.fd).st_blocks * 512 == SIZE // 2
    other = Arena.attach(os.dup(arena.fd), SIZE)
    other.populate_once(0, SIZE // 2)
    assert os.fstat(arena.fd).st_blocks * 512 == SIZE // 2
    arena.view(100, 3)[:] = b"abc"
    assert bytes(other.view(100, 3)) == b"abc"
    other.close()
    arena.close()


def test_memory_that_another_process_has_written_is_not_allocated_again():
    arena = Arena.create("test", SIZE)
    other, third = (Arena.attach(os.dup(arena.fd), SIZE) for _ in range(2))
    assert arena.reserve(0, SIZE)
    assert other.reserve(0, SIZE), "it is allocated, but has yet to be cleared"
    arena.view(0, SIZE)[:] = bytes([7]) * SIZE
    assert not third.reserve(0, SIZE)
    third.prepare(0, SIZE)
    assert third.missing_bytes(0, SIZE) == 0
    assert bytes(third.view(SIZE - 1, 1)) == b"\x07"
    for mapped in (arena, other, third):
        mapped.close()


REGIONS = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), min_size=1)


@given(REGIONS)
def test_whatever_was_mapped_before_what_is_mapped_has_no_page_fault(regions: Sequence[list[int]]):
    arena = Arena.create("test", SIZE)
    arena.reserve(0, SIZE)
    for start, end in regions:
        arena.populate_once(start, end - start)
    start, end = max(regions, key=lambda region: region[1] - region[0])
    pages = memoryview(arena.buffer)[start : end : mmap.PAGESIZE]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for page in range(len(pages)):
        pages[page] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults <= 8 + len(pages) // 2  # some addresses are in the interpreter's own memory
    assert os.fstat(arena.fd).st_blocks * 512 == SIZE
    pages.release()
    arena.close()


@given(regions=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)), max_size=8))
def test_what_is_reserved_once_is_allocated_and_little_else(regions: Sequence[tuple[int, int]]):
    arena, piece, pieces = Arena.create("test", SIZE), 64 << 10, set[int]()
    for offset, most in regions:
        length = min(most, SIZE - offset)
        arena.reserve(offset, length)
        pieces |= {*range(offset // piece, -(-(offset + length) // piece))}
        assert os.fstat(arena.fd).st_blocks * 512 == len(pieces) * piece
    arena.close()


def test_memory_that_was_released_can_be_reserved_again():
    arena = Arena.create("test", SIZE)
    arena.reserve(0, SIZE)
    arena.release(SIZE // 4, SIZE // 2)
    assert arena.missing_bytes(0, SIZE) == arena.reserved_bytes == SIZE // 2
    assert os.fstat(arena.fd).st_blocks * 512 == SIZE // 2
    arena.reserve(SIZE // 4, SIZE // 4)
    assert arena.missing_bytes(0, SIZE) == SIZE // 4
    assert os.fstat(arena.fd).st_blocks * 512 == arena.reserved_bytes == SIZE * 3 // 4
    arena.close()


def test_new_memory_is_allocated_as_it_is_filled_and_only_to_its_end(monkeypatch):
    monkeypatch.setattr("dataplane.arena.pages.shared_huge_pages", lambda: "deny")
    arena, piece, page = Arena.create("test", SIZE), 64 << 10, 4096
    other = Arena.create("test", SIZE)
    body = os.urandom(4 * piece)
    with arena.view(page, len(body)) as view:
        new = arena.new_memory(view)
        assert new is not None
        assert other.new_memory(view) is None
    assert arena.new_memory(memoryview(bytearray(page))) is None
    assert arena.is_new(page, len(body))
    assert not arena.is_new(0, page), "it is part of a piece that others may have allocated"
    assert new.write(body[:100]) == 100
    assert os.pwrite(new.fd, body[100:60_000], new.offset) == 59_900
    new.moved(59_900)
    assert arena.is_new(page, len(body)), "it may still fail"
    assert new.write(body[60_000:] + b"beyond its end") == len(body) - 60_000
    assert bytes(arena.view(0, SIZE)) == bytes(page) + body + bytes(SIZE - page - len(body))
    assert arena.missing_bytes(0, SIZE) == SIZE - 3 * piece, "pieces at the edges are not complete"
    assert not arena.is_new(page, len(body))
    arena.close()
    other.close()


def test_bytes_are_written_into_memory_that_is_not_mapped():
    arena, body = Arena.create("test", SIZE), os.urandom(10_000)
    for _ in range(2):  # new memory, and memory that exists
        arena.write(100, memoryview(body))
        assert bytes(arena.view(0, 20_000)) == bytes(100) + body + bytes(20_000 - 10_100)
    arena.close()
    with pytest.raises(ClosedError):
        arena.write(100, memoryview(body))


def test_new_memory_that_the_machine_lacks_gives_our_error(monkeypatch):
    arena = Arena.create("test", SIZE)
    with arena.view(0, SIZE) as view:
        new = arena.new_memory(view)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "none left")

    monkeypatch.setattr("os.pwrite", full)
    assert new is not None
    with pytest.raises(BudgetTooSmall, match=r"no memory for an arena of 3 bytes: .*none left"):
        new.write(b"abc")
    with pytest.raises(BudgetTooSmall, match=f"no memory for an arena of {SIZE} bytes: "):
        new.moved(0, errno.ENOSPC)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        new.moved(0, errno.EIO)
    arena.close()


def test_a_view_outlives_the_arena():
    arena = Arena.create("test", SIZE)
    arena.reserve(0, SIZE)
    array = np.frombuffer(arena.view(0, 4096), dtype=np.uint8)
    array[:] = 7
    arena.close()
    arena.close()
    assert int(array.sum()) == 7 * 4096
    with pytest.raises(ClosedError):
        _ = arena.buffer


def test_whatever_interrupts_mapping_an_arena_leaves_no_descriptor(monkeypatch):
    arena = Arena.create("test", SIZE)

    def interrupted(*_: object) -> None:
        raise RuntimeError("a signal handler raises")

    monkeypatch.setattr("fcntl.fcntl", interrupted)
    with pytest.raises(RuntimeError, match="handler"):
        Arena.attach(os.dup(arena.fd), SIZE)
    arena.close()


def test_what_is_not_an_arena_of_that_size_is_refused():
    arena = Arena.create("test", SIZE)
    with pytest.raises(ClosedError, match="expected a sealed arena"):
        Arena.attach(os.dup(arena.fd), 2 * SIZE)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    with pytest.raises(ClosedError, match="expected a sealed arena"):
        Arena.attach(unsealed, SIZE)
    with pytest.raises(ClosedError, match="cannot map"):
        Arena.attach(os.open(os.devnull, os.O_RDWR), SIZE)
    with pytest.raises(IndexError):
        arena.view(SIZE - 1, 2)
    arena.close()


def test_more_memory_than_there_is_gives_our_error():
    with pytest.raises(
        BudgetTooSmall, match=r"lower block_arena_bytes or .*DATAPLANE_BLOCK_ARENA_BYTES="
    ):
        Arena.create("test", 1 << 60)
    assert mmap.PAGESIZE == 4096


def _of_mapping(name: str, fact: str) -> int:
    """Bytes of this fact of the mappings of a memfd, from /proc/self/smaps."""
    size_bytes, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if "-" in line.partition(" ")[0]:
            is_wanted = f"memfd:{name}" in line
        elif is_wanted and key == fact:
            size_bytes += int(value.split()[0]) << 10
    return size_bytes


@pytest.mark.parametrize("size", [pages.HUGE_BYTES - 1, 2 * pages.HUGE_BYTES, 3 * SIZE + 5])
def test_an_arena_is_mapped_where_huge_pages_fit_and_nothing_beside_it(size: int):
    fd = os.memfd_create("test-huge", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    address = pages.map_shared(fd, size)
    assert size < pages.HUGE_BYTES or address % pages.HUGE_BYTES == 0
    assert _of_mapping("test-huge", "Size") == -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 2
    pages.unmap(address, size)
    os.close(fd)


def test_reserved_memory_has_huge_pages_where_the_kernel_gives_them():
    arena = Arena.create("test-pages", 2 * pages.HUGE_BYTES)
    arena.prepare(0, arena.size_bytes)
    assert os.fstat(arena.fd).st_blocks * 512 == arena.size_bytes
    is_huge = pages.shared_huge_pages() != "deny"
    huge_bytes = _of_mapping("test-pages", "ShmemPmdMapped")
    # A machine without free huge pages gives small ones.
    assert huge_bytes in ({0, arena.size_bytes} if is_huge else {0})
    arena.close()


def _eager() -> pages.HugePages:
    made = pages.HugePages()
    assert not made.fill(0, 32 << 20), "the first memory of a process is small pages"
    return made


def test_huge_pages_are_made_of_memory_that_others_have_written():
    """Where the kernel makes some; memory is what it was everywhere."""
    arena = Arena.create("test-fill", 4 * pages.HUGE_BYTES)
    other = Arena.attach(os.dup(arena.fd), arena.size_bytes)
    for at in (0, 5000, pages.HUGE_BYTES - 1, 2 * pages.HUGE_BYTES):
        other.prepare(at, 1)
        other.buffer[at] = 7
    written = bytes(other.buffer)
    address = arena._address
    is_done = _eager().fill(address, 3 * pages.HUGE_BYTES)
    assert bytes(arena.buffer) == written
    assert bytes(other.buffer) == written
    if is_done:
        assert _of_mapping("test-fill", "ShmemPmdMapped") >= 3 * pages.HUGE_BYTES
        assert os.fstat(arena.fd).st_blocks * 512 >= 3 * pages.HUGE_BYTES
    other.close()
    arena.close()


def test_prepared_memory_is_made_of_huge_pages_but_for_those_that_have_memory(monkeypatch):
    advised = list[tuple[int, int]]()

    class Kept:
        def fill(self, address: int, size_bytes: int) -> bool:
            advised.append((address, size_bytes))
            return False

    monkeypatch.setattr("dataplane.arena.memfd._huge_pages", Kept())
    monkeypatch.setattr("dataplane.arena.pages.shared_huge_pages", lambda: "never")
    huge = pages.HUGE_BYTES
    arena = Arena.create("test-units", 5 * huge + SIZE)
    start = arena._address
    arena.prepare(huge + 5, huge)
    arena.prepare(huge + 5, huge)
    arena.prepare(0, 4 * huge)
    arena.prepare(3 * huge + 1, 2 * huge + SIZE)
    assert advised == [(start + huge, 2 * huge), (start, huge), (start + 4 * huge, huge)]
    assert arena.missing_bytes(0, arena.size_bytes) == 0
    arena.close()


def test_trials_of_huge_pages_take_a_hundredth_of_what_small_pages_do(monkeypatch):
    clock, at = [0.0], list[int]()

    def slow(*_: object) -> None:
        clock[0] += 0.003

    monkeypatch.setattr("dataplane.arena.pages.advise", slow)
    monkeypatch.setattr("time.thread_time", lambda: clock[0])
    made = _eager()
    for mib in range(0, 3000, 2):
        before = clock[0]
        made.fill(0, 2 << 20)
        if clock[0] > before:
            at.append(mib)
    assert at == [0, 1002, 2004], "6 ms are what 1000 MiB of small pages may have of them"


def test_huge_pages_that_cost_too_much_are_tried_again_ever_later(monkeypatch):
    tried = 0

    def refused(*_: object) -> None:
        nonlocal tried
        tried += 1
        raise OSError

    monkeypatch.setattr("dataplane.arena.pages.advise", refused)
    made, at = _eager(), list[int]()
    for mib in range(0, 1600, 2):
        before = tried
        made.fill(0, 2 << 20)
        if tried > before:
            at.append(mib)
    assert at == [0, 258, 772]
