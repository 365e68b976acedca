from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from dataplane.base import collector


class Listed:
    """An object with weak references."""


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


def test_what_a_process_has_when_it_settles_is_not_looked_at_again() -> None:
    code = (
        "import gc, dataplane.node.server\n"
        "from dataplane.base import collector\n"
        "found = len(gc.get_objects())\n"
        "collector.settle()\n"
        "print(found, len(gc.get_objects()), gc.get_threshold()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    before, after, threshold = map(int, done.stdout.split())
    assert before > 20_000
    assert after < before / 10
    assert threshold > 700


def test_between_start_and_settling_nothing_is_looked_at() -> None:
    code = (
        "import gc\n"
        "from dataplane.base import collector\n"
        "looked = []\n"
        "collector.start()\n"
        "gc.callbacks.append(lambda phase, facts: looked.append(phase))\n"
        "import dataplane.node.server\n"
        "collector.settle()\n"
        "print(len(looked), gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == [b"0", b"True"]


def test_a_node_settles_when_it_serves() -> None:
    code = (
        "import gc\n"
        "from dataplane.commands import serve\n"
        "from dataplane.commands.serve import Notices\n"
        "from dataplane.node import __main__\n"
        "__main__._started(None)\n"
        "print(gc.get_freeze_count())\n"
        "gc.unfreeze()\n"
        "serve._serving('here', Notices({}))\n"
        "print(gc.get_freeze_count())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    embedded, _ready, _here, _name, served = done.stdout.split()
    assert int(embedded) > 1000
    assert int(served) > 1000
