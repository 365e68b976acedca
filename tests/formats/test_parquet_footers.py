"""A footer is parsed once for the blocks of its shard, and never confused with another."""

from __future__ import annotations

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataplane.formats import parquet_footers
from dataplane.formats.base import RawBlock
from dataplane.formats.parquet_footers import Footers, cut_footer, parsed
from dataplane.model.records import Region


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


def test_a_rewritten_shard_has_a_new_footer() -> None:
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
        made = [footers.of(str(number), content) for number in range(30)]
        # From the last to the first, so that asking for one forgets none that is asked for later.
        again = [footers.of(str(i), content) is made[i] for i in range(29, 29 - kept, -1)]
        assert all(again)
        assert footers.of("0", content) is not made[0]


def test_what_is_no_footer_is_not_remembered() -> None:
    footers = Footers()
    for _ in range(2):
        with pytest.raises((pa.ArrowException, OSError)):
            footers.of("a", b"nothing")
    assert footers.of("a", footer()).metadata.num_rows == parsed(footer()).metadata.num_rows


def wide_footer(groups: int = 40, columns: int = 40, seed: int = 0) -> bytes:
    """More than SMALL_BYTES; every third row group is empty."""
    sink = io.BytesIO()
    table = pa.table({f"column{seed}_{i}": pa.array([float(i)]) for i in range(columns)})
    with pq.ParquetWriter(sink, table.schema) as writer:
        for group in range(groups):
            writer.write_table(table.slice(0, 0 if group % 3 == 2 else 1))
    content = sink.getvalue()
    length = int.from_bytes(content[-8:-4], "little")
    assert length > parquet_footers.SMALL_BYTES
    return content[-8 - length :]


def block_of(content: bytes, index: int, number: int, url: str = "a") -> RawBlock:
    nowhere, preamble = Region(0, 0), memoryview(content)
    return RawBlock(url, index, 1, nowhere, 0, nowhere, preamble, memoryview(b""), (), number)


def test_only_the_row_group_of_a_block_is_parsed_where_large_footers_have_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content, first = wide_footer(), wide_footer(seed=1)
    monkeypatch.setattr(parquet_footers, "BYTES_MAX", len(first) + 1)
    footers, whole = Footers(), parsed(content)
    remembered, _ = footers.group_of(block_of(first, 0, number=1, url="first"))
    assert remembered.num_row_groups == 40
    for index, group in enumerate(whole.groups):
        metadata, at = footers.group_of(block_of(content, index, number=2))
        assert (metadata.num_row_groups, at) == (1, 0)
        assert metadata.row_group(0).to_dict() == whole.metadata.row_group(group).to_dict()
        assert metadata.schema.equals(whole.metadata.schema)
        assert metadata.metadata == whole.metadata.metadata
    with pytest.raises(IndexError):
        footers.group_of(block_of(content, len(whole.groups), number=2))
    assert footers.group_of(block_of(first, 0, number=1, url="first"))[0] is remembered


def test_an_unused_footer_makes_room_for_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content, first = wide_footer(), wide_footer(seed=1)
    monkeypatch.setattr(parquet_footers, "BYTES_MAX", len(first) + 1)
    monkeypatch.setattr(parquet_footers, "STALE_USES", 2)
    footers = Footers()
    footers.group_of(block_of(first, 0, number=1, url="first"))
    footers_read = [footers.group_of(block_of(content, 0, number=2))[0] for _ in range(4)]
    assert [metadata.num_row_groups for metadata in footers_read] == [1, 1, 40, 40]


def test_a_preamble_with_a_known_number_is_not_read_again() -> None:
    footers, content = Footers(), footer()
    first, _ = footers.group_of(block_of(content, 0, number=3))
    assert footers.group_of(block_of(bytes(len(content)), 0, number=3))[0] is first
    assert footers.group_of(block_of(content, 0, number=4))[0] is first, "its bytes are the same"
    with pytest.raises((pa.ArrowException, OSError)):
        footers.group_of(block_of(bytes(len(content)), 0, number=5))


def test_a_damaged_footer_is_cut_or_refused() -> None:
    content, chance = wide_footer()[:-8], random.Random(1)
    cut_count = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice((0, 127, 128, 255))
        damaged = damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))]
        try:
            cuts = cut_footer(memoryview(damaged))
        except ValueError:
            continue
        cut_count += 1
        for index in range(len(cuts.filled)):
            assert len(cuts.footer_of(memoryview(damaged), index)) <= len(damaged)
    assert 0 < cut_count < 300


def test_more_row_groups_than_are_expected_are_cut_as_well() -> None:
    content = footer(rows=1, groups=1500)
    cuts, whole = cut_footer(memoryview(content)[:-8]), parsed(content)
    assert len(cuts.filled) == len(whole.groups) == 1500
    own = cuts.footer_of(memoryview(content)[:-8], 1499)
    metadata = parsed(own + len(own).to_bytes(4, "little") + b"PAR1").metadata
    assert metadata.row_group(0).to_dict() == whole.metadata.row_group(1499).to_dict()
