"""Outages of stores, and pauses that stores ask for, as processes of a host share them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from awry import Awry, Mood, awry_server
from fake_clock import Time
from msgspec.structs import replace
from servers import reach

from dataplane.model.records import StorePause
from dataplane.store.connect import Stores
from dataplane.store.outage import FORGOTTEN_S, Outage, Outages, Pauses
from dataplane.store.retry import SLOW_DOWN

BEGAN = Outage("s3://lab", 100.0, "refused", last_request_at=100.0)
ENDED = replace(BEGAN, last_request_at=160.0, until=161.0)


def outages() -> tuple[Outages, list[Outage]]:
    reports: list[Outage] = []
    return Outages(reports.append), reports


def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends() -> None:
    seen, reports = outages()
    seen.note(BEGAN)
    seen.note(replace(BEGAN, error="reset", last_request_at=130.0))
    assert [outage.error for outage in seen.now(130.0)] == ["reset"]
    seen.note(ENDED)
    assert seen.now(161.0) == ()
    assert [(outage.since, outage.is_over) for outage in reports] == [(100.0, False), (100.0, True)]


def test_a_store_is_away_as_long_as_one_process_says_so() -> None:
    seen, reports = outages()
    seen.note(BEGAN, "fetching")
    seen.note(replace(BEGAN, since=90.0, last_request_at=101.0), "indexing")
    (now,) = seen.now(102.0)
    assert now.since == 90.0
    seen.note(ENDED, "fetching")
    assert len(seen.now(162.0)) == len(reports) == 1
    seen.forget("indexing", 170.0)
    assert (seen.now(170.0), len(reports), reports[1].until) == ((), 2, 170.0)


def test_stores_are_apart_and_an_end_without_a_beginning_is_nothing() -> None:
    seen, reports = outages()
    seen.note(replace(ENDED, store="gs://other"))
    seen.note(BEGAN)
    seen.note(replace(BEGAN, store="az://more"))
    assert [outage.store for outage in seen.now(100.0)] == ["az://more", "s3://lab"]
    assert len(reports) == 2


def test_an_unused_store_is_not_shown_as_away_for_ever() -> None:
    seen, _ = outages()
    seen.note(BEGAN)
    assert seen.now(BEGAN.last_request_at + FORGOTTEN_S - 1)
    assert not seen.now(BEGAN.last_request_at + FORGOTTEN_S)


def test_a_callback_may_ask_which_stores_are_away() -> None:
    answers: list[tuple[Outage, ...]] = []
    seen = Outages(lambda outage: answers.append(seen.now(outage.last_request_at)))
    seen.note(BEGAN)
    assert answers == [(BEGAN,)]


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
    pauses.publish(short, first.hear)
    pauses.publish(long)
    assert (first, second) == ([long], [short, long])
    time.now += 3.0
    pauses.join(late.hear)
    assert late == pauses.now() == [StorePause("s3://another", 3, 5.0)]
    pauses.leave(second.hear)
    pauses.leave(second.hear)
    pauses.publish(short)
    assert len(second) == 2
    assert late[1:] == [short]


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"bucket/a.bin": bytes(100)}) as server:
        reach(server, monkeypatch)
        yield server


def test_stores_tell_of_their_pauses_and_keep_those_of_others(awry: Awry) -> None:
    time, pauses = Time(), Told()
    stores = Stores(clock=time.clock())
    stores.pauses.join(pauses.hear)
    stores.connect(URL).head(URL)
    awry.be(Mood.SLOW_DOWN)
    stores.connect(URL).head(URL)
    assert [(pause.store, pause.level) for pause in pauses] == [(STORE, 1)]

    # A store that is open, and one that is opened during the pause.
    for others in (stores, Stores(clock=time.clock())):
        time.waited.clear()
        others.pauses.publish(StorePause(STORE, 1, 7.0), pauses.hear)
        others.connect(URL).head(URL)
        assert time.waited[0] >= 7.0
        assert time.waited[0] <= 7.0 + SLOW_DOWN.span_s(2)
    assert len(pauses) == 1, "nobody is told what it has told"
