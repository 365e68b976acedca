from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace

from dataplane.model.config import ORDER_VERSION, JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import End, Region
from dataplane.plan.cluster import RUN_BYTES, Cluster, Owners, Weighed
from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.explain import explain as explained_order
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.quality import quality
from dataplane.plan.shards import Shard
from dataplane.plan.shuffled import ShuffledSource
from plan import golden


def manifest_of(rows, shard_count=1, length=1000):
    block_shard = np.arange(len(rows)) * shard_count // len(rows)
    counts = np.bincount(block_shard, minlength=shard_count).tolist()
    shards = tuple(
        Shard(f"s3://b/{number}", 1 << 30, "e", count, Region(0, 0), True)
        for number, count in enumerate(counts)
    )
    column = np.full(len(rows), length)
    return Manifest(
        ("s3://b/",), "arrow_ipc", b"", shards, block_shard, rows, column * 0, column, column
    )


def explain(manifest, order, cluster, batch, end=End.RAGGED, ramp=0):
    spec = JobSpec("", global_batch=batch, end=end, ramp=ramp)
    sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
    whole = ShuffledSource(sizes, order.window, batch, int(manifest.block_length.sum()))
    return explained_order(spec, whole, order, cluster)


def explained(manifest, lanes, window, cluster, batch=32, end=End.RAGGED, shuffle=True):
    order = Order(manifest.block_rows, 5, shuffle, lanes, window, 0)
    return explain(manifest, order, cluster, batch, end)


def test_hosts_read_disjoint_blocks_when_ranks_divide_the_lanes():
    found = explained(manifest_of(np.full(960, 10)), 96, 20, Cluster(48, 8), 96)
    assert found.hosts_per_block == 1
    assert found.lanes_per_rank == 2
    assert found.bytes_read_per_host == 960 * 1000 // 6
    assert found.warnings == ()


def test_open_windows_are_a_sum_over_the_lanes_of_a_host():
    manifest = manifest_of(np.full(96, 100))
    alone = explained(manifest, 8, 200, Cluster(1, 1)).open_window_bytes_per_host
    spread = explained(manifest, 8, 200, Cluster(8, 2)).open_window_bytes_per_host
    # 200 samples of 10 bytes and 4 of permutation each, and a block's rest of 1000.
    assert alone == 8 * 3800
    assert spread == 2 * 3800


def test_steps_and_what_the_end_costs():
    manifest = manifest_of(np.full(10, 10))
    ends = [explained(manifest, 1, 100, Cluster(2, 2), 32, end) for end in End]
    shown = [(each.step_count, each.samples_dropped, each.samples_padded) for each in ends]
    assert dict(zip(End, shown, strict=True)) == {
        End.RAGGED: (4, 0, 0),
        End.DROP: (3, 4, 0),
        End.PAD: (4, 0, 28),
    }


def test_quality_is_one_for_a_full_shuffle_and_zero_without_a_shuffle():
    manifest = manifest_of(np.full(400, 100), shard_count=20)
    full = explained(manifest, 1, 40_000, Cluster())
    assert full.quality > 0.9
    none = explained(manifest, 1, 1, Cluster(), shuffle=False)
    assert none.quality < 0.1


def test_the_ramp_is_told_with_the_quality_of_epoch_0():
    rows = np.full(50, 1000)
    manifest = manifest_of(rows, length=4_096_000)
    shuffle = shuffle_of(BlockSizes.of(rows, manifest.block_decoded))
    for epoch in (0, 1):
        order = Order(rows, 5, True, shuffle.lanes, shuffle.window, epoch, shuffle.ramp)
        found = explain(manifest, order, Cluster(), 256, ramp=shuffle.ramp)
        assert found.ramp_windows == (6250, 6250, 12_500, 25_000)
        assert found.ramp_end == 50_000
        assert found.quality == 1
        assert found.quality_of_epoch_0 == pytest.approx(0.76, abs=0.03)
    order = Order(rows, 5, True, 4, 2000, 0, 2)
    found = explain(manifest, order, Cluster(), 256, ramp=2)
    assert (found.ramp_windows, found.ramp_end) == ((500, 500, 1000), 8000)
    short = explain(manifest, Order(rows, 5, True, 4, 3, 0, 3), Cluster(), 256, ramp=3)
    assert (short.ramp_windows, short.ramp_end) == ((1, 1, 1), 12)
    none = explained(manifest, 4, 2000, Cluster(), 256)
    assert (none.ramp_windows, none.ramp_end) == ((), 0)
    assert none.quality == none.quality_of_epoch_0


def test_a_batch_that_drops_much_is_warned_of():
    found = explained(manifest_of(np.full(100, 100)), 8, 200, Cluster(8, 8), 7000, End.DROP)
    (said,) = found.warnings
    assert "loses 3000 of 10000 samples (30.0%)" in said


def test_locality_is_told_for_1_to_1024_hosts():
    manifest = manifest_of(np.full(8192, 10))
    found = explained(manifest, 512, 20, Cluster(64, 8), 4096).by_host_count
    assert [each.host_count for each in found] == [1 << power for power in range(11)]
    for each in found:
        order = Order(manifest.block_rows, 5, True, 512, 20, 0)
        exact = explain(manifest, order, Cluster(8 * each.host_count, 8), 8192)
        assert each.dp_size == 8 * each.host_count
        assert each.lanes_per_rank == exact.lanes_per_rank
        assert each.open_window_bytes_per_host == exact.open_window_bytes_per_host
        assert each.bytes_read_per_host == exact.bytes_read_per_host


def test_permutations_that_are_not_remembered_are_warned_of(monkeypatch):
    monkeypatch.setattr("dataplane.plan.explain.WINDOW_CACHE_BYTES", 1 << 20)
    manifest = manifest_of(np.full(4000, 1000))
    for cluster, warned in ((Cluster(96, 8), 0), (Cluster(8, 8), 1)):
        found = explained(manifest, 96, 20_000, cluster, 96).warnings
        assert sum("take 3 MiB" in each for each in found) == warned


@pytest.mark.parametrize(("window", "warned"), [(1 << 16, 0), ((1 << 16) + 1, 1)])
def test_entries_of_windows_take_two_bytes_up_to_65536_samples(monkeypatch, window, warned):
    monkeypatch.setattr("dataplane.plan.explain.WINDOW_CACHE_BYTES", 1 << 17)
    found = explained(manifest_of(np.full(100, 1000)), 1, window, Cluster())
    assert len(found.warnings) == warned


@pytest.mark.parametrize(("dp_size", "ranks_per_host"), [(0, 1), (1, 0), (-3, 8)])
def test_a_cluster_without_ranks_is_refused(dp_size, ranks_per_host):
    with pytest.raises(ConfigError):
        Cluster(dp_size, ranks_per_host)


def test_more_ranks_than_samples_in_a_batch_are_refused():
    with pytest.raises(ConfigError, match="at least one sample a rank"):
        explained(manifest_of(np.full(4, 10)), 1, 40, Cluster(64, 8), 32)


ROOT = Path(__file__).resolve().parents[2]
SHUFFLES = Path(__file__).with_name("shuffles.json")
_NAME = "shuffle_benchmark"


def test_the_specification_names_its_vectors_and_has_their_version():
    page = (ROOT / "docs" / "order.md").read_text()
    assert "(../tests/plan/order_vectors.json)" in page
    assert f"version {golden.VECTORS['version']} of the order," in page
    assert golden.VECTORS["version"] == ORDER_VERSION


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(_NAME, ROOT / "benchmarks" / "plans.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = found
    try:
        spec.loader.exec_module(found)
        yield found
    finally:
        del sys.modules[_NAME]


@pytest.fixture(scope="module")
def rows():
    """The cells of the simulations, by dataset."""
    return {name: rest for name, *rest in json.loads(SHUFFLES.read_text())["rows"]}


def test_simulations_have_the_defaults_of_every_dataset(script, rows):
    assert list(rows) == [shape.name for shape in script.SHAPES]
    for shape in script.SHAPES:
        counts = np.full(shape.blocks, shape.rows)
        found = shuffle_of(BlockSizes.of(counts, counts * shape.sample_bytes))
        expected = [f"{each:,}" for each in (found.lanes, found.window, found.ramp)]
        assert rows[shape.name][:3] == expected


@pytest.mark.parametrize("at", [0, 4, 8])
def test_datasets_of_few_blocks_shuffle_as_simulated(script, rows, at):
    shape = script.SHAPES[at]
    found = script.figures(shape, 12)
    assert found.missed == ()
    entropy, epoch_0, first, _, *rest = rows[shape.name][3:]
    assert float(entropy.rstrip("%")) == pytest.approx(100 * found.entropy, abs=1.5)
    assert float(epoch_0.rstrip("%")) == pytest.approx(100 * found.entropy_of_epoch_0, abs=2)
    assert first == f"{found.entropy_first:.1%}"
    cells = script.row_of(found).strip("| ").split(" | ")
    assert cells[8:] == rest


def test_the_plan_shows_the_entropy_that_was_simulated(rows, script):
    for shape in script.SHAPES:
        counts = np.full(shape.blocks, shape.rows)
        sizes = BlockSizes.of(counts, counts * shape.sample_bytes)
        shuffle = shuffle_of(sizes)
        later = replace(shuffle, ramp=0)
        for one, cell in zip((later, shuffle), rows[shape.name][3:5], strict=True):
            expected = min(float(cell.rstrip("%")) / 100, 1)
            assert quality(sizes, one, 256) == pytest.approx(expected, abs=0.025)


DATASET = bytes(range(16))
RUNS = [(shard, run * RUN_BYTES) for shard in range(40) for run in range(50)]

names = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=12, unique=True)


def owned(nodes: list[Weighed], dataset: bytes = DATASET) -> dict[tuple[int, int], str]:
    owners = Owners(nodes)
    return {run: owners.names[owners.of(dataset, *run)] for run in RUNS}


@given(names, st.randoms())
def test_the_owner_does_not_depend_on_the_order_of_the_nodes(
    names: list[str], chance: object
) -> None:
    nodes = [Weighed(name, 1 + i % 3) for i, name in enumerate(names)]
    again = sorted(nodes, key=lambda node: hash((str(chance), node)))
    first, second = Owners(nodes), Owners(again)
    for run in RUNS[::97]:
        assert first.names[first.of(DATASET, *run)] == second.names[second.of(DATASET, *run)]


def test_a_node_that_comes_takes_blocks_only_for_itself() -> None:
    nodes = [Weighed(f"node-{i}", 4 << 30) for i in range(6)]
    before, after = owned(nodes[:5]), owned(nodes)
    moved = {run for run in RUNS if before[run] != after[run]}
    assert {after[run] for run in moved} == {"node-5"}
    assert len(RUNS) / 6 * 0.8 < len(moved) < len(RUNS) / 6 * 1.2


def test_each_node_owns_as_much_as_its_memory_is_of_all() -> None:
    weights = {"small": 1 << 30, "large": 3 << 30, "other": 4 << 30}
    counts = Counter(owned([Weighed(*each) for each in weights.items()]).values())
    for name, weight in weights.items():
        share = len(RUNS) * weight / sum(weights.values())
        assert counts[name] == pytest.approx(share, rel=0.15)


def test_blocks_that_lie_side_by_side_have_one_owner() -> None:
    owners = Owners([Weighed(f"node-{i}", 1) for i in range(9)])
    for shard in range(20):
        assert len({owners.of(DATASET, shard, at) for at in range(0, RUN_BYTES, 1 << 20)}) == 1


def test_an_owner_stays_what_it_was() -> None:
    """All nodes of a cluster must agree, whatever version of numpy or Python they run."""
    owners = Owners([Weighed("a", 1.0), Weighed("b", 2.0), Weighed("c", 4.0)])
    found = [owners.of(DATASET, shard, shard * 7 * RUN_BYTES) for shard in range(24)]
    assert found == [1, 1, 1, 2, 2, 0, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 0, 1, 2, 1, 2, 2, 2]
