"""A packed block gives the same slabs as the block that it was made from, to the byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import BOTH, Open, rows_by
from msgspec.structs import replace
from oracles import rows as oracle

from dataplane.arena.slab_layout import row_bytes
from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec
from dataplane.model.errors import RowOutOfBounds
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind
from dataplane.node.dataset import can_pack, dataset_of
from dataplane.plan.manifest import Manifest
from dataplane.rpc.messages import Batch
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.worker import row_layout
from dataplane.worker.columns import BlockColumns, RowLayout, open_block
from dataplane.worker.gather import Gather
from dataplane.worker.rows import Rows

DTYPES = ("bool", "int8", "uint16", "float32", "int64")
UNTOUCHED = 0xAA


def packed_block(
    batch: pa.RecordBatch, specs: tuple[ColumnSpec, ...], how: RowLayout
) -> BlockColumns:
    """As a worker writes a block into the arena, and finds it there."""
    region = memoryview(bytearray([UNTOUCHED]) * row_layout.stored_bytes(batch, how))
    row_layout.store(batch, specs, how, region)
    return row_layout.open_stored(region, specs, how)


def slab_of(
    specs: tuple[ColumnSpec, ...],
    blocks: list[BlockColumns],
    index: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    batches: list[Batch],
    how: Open,
) -> tuple[bytes, object]:
    slab = bytearray([UNTOUCHED]) * (1 << 18)
    with rows_by(how):
        told = Gather(specs, blocks, index, batches).into(memoryview(slab))
    return bytes(slab), told


def _all_small(
    rows: int, width: int, seed: int, dtypes: tuple[str, ...] = DTYPES
) -> pa.RecordBatch:
    random = np.random.default_rng(seed)
    names = random.choice(dtypes, width)
    return pa.record_batch(
        {
            f"c{i}": pa.array(random.integers(0, 2, rows).astype(dtype))
            for i, dtype in enumerate(names)
        }
    )


@settings(max_examples=50)
@given(st.data(), st.integers(1, 12).flatmap(lambda rows: arrow_columns.batches(rows, 4)))
def test_any_block_gives_the_same_slab_packed_or_not(
    data: st.DataObject, drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]]
) -> None:
    source, leaves = drawn
    rows = source.num_rows
    # Enough columns that some are packed, whatever the others are.
    for i, dtype in enumerate(("float64", "int8", "uint16", "float32")):
        source = source.add_column(i, f"more{i}", pa.array(np.arange(rows).astype(dtype)))
    fills = tuple((leaf.name, 3.0) for leaf in leaves)
    plan = plan_columns(source.schema, ColumnOptions(fill_null=fills))
    how = row_layout.plan_row_layout(plan.specs)
    assert how is not None
    cut = data.draw(st.integers(0, rows))
    parts = [
        canonical(source.slice(a, b - a), plan, "url")
        for a, b in itertools.pairwise([0, cut, rows])
    ]
    chosen = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9)))
    index = np.stack([chosen >= cut, np.where(chosen < cut, chosen, chosen - cut)], 1)
    first = data.draw(st.integers(0, len(chosen)))
    batches = [Batch(i, n, n) for i, n in enumerate((first, len(chosen) - first))]
    plain = [open_block(part, plan.specs) for part in parts]
    packed = [packed_block(part, plan.specs, how) for part in parts]
    expected = slab_of(plan.specs, plain, index.astype(np.int32), batches, Rows)
    for rows_how in BOTH:
        found = slab_of(plan.specs, packed, index.astype(np.int32), batches, rows_how)
        assert found == expected


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("rows", [1, 3, 255, 256, 257, 1030])
@pytest.mark.parametrize("width", [4, 5, 7, 40])
def test_many_rows_of_small_columns_come_back(how: Open, rows: int, width: int) -> None:
    batch = _all_small(rows, width, seed=rows + width)
    plan = plan_columns(batch.schema)
    packed_as = row_layout.plan_row_layout(plan.specs)
    assert packed_as is not None
    block = canonical(batch, plan, "url")
    index = np.zeros((rows, 2), np.int32)
    index[:, 1] = np.random.default_rng(0).permutation(rows)
    batches = [Batch(0, rows, rows)]
    plain, packed = open_block(block, plan.specs), packed_block(block, plan.specs, packed_as)
    assert slab_of(plan.specs, [packed], index, batches, how) == slab_of(
        plan.specs, [plain], index, batches, how
    )


@pytest.mark.parametrize("rows", [1, 257])
def test_numpy_packs_the_same_bytes(rows: int) -> None:
    batch = _all_small(rows, 30, seed=rows)
    plan = plan_columns(batch.schema)
    block, packed_as = canonical(batch, plan, ""), row_layout.plan_row_layout(plan.specs)
    assert packed_as is not None
    found, expected = np.zeros((2, rows * packed_as.row_bytes), np.uint8)
    row_layout.pack(block, plan.specs, packed_as, found)
    oracle.pack(block, plan.specs, packed_as, expected)
    assert found.tobytes() == expected.tobytes()


@given(st.lists(st.sampled_from(["int8", "bool", "int16", "float32", "int64"]), max_size=9),
       st.lists(st.integers(1, 40), max_size=4))  # fmt: skip
def test_fields_of_a_row_never_overlap_and_padding_is_small(
    dtypes: list[str], widths: list[int]
) -> None:
    specs = [ColumnSpec(f"c{i}", Kind.FIXED, dtype) for i, dtype in enumerate(dtypes)]
    specs += [ColumnSpec(f"l{i}", Kind.FIXED, "int8", (n,)) for i, n in enumerate(widths)]
    small = [at for at, spec in enumerate(specs) if row_bytes(spec) <= 32]
    how = row_layout.plan_row_layout([*specs, ColumnSpec("t", Kind.STRING, "")])
    if len(small) < 4:
        assert how is None
        return
    assert how is not None
    assert sorted(how.columns) == small
    fields = how.fields.tolist()
    assert [size for _, size in fields] == [row_bytes(specs[at]) for at in how.columns]
    ends = [start + size for start, size in fields]
    assert [start for start, _ in fields] == [0, *ends[:-1]]
    assert ends[-1] <= how.row_bytes <= ends[-1] * 9 / 8
    assert how.padding_bytes == how.row_bytes - ends[-1]


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("wrong", [(1, 0), (0, 5), (0, -1), (-1, 0)])
def test_a_row_outside_of_a_packed_block_is_refused(how: Open, wrong: tuple[int, int]) -> None:
    batch = _all_small(5, 6, seed=1)
    plan = plan_columns(batch.schema)
    packed_as = row_layout.plan_row_layout(plan.specs)
    assert packed_as is not None
    block = packed_block(canonical(batch, plan, ""), plan.specs, packed_as)
    index = np.array([(0, 4), wrong], np.int32)
    with rows_by(how), pytest.raises(RowOutOfBounds) as caught:
        Gather(plan.specs, [block], index, [Batch(0, 2, 2)])
    assert caught.value.row == 1


def test_a_region_that_is_too_short_for_its_rows_is_refused() -> None:
    batch = _all_small(100, 6, 1, ("int64",))
    plan = plan_columns(batch.schema)
    how = row_layout.plan_row_layout(plan.specs)
    assert how is not None
    region = memoryview(bytearray(row_layout.stored_bytes(batch, how)))
    row_layout.store(batch, plan.specs, how, region)
    with pytest.raises(RowOutOfBounds, match="100 packed rows"):
        row_layout.open_stored(region[:300], plan.specs, how)


def _manifest(folder: Path, *dtypes: str) -> Manifest:
    """Of one block that needs no decoding, if nothing must become another type."""
    batch = _all_small(640, 8, 0, dtypes)
    with pa.ipc.new_file(folder / "a.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    return index_dataset(str(folder / "a.arrow"))


def test_only_shuffled_rows_of_several_columns_are_packed_and_only_where_there_is_room(
    tmp_path: Path,
) -> None:
    manifest = _manifest(tmp_path, "float32")
    shuffled = JobSpec(manifest.fingerprint, shuffle=True, window=64)
    assert can_pack(manifest, shuffled, 1 << 20)
    assert not can_pack(manifest, JobSpec(manifest.fingerprint), 1 << 20)
    assert not can_pack(manifest, shuffled, 4096)
    few = JobSpec(
        manifest.fingerprint,
        shuffle=True,
        window=64,
        column_options=ColumnOptions(("c0", "c1", "c2")),
    )
    assert not can_pack(manifest, few, 1 << 20)


def test_long_rows_are_not_copied_for_the_sake_of_a_few_small_columns(tmp_path: Path) -> None:
    batch = _all_small(4096, 4, 0, ("int64",))
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4096 * 64, np.int32)), 64)
    batch = batch.append_column("tokens", tokens)
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    manifest = index_dataset(str(tmp_path / "a.arrow"))
    whole = JobSpec(manifest.fingerprint, shuffle=True, window=64)
    assert not can_pack(manifest, whole, 1 << 30)
    assert can_pack(
        manifest, replace(whole, column_options=ColumnOptions(("c0", "c1", "c2", "c3"))), 1 << 30
    )


def test_what_takes_memory_anyway_is_packed_wherever_it_fits(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path, "bool")  # a bit in the file, a byte in a slab
    assert can_pack(manifest, JobSpec(manifest.fingerprint, shuffle=True, window=64), 4096)


def test_a_packed_block_is_decoded_where_another_lies_in_its_file(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path, "int64")
    spec = JobSpec(manifest.fingerprint, shuffle=True)
    plain, packed = dataset_of(1, manifest, spec), dataset_of(2, manifest, spec, packed=True)
    assert not plain.blocks.needs_decode(0)
    assert plain.blocks.marks.decoded.tolist() == [0]
    assert packed.blocks.needs_decode(0)
    assert int(packed.blocks.marks.decoded[0]) >= 64 * 8 * 8


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("begin", [-1, 1 << 40, 33])
def test_columns_that_do_not_fit_into_their_slab_are_refused(how: Open, begin: int) -> None:
    batch = _all_small(5, 4, 1, ("int64",))
    plan = plan_columns(batch.schema)
    packed_as = row_layout.plan_row_layout(plan.specs)
    assert packed_as is not None
    block = packed_block(canonical(batch, plan, ""), plan.specs, packed_as)
    rows = how([block], np.zeros((4, 2), np.int32))
    out = np.full(64, UNTOUCHED, np.uint8)
    with pytest.raises(RowOutOfBounds):
        rows.packed(packed_as, 4, out, np.array([0, 0, 0, begin]))
    assert (out == UNTOUCHED).all()
