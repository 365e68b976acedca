"""Gathered rows equal the rows of the blocks, and nothing else is written."""

from __future__ import annotations

import itertools

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf, canonical_values, comparable
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import BOTH, Open, rows_by
from slabs import batch_values

from dataplane.model.records import ColumnOptions, ColumnSpec, Kind, ListPolicy
from dataplane.rpc.messages import Batch
from dataplane.rpc.tasks import Assembled
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.worker.columns import BlockColumns, open_block
from dataplane.worker.gather import Gather
from dataplane.worker.rows import Rows

FILL = 3.0
GUARD = 64
UNTOUCHED = 0xAA


def _stored(batch: pa.RecordBatch) -> pa.RecordBatch:
    """As a worker finds a decoded block in the arena."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        return reader.read_next_batch()


class Case:
    """Some rows of some blocks, in batches, and what they should be."""

    def __init__(
        self,
        data: st.DataObject,
        drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]],
        lists: ListPolicy,
    ) -> None:
        source, leaves = drawn
        fills = tuple((leaf.name, FILL) for leaf in leaves)
        plan = plan_columns(source.schema, ColumnOptions(lists=lists, fill_null=fills))
        self.specs: tuple[ColumnSpec, ...] = plan.specs
        rows = source.num_rows
        cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1), max_size=3))) if rows > 1 else []
        bounds = [0, *cuts, rows]
        self.blocks: list[BlockColumns] = []
        for a, b in itertools.pairwise(bounds):
            block = canonical(source.slice(a, b - a), plan, "url")
            if data.draw(st.booleans()):
                block = _stored(block)
            self.blocks.append(open_block(block, plan.specs))
        sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
        self.batches = [Batch(i, size, size) for i, size in enumerate(sizes)]
        chosen = data.draw(
            st.lists(st.integers(0, rows - 1), min_size=sum(sizes), max_size=sum(sizes))
        )
        block_of = np.searchsorted(bounds, chosen, side="right") - 1
        row_of = np.array(chosen, np.int64) - np.array(bounds)[block_of]
        self.row_index = np.stack([block_of, row_of], 1).astype(np.int32).reshape(-1, 2)
        self.expected = [
            [values[row] for row in chosen]
            for values in (canonical_values(leaf, FILL) or [] for leaf in leaves)
        ]

    def gather(
        self,
        batch_count: int | None = None,
        how: Open = Rows,
        part: slice = slice(None),
    ) -> Gather:
        batches = self.batches[:batch_count]
        rows = sum(batch.rows for batch in batches)
        with rows_by(how):
            return Gather(self.specs, self.blocks, self.row_index[:rows], batches, part=part)

    def check(self, slab: memoryview, result: Assembled) -> None:
        done = self.batches[: result.batch_count]
        for spec, column, expected in zip(self.specs, result.columns, self.expected, strict=True):
            first = 0
            for i, batch in enumerate(done):
                found = batch_values(slab, spec, column, done, i)
                assert comparable(found) == comparable(expected[first : first + batch.rows])
                first += batch.rows


def _filled(size: int) -> bytearray:
    return bytearray([UNTOUCHED]) * (GUARD + size + GUARD)


def _whole(case: Case) -> Assembled:
    return case.gather().into(memoryview(bytearray(1 << 20)))


DRAWN = st.integers(1, 8).flatmap(lambda rows: arrow_columns.batches(rows, 3))


@settings(max_examples=60)
@given(st.data(), DRAWN, st.sampled_from(ListPolicy))
def test_every_batch_that_fits_is_gathered_and_nothing_else_is_written(
    data: st.DataObject, drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]], lists: ListPolicy
) -> None:
    case = Case(data, drawn, lists)
    whole = _whole(case)
    assert whole.batch_count == len(case.batches)
    size = data.draw(st.sampled_from([whole.bytes_used, whole.bytes_used + 100]))
    size = max(size - data.draw(st.integers(0, whole.bytes_used)), 0)
    memory = _filled(size)
    slab = memoryview(memory)[GUARD : GUARD + size]
    result = case.gather().into(slab)
    outside = bytes(memory[:GUARD]), bytes(memory[GUARD + result.bytes_used :])
    assert set(b"".join(outside)) <= {UNTOUCHED}
    if result.batch_count < len(case.batches):
        # The cut is exact: one batch more would not have fitted.
        more = case.gather(result.batch_count + 1).into(memoryview(bytearray(1 << 20)))
        assert more.bytes_used > size
    if not result.batch_count:
        enough = case.gather().into(memoryview(bytearray(result.bytes_needed)))
        assert enough.batch_count >= 1
        return
    case.check(slab, result)


@settings(max_examples=60)
@given(st.data(), DRAWN, st.sampled_from(ListPolicy))
def test_the_kernel_and_numpy_write_the_same_bytes(
    data: st.DataObject, drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]], lists: ListPolicy
) -> None:
    case = Case(data, drawn, lists)
    size = data.draw(st.integers(0, _whole(case).bytes_used + 100))
    slabs = [_filled(size) for _ in BOTH]
    told = [
        case.gather(how=how).into(memoryview(slab)[GUARD : GUARD + size])
        for how, slab in zip(BOTH, slabs, strict=True)
    ]
    assert told[0] == told[1]
    assert slabs[0] == slabs[1]


@settings(max_examples=100)
@given(st.data(), DRAWN, st.sampled_from(ListPolicy), st.sampled_from(BOTH))
def test_parts_of_a_slab_in_any_order_are_the_whole_and_write_nothing_else(
    data: st.DataObject,
    drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]],
    lists: ListPolicy,
    how: Open,
) -> None:
    case = Case(data, drawn, lists)
    size = data.draw(st.integers(0, _whole(case).bytes_used + 100))
    whole, slab = _filled(size), _filled(size)
    told = case.gather(how=how).into(memoryview(whole)[GUARD : GUARD + size])
    rows = len(case.row_index)
    cuts = data.draw(st.sets(st.integers(1, max(rows - 1, 1)), max_size=4)) if rows else set()
    parts = [slice(*ends) for ends in itertools.pairwise([0, *sorted(cuts), rows])]
    for part in data.draw(st.permutations(parts)):
        made = case.gather(how=how, part=part).into(memoryview(slab)[GUARD : GUARD + size])
        assert made == told
    assert slab == whole


@settings(max_examples=50)
@given(st.data(), DRAWN, st.sampled_from(ListPolicy))
def test_batches_that_fit_have_the_same_bytes_as_in_a_slab_of_their_own(
    data: st.DataObject, drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]], lists: ListPolicy
) -> None:
    case = Case(data, drawn, lists)
    count = data.draw(st.integers(1, len(case.batches)))
    alone = _filled(1 << 16)
    of_alone = case.gather(count).into(memoryview(alone)[GUARD:])
    cut = _filled(of_alone.bytes_used)
    of_cut = case.gather().into(memoryview(cut)[GUARD : GUARD + of_alone.bytes_used])
    assert of_cut.batch_count >= count
    if of_cut.batch_count == count:  # empty batches beyond may take no room
        assert (of_cut.bytes_used, of_cut.columns) == (of_alone.bytes_used, of_alone.columns)
        assert cut[: GUARD + of_cut.bytes_used] == alone[: GUARD + of_cut.bytes_used]


@pytest.mark.parametrize("how", BOTH)
def test_long_rows_and_rows_in_one_piece_are_copied_right(how: Open) -> None:
    width = 700
    rows = np.arange(40 * width, dtype=np.int32).reshape(40, width)
    names = [[bytes([i]) * (i * 60)] for i in range(40)]
    batch = pa.record_batch(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), width),
            "b": pa.array([name[0] for name in names], pa.binary()),
        }
    )
    plan = plan_columns(batch.schema)
    blocks = [open_block(canonical(batch.slice(at, 10), plan, ""), plan.specs)
              for at in range(0, 40, 10)]  # fmt: skip
    for chosen in (np.arange(3, 9), np.arange(40), np.array([39, 0, 17, 17, 5, 31])):
        batches = [Batch(0, 2, 2), Batch(1, len(chosen) - 2, len(chosen) - 2)]
        index = np.stack([chosen // 10, chosen % 10], 1).astype(np.int32)
        slab = memoryview(bytearray(1 << 20))
        with rows_by(how):
            result = Gather(plan.specs, blocks, index, batches).into(slab)
        found = [
            [v for i in (0, 1) for v in batch_values(slab, spec, column, batches, i)]
            for spec, column in zip(plan.specs, result.columns, strict=True)
        ]
        assert found[0] == rows[chosen].tolist()
        assert found[1] == [names[i][0] for i in chosen]


def test_objects_of_nested_dictionaries_from_different_blocks_come_together() -> None:
    def block(words: list[str]) -> pa.RecordBatch:
        values = pa.array(words).dictionary_encode()
        offsets = pa.array(range(len(words) + 1), pa.int32())
        return pa.record_batch({"w": pa.ListArray.from_arrays(offsets, values)})

    sources = [block(["a", "b"]), block(["c", "a"])]
    plan = plan_columns(sources[0].schema)
    assert plan.specs[0].kind is Kind.OBJECT
    blocks = [open_block(_stored(canonical(s, plan, "")), plan.specs) for s in sources]
    index = np.array([[1, 0], [0, 1], [0, 0], [1, 1]], np.int32)
    slab = memoryview(bytearray(1 << 16))
    batches = [Batch(0, 4, 4)]
    result = Gather(plan.specs, blocks, index, batches).into(slab)
    found = batch_values(slab, plan.specs[0], result.columns[0], batches, 0)
    assert found == [["c"], ["b"], ["a"], ["a"]]
