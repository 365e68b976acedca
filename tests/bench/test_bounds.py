"""Hardware bounds: plausible figures for each workload, the tightest first."""

from __future__ import annotations

import dataclasses
import math
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_bench import bounds
from dataplane_bench.measure import MEASURES, best_rate
from dataplane_bench.model import ColumnType, DatasetPlace, StorageKind, Workload, WorkloadColumn
from dataplane_bench.trial.launch import TrialFailed
from dataplane_bench.workloads.generate import RECIPES, generated

SMALL = 0.001
SHORT_S = 0.02
CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("bounds")


@pytest.mark.parametrize("name", RECIPES)
def test_every_bound_of_a_workload_is_measured_and_can_be(name, root):
    workload = generated(name, root, SMALL)
    names = bounds.names(workload, StorageKind.LOCAL)
    found = bounds.measure(names, workload, None, SHORT_S)
    assert tuple(found) == names
    for one, value in found.items():
        # No machine copies 1,000 GB/s on one core, and none decodes only one image a second.
        low, high = (0.01, 1000.0) if one.endswith("_gb_per_s") else (1.0, 1e9)
        assert low < value < high, one
    limits = bounds.bound_of(workload, StorageKind.LOCAL, found)
    assert limits == sorted(limits, key=lambda one: one[1])
    assert all(math.isfinite(limit) and limit > 0 for _, limit in limits)


def test_rates_become_samples(root):
    tokens = generated("tokens", root, SMALL)
    found = {bounds.GATHER: 8.2, bounds.MEMCPY: 1.0}
    assert bounds.bound_of(tokens, StorageKind.LOCAL, found) == [
        ("gather, one core", pytest.approx(8.2e9 / (8 + 4 * 2048)))
    ]
    images = generated("images", root, SMALL)
    assert bounds.bound_of(
        images, StorageKind.LOCAL, {bounds.JPEG_CROP: 100.0, bounds.JPEG_DECODE: 120.0}
    ) == [(f"JPEG decode and resize x {CORES} cores", 100.0 * CORES)]
    table = generated("tabular", root, SMALL)
    (limit,) = bounds.bound_of(table, StorageKind.LOCAL, {bounds.TABLE_GATHER: 1.0})
    assert limit == (
        "gather of whole rows, one core",
        pytest.approx(1e9 / (29 * 4 + 6 * 4 + 5 * 8)),
    )


def test_what_the_server_delivers_bounds_what_is_read_from_it(root):
    tokens = generated("tokens", root, SMALL)
    stored = sum(path.stat().st_size for path in tokens.source.iterdir()) / tokens.sample_count
    slow = bounds.bound_of(tokens, StorageKind.S3, {bounds.GATHER: 8.0, bounds.S3: 0.5})
    assert slow[0] == ("S3 server's own ceiling", pytest.approx(0.5e9 / stored))
    fast = bounds.bound_of(tokens, StorageKind.S3, {bounds.GATHER: 0.1, bounds.S3: 50.0})
    assert [name for name, _ in fast] == ["gather, one core", "S3 server's own ceiling"]


def test_the_server_is_measured(s3_server, root):
    workload = generated("text", root, SMALL)
    bucket = s3_server.bucket()
    s3_server.put(
        bucket, {f"source/{path.name}": path.read_bytes() for path in workload.source.iterdir()}
    )
    place = DatasetPlace(
        workload.source,
        f"s3://{bucket}/source",
        s3_server.endpoint,
        s3_server.access_key,
        s3_server.secret_key,
    )
    assert bounds.S3 in bounds.names(workload, StorageKind.S3)
    found = bounds.measure([bounds.S3], workload, place, SHORT_S)
    assert 0 < found[bounds.S3] < 100


def test_what_a_user_may_have_is_measured_too(tmp_path):
    rows = {
        "flag": pa.array([True, False] * 50),
        "grid": pa.FixedSizeListArray.from_arrays(pa.array(range(600), pa.int16()), 6),
        "empty": pa.array([[]] * 100, pa.list_(pa.float32())),
        "text": pa.array(["é" * (i % 9) for i in range(100)]),
    }
    pq.write_table(pa.table(rows), tmp_path / "shard-00000.parquet")
    columns = (
        WorkloadColumn("flag", ColumnType.FIXED, "bool"),
        WorkloadColumn("grid", ColumnType.FIXED, "int16", (2, 3)),
        WorkloadColumn("empty", ColumnType.RAGGED, "float32"),
        WorkloadColumn("text", ColumnType.STRING),
    )
    mixed = Workload("text", columns, 25, 100, tmp_path, "own", 5.0)
    for workload in (mixed, dataclasses.replace(mixed, columns=columns[:2])):
        names = bounds.names(workload, StorageKind.LOCAL)
        found = bounds.measure(names, workload, None, SHORT_S)
        assert all(value > 0 for value in found.values())
        assert bounds.bound_of(workload, StorageKind.LOCAL, found)
    assert {bounds.LISTS, bounds.STRINGS} <= set(bounds.names(mixed, StorageKind.LOCAL))


def test_a_failed_measurement_is_reported(root):
    workload = dataclasses.replace(generated("text", root, SMALL), source=root / "gone")
    with pytest.raises(TrialFailed, match="bounds"):
        bounds.measure([bounds.PAGE_CACHE], workload, None, SHORT_S)


def test_the_best_pass_counts():
    passes = []
    assert best_rate(lambda: passes.append(1), 1.0, SHORT_S) > 1000
    assert len(passes) > 3


def test_every_name_has_a_measurement():
    named = {
        value
        for name, value in vars(bounds).items()
        if name.isupper() and str(value).endswith(("_per_s",))
    }
    assert named == set(MEASURES)
