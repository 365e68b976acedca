"""The kernel gathers exactly the rows that its oracle and plain Python do."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import arrow_columns
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from arrow_columns import Leaf
from hypothesis import given
from hypothesis import strategies as st
from kernels import BOTH, Open, rows_by
from msgspec.structs import replace
from oracles import rows as oracle

from dataplane.arena.slab_layout import row_bytes
from dataplane.base.build_kernels import KERNEL, compile_library
from dataplane.base.compiled import sources_of
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
from dataplane.worker.columns import BlockColumns, RowIndex, RowLayout, open_block
from dataplane.worker.gather import Gather
from dataplane.worker.kernel import LIBRARY, SOURCE, kernel
from dataplane.worker.rows import Rows

UNTOUCHED = 0xAA


def fixed_block(values: np.ndarray[Any, Any]) -> BlockColumns:
    """Shapes:  values: uint8[rows, row_bytes]."""
    rows, size = values.shape
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), size)
    batch = pa.record_batch({"c": column})
    assert batch.num_rows == rows
    return open_block(batch, [ColumnSpec("c", Kind.FIXED, "uint8", (size,))])


LARGE = pa.large_binary()
LARGES = (LARGE, pa.large_list(pa.int16()))


def text_block(texts: list[bytes | None], cut: int = 0) -> BlockColumns:
    batch = pa.record_batch({"c": pa.array(texts, pa.large_binary())}).slice(cut)
    return open_block(batch, [ColumnSpec("c", Kind.BYTES, "")])


def drawn_index(random: np.random.Generator, blocks: list[BlockColumns], count: int) -> RowIndex:
    chosen = random.integers(0, len(blocks), count)
    rows = np.array([random.integers(0, blocks[block].rows) for block in chosen])
    return np.stack([chosen, rows], 1).astype(np.int32)


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 8, 16, 17, 64, 700, 4096, 8200])
@pytest.mark.parametrize("count", [0, 1, 255, 1000])
def test_rows_of_any_size_are_those_of_the_blocks(how: Open, row_bytes: int, count: int) -> None:
    random = np.random.default_rng(row_bytes)
    tables = [random.integers(0, 256, (rows, row_bytes), np.uint8) for rows in (1, 9, 40)]
    blocks = [fixed_block(table) for table in tables]
    index = drawn_index(random, blocks, count)
    out = np.full(count * row_bytes + 8, UNTOUCHED, np.uint8)
    how(blocks, index).fixed(0, row_bytes, out[: count * row_bytes])
    expected = b"".join(tables[block][row].tobytes() for block, row in index)
    assert bytes(out) == expected + bytes([UNTOUCHED]) * 8


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("longest", [0, 40, 9000])
def test_runs_of_any_length_are_those_of_the_blocks_with_zeros_behind(
    how: Open, longest: int
) -> None:
    random = np.random.default_rng(longest)
    texts: list[list[bytes | None]] = [
        [
            None if length % 7 == 3 else bytes(random.integers(0, 256, length, np.uint8))
            for length in random.integers(0, longest + 1, rows)
        ]
        for rows in (30, 1, 50)
    ]
    blocks = [text_block(some) for some in texts]
    index = drawn_index(random, blocks, 400)
    chosen = [texts[block][row] for block, row in index]
    rows = how(blocks, index)
    spans = rows.spans(0)
    assert spans[1].tolist() == [len(text or b"") for text in chosen]
    assert rows.valid(0, 300).tolist() == [text is not None for text in chosen[:300]]
    room = spans[1] + random.integers(0, 3, 400)
    put = np.cumsum(room) - room
    out = np.full(int(room.sum()) + 8, UNTOUCHED, np.uint8)
    rows.runs(0, 1, spans, put, room, out[:-8])
    expected = b"".join(
        (text or b"").ljust(int(r), b"\0") for text, r in zip(chosen, room, strict=True)
    )
    assert bytes(out) == expected + bytes([UNTOUCHED]) * 8


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_what_a_run_leaves_is_filled_with_the_padding(how: Open, size: int) -> None:
    padding = bytes(range(1, size + 1))
    block = text_block([b"a" * size, b"", b"b" * 2 * size])
    rows = how([block], np.array([(0, 2), (0, 0), (0, 1)], np.int32))
    starts, lengths = rows.spans(0)
    out = np.full(9 * size + 8, UNTOUCHED, np.uint8)
    put, room = np.arange(3) * 3 * size, np.full(3, 3 * size)
    rows.runs(0, size, (starts // size, lengths // size), put, room, out[:-8], padding)
    expected = b"b" * 2 * size + padding + b"a" * size + 2 * padding + 3 * padding
    assert bytes(out) == expected + bytes([UNTOUCHED]) * 8


@given(st.lists(st.lists(st.none() | st.binary(max_size=6)), min_size=1, max_size=4), st.data())
def test_any_texts_in_any_blocks_are_taken_alike(
    texts: list[list[bytes | None]], data: st.DataObject
) -> None:
    cuts = [data.draw(st.integers(0, len(some))) for some in texts]
    blocks = [text_block(some, cut) for some, cut in zip(texts, cuts, strict=True)]
    there = [(b, r) for b, block in enumerate(blocks) for r in range(block.rows)]
    chosen = data.draw(st.lists(st.sampled_from(there), max_size=8)) if there else []
    index = np.array(chosen, np.int32).reshape(-1, 2)
    expected = [texts[b][cuts[b] + r] for b, r in chosen]
    for how in BOTH:
        rows = how(blocks, index)
        starts, lengths = rows.spans(0)
        out = np.zeros(int(lengths.sum()), np.uint8)
        rows.runs(0, 1, (starts, lengths), np.cumsum(lengths) - lengths, lengths, out)
        ends = np.cumsum(lengths).tolist()
        found = [bytes(out[a:b]) for a, b in itertools.pairwise([0, *ends])]
        assert found == [text or b"" for text in expected]
        assert rows.valid(0, len(index)).tolist() == [text is not None for text in expected]


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("cut", [0, 3])
def test_rows_are_the_same_whatever_the_width_of_their_starts(how: Open, cut: int) -> None:
    texts = [b"a" * (i % 7) for i in range(600)]
    lists = [[i] * (i % 5) for i in range(600)]
    specs = [ColumnSpec("b", Kind.BYTES, ""), ColumnSpec("l", Kind.RAGGED, "int16")]
    index = np.stack([np.arange(800) % 2, np.arange(800) * 7 % 590], 1).astype(np.int32)
    found = []
    for kinds in ((pa.binary(), pa.list_(pa.int16())), LARGES):
        columns = [pa.array(texts, kinds[0]), pa.array(lists, kinds[1])]
        batch = pa.record_batch(columns, names=["b", "l"])
        # Blocks of both widths in one slab: shards may differ.
        wide = [c.cast(kind) for c, kind in zip(columns, LARGES, strict=True)]
        other = pa.record_batch(wide, names=["b", "l"])
        rows = how(
            [open_block(batch.slice(cut), specs), open_block(other.slice(cut), specs)], index
        )
        found.append([span.tolist() for at in range(2) for span in rows.spans(at)])
        expected = [len(each[cut + row]) for each in (texts, lists) for _, row in index]
        assert found[-1][1] + found[-1][3] == expected
    assert found[0] == found[1]


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("wrong", [(-1, 0), (2, 0), (0, -1), (0, 3), (1, 2), (2**31 - 1, 0)])
def test_a_row_outside_of_its_block_is_refused_before_anything_is_read(
    how: Open, wrong: tuple[int, int]
) -> None:
    blocks = [fixed_block(np.zeros((rows, 4), np.uint8)) for rows in (3, 2)]
    index = np.array([(0, 2), (1, 1), wrong, (0, 0)], np.int32)
    with pytest.raises(RowOutOfBounds) as caught:
        how(blocks, index)
    assert caught.value.row == 2


def _ten_bytes(kind: pa.DataType = LARGE) -> tuple[BlockColumns, npt.NDArray[np.integer]]:
    """A block of three rows over ten bytes, and its starts, to change them later."""
    starts = np.array([0, 3, 10, 10], np.int64 if kind == LARGE else np.int32)
    buffers = [None, pa.py_buffer(starts), pa.py_buffer(b"0123456789")]
    column = pa.Array.from_buffers(kind, 3, buffers)
    return open_block(pa.record_batch({"c": column}), [ColumnSpec("c", Kind.BYTES, "")]), starts


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("kind", [pa.binary(), LARGE], ids=str)
@pytest.mark.parametrize("starts", [[0, 4, 2, 9], [0, 3, 11, 11], [0, -2, 5, 5], [0, 2**62, 1, 1]])
def test_starts_that_are_not_within_the_values_are_refused(
    how: Open, kind: pa.DataType, starts: list[int]
) -> None:
    block, memory = _ten_bytes(kind)
    memory[:] = np.minimum(starts, np.iinfo(memory.dtype).max)
    index = np.array([(0, 0), (0, 1), (0, 2)], np.int32)
    with pytest.raises(RowOutOfBounds):
        how([block], index).spans(0)


@pytest.mark.parametrize("how", BOTH)
def test_starts_that_change_while_a_slab_is_made_change_nothing(how: Open) -> None:
    block, starts = _ten_bytes()
    rows = how([block], np.array([(0, 1), (0, 0)], np.int32))
    spans = rows.spans(0)
    starts[:] = 2**40
    out = np.zeros(10, np.uint8)
    rows.runs(0, 1, spans, np.array([0, 7]), spans[1], out)
    assert bytes(out) == b"3456789012"


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize(("put", "room"), [(-1, 3), (0, 2), (98, 3), (2**63 - 1, 3)])
def test_a_run_that_does_not_fit_is_refused(how: Open, put: int, room: int) -> None:
    rows = how([text_block([b"abc"])], np.zeros((1, 2), np.int32))
    out = np.full(100, UNTOUCHED, np.uint8)
    with pytest.raises(RowOutOfBounds):
        rows.runs(0, 1, rows.spans(0), np.array([put]), np.array([room]), out)
    assert (out == UNTOUCHED).all()


@pytest.mark.parametrize("how", BOTH)
def test_an_empty_list_of_blocks_has_no_rows(how: Open) -> None:
    rows = how([], np.zeros((0, 2), np.int32))
    rows.fixed(0, 4, np.empty(0, np.uint8))
    assert [len(span) for span in rows.spans(0)] == [0, 0]
    with pytest.raises(RowOutOfBounds):
        how([], np.zeros((1, 2), np.int32))


def test_this_installation_has_the_kernel_of_this_source() -> None:
    assert kernel()._name == str(LIBRARY)


RUNS_FAR_AWAY = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import numpy as np
    import pyarrow as pa
    from dataplane.model.errors import RowOutOfBounds
    from dataplane.model.records import ColumnSpec, Kind
    from dataplane.worker.columns import open_block
    from dataplane.worker import kernel
    from dataplane.worker.rows import Rows

    kernel.LIBRARY = Path(sys.argv[1])
    values = pa.array([[1, 2]] * 40, pa.large_list(pa.int64()))
    batch = pa.record_batch({"c": values})
    block = open_block(batch, [ColumnSpec("c", Kind.RAGGED, "int64")])
    rows = Rows([block], np.stack([np.zeros(40), np.arange(40)], 1).astype("i4"))
    starts, lengths = rows.spans(0)
    starts[30], lengths[30] = 1 << 60, 1 << 61
    put, room = np.arange(40) * 16, np.full(40, 16)
    try:
        rows.runs(0, 8, (starts, lengths), put, room, np.zeros(640, np.uint8))
    except RowOutOfBounds as error:
        print(error.row)
    """
)


def test_no_address_is_made_of_a_run_that_is_not_checked_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefetching stays in bounds, too: pointers beyond an array are undefined behaviour."""
    for source in sources_of(SOURCE):
        copy = tmp_path / source.relative_to(SOURCE.parents[2])
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    checks = "-fsanitize=undefined -fno-sanitize=alignment -fsanitize-undefined-trap-on-error"
    monkeypatch.setenv("CFLAGS", checks)
    compile_library(KERNEL, tmp_path)
    command = [sys.executable, "-c", RUNS_FAR_AWAY, str(tmp_path / KERNEL.path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "30\n"), ran.stderr


DTYPES = ("bool", "int8", "uint16", "float32", "int64")


def packed_block(
    batch: pa.RecordBatch, specs: tuple[ColumnSpec, ...], how: RowLayout
) -> BlockColumns:
    """Write a block into the arena as a worker does, and return it as found there."""
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
    """The rows of one block that needs no decoding, if nothing must become another type."""
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
