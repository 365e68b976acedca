"""A service and its trainers may start in any order, with any delay."""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from fleet import Run, Service, free_address
from small_nodes import tiny_budgets

from dataplane.model.errors import DataStallError

COUNT = 60
OPTIONS = {"global_batch_size": 6, "columns": ["id"]}
WHOLE = [[i] for i in range(COUNT)]
NODE_WAITS, NODE_GOES_ON = "coordinator does not answer", "coordinator answers again"
HARDEST = ("trainers", "node", "coordinator")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_budgets(monkeypatch, tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    pq.write_table(pa.table({"id": range(COUNT)}), tmp_path / "a.parquet", row_group_size=10)
    return str(tmp_path / "a.parquet")


class Cluster:
    """A coordinator, a node and its trainers, each started when a test says so."""

    def __init__(
        self, folder: Path, url: str, stack: contextlib.ExitStack, trainer_count: int = 1
    ) -> None:
        self.trainer_count = trainer_count
        self.folder, self.url, self.stack = folder, url, stack
        self.address = free_address()
        self.parts: dict[str, Service] = {}
        self.run: Run | None = None

    def start(self, part: str) -> None:
        """Start this part, and wait until it is ready or says for whom it waits."""
        if part == "trainers":
            options = {**OPTIONS, "service": self.address, "name": "run"}
            run = self.run = self.stack.enter_context(
                Run(self.folder / "run", self.url, self.trainer_count, options)
            )
            run.order("end")
            whom = (
                f"the coordinator at {self.address}"
                if "node" in self.parts
                else "a node of service"
            )
            if len(self.parts) < 2:
                run.log.wait_for(f"waiting for {whom}", self.trainer_count)
            return
        where = ("--listen" if part == "coordinator" else "--join", self.address)
        log = self.folder / f"{part}.log"
        service = Service(f"--{part}", *where, log=log, awaited=False)
        self.parts[part] = self.stack.enter_context(service)
        assert service.log is not None
        if part == "node" and "coordinator" not in self.parts:
            service.log.wait_for(NODE_WAITS)
        else:
            service.wait_ready()

    def finish(self) -> None:
        """All have started: read the epoch, and check that each wait was logged with its end."""
        assert self.run is not None
        self.run.answers()
        assert self.run.stream() == WHOLE
        waits = [line for line in self.run.log.read().splitlines() if "waiting for" in line]
        assert len(waits) == 2 * sum("no longer" in line for line in waits)
        self.run.kill()
        for name in ("node", "coordinator"):
            assert self.parts[name].stop() == 0


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, marks=[] if order == HARDEST else [pytest.mark.slow])
        for order in itertools.permutations(HARDEST)
    ],
    ids="-".join,
)
def test_a_service_and_its_trainers_start_in_any_order(tmp_path, url, order) -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, url, stack)
        for part in order:
            cluster.start(part)
        node = cluster.parts["node"]
        if order.index("node") < order.index("coordinator"):
            node.wait_ready()
            assert node.log is not None
            assert len(node.log.wait_for(NODE_WAITS)) == len(node.log.wait_for(NODE_GOES_ON)) == 1
        cluster.finish()


@pytest.mark.slow
def test_a_coordinator_may_be_late_by_half_a_minute(tmp_path, url) -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, url, stack, trainer_count=3)
        for part in ("node", "trainers"):
            cluster.start(part)
        threading.Event().wait(30)
        cluster.start("coordinator")
        cluster.finish()


def test_a_rank_whose_coordinator_never_answers_gets_an_error_with_its_address(
    tmp_path, url
) -> None:
    environ = {"DATAPLANE_STALL_TIMEOUT_S": "0.5"}
    address = free_address()
    with (
        Service("--node", "--join", address, environ=environ, awaited=False) as node,
        DataLoader(url, 6, service=address, name="run") as loader,
    ):
        with pytest.raises(DataStallError, match=f"job 'run'.*coordinator at {address}") as caught:
            len(loader)
        assert caught.value.stage == "join"
        assert caught.value.coordinator == address
        assert node.stop() == 0
