"""Rows of steps and steps of rows: the plan read forwards and backwards."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from manifests import small

from dataplane.model.changes import EpochSteps
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import End, Region
from dataplane.plan.manifest import Manifest
from dataplane.plan.orders import order_of
from dataplane.plan.shards import Shard
from dataplane.plan.slices import Slice
from dataplane.plan.tombstones import RowNames, places_of, rows_of_step, shard_named
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


@settings(max_examples=60)
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


@settings(max_examples=60)
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


@settings(max_examples=60)
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
