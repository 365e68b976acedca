"""A footer is parsed once for the blocks of its shard, and never taken for another."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataplane.formats import parquet_footers
from dataplane.formats.parquet_footers import Footers, parsed


def footer(rows: int = 3, name: str = "x", groups: int = 1) -> bytes:
    sink = io.BytesIO()
    table = pa.table({name: pa.array(range(rows * groups), pa.int64())})
    pq.write_table(table, sink, row_group_size=rows)
    content = sink.getvalue()
    length = int.from_bytes(content[-8:-4], "little")
    return content[-8 - length :]


def test_the_same_bytes_are_parsed_once() -> None:
    footers, content = Footers(), footer(groups=3)
    first = footers.of("a", content)
    assert footers.of("a", memoryview(bytearray(content))) is first
    assert first.groups == (0, 1, 2)
    assert first.metadata.num_rows == 9


def test_a_shard_that_was_written_anew_has_its_own_footer() -> None:
    footers = Footers()
    old, new = footer(name="x"), footer(name="y")
    assert len(old) == len(new)
    assert footers.of("a", old).metadata.schema.names == ["x"]
    assert footers.of("a", new).metadata.schema.names == ["y"]
    assert footers.of("a", old).metadata.schema.names == ["x"]
    assert footers.of("b", new).metadata.schema.names == ["y"]


def test_what_is_remembered_does_not_change_with_the_memory_that_it_was_read_from() -> None:
    footers, content = Footers(), bytearray(footer(name="x"))
    first = footers.of("a", content)
    content[:] = footer(name="y")
    assert footers.of("a", content).metadata.schema.names == ["y"]
    assert first.metadata.schema.names == ["x"]


def test_as_many_are_remembered_as_the_bytes_allow_and_the_last_one_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = footer()
    for bytes_max, kept in ((0, 1), (20 * len(content), 20)):
        monkeypatch.setattr(parquet_footers, "BYTES_MAX", bytes_max)
        footers = Footers()
        made = [footers.of(str(each), content) for each in range(30)]
        # From the last to the first, so that asking for one forgets none that is asked for later.
        again = [footers.of(str(each), content) is made[each] for each in range(29, 29 - kept, -1)]
        assert all(again)
        assert footers.of("0", content) is not made[0]


def test_what_is_no_footer_is_not_remembered() -> None:
    footers = Footers()
    for _ in range(2):
        with pytest.raises((pa.ArrowException, OSError)):
            footers.of("a", b"nothing")
    assert footers.of("a", footer()).metadata.num_rows == parsed(footer()).metadata.num_rows
