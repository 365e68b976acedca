"""Whatever batches leave out is indexed one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.formats.base import Format, ShardIndex
from dataplane.index.indexing import index_dataset
from dataplane.index.run import BatchEnd, StoredShard
from dataplane.model.records import ObjectInfo
from dataplane.store.local import LocalStore


class Leaving:
    """Batches that leave out what was drawn, and end as drawn: at once, or in a thread."""

    def __init__(
        self, format_: Format, left: Iterator[bool], later: Iterator[bool], shards: int, count: int
    ) -> None:
        self._format, self._left, self._later = format_, left, later
        self.shards_at_once, self._count = shards, count
        self._pool = ThreadPoolExecutor(1)
        self.is_closed = False

    @property
    def has_room(self) -> bool:
        return not self.is_over

    @property
    def is_over(self) -> bool:
        return self._count <= 0

    def send(
        self,
        shards: Sequence[int],
        listed: Sequence[ObjectInfo],
        tell: Callable[[BatchEnd], None],
    ) -> None:
        self._count -= 1
        found = dict(zip(shards, listed, strict=True))
        indexes = {at: self._index(one) for at, one in found.items() if not next(self._left)}
        if next(self._later):
            self._pool.submit(tell, BatchEnd(shards, indexes))
        else:
            tell(BatchEnd(shards, indexes))

    def close(self) -> None:
        self._pool.shutdown()
        self.is_closed = True

    def _index(self, listed: ObjectInfo) -> ShardIndex:
        return self._format.index(StoredShard(listed, LocalStore(), threading.Event()))


@pytest.fixture
def expected(dataset: Path) -> bytes:
    """The manifest without batches."""
    return index_dataset(dataset).to_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    left=st.lists(st.booleans(), min_size=12, max_size=12),
    later=st.lists(st.booleans(), min_size=12, max_size=12),
    shards=st.integers(1, 5),
    count=st.integers(0, 12),
    workers=st.integers(1, 3),
)
def test_no_shard_is_lost_whatever_batches_leave_out(
    dataset: Path,
    expected: bytes,
    left: list[bool],
    later: list[bool],
    shards: int,
    count: int,
    workers: int,
) -> None:
    made: list[Leaving] = []

    def begin(format_: Format, _listed: Sequence[ObjectInfo]) -> Leaving:
        made.append(Leaving(format_, iter(left), iter(later), shards, count))
        return made[0]

    found = index_dataset(dataset, workers=workers, begin_batches=begin)
    assert found.to_bytes() == expected
    assert made[0].is_closed


def test_batches_are_ended_when_a_shard_fails(dataset: Path) -> None:
    made: list[Leaving] = []

    def begin(format_: Format, listed: Sequence[ObjectInfo]) -> Leaving:
        left = iter([True, *[False] * len(listed)])
        made.append(Leaving(format_, left, iter([False] * len(listed)), 3, len(listed)))
        return made[0]

    def refuse(_format: Format, shard: StoredShard) -> ShardIndex:
        raise ZeroDivisionError(shard.url)

    with pytest.raises(ZeroDivisionError, match=r"000\.parquet"):
        index_dataset(dataset, index_shard=refuse, begin_batches=begin)
    assert made[0].is_closed
