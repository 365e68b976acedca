"""Rows of steps and steps of rows: the plan read forwards and backwards."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from manifests import small
from msgspec.structs import replace

from dataplane.client.state import RowsDigest
from dataplane.model.changes import (
    ALL_ROWS,
    Changes,
    EpochSteps,
    Gaps,
    Skip,
    TakenDocument,
    rows_layout,
)
from dataplane.model.config import JobSpec, MixtureSpec, SourceSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import (
    DatasetIdentity,
    End,
    Exhausted,
    PackSpec,
    Region,
    Stream,
    Tombstone,
    View,
)
from dataplane.plan.manifest import Manifest
from dataplane.plan.orders import delivered_order, job_order, order_of
from dataplane.plan.packed_blocks import given_counts, made, packed
from dataplane.plan.shards import Shard
from dataplane.plan.slices import Slice
from dataplane.plan.tombstones import (
    RowNames,
    Substitutes,
    check_tombstones,
    places_of,
    rows_of_step,
    shard_named,
    substitute,
    substitute_key,
)
from dataplane.rpc.codec import decode, encode
from dataplane.rpc.tasks import Assemble
from dataplane.scheduler.walk import SlabSizes, Walk
from dataplane.worker.pack_blocks import AskedPacks
from plan import golden, plain

SIZES = (1, 2, 3, 4, 8)
shards = st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=5).filter(
    lambda found: sum(map(len, found))
)
ends = st.sampled_from(list(End))


def manifest_of(shard_blocks: list[list[int]]) -> Manifest:
    rows = [count for blocks in shard_blocks for count in blocks]
    counts = [len(blocks) for blocks in shard_blocks]
    return Manifest(
        ("mem://",),
        "parquet",
        b"schema",
        tuple(
            Shard(f"mem://part-{at}", 100, "e", count, Region(0, 0), False)
            for at, count in enumerate(counts)
        ),
        block_shard=np.repeat(np.arange(len(counts)), counts),
        block_rows=np.array(rows),
        block_offset=np.zeros(len(rows), np.int64),
        block_length=np.ones(len(rows), np.int64),
        block_decoded=np.ones(len(rows), np.int64),
    )


@st.composite
def jobs(draw):
    manifest = manifest_of(draw(shards))
    end = draw(ends)
    batch = draw(st.integers(8, 20))
    if end is End.DROP and manifest.sample_count < batch:
        end = End.PAD
    spec = JobSpec(
        manifest.fingerprint, draw(st.integers(0, 99)), draw(st.booleans()), draw(st.integers(1, 6)),
        draw(st.integers(1, 30)), batch, end, ramp=draw(st.integers(0, 3)),
    )  # fmt: skip
    cursor = draw(st.integers(0, manifest.sample_count))
    return manifest, spec, draw(st.integers(0, 3)), cursor


def steps_of(manifest, spec, cursor, dp_size=1):
    return EpochSteps.of(spec, manifest.sample_count, cursor=cursor, dp_size=dp_size)


@given(jobs())
def test_the_rows_of_a_step_are_those_that_the_ranks_read_whatever_their_number(job):
    manifest, spec, epoch, cursor = job
    order, names = order_of(spec, manifest, epoch), RowNames(manifest)
    for size in SIZES:
        steps = steps_of(manifest, spec, cursor, size)
        for step in range(steps.count):
            found = rows_of_step(steps, order, [names], step)
            for rank in range(size):
                own = Slice(steps, rank).positions(step)
                mine = found.dp_ranks == rank
                blocks, rows = order.locate(own)
                assert found.blocks[mine].tolist() == blocks.tolist()
                assert found.block_rows[mine].tolist() == rows.tolist()


@given(jobs(), st.sampled_from(SIZES))
def test_the_places_of_a_row_are_the_inverse_of_the_rows_of_steps(job, size):
    manifest, spec, epoch, cursor = job
    order, names = order_of(spec, manifest, epoch), RowNames(manifest)
    steps, forwards = steps_of(manifest, spec, cursor, size), {}
    for step in range(steps.count):
        found = rows_of_step(steps, order, [names], step)
        rows = zip(
            found.shards.tolist(), found.shard_rows.tolist(), found.positions.tolist(),
            found.dp_ranks.tolist(), strict=True,
        )  # fmt: skip
        for shard, row, position, rank in rows:
            forwards.setdefault((shard, row), []).append((position, step, rank))
    backwards = {}
    for shard in range(len(manifest.shards)):
        for row in range(names.row_count(shard)):
            places = places_of(steps, order, *names.block_of(shard, row))
            assert len(places) >= 1
            seen = [(at.position, at.step, at.dp_rank) for at in places if at.step is not None]
            assert all(at.is_padding == (at.position >= order.sample_count) for at in places)
            if seen:
                backwards[shard, row] = seen
    assert backwards == forwards


@given(jobs(), st.sampled_from(SIZES))
def test_steps_are_what_the_documentation_defines(job, size):
    manifest, spec, epoch, cursor = job
    if not spec.shuffle:
        return
    order, names = order_of(spec, manifest, epoch), RowNames(manifest)
    shard_blocks = [
        manifest.block_rows[manifest.block_shard == shard].tolist()
        for shard in range(len(manifest.shards))
    ]
    served = plain.order(
        manifest.block_rows.tolist(), spec.seed, spec.lanes, spec.window, epoch, spec.ramp
    )
    expected = plain.steps(served, shard_blocks, spec.global_batch, spec.end.value, cursor, size)
    steps, found = steps_of(manifest, spec, cursor, size), []
    for step in range(steps.count):
        rows = rows_of_step(steps, order, [names], step)
        found.append(list(zip(rows.shards.tolist(), rows.shard_rows.tolist(), strict=True)))
    assert found == expected


def test_golden_steps_of_rows():
    for (shard_blocks, seed, lanes, window, batch, size, epoch), places in golden.TRAILS.items():
        manifest = manifest_of([list(blocks) for blocks in shard_blocks])
        spec = JobSpec(manifest.fingerprint, seed, True, lanes, window, batch)
        order, names = order_of(spec, manifest, epoch), RowNames(manifest)
        steps = steps_of(manifest, spec, 0, size)
        found = " ".join(
            f"{at.step}.{at.dp_rank}"
            for shard in range(len(shard_blocks))
            for row in range(names.row_count(shard))
            for at in places_of(steps, order, *names.block_of(shard, row))
        )
        assert found == places


def test_rows_that_do_not_exist_are_refused_by_name():
    names = RowNames(small())
    assert names.block_of(0, 29) == (1, 19)
    assert names.block_of(2, 0) == (2, 0)
    with pytest.raises(ConfigError, match="s3://b/0 has no row 30: it has 30"):
        names.block_of(0, 30)
    with pytest.raises(ConfigError, match="no row 0: it has 0"):
        names.block_of(1, 0)
    with pytest.raises(ConfigError, match="no shard 3"):
        names.block_of(3, 0)


def test_a_shard_is_named_by_number_url_or_the_end_of_its_url():
    manifest = manifest_of([[1], [1]])
    assert [shard_named(manifest, name) for name in ("1", "mem://part-0", "part-1")] == [1, 0, 1]
    with pytest.raises(ConfigError, match="no shard 'art-1'"):
        shard_named(manifest, "art-1")


modest = settings(max_examples=80)
ranges = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 40)), max_size=3)


@st.composite
def epochs(draw):
    count = draw(st.integers(1, 120))
    end = draw(st.sampled_from(End))
    batch = draw(st.integers(4, 30))
    if end is End.DROP and batch > count:
        end = End.RAGGED
    cursor = draw(st.integers(0, count))
    skips = [Skip(0, min(a, count), min(a + size, count)) for a, size in draw(ranges)]
    return count, cursor, batch, end, Changes(tuple(sorted(skips))).gaps(0)


sizes, weights = st.integers(1, 4), st.integers(0, 120)


@modest
@given(epochs())
def test_live_indices_number_the_positions_that_are_not_skipped(epoch):
    count, cursor, _, _, gaps = epoch
    assert all(a < b for a, b in gaps.ranges)
    assert all(one[1] < other[0] for one, other in zip(gaps.ranges, gaps.ranges[1:], strict=False))
    live = [at for at in range(count) if not any(a <= at < b for a, b in gaps.ranges)]
    assert [gaps.place(index) for index in range(len(live))] == live
    assert [gaps.live(at) for at in live] == list(range(len(live)))
    left = EpochSteps(count, cursor, 4, End.PAD, gaps=gaps).left
    assert left == sum(at >= cursor for at in live)
    pieces = gaps.pieces(gaps.live(cursor), len(live))
    assert [at for piece in pieces for at in range(*piece)] == [at for at in live if at >= cursor]


@modest
@given(epochs(), weights)
def test_global_batches_are_those_of_the_specification_for_every_dp_size(epoch, changed):
    count, cursor, batch, end, gaps = epoch
    for size in (1, 2, 3, 4):
        expected = plain.skipping(count, cursor, batch, end.value, gaps.ranges, size, changed)
        steps = EpochSteps(count, cursor, batch, end, size, gaps, changed)
        own = [Slice(steps, rank) for rank in range(size)]
        assert {each.step_count for each in own} == {len(expected)}
        for step, positions in enumerate(expected):
            for rank, each in enumerate(own):
                mine = [at for at in positions if at % size == rank]
                found = each.positions_of_steps(step, 1)
                assert found.positions.tolist() == [at % count for at in mine]
                assert found.valid.tolist() == [sum(at < count for at in mine)]
            assert own[0].steps.begin(step) == positions[0]
    many = own[-1].positions_of_steps(0, len(expected))
    singly = [own[-1].positions(step).tolist() for step in range(len(expected))]
    assert many.positions.tolist() == [at for each in singly for at in each]
    assert many.rows.tolist() == [len(each) for each in singly]


@modest
@given(epochs(), st.integers(0, 40), sizes, weights)
def test_a_run_that_is_resumed_after_any_step_has_the_rest(epoch, step, size, changed):
    count, cursor, batch, end, gaps = epoch
    steps = plain.skipping(count, cursor, batch, end.value, gaps.ranges, size, changed)
    step, own = min(step, len(steps)), EpochSteps(count, cursor, batch, end, size, gaps, changed)
    at = own.after(step)
    assert at == (max(one for one in steps[step - 1] if one < count) + 1 if step else cursor)
    assert EpochSteps(count, at, batch, end, size, gaps, changed).count == len(steps) - step
    assert plain.skipping(count, at, batch, end.value, gaps.ranges, size, changed) == steps[step:]


@modest
@given(epochs(), st.lists(st.integers(0, 40), max_size=3))
def test_a_digest_covers_the_positions_that_were_read_however_often_it_was_resumed(epoch, stops):
    count, cursor, batch, end, gaps = epoch
    steps = len(plain.skipping(count, cursor, batch, end.value, gaps.ranges))
    own = EpochSteps(count, cursor, batch, end, gaps=gaps)
    last = own.after(steps)
    whole = RowsDigest().continued("o", 0, cursor).reached(last, gaps)
    found = RowsDigest().continued("o", 0, cursor)
    for stop in sorted(min(stop, steps) for stop in stops):
        at = own.after(stop)
        found = found.reached(at, gaps)
        found = RowsDigest.from_dict(found.to_dict(0, at), 0, at).continued("o", 0, at)
    assert found.reached(last, gaps).value == whole.value
    read = gaps.live(last) - gaps.live(cursor)
    plainly = RowsDigest().continued("o", 0, cursor).reached(last)
    assert (plainly.value == whole.value) == (read == last - cursor)


@given(epochs(), st.integers(1, 4), st.integers(1, 5))
def test_a_walk_plans_exactly_the_steps_that_are_not_skipped(epoch, size, most):
    count, cursor, batch, end, gaps = epoch
    spec = JobSpec("f", global_batch=batch, end=end)
    order = job_order(spec, (manifest_of([[count]]),), 0)
    walk = Walk(spec, order, Stream(0, cursor, 0, size), SlabSizes(most, most, 0), gaps=gaps)
    expected = plain.skipping(count, cursor, batch, end.value, gaps.ranges, size)
    plans = walk.next_plans(200)
    rows = [plan.row_index[:, 1].tolist() for plan in plans]
    mine = [at % count for positions in expected for at in positions if at % size == 0]
    assert [row for some in rows for row in some] == mine
    for plan in plans:
        assert walk.position_of(plan) == expected[plan.batches[0].step][0]


@st.composite
def datasets(draw):
    """A manifest, its view, and (shard, row in the shard, number in the view) of the rows of each
    of its blocks.
    """
    shard_blocks = draw(shards)
    whole = manifest_of(shard_blocks)
    is_chosen, blocks = draw(st.booleans()), []
    for shard, counts in enumerate(shard_blocks):
        for at, count in enumerate(counts):
            first = sum(counts[:at])
            left = sorted(draw(st.sets(st.integers(0, count - 1)))) if is_chosen else range(count)
            numbered = enumerate(left) if is_chosen else ((None, row) for row in left)
            blocks.append([(shard, first + row, number) for number, row in numbered])
    if not is_chosen or not any(blocks):
        whole_blocks = blocks if not is_chosen else [
            [(shard, sum(counts[:at]) + row, None) for row in range(count)]
            for shard, counts in enumerate(shard_blocks) for at, count in enumerate(counts)
        ]  # fmt: skip
        return whole, View(map="m:f"), whole_blocks
    view = View(where="x > 0", map="m:f")
    return whole.viewed(np.array([len(rows) for rows in blocks])), view, list(filter(None, blocks))


@st.composite
def taken(draw):
    """A job over a dataset, or a mixture, the rows that are taken out, and those of each block."""
    found = [draw(datasets()) for _ in range(draw(st.integers(1, 3)))]
    gone, blocks = [], []
    for source, (_, _, rows_of_blocks) in enumerate(found):
        for rows in rows_of_blocks:
            some = draw(st.sets(st.sampled_from(rows), max_size=len(rows) - 1)) if rows else set()
            gone += [Tombstone(shard, row, source, number) for shard, row, number in some]
            blocks.append((source, [row in some for row in rows], rows))
    manifests, views, _ = zip(*found, strict=True)
    window, ramp = draw(st.integers(1, 30)), draw(st.integers(0, 2))
    mixture = None
    if len(found) > 1:
        sources = tuple(
            SourceSpec(f"s{at}", "f", draw(st.integers(1, 9)), 1, window, ramp, view)
            for at, view in enumerate(views)
        )
        mixture = MixtureSpec(sources, Exhausted.RENORMALISE)
    spec = JobSpec(
        "f", draw(st.integers(0, 2**64 - 1)), draw(st.booleans()), draw(st.integers(1, 4)), window,
        8, ramp=ramp, view=views[0] if mixture is None else View(), mixture=mixture,
    )  # fmt: skip
    return manifests, spec, draw(st.integers(0, 2)), tuple(sorted(gone)), blocks


@modest
@given(taken())
def test_only_positions_of_rows_that_were_taken_out_change_and_stay_in_their_block(found):
    manifests, spec, epoch, tombstones, blocks = found
    plainly = job_order(spec, manifests, epoch)
    order = delivered_order(spec, manifests, epoch, tombstones)
    positions = np.arange(plainly.sample_count)
    assert order.sample_count == plainly.sample_count
    expected = []
    for block, row in zip(*(each.tolist() for each in plainly.locate(positions)), strict=True):
        source, is_gone, rows = blocks[block]
        gone, given_row = [at for at, one in enumerate(is_gone) if one], row
        if is_gone[row]:
            seed = spec.seed if spec.mixture is None else plain.key(spec.seed, plain.SOURCE, source)
            given_row = plain.substitute(seed, *rows[row][:2], len(rows), gone)
        expected.append((block, given_row))
    given_blocks, given_rows = order.locate(positions)
    assert list(zip(given_blocks.tolist(), given_rows.tolist(), strict=True)) == expected
    assert not any(blocks[block][1][row] for block, row in expected)
    every = np.arange(len(blocks))
    for mine, others in zip(order.block_span(every), plainly.block_span(every), strict=True):
        assert mine.tolist() == others.tolist()


def test_substitutes_are_the_golden_ones():
    for (seed, shard, row, count, *gone), expected in golden.SUBSTITUTES.items():
        assert plain.substitute(seed, shard, row, count, gone) == expected
        assert substitute(substitute_key(seed, shard, row), count, gone) == expected


def test_a_block_keeps_a_row():
    manifest, spec = manifest_of([[3], [4, 2]]), JobSpec("f")
    rows = tuple(Tombstone(1, row) for row in (4, 5))
    with pytest.raises(ConfigError, match=r"rows 4 to 5 of mem://part-1, a whole block"):
        check_tombstones(spec, (manifest,), rows)
    with pytest.raises(ConfigError, match=r"mem://part-1 has no row 6"):
        check_tombstones(spec, (manifest,), (Tombstone(1, 6),))
    with pytest.raises(ConfigError, match="there is no source 1"):
        check_tombstones(spec, (manifest,), (Tombstone(1, 3, 1),))
    check_tombstones(spec, (manifest,), rows[:1])


def test_rows_of_a_condition_need_their_numbers_and_one_that_is_left():
    whole, rows = manifest_of([[3], [4, 2]]), tuple(Tombstone(1, row) for row in (1, 3, 4))
    limited = whole.viewed(np.array([3, 3, 0]))
    chosen = JobSpec("f", view=View(where="x > 0"))
    with pytest.raises(ConfigError, match="row 1 of shard 1 was taken out, but the ledger does"):
        check_tombstones(chosen, (limited,), rows)
    numbered = tuple(Tombstone(1, row, 0, row) for row in range(3))
    with pytest.raises(ConfigError, match="all rows that the view has of a block of mem://part-1"):
        check_tombstones(chosen, (limited,), numbered)


def test_a_plan_of_packs_names_the_documents_that_were_taken_out_of_each_of_its_blocks():
    of_packs = packed(manifest_of([[3], [4, 2]]), np.array([2, 0, 1]))
    spec = JobSpec("f", 7, False, global_batch=3, view=View(pack=PackSpec("tokens", 8)))
    gone = (Tombstone(0, 1), Tombstone(0, 2), Tombstone(1, 0), Tombstone(1, 5))
    order = delivered_order(spec, (of_packs,), 0, gone)
    assert order.locate(np.arange(3))[1].tolist() == [0, 1, 0]
    first = tuple(TakenDocument(row, plain.key(7, plain.TOMBSTONE, 0, row)) for row in (1, 2))
    last = (TakenDocument(1, plain.key(7, plain.TOMBSTONE, 1, 5)),)
    (plan,) = Walk(spec, order, Stream(0, 0, 0, 1), SlabSizes(3, 3, 0)).next_plans(1)
    assert [each.taken_out for each in plan.packs] == [first, last]
    assert [plan.packs_of(block).taken_out for block in range(2)] == [first, last]
    shuffled = replace(spec, shuffle=True)
    order = delivered_order(shuffled, (of_packs,), 0, gone)
    (plan,) = Walk(shuffled, order, Stream(0, 0, 0, 1), SlabSizes(3, 3, 0)).next_plans(1)
    assert [(len(each.keys), each.taken_out) for each in plan.packs] == [(1, first), (1, last)]
    body = Assemble(1, (5, 9), Region(0, 0), (), 1, Region(0, 0), **plan.packs_told)
    asked = AskedPacks.of_blocks(decode(Assemble, encode(body)))
    assert [tuple(each) for each in asked] == [tuple(each) for each in plan.packs]
    with pytest.raises(ConfigError, match="all rows that the view has of a block of mem://part-1"):
        check_tombstones(spec, (of_packs,), (Tombstone(1, 4), Tombstone(1, 5)))


def test_tombstones_hold_for_one_view_and_one_list_of_sources():
    def key_of(view=View(), *names):  # noqa: B008 - it is frozen
        sources = tuple(SourceSpec(name, "f", 1, view=view) for name in names)
        mixture = MixtureSpec(sources) if names else None
        return rows_layout(JobSpec("f", view=view, mixture=mixture), identity)

    where, identity = View(where="x > 0"), DatasetIdentity("content", "layout")
    assert key_of() == key_of(View(map="m:f", pack=PackSpec("tokens", 8))) == "layout"
    assert key_of(where) == key_of(View(where="x > 0", collate="m:g"))
    keys = [
        key_of(), key_of(where), key_of(View(limit=3)), key_of(View(sample=9)), key_of(View(split_to=9)), key_of(View(), "a"),
        key_of(View(), "a", "b"), key_of(View(), "b", "a"), key_of(where, "a", "b"),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    # A condition may find other rows in shards that were changed in place.
    identity = DatasetIdentity("changed", "layout")
    assert key_of(View(sample=9)) == keys[3]
    assert not {key_of(where), key_of(where, "a", "b")} & {*keys}


def test_ranges_that_touch_or_overlap_are_one_and_other_epochs_have_none():
    skips = (Skip(0, 0, 8), Skip(0, 8, 16), Skip(0, 12, 14), Skip(0, 20, 24), Skip(1, 0, 4))
    assert Changes(skips).gaps(0) == Gaps(((0, 16), (20, 24)))
    assert Changes(skips).gaps(2) == Gaps()


def test_rows_that_a_map_makes_are_numbered_and_replaced_among_themselves():
    whole = manifest_of([[4, 4], [4]])
    of_view = whole.viewed(np.array([2, 4, 3]))
    samples = made(of_view, View(map="m:f", resizes=True), np.array([0, 7, 3]))
    assert samples.block_rows.tolist() == [7, 3]
    assert given_counts(samples).tolist() == [4, 3]
    names = RowNames(samples)
    shards, rows = names.of(np.array([0, 0, 1]), np.array([0, 6, 2]))
    assert (shards.tolist(), rows.tolist()) == ([0, 0, 1], [0, 6, 2])
    assert names.block_of(0, 6) == (0, 6)
    assert names.row_count(0) == 7
    spec = JobSpec(samples.fingerprint, view=View(where="x > 1", map="m:f", resizes=True))
    gone = Substitutes(spec, [samples], [Tombstone(0, 5)])
    _, instead = gone.of(np.array([0, 0]), np.array([5, 4]))
    assert instead[0] == plain.substitute(0, 0, 5, 7, {5})
    assert instead[1] == 4


@given(jobs())
def test_other_blocks_stand_for_those_of_a_removed_shard_and_have_their_spans(job):
    manifest, spec, epoch, _ = job
    of_block, seed, count = manifest.block_shard.tolist(), spec.seed, manifest.block_count
    lost = {block for block, shard in enumerate(of_block) if shard == of_block[-1]}
    gone = [Tombstone(of_block[-1], ALL_ROWS)]
    if len(lost) == count:
        with pytest.raises(ConfigError, match="all shards that the job reads"):
            check_tombstones(spec, [manifest], gone)
        return
    order, whole = delivered_order(spec, [manifest], epoch, gone), order_of(spec, manifest, epoch)
    positions = np.arange(manifest.sample_count)
    blocks, rows = order.locate(positions)
    first, last = order.block_span(blocks)
    assert ((first <= positions) & (positions <= last)).all()
    assert (order.block_span(np.array(sorted(lost)))[1] < 0).all()
    starts = np.cumsum([0, *manifest.block_rows.tolist()])
    begin = starts[of_block.index(of_block[-1])]
    for planned, delivered in zip(
        zip(*map(np.ndarray.tolist, whole.locate(positions)), strict=True),
        zip(blocks.tolist(), rows.tolist(), strict=True),
        strict=True,
    ):
        block, row = planned
        if block in lost:
            row_in_shard = int(starts[block] - begin)
            block = plain.substitute(seed, of_block[-1], row_in_shard, count, lost)
            row %= int(manifest.block_rows[block])
        assert delivered == (block, row)
