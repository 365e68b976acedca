"""A pause that a store asks for is kept by all who know of each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from awry import Awry, Mood, awry_server
from fake_clock import Time
from servers import reach

from dataplane.model import StorePause
from dataplane.store.connect import Stores
from dataplane.store.gate import SLOW_DOWN
from dataplane.store.pauses import Pauses

STORE = "s3://bucket"
URL = f"{STORE}/a.bin"


class Told(list[StorePause]):
    def hear(self, pause: StorePause) -> None:
        self.append(pause)


def test_all_but_the_source_are_told_and_newcomers_of_what_lasts() -> None:
    time = Time()
    pauses, first, second, late = Pauses(time.clock()), Told(), Told(), Told()
    pauses.join(first.hear)
    pauses.join(second.hear)
    short, long = StorePause(STORE, 1, 2.0), StorePause("s3://another", 3, 8.0)
    pauses.tell(short, first.hear)
    pauses.tell(long)
    assert (first, second) == ([long], [short, long])
    time.now += 3.0
    pauses.join(late.hear)
    assert late == pauses.now() == [StorePause("s3://another", 3, 5.0)]
    pauses.leave(second.hear)
    pauses.leave(second.hear)
    pauses.tell(short)
    assert len(second) == 2
    assert late[1:] == [short]


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"bucket/a.bin": bytes(100)}) as server:
        reach(server, monkeypatch)
        yield server


def test_stores_tell_of_their_pauses_and_keep_those_of_others(awry: Awry) -> None:
    time, told = Time(), Told()
    stores = Stores(clock=time.clock())
    stores.pauses.join(told.hear)
    stores.connect(URL).head(URL)
    awry.be(Mood.SLOW_DOWN)
    stores.connect(URL).head(URL)
    assert [(pause.store, pause.level) for pause in told] == [(STORE, 1)]

    # A store that is open, and one that is opened during the pause.
    for others in (stores, Stores(clock=time.clock())):
        time.waited.clear()
        others.pauses.tell(StorePause(STORE, 1, 7.0), told.hear)
        others.connect(URL).head(URL)
        assert time.waited[0] >= 7.0
        assert time.waited[0] <= 7.0 + SLOW_DOWN.span_s(2)
    assert len(told) == 1, "nobody is told what it has told"
