from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from dataplane import collector


class Listed:
    """Something that a weak reference can tell about."""


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    assert gc.isenabled()
    if not was_on:
        gc.disable()


def test_the_collector_rests_until_the_last_one_leaves() -> None:
    with collector.resting():
        with collector.resting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_works_again_after_a_failure() -> None:
    with pytest.raises(ValueError, match="x"), collector.resting():
        raise ValueError("x")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector.resting():
        pass
    assert not gc.isenabled()
    gc.enable()


@pytest.mark.parametrize("count", [0, 1, 4096, 10_000])
def test_lists_are_emptied_and_what_only_they_had_is_freed(count: int) -> None:
    one, other = [Listed() for _ in range(count)], ["kept"]
    seen = [weakref.ref(each) for each in one]
    collector.release(one, other)
    assert (one, other) == ([], [])
    assert not any(each() for each in seen)
