"""A node without workers, whose slabs other nodes make, over real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader, Pack
from fleet import Service, wait_until

from dataplane.cli import run
from dataplane.model.errors import ConfigError, CorruptShard

SHARDS, BLOCKS, BLOCK_ROWS = 4, 4, 64


SMALL = ("--block-arena-bytes", "32MiB", "--slab-bytes", "64KiB",
         "--delivery-bytes-per-rank", "2MiB")  # fmt: skip
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 5, "lanes": 2}


@pytest.fixture(autouse=True)
def state_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of an earlier run have leases in the state of a coordinator."""
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(SHARDS):
        first = number * BLOCKS * BLOCK_ROWS
        ids = np.arange(first, first + BLOCKS * BLOCK_ROWS)
        words = [f"{i} " * (i % 50) for i in ids.tolist()]
        values = pa.FixedSizeListArray.from_arrays(
            pa.array(np.repeat(ids, 256).astype(np.float32)), 256
        )
        table = pa.table({"id": ids, "words": words, "values": values})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=BLOCK_ROWS)
    return str(folder)


class Cluster:
    """A coordinator, a node without workers, and any number of makers."""

    def __init__(self, stack: contextlib.ExitStack, *more: str) -> None:
        self._stack = stack
        self.coordinator = stack.enter_context(Service("--coordinator", "--listen", "127.0.0.1:0"))
        self.service = f"trainers-{os.getpid()}-{id(self)}:7077"
        stack.enter_context(self._node(self.service, 0, *more))
        self.makers: list[Service] = []

    def make(self, count: int) -> None:
        """Start so many makers more."""
        for _ in range(count):
            name = f"maker-{len(self.makers)}-{os.getpid()}-{id(self)}:7077"
            self.makers.append(self._stack.enter_context(self._node(name, 1)))

    def _node(self, service: str, workers: int, *more: str) -> Service:
        return Service(
            "--node", "--join", self.coordinator.address, "--service", service,
            "--worker-count", str(workers), *SMALL, *more,
        )  # fmt: skip


@pytest.fixture
def cluster(state_of_this_test: None) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(stack)


def batches(url: str, **options: Any) -> list[dict[str, Any]]:
    """Return a trainer's batches from a node of its own."""
    with DataLoader(url, 16, **OPTIONS, **options) as loader:
        return [{name: _plain(values) for name, values in batch.items()} for batch in loader]


def _plain(values: Any) -> Any:
    return values if isinstance(values, list) else values.tolist()


def test_slabs_made_elsewhere_are_without_what_was_left_out(url: str, cluster: Cluster) -> None:
    cluster.make(1)
    job = {"service": cluster.service, "name": "j", **OPTIONS}

    def read() -> list[list[int]]:
        with DataLoader(url, 16, **job) as loader:
            return [batch["id"].tolist() for batch in loader]

    whole, at = read(), ("--join", cluster.coordinator.address)
    # The coordinator may hear of the end of the first job only now.
    wait_until(lambda: run(["skip", "j", "--steps", "2:5", "--epoch", "0", *at]) == 0)
    assert run(["tombstone", "j", "--row", f"{whole[0][0] // 256}:{whole[0][0] % 256}", *at]) == 0
    found = read()
    assert found[1:] == [whole[1], *whole[5:]]
    assert found[0][1:] == whole[0][1:]
    assert found[0][0] != whole[0][0]
    assert found[0][0] // BLOCK_ROWS == whole[0][0] // BLOCK_ROWS


def test_slabs_made_elsewhere_are_those_of_a_node_with_workers(url: str, cluster: Cluster) -> None:
    view = {"where": "id >= 100 and id % 7 != 2", "sample": 0.9}
    expected, options = batches(url, **view), {"service": cluster.service, **OPTIONS, **view}
    with DataLoader(url, 16, **options) as loader:
        cluster.make(2)  # while the trainer waits for one
        found = []
        for batch in loader:
            found.append({name: _plain(values) for name, values in batch.items()})
            if len(found) == 7:
                state = loader.state_dict()
                break
    with DataLoader(url, 16, **options) as loader:
        loader.load_state_dict(state)
        found += [{name: _plain(values) for name, values in one.items()} for one in loader]
        assert found == expected
        ids = []
        for batch in loader:
            if len(ids) == 10 * 16:
                cluster.makers[0].kill()
            ids += batch["id"].tolist()
        every = sorted(row for batch in expected for row in batch["id"])
        assert sorted(ids) == every, "a maker that dies costs no batch"


def test_rows_that_a_maker_replaces_count_for_the_node_that_asks(
    tmp_path: Path, cluster: Cluster
) -> None:
    lines = ["{" if row % 20 == 7 else f'{{"id": {row}}}' for row in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    bad, url = {"on_bad": "replace", "bad_max": 0.05}, str(tmp_path / "a.jsonl")
    alone, made = batches(url, **bad), {"service": cluster.service, "name": "elsewhere", **bad}
    cluster.make(1)
    assert batches(url, **made) == alone
    with pytest.raises(CorruptShard, match=r"rows .* more than the 8 that bad_max="):
        batches(url, **{**made, "name": "too-many", "bad_max": 0.04})


@pytest.mark.slow
def test_makers_that_die_or_are_stopped_cost_no_batch(url: str, cluster: Cluster) -> None:
    expected = [batch["id"] for batch in batches(url)]
    cluster.make(3)
    found: list[list[int]] = []
    with DataLoader(url, 16, service=cluster.service, **OPTIONS) as loader:
        for step, batch in enumerate(loader):
            found.append(batch["id"].tolist())
            if step == 5:
                cluster.makers[0].kill()
            if step == 15:
                _signal_all(cluster.makers[1], signal.SIGSTOP)
            if step == 40:
                _signal_all(cluster.makers[1], signal.SIGCONT)
    assert found == expected


def _signal_all(service: Service, number: signal.Signals) -> None:
    node = psutil.Process(service.process.pid)
    for process in [node, *node.children(recursive=True)]:
        process.send_signal(number)


def test_packs_are_made_elsewhere_if_the_manifest_has_their_counts(
    tmp_path: Path, cluster: Cluster
) -> None:
    rows = [[number] * (1 + number % 40) for number in range(400)]
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    manifest, pack = tmp_path / "a.manifest", Pack("tokens", 64)
    cluster.make(1)
    with (
        pytest.raises(ConfigError, match=r"index --pack tokens,length=64 -o"),
        DataLoader(tmp_path / "a.parquet", 8, pack=pack, service=cluster.service) as loader,
    ):
        next(iter(loader))
    assert run([
        *("index", str(tmp_path / "a.parquet"), "--pack", "tokens,length=64", "-o"),
        str(manifest),
    ]) == 0  # fmt: skip
    alone = batches(str(manifest), pack=pack)
    elsewhere = {"pack": pack, "service": cluster.service, "name": "elsewhere"}
    assert batches(str(manifest), **elsewhere) == alone
    row = ("--row", "0:39", "--data", str(manifest))
    assert run(["tombstone", "elsewhere", *row, "--join", cluster.coordinator.address]) == 0
    flat = [np.concatenate([np.ravel(batch["tokens"]) for batch in found]).tolist()
            for found in (alone, batches(str(manifest), **elsewhere))]  # fmt: skip
    assert [79 if one == 39 else one for one in flat[0]] == flat[1] != flat[0]
