"""Gathered rows equal the rows of the blocks, and nothing else is written."""

from __future__ import annotations

import itertools

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf, canonical_values, comparable
from hypothesis import given
from hypothesis import strategies as st
from kernels import BOTH, Open, rows_by
from msgspec.structs import replace
from slabs import batch_values

from dataplane.arena.slab_layout import row_numbers_bytes
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError, RowOutOfBounds
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind, ListPolicy, StackSpec
from dataplane.rpc.messages import Batch
from dataplane.rpc.tasks import Assembled
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.stacks import Stack, stack_specs
from dataplane.worker import row_layout
from dataplane.worker.apart import open_excerpt, places_of, write_excerpt
from dataplane.worker.columns import BlockColumns, RowLayout, open_block
from dataplane.worker.gather import Gather
from dataplane.worker.rows import Rows
from dataplane.worker.stacking import canonical_stacked, plan_stacked

FILL = 3.0
GUARD = 64
UNTOUCHED = 0xAA


def _stored(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a decoded block as a worker finds it in the arena."""
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


RowIndex = np.ndarray[tuple[int, int], np.dtype[np.int32]]


def excerpt_of(
    block: BlockColumns, specs: tuple[ColumnSpec, ...], numbers: np.ndarray, how: RowLayout | None
) -> tuple[BlockColumns, np.ndarray]:
    """Write a block as a worker does, with exactly the room that it needs, and return it as found."""
    small = bytearray(row_numbers_bytes(len(numbers)))
    small[: 4 * len(numbers)] = numbers.astype(np.int32).tobytes()
    need = write_excerpt(block, specs, memoryview(small), len(numbers))
    region = bytearray(b"\xaa" * need)
    region[: 4 * len(numbers)] = numbers.astype(np.int32).tobytes()
    assert write_excerpt(block, specs, memoryview(region), len(numbers)) == need
    return open_excerpt(memoryview(bytes(region)), specs, how, len(numbers))


def slab_of(
    specs: tuple[ColumnSpec, ...], blocks: list[BlockColumns], index: RowIndex, rows: int
) -> tuple[bytes, object]:
    slab = bytearray(1 << 18)
    batches = [Batch(0, rows // 2, rows // 2), Batch(1, rows - rows // 2, rows - rows // 2)]
    told = Gather(specs, blocks, index, batches).into(memoryview(slab))
    return bytes(slab), told


@given(st.data(), st.integers(2, 14).flatmap(lambda rows: arrow_columns.batches(rows, 4)))
def test_a_slab_from_excerpts_and_whole_blocks_equals_one_from_whole_blocks(
    data: st.DataObject, drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]]
) -> None:
    source, leaves = drawn
    if data.draw(st.booleans(), "enough to pack"):
        for i, dtype in enumerate(("float64", "int8", "uint16", "float32")):
            source = source.append_column(
                f"small{i}", pa.array(np.arange(source.num_rows).astype(dtype))
            )
    plan = plan_columns(
        source.schema, ColumnOptions(fill_null=tuple((leaf.name, 3.0) for leaf in leaves))
    )
    how = row_layout.plan_row_layout(plan.specs) if data.draw(st.booleans(), "pack") else None
    cut = data.draw(st.integers(1, source.num_rows - 1))
    blocks: list[BlockColumns] = []
    for a, b in itertools.pairwise((0, cut, source.num_rows)):
        batch = canonical(source.slice(a, b - a), plan, "url")
        if how is None and data.draw(st.booleans(), "in place"):
            blocks.append(open_block(batch, plan.specs))
            continue
        region = memoryview(bytearray(row_layout.stored_bytes(batch, how)))
        row_layout.store(batch, plan.specs, how, region)
        blocks.append(row_layout.open_stored(region, plan.specs, how))
    of = st.integers(0, 1)
    drawn_rows = data.draw(st.lists(of, min_size=1, max_size=12)), data.draw(st.randoms())
    index = np.array(
        [(b, drawn_rows[1].randrange(blocks[b].rows)) for b in drawn_rows[0]], np.int32
    )
    numbers: list[np.ndarray | None] = [None, None]
    excerpts = list(blocks)
    for b in range(2):
        own = set(index[index[:, 0] == b, 1].tolist())
        own |= data.draw(st.sets(st.integers(0, blocks[b].rows - 1)), "rows of other slabs")
        if own and data.draw(st.booleans(), "excerpt"):
            excerpts[b], numbers[b] = excerpt_of(blocks[b], plan.specs, np.array(sorted(own)), how)
    places = places_of(index, numbers)
    assert slab_of(plan.specs, excerpts, places, len(index)) == slab_of(
        plan.specs, blocks, index, len(index)
    )


def test_a_row_that_an_excerpt_lacks_is_an_error_and_not_another_row() -> None:
    index = np.array([(0, 5), (1, 3), (0, 7)], np.int32)
    with pytest.raises(RowOutOfBounds) as caught:
        places_of(index, [np.array([1, 5, 6]), None])
    assert caught.value.nouns["row"] == 2
    assert places_of(index, [np.array([1, 5, 7]), None]).tolist() == [[0, 1], [1, 3], [0, 2]]


def test_damaged_offsets_are_found_before_arrow_follows_them() -> None:
    offsets = np.array([0, 2, 1 << 40, 6], np.int64)
    array = pa.Array.from_buffers(
        pa.large_string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"abcdef")]
    )
    batch = pa.record_batch([array], names=["s"])
    plan = plan_columns(batch.schema, ColumnOptions())
    block = open_block(batch, plan.specs)
    with pytest.raises(RowOutOfBounds):
        excerpt_of(block, plan.specs, np.array([1]), None)


FLOATS = ("float16", "float32", "float64")
numbers = st.sampled_from(
    ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", *FLOATS]
)


def table(dtypes: list[str], rows: int, seed: int, *, nulls: bool) -> pa.RecordBatch:
    random = np.random.default_rng(seed)
    columns = {}
    for i, dtype in enumerate(dtypes):
        values = random.integers(0, 2 if dtype == "bool" else 100, rows).astype(dtype)
        mask = random.random(rows) < 0.2 if nulls and dtype in FLOATS else None
        columns[f"c{i}"] = pa.array(values, mask=mask)
    return pa.record_batch(columns)


@given(
    dtypes=st.lists(numbers, min_size=1, max_size=7),
    rows=st.sampled_from([0, 1, 5, 300]),
    seed=st.integers(0, 99),
    target=st.sampled_from(["", *FLOATS]),
    data=st.data(),
)
def test_a_stack_is_its_columns_side_by_side(dtypes, rows, seed, target, data):
    dtypes = dtypes if target else [dtypes[0]] * len(dtypes)
    batch = table(["int64", *dtypes, "float32"], rows, seed, nulls=True)
    members = data.draw(st.permutations([f"c{i + 1}" for i in range(len(dtypes))]))
    stack = StackSpec("x", tuple(members), target)
    plan = plan_stacked(batch.schema, ColumnOptions(stack=(stack,)))
    last = f"c{len(dtypes) + 1}"
    assert [spec.name for spec in plan.specs] == ["c0", last, "x"]
    spec = plan.specs[-1]
    assert (spec.kind, spec.dtype, spec.shape) == (
        Kind.FIXED,
        target or dtypes[0],
        (len(dtypes),),
    )
    plain = canonical(batch, plan_columns(batch.schema), "")
    wanted = [plain.column(name).to_numpy().astype(spec.dtype) for name in members]
    found = canonical_stacked(batch, plan, "")
    assert found.schema == plan.schema
    assert found.column("c0").equals(plain.column("c0"))
    values = found.column("x").values.to_numpy().reshape(rows, len(dtypes))
    np.testing.assert_array_equal(values, np.stack(wanted, 1))


@given(drawn=st.integers(1, 9).flatmap(lambda rows: arrow_columns.batches(rows, 5)))
def test_any_column_that_is_a_number_can_be_stacked_and_any_other_says_why_not(drawn):
    batch, leaves = drawn
    specs = plan_columns(batch.schema).specs
    fills = tuple((leaf.name, 3.0) for leaf in leaves)
    for spec in specs:
        stack = (StackSpec("a new name", (spec.name,)),)
        if spec.kind is Kind.FIXED and not spec.shape:
            options = ColumnOptions((spec.name,), fill_null=fills, stack=stack)
            plan = plan_stacked(batch.schema, options)
            top = batch.select(list(plan.leaves.top_level))
            found = canonical_stacked(top, plan, "").column(0)
            wanted = canonical(top, plan.leaves, "").column(0)
            assert found.values.equals(wanted)
        else:
            with pytest.raises(ConfigError, match="not one number per sample"):
                plan_stacked(batch.schema, ColumnOptions((spec.name,), stack=stack))


SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ("f", pa.float32()),
        ("text", pa.string()),
        ("some", pa.list_(pa.int32())),
        ("vector", pa.list_(pa.float32(), 3)),
        ("parts", pa.struct([("a", pa.int64())])),
    ]
)


@pytest.mark.parametrize(
    ("stack", "says"),
    [
        (StackSpec("x", ("i", "f")), 'Stack.*dtype="float32"'),
        (StackSpec("x", ("text",)), "'text' .string. is not one number"),
        (StackSpec("x", ("some",)), "'some' .padded. is not one number"),
        (StackSpec("x", ("vector",)), r"float32 of shape \[3\]"),
        (StackSpec("x", ("parts",)), "list its fields"),
        (StackSpec("x", ("nowhere",)), "there is no column 'nowhere'; the dataset has: i"),
        (StackSpec("f", ("i",)), "choose another"),
        (StackSpec("x", ("i", "f"), "int32"), "cannot hold"),
    ],
)
def test_what_cannot_be_stacked_says_what_to_do(stack, says):
    with pytest.raises(ConfigError, match=says):
        plan_stacked(SCHEMA, ColumnOptions(stack=(stack,)))


@pytest.mark.parametrize(
    "given",
    [["a"], {"x": "a"}, {"x": []}, {"x": [1]}, {1: ["a"]}, {"x": Stack(["a"], dtype="complex64")},
     {"x": ["a", "a"]}, {"x": ["a"], "y": ["a"]}],
)  # fmt: skip
def test_what_is_no_stack_is_refused_before_anything_is_opened(given):
    with pytest.raises(ConfigError):
        stack_specs(given)


def test_a_stack_may_use_columns_that_are_not_chosen_and_their_fill_values():
    batch = pa.record_batch(
        {"a": pa.array([1, None, 3]), "b": pa.array([4, 5, 6]), "c": pa.array(["x", "y", "z"])}
    )
    (stack,) = stack_specs({"x": ["b", "a"]})
    options = ColumnOptions(("c",), stack=(stack,))
    plan = plan_stacked(batch.schema, replace(options, fill_null=(("a", 9.0),)))
    assert [spec.name for spec in plan.specs] == ["c", "x"]
    assert plan.leaves.top_level == ("c", "b", "a")
    found = canonical_stacked(batch, plan, "")
    assert found.column("x").to_pylist() == [[4, 1], [5, 9], [6, 3]]
    with pytest.raises(ConfigError, match="fill_null"):
        canonical_stacked(batch, plan_stacked(batch.schema, options), "")


def test_a_stack_is_part_of_the_digest_and_jobs_without_one_keep_theirs():
    plain = JobSpec("f" * 32)
    one, other = (
        JobSpec("f" * 32, column_options=ColumnOptions(stack=(StackSpec("x", c),)))
        for c in (("a", "b"), ("b", "a"))
    )
    assert len({plain.digest(), one.digest(), other.digest()}) == 3
    assert [name for name, _, _ in one.differences(other)] == ["stack"]


@pytest.mark.parametrize(
    ("values", "dtype", "shown"),
    [
        ([1.0, None, 1e39, float("inf")], "float32", "1e+39"),
        ([1, 2, 70_000, 4], "float16", "70000"),
    ],
)
def test_a_number_that_would_become_infinite_in_a_stack_is_refused(values, dtype, shown):
    batch = pa.record_batch({"x": [0.0] * 4, "y": values})
    plan = plan_stacked(batch.schema, ColumnOptions(stack=(StackSpec("xy", ("x", "y"), dtype),)))
    with pytest.raises(ConfigError) as caught:
        canonical_stacked(batch, plan, "file:///a")
    assert f"file:///a: stack 'xy': row 2 of its block has {shown} in column 'y'" in str(
        caught.value
    )
    found = canonical_stacked(pa.record_batch({"x": [0.0], "y": pa.array(values[3:])}), plan, "")
    assert found.column("xy").to_pylist() == [[0.0, values[3]]]
