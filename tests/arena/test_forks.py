"""The numbered invariants of arena/forks.py, and the memory of an arena in a child."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from forked import forking

from dataplane.arena import forks
from dataplane.arena.memfd import Arena

SIZE = 8 << 20


def test_what_lived_at_a_fork_is_kept_until_all_who_descend_from_it_have_ended():
    before, after = forks.born(), None
    kept: forks.Kept[str] = forks.Kept()
    with forking(lambda: 0) as first, forking(lambda: 0, closes_all=True) as two:
        after = forks.born()
        with forking(lambda: 0) as three:
            lasting = forks.died(before)
            assert len(lasting) == 2
            kept.add(lasting, "before")
            kept.add(forks.died(after), "after")
            for child in (first, two):
                assert kept.let_go() == []
                assert child.ask() == 0
            assert kept.let_go() == []
            assert three.ask() == 0
            assert sorted(kept.let_go()) == ["after", "before"]
            assert kept.let_go() == []


def test_nothing_is_kept_for_a_fork_before_it_or_without_one():
    number = forks.born()
    assert forks.died(number) == ()
    with forking(lambda: 0):
        number = forks.born()
        assert forks.died(number) == ()


def test_a_child_whose_end_cannot_be_observed_never_counts_as_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    number = forks.born()

    def no_more(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", no_more)
        with forking(lambda: 0) as child:
            assert child.ask() == 0
    (fork,) = forks.died(number)
    assert not fork.is_over()
    forks._forks.remove(fork)


class Shared(dict):
    """The numbers of objects, of which another thread makes one while this one reads the newest."""

    def __reversed__(self):
        newest = super().__reversed__()
        self.setdefault(-1)
        return newest


def test_an_object_that_another_thread_makes_during_a_fork_disturbs_nothing(monkeypatch):
    number = forks.born()
    monkeypatch.setattr(forks, "_alive", Shared(forks._alive))
    with forking(lambda: 0) as child:
        (fork,) = forks.died(number)
        assert not fork.is_over()
        assert child.ask() == 0
    assert fork.is_over()


def test_a_forked_child_can_fork_again():
    inherited = forks.born()

    def grandchildren() -> int:
        if forks.died(inherited):
            return 1
        number = forks.born()
        with forking(lambda: 0) as grandchild:
            (fork,) = forks.died(number)
            if fork.is_over() or grandchild.ask():
                return 2
        return 0 if fork.is_over() else 3

    with forking(grandchildren) as child:
        assert child.ask() == 0
    assert forks.died(inherited) == ()


def test_a_child_keeps_the_pages_that_it_is_told_to_and_no_descriptor():
    arena = Arena.create("forked", SIZE)
    arena.reserve(0, SIZE)
    memory = [np.frombuffer(arena.view(SIZE // 2 + 100, 4096), np.uint8)]
    memory[0][:] = 7
    inode = os.fstat(arena.fd).st_ino

    def looks() -> int:
        arena.keep_only([(SIZE // 2 + 100, 4096)])
        lines = Path("/proc/self/maps").read_text().splitlines()
        ours = [line.split()[0] for line in lines if line.split()[4] == str(inode)]
        sizes = [int(b, 16) - int(a, 16) for a, b in (each.split("-") for each in ours)]
        return 0 if sum(sizes) <= 8192 and int(memory[0].sum()) == 7 * 4096 else 1

    with forking(looks) as child:
        assert child.ask() == 0
    arena.close()
    memory.clear()
    arena.keep_only([])  # it is no longer mapped, and all other content stays
