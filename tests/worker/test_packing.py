"""Slabs of packs have the documents of their blocks, pack by pack, and say where each one lies."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import BOTH, rows_by
from msgspec.structs import replace
from numpy.typing import NDArray
from plan import plain

from dataplane.arena.slab_layout import row_numbers_bytes
from dataplane.model.changes import TakenDocument
from dataplane.model.errors import ConfigError, CorruptShard, RowOutOfBounds
from dataplane.model.records import (
    PACK_OUTPUTS,
    ColumnSpec,
    Kind,
    LongPolicy,
    PackPolicy,
    PackSpec,
    Region,
)
from dataplane.plan.packs import PACK_BITS, documents_max, packs_of, without
from dataplane.rpc import tasks
from dataplane.rpc.messages import Batch
from dataplane.rpc.tasks import Origin
from dataplane.worker import worker
from dataplane.worker.apart import OpenBlock, open_excerpt, places_of, write_packs
from dataplane.worker.columns import BlockColumns, open_block
from dataplane.worker.gather import Gathered
from dataplane.worker.pack_blocks import KnownPacks, PackBlock, PackForm
from dataplane.worker.packing import CountGather, PackGather

Documents = list[list[int]]
Arrays = dict[str, NDArray[np.generic]]
DTYPES = ("uint8", "int16", "uint16", "int32", "uint32", "int64")
LOSSES = dict(zip(DTYPES, ("bool", "int8", "int32", "bool", "int64", "uint16"), strict=True))
SPECS = {
    dtype: (
        ColumnSpec("mask", Kind.RAGGED, "float32"),
        ColumnSpec("tokens", Kind.PADDED, dtype),
        ColumnSpec("loss", Kind.PADDED, LOSSES[dtype]),
    )
    for dtype in DTYPES
}
ALL = (*PACK_OUTPUTS, "labels")


def block_of(documents: Documents, dtype: str, *, is_large: bool = False) -> BlockColumns:
    make = pa.large_list if is_large else pa.list_
    tokens = pa.array(documents, make(pa.from_numpy_dtype(np.dtype(dtype))))
    masks = [[token / 2 for token in each] for each in documents]
    stored = LOSSES[dtype].replace("bool", "uint8")  # as blocks have them
    has_loss = 1 if stored.endswith("int8") else 256  # the last byte is 0
    losses = [[has_loss * (token % 3 > 0) for token in each] for each in documents]
    batch = pa.record_batch({
        "mask": pa.array(masks, pa.list_(pa.float32())),
        "tokens": tokens,
        "loss": pa.array(losses, pa.list_(pa.from_numpy_dtype(np.dtype(stored)))),
    })  # fmt: skip
    return open_block(batch, SPECS[dtype])


def expected_pack(
    documents: Documents, pieces: list[tuple[int, int, int, int]], form: PackSpec
) -> dict[str, list[float]]:
    """One pack, token by token."""
    size, width = form.length, documents_max(form) + 2
    tokens, mask, labels = [form.pad_value] * size, [0.0] * size, [-100] * size
    positions, ids, ends = list(range(size)), [-1] * size, []
    for number, (row, begin, length, place) in enumerate(pieces):
        end = place + plain.padded(length, form.multiple)
        if number + 1 < len(pieces):
            end = pieces[number + 1][3]
        ends.append(end)
        for at in range(place, end):
            positions[at], ids[at] = at - place, number
        for at in range(length):
            token = documents[row][begin + at]
            tokens[place + at], mask[place + at] = token, token / 2
            following = documents[row][begin + at + 1 : begin + at + 2]
            if following and (not form.loss_mask or following[0] % 3):
                labels[place + at] = following[0]
    for at in range(ends[-1], size):
        positions[at] = at - ends[-1]
    cuts = [0, *ends] + [size] * (width - len(ends) - 1)
    return {
        "tokens": tokens,
        "mask": mask,
        "labels": labels,
        "position_ids": positions,
        "document_ids": ids,
        "cu_seqlens": cuts,
        "max_seqlen": [max(np.diff(cuts).tolist())],
    }


def expected_padded(
    documents: Documents, pieces: list[tuple[int, int, int, int]], form: PackSpec
) -> dict[str, list[Any]]:
    """One padded batch, row by row."""
    flat, lengths = expected_pack(documents, pieces, form), [length for _, _, length, _ in pieces]
    width = max(plain.padded(length, form.multiple) for length in lengths)
    found = {}
    for name in ("mask", "tokens", "labels"):
        values = flat[name]
        found[name] = [values[at * width : (at + 1) * width] for at in range(len(lengths))]
    return {**found, "lengths": lengths}


def read_padded(slab: bytes, form: PackForm, columns: tuple[Any, ...], at: int) -> Arrays:
    """One batch of a slab of padded batches, as a trainer finds it."""
    batch = {}
    for spec, column in zip(form.batch_specs, columns, strict=True):
        shape = np.frombuffer(slab, np.int64, len(spec.shape), column.lengths[at])
        assert column.width[at] == np.prod(shape)
        batch[spec.name] = np.ndarray(shape.tolist(), spec.dtype, slab, column.values[at])
    return batch


def read(slab: bytes, form: PackForm, columns: tuple[object, ...], rows: list[int]) -> list[Arrays]:
    """The batches of a slab."""
    found = []
    for at, count in enumerate(rows):
        batch = {}
        for spec, column in zip(form.specs, columns, strict=True):
            size = count * int(np.prod(spec.shape, dtype=np.int64))
            values = np.frombuffer(slab, spec.dtype, size, column.values[at])
            batch[spec.name] = values.reshape(count, *(spec.shape or (1,)))
        found.append(batch)
    return found


@st.composite
def forms(draw: st.DrawFn) -> PackSpec:
    multiple = draw(st.sampled_from([1, 1, 2]))
    policy = draw(st.sampled_from(PackPolicy))
    return PackSpec(
        "tokens",
        multiple * draw(st.integers(1, 10)),
        policy,
        draw(st.sampled_from(LongPolicy)),
        ("mask",),
        ("lengths", "labels") if policy is PackPolicy.PAD else ALL,
        multiple=multiple,
        pad_value=draw(st.sampled_from([0, 99])),
        loss_mask=draw(st.sampled_from(["", "loss"])),
    )


WORDS = st.integers(0, 2**64 - 1)
BLOCKS = st.lists(
    st.lists(st.lists(st.integers(0, 127), max_size=25), max_size=12), min_size=1, max_size=3
)


@st.composite
def keys_of_some(draw: st.DrawFn, kept: list[int]) -> dict[int, int]:
    """Some documents of a block, with keys, so that one with tokens is left."""
    some = draw(st.dictionaries(st.integers(0, len(kept) - 1), WORDS)) if kept else {}
    if not any(tokens for row, tokens in enumerate(kept) if row not in some):
        return {}
    return some


@given(BLOCKS, forms(), st.sampled_from(DTYPES), st.sampled_from([None, 5]), st.data())
def test_packs_have_the_tokens_of_their_documents_and_say_where_these_lie(
    drawn: list[Documents], pack: PackSpec, dtype: str, keyed: int | None, data: st.DataObject
) -> None:
    wide = [one for one in ("int32", "int64") if np.can_cast(dtype, one)]
    pack = replace(pack, dtype=data.draw(st.sampled_from(["", *wide]), "dtype"))
    form, blocks, packs = PackForm.of(SPECS[dtype], pack), [], []
    for documents in drawn:
        lengths = np.array([len(each) for each in documents], np.int64)
        block = block_of(documents, dtype, is_large=data.draw(st.booleans(), "large"))
        kept = plain.packed_tokens(lengths.tolist(), pack.length, pack.long.value)
        gone = data.draw(keys_of_some(kept), "taken out")
        made = packs_of(lengths, pack, keyed)
        taken_out = tuple(TakenDocument(*one) for one in gone.items())
        blocks.append(PackBlock(block, (without(made, lengths, pack, taken_out),)))
        plainly = plain.packs(
            lengths.tolist(), pack.length, keyed, policy=pack.policy.value,
            long=pack.long.value, multiple=pack.multiple, most=documents_max(pack),
        )  # fmt: skip
        packs.append(plain.without(plainly, kept, gone, pack.multiple, pack.policy.value))
        assert len(packs[-1]) == len(plainly) == len(made)
        assert not {piece[0] for each in packs[-1] for piece in each} & gone.keys()
    every = [(at, row) for at, some in enumerate(packs) for row in range(len(some))]
    if not every:
        return
    chosen = data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=8), "rows")
    index = np.array(chosen, np.int32)
    numbers: list[NDArray[np.int64] | None] = [None] * len(blocks)
    if data.draw(st.booleans(), "an excerpt"):
        at = chosen[0][0]
        numbers[at] = np.unique(index[index[:, 0] == at, 1]).astype(np.int64)
        blocks[at] = excerpt_of(form, blocks[at], numbers[at])
    cut = data.draw(st.integers(0, len(chosen)), "first batch")
    pads = pack.policy is PackPolicy.PAD
    rows = [cut, len(chosen) - cut]
    if pads:
        rows = [1] * cut + [0] + [1] * (len(chosen) - cut)
    batches = [Batch(step, count, count) for step, count in enumerate(rows)]
    for how in BOTH:
        slab = bytearray(b"\xaa" * (1 << 17))
        args = form, blocks, places_of(index, numbers), batches
        with rows_by(how):
            told = PackGather(*args).into(memoryview(slab))
            assert pads or made_in_parts(args, cut, told) == slab
        assert told.batch_count == len(rows)
        if pads:
            made = [read_padded(bytes(slab), form, told.columns, at) for at in range(len(rows))]
            assert [each.shape for each in made.pop(cut).values()] == [(0, 0)] * 2 + [(0,), (0, 0)]
            for batch, (at, row) in zip(made, chosen, strict=True):
                expected = expected_padded(drawn[at], packs[at][row], pack)
                assert {name: each.tolist() for name, each in batch.items()} == expected
            continue
        found = read(bytes(slab), form, told.columns, rows)
        joined = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        for place, (at, row) in enumerate(chosen):
            expected = expected_pack(drawn[at], packs[at][row], pack)
            assert {name: joined[name][place].tolist() for name in joined} == expected


def made_in_parts(args: tuple[Any, ...], cut: int, told: Gathered) -> bytearray:
    """The slab of a gather with these arguments, the packs from `cut` on first."""
    slab = bytearray(b"\xaa" * (1 << 17))
    for part in (slice(cut, None), slice(0, cut)):
        assert PackGather(*args, part=part).into(memoryview(slab)) == told
    return slab


def excerpt_of(form: PackForm, block: PackBlock, numbers: NDArray[np.int64]) -> PackBlock:
    """Write a slab as a worker does, with exactly the room that it needs, and return it as found."""
    head = row_numbers_bytes(len(numbers))
    small = bytearray(head)
    small[: 4 * len(numbers)] = numbers.astype(np.int32).tobytes()
    need = write_packs(form, block, memoryview(small), len(numbers))
    region = bytearray(small) + bytearray(need - head)
    assert write_packs(form, block, memoryview(region), len(numbers)) == need
    columns, found = open_excerpt(memoryview(bytes(region)), form.specs, None, len(numbers))
    assert found.tolist() == numbers.tolist()
    return PackBlock(columns, None)


@pytest.mark.parametrize("policy", [PackPolicy.BEST_FIT, PackPolicy.PAD])
def test_as_many_batches_as_fit_are_written_and_a_slab_that_is_too_small_says_what_it_needs(
    policy: PackPolicy,
) -> None:
    pads = policy is PackPolicy.PAD
    pack = PackSpec("tokens", 8, policy, outputs=("lengths",) if pads else PACK_OUTPUTS)
    form = PackForm.of(SPECS["int32"], pack)
    documents = [[1] * 8] * 6
    block = PackBlock(block_of(documents, "int32"), (packs_of(np.full(6, 8), pack, None),))
    index = np.stack([np.zeros(6), np.arange(6)], axis=1).astype(np.int32)
    batches = [Batch(step, *[1 if pads else 2] * 2) for step in range(6 if pads else 3)]
    gather = PackGather(form, [block], index, batches)
    needed = gather.into(memoryview(bytearray(10))).bytes_needed
    slab = bytearray(needed)
    expected: list[int] = []
    told = gather.into(memoryview(slab), expected.append)
    assert told.batch_count == 1
    assert len(expected) == 1
    assert told.bytes_used <= expected[0] <= needed
    assert pads or expected[0] == told.bytes_used == needed


def test_a_batch_of_several_padded_batches_is_refused() -> None:
    pack = PackSpec("tokens", 8, PackPolicy.PAD, outputs=("lengths",))
    block = PackBlock(block_of([[1] * 8] * 2, "int32"), (packs_of(np.full(2, 8), pack, None),))
    index = np.array([(0, 0), (0, 1)], np.int32)
    gather = PackGather(PackForm.of(SPECS["int32"], pack), [block], index, [Batch(0, 2, 2)])
    with pytest.raises(RowOutOfBounds, match="more than one"):
        gather.into(memoryview(bytearray(4096)))


def test_packs_are_made_once_for_a_block_and_a_key() -> None:
    form, known = PackForm.of(SPECS["int32"], PackSpec("tokens", 8)), KnownPacks()
    block = block_of([[1, 2]] * 9, "int32")
    first = known.of(1, block, form, 5, None)
    assert known.of(1, block, form, 5, None) is first
    other = known.of(1, block, form, 6, None)
    assert other is not first
    assert known.of(1, block, form, 6, None) is other
    gone = (TakenDocument(0, 7),)
    less = known.of(1, block, form, 6, None, gone)
    assert known.of(1, block, form, 6, None) is other
    assert known.of(1, block, form, 6, None, gone) is less
    known.forget(1)
    assert known.of(1, block, form, 6, None) is not other


def test_documents_that_nothing_can_stand_for_are_refused_and_those_without_tokens_need_nothing() -> (
    None
):
    pack = PackSpec("tokens", 8, long=LongPolicy.DROP)
    lengths = np.array([3, 0, 9, 2])
    made = packs_of(lengths, pack, 5)
    empty = without(made, lengths, pack, (TakenDocument(1, 7), TakenDocument(2, 7)))
    assert empty.pieces.tolist() == made.pieces.tolist()
    with pytest.raises(ConfigError, match="all documents with tokens of a block were taken out"):
        without(made, lengths, pack, (TakenDocument(0, 7), TakenDocument(3, 7)))
    with pytest.raises(RowOutOfBounds):
        without(made, lengths, pack, (TakenDocument(4, 7),))


def test_carried_columns_of_other_lengths_are_named_with_their_row() -> None:
    pack = PackSpec("tokens", 8, carry=("mask",))
    batch = pa.record_batch({
        "mask": pa.array([[1.0], [1.0, 1.0]], pa.list_(pa.float32())),
        "tokens": pa.array([[1], [1]], pa.list_(pa.int32())),
    })  # fmt: skip
    block = open_block(batch, SPECS["int32"][:2])
    form = PackForm.of(SPECS["int32"][:2], pack)
    with pytest.raises(CorruptShard, match=r"s3://a: row 11: column 'mask' has 2 values and 'tok"):
        KnownPacks().of(1, block, form, None, Origin("s3://a", 0, 10))


def test_a_pack_that_a_block_does_not_have_is_refused() -> None:
    pack = PackSpec("tokens", 8)
    block = PackBlock(block_of([[1]], "int32"), (packs_of(np.array([1]), pack, None),))
    for row in (1, -1, 1 << PACK_BITS):
        index = np.array([(0, row)], np.int32)
        gather = PackGather(PackForm.of(SPECS["int32"], pack), [block], index, [Batch(0, 1, 1)])
        with pytest.raises(RowOutOfBounds):
            gather.into(memoryview(bytearray(4096)))


@settings(max_examples=80)
@given(st.data(), st.sampled_from([PackPolicy.BEST_FIT, PackPolicy.PAD]))
def test_damaged_packs_are_refused_or_stay_within_the_slab(
    data: st.DataObject, policy: PackPolicy
) -> None:
    """A worker makes packs of offsets that lie in shared memory."""
    outputs = ("labels", "lengths") if policy is PackPolicy.PAD else ALL
    pack = PackSpec("tokens", 8, policy, outputs=outputs, carry=("mask",), documents=2)
    documents = [[1] * size for size in (3, 5, 8, 11, 2)]
    packs = packs_of(np.array([3, 5, 8, 11, 2]), pack, 5)
    numbers = st.one_of(st.integers(-9, 40), st.sampled_from([-(2**31), 2**31 - 1]))
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        part = packs.starts if data.draw(st.booleans(), "starts") else packs.pieces.reshape(-1)
        part[data.draw(st.integers(0, len(part) - 1), "where")] = data.draw(numbers, "number")
    form = PackForm.of(SPECS["int32"], pack)
    block = PackBlock(block_of(documents, "int32"), (packs,))
    index = np.stack([np.zeros(len(packs)), np.arange(len(packs))], axis=1).astype(np.int32)
    batches = [Batch(0, len(index), len(index))]
    gather = PackGather(form, [block], index, batches, as_rows=True)
    needed = gather.into(memoryview(b"")).bytes_needed
    slab = bytearray(b"\xaa" * (needed + 4096))
    with contextlib.suppress(RowOutOfBounds):
        gather.into(memoryview(slab)[:needed])
    assert bytes(slab[needed:]) == b"\xaa" * 4096


@pytest.mark.parametrize(
    ("pack", "said"),
    [
        (PackSpec("text", 8), "'text'.*missing"),
        (PackSpec("mask", 8), "lists of float32"),
        (PackSpec("tokens", 8, carry=("score",)), "'score' to be lists"),
    ],
)
def test_columns_that_cannot_be_packed_are_refused(pack: PackSpec, said: str) -> None:
    specs = (*SPECS["int32"], ColumnSpec("score", Kind.FIXED, "float32"))
    with pytest.raises(ConfigError, match=said):
        PackForm.of(specs, pack)


@pytest.mark.parametrize("outputs", [PACK_OUTPUTS, ("packing",), ("lengths",)])
@pytest.mark.parametrize("keys", [((5, 6, 7), (1, 2)), ((), ())])
def test_a_worker_that_looks_for_a_bad_block_reads_its_packs_alone(
    outputs: tuple[str, ...], keys: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    told: list[tasks.Reading] = []
    state: Any = worker._State(1 << 30, told.append)
    block = block_of([[1, 2, 3], [4] * 9, [5]], "int32")
    policy = PackPolicy.PAD if outputs == ("lengths",) else PackPolicy.BEST_FIT
    pack = PackSpec("tokens", 8, policy, outputs=outputs)
    state.blocks = dict.fromkeys((7, 9), OpenBlock(block, None, None, None, None))
    form = PackForm.of(SPECS["int32"], pack)
    index, nowhere = np.array([(0, 0), (1, 0), (0, 0)], np.int32), Region(0, 0)
    body = tasks.Assemble(
        1,
        (7, 9),
        nowhere,
        (Batch(0, 3, 3),),
        1,
        nowhere,
        pack_keys=keys[0],
        pack_key_counts=keys[1],
    )
    dataset: Any = SimpleNamespace(packs=form)
    worker._read_one_by_one(state, dataset, body, index)
    assert told == [tasks.Reading(7), tasks.Reading(9)]
    told.clear()
    worker._read_one_by_one(state, dataset, replace(body, first_row=2, row_count=1), index)
    assert told == [tasks.Reading(7)]  # of its own rows


def test_each_part_of_a_slab_counts_the_packs_of_its_own_blocks() -> None:
    form = PackForm.of(SPECS["int32"], PackSpec("tokens", 8, outputs=("packing",)))
    blocks = [(block_of([[1] * count], "int32"), None) for count in (3, 8, 5)]
    index = np.array([(2, 0), (0, 0), (1, 0)], np.int32)
    batches = (Batch(0, 2, 2), Batch(1, 0, 0), Batch(2, 1, 1))
    whole, slab = bytearray(1 << 10), bytearray(1 << 10)
    told = CountGather(form, blocks, index, batches).into(memoryview(whole))
    made = np.frombuffer(whole, np.int64, 15, told.columns[0].values[0]).reshape(3, 5)
    assert made[:, 0].tolist() == [5, 3, 8]
    for part in (slice(1, None), slice(0, 1)):
        own = [block if at in set(index[part, 0].tolist()) else None
               for at, block in enumerate(blocks)]  # fmt: skip
        gather = CountGather(form, cast("Any", own), index, batches, part)
        assert gather.into(memoryview(slab)) == told
    assert slab == whole
    none = CountGather(form, [], index[:0], (Batch(0, 0, 0),))
    assert none.into(memoryview(slab)).batch_count == 1
