"""Pauses that stores ask for are kept by the processes that index, too, and told by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from awry import Awry, Mood, awry_server
from batched_index import indexing
from servers import reach
from shards import parquet_bytes

from dataplane.index import batches, processes
from dataplane.index.indexing import index_dataset
from dataplane.index.processes import IndexProcesses
from dataplane.index.run import ShardBatches
from dataplane.model.records import StorePause
from dataplane.store.outage import Pauses
from dataplane.store.retry import SLOW_DOWN

BASE = "s3://bucket"
CONTENT = parquet_bytes(pa.table({"id": range(60)}), row_group_size=20)
SHARDS = {f"{number:03}.parquet": CONTENT for number in range(23)}


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BATCHED_MIN", 2)
    monkeypatch.setattr(batches, "_SHARDS_MAX", 4)


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({f"{BASE[5:]}/{name}": body for name, body in SHARDS.items()}) as made:
        reach(made, monkeypatch)
        yield made


def test_a_pause_that_readers_are_asked_for_is_kept_by_the_host(
    awry: Awry, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, told = Pauses(), list[StorePause]()
    pauses.join(told.append)
    begin = IndexProcesses.begin_batches

    def begun(*given: Any) -> ShardBatches | None:
        # To what is asked after the listing; a store that never answered is away.
        awry.be(Mood.WELL, Mood.WELL, Mood.SLOW_DOWN)
        return begin(*given)

    monkeypatch.setattr(IndexProcesses, "begin_batches", begun)
    with indexing(pauses=pauses) as found:
        assert found.of(BASE).to_bytes() == index_dataset(BASE).to_bytes()
    assert [(one.store, one.level) for one in told] == [(BASE, 1)]
    assert 0 <= told[0].left_s <= SLOW_DOWN.span_s(1)
    assert found.alone == set(), "readers wait, and try again"


def test_readers_keep_the_pauses_of_the_host(awry: Awry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_FETCHERS_MAX", 1)
    names = sorted(SHARDS)
    pause, pauses = StorePause(BASE, 1, 1e6), Pauses()
    expected = index_dataset(BASE).to_bytes()
    with indexing(keep=lambda *_: pauses.publish(pause), pauses=pauses, budget_s=0.2) as found:
        assert found.of(BASE).to_bytes() == expected
    in_flight = 4 * batches._BATCHES_A_FETCHER
    assert found.alone >= set(names[in_flight + 4 :]), "those that come after the first preamble"
    with indexing(pauses=pauses, budget_s=0.2) as found:
        assert found.of(BASE).to_bytes() == expected
    assert found.alone == set(names), "no reader has begun before the pause"
