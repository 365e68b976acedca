"""Stores that are away, as seen by one process and those that report to it."""

from __future__ import annotations

from msgspec.structs import replace

from dataplane.store.outage import FORGOTTEN_S, Outage, Outages

BEGAN = Outage("s3://lab", 100.0, "refused", asked=100.0)
ENDED = replace(BEGAN, asked=160.0, until=161.0)


def outages() -> tuple[Outages, list[Outage]]:
    told: list[Outage] = []
    return Outages(told.append), told


def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends() -> None:
    seen, told = outages()
    seen.note(BEGAN)
    seen.note(replace(BEGAN, error="reset", asked=130.0))
    assert [one.error for one in seen.now(130.0)] == ["reset"]
    seen.note(ENDED)
    assert seen.now(161.0) == ()
    assert [(one.since, one.is_over) for one in told] == [(100.0, False), (100.0, True)]


def test_a_store_is_away_as_long_as_one_process_says_so() -> None:
    seen, told = outages()
    seen.note(BEGAN, "fetching")
    seen.note(replace(BEGAN, since=90.0, asked=101.0), "indexing")
    (now,) = seen.now(102.0)
    assert now.since == 90.0
    seen.note(ENDED, "fetching")
    assert len(seen.now(162.0)) == len(told) == 1
    seen.forget("indexing", 170.0)
    assert (seen.now(170.0), len(told), told[1].until) == ((), 2, 170.0)


def test_stores_are_apart_and_an_end_without_a_beginning_is_nothing() -> None:
    seen, told = outages()
    seen.note(replace(ENDED, store="gs://other"))
    seen.note(BEGAN)
    seen.note(replace(BEGAN, store="az://more"))
    assert [one.store for one in seen.now(100.0)] == ["az://more", "s3://lab"]
    assert len(told) == 2


def test_an_unused_store_is_not_shown_as_away_for_ever() -> None:
    seen, _ = outages()
    seen.note(BEGAN)
    assert seen.now(BEGAN.asked + FORGOTTEN_S - 1)
    assert not seen.now(BEGAN.asked + FORGOTTEN_S)


def test_a_callback_may_ask_which_stores_are_away() -> None:
    found: list[tuple[Outage, ...]] = []
    seen = Outages(lambda one: found.append(seen.now(one.asked)))
    seen.note(BEGAN)
    assert found == [(BEGAN,)]
