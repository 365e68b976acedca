"""Killing the node at any moment while a job opens costs only time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from away import Away, Proxy
from dataplane_torch import DataLoader
from fleet import Rows, Service, free_address, interleaved, own_nodes, worker_processes
from remote_epoch import OPTIONS
from small_nodes import alone, tiny_budgets

SIZE = 2
# Numbers count requests to the store: the listing, the shards' footers, then blocks.
MOMENTS = ("node runs", "workers run", *range(1, 17), "job is open", "first batches are there")
IN_SUITE = {("embedded", 2), ("embedded", 9), ("served", "node runs"), ("served", "job is open")}
WAIT_S = 60


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone(monkeypatch)
    tiny_budgets(monkeypatch, tmp_path, LINGER_S=0.2, STALL_TIMEOUT_S=60)


class Ranks:
    """All ranks of a job as threads. They stop when the job is open and after the first batch,
    until the test lets them continue.
    """

    def __init__(self, url: str, service: str | None, pool: ThreadPoolExecutor) -> None:
        self.stops = {moment: _Stop() for moment in ("job is open", "first batches are there")}
        name = f"run-{os.getpid()}"
        self._loaders = [
            DataLoader(url, service=service, name=name, dp_rank=rank, dp_size=SIZE, **OPTIONS)
            for rank in range(SIZE)
        ]
        self._epochs: list[Future[Rows]] = [pool.submit(self._read, one) for one in self._loaders]

    def _read(self, loader: Any) -> Rows:
        rows: Rows = []
        with loader:
            len(loader)
            self.stops["job is open"].reached()
            for step, batch in enumerate(loader):
                if step == 1:
                    self.stops["first batches are there"].reached()
                columns = [batch["id"].tolist(), batch["x"]]
                rows += [list(row) for row in zip(*columns, strict=True)]
        return rows

    def go_on(self) -> None:
        """To the end, without a stop."""
        for stop in self.stops.values():
            stop.over.set()

    def raise_failed(self) -> None:
        """Return the error of the rank that has failed, if one has."""
        for epoch in self._epochs:
            if epoch.done():
                epoch.result()

    def stream(self) -> Rows:
        """The epoch that the ranks have read."""
        return interleaved([epoch.result(WAIT_S) for epoch in self._epochs], 0)


class _Stop:
    """A place at which all ranks wait."""

    def __init__(self) -> None:
        self._waiting = threading.Semaphore(0)
        self.over = threading.Event()

    def reached(self) -> None:
        self._waiting.release()
        assert self.over.wait(WAIT_S)

    def wait(self) -> None:
        """Until all ranks are here."""
        for _ in range(SIZE):
            assert self._waiting.acquire(timeout=WAIT_S)


def until(found: Callable[[], list[psutil.Process]]) -> psutil.Process:
    """Wait for the first process, and return it."""
    for _ in range(WAIT_S * 200):
        with contextlib.suppress(psutil.Error):
            if processes := found():
                return processes[0]
        threading.Event().wait(0.005)
    pytest.fail("it was never started")


def wait_for(
    moment: int | str, proxy: Proxy, ranks: Ranks, node: Callable[[], psutil.Process]
) -> None:
    """Until it has come, and, but for the first two, let nothing go on from there."""
    if isinstance(moment, int):
        ranks.go_on()
        proxy.wait_until(Away.HANG)
    elif moment == "node runs":
        node()
    elif moment == "workers run":
        until(lambda: worker_processes(node()))
    else:
        if moment != "job is open":
            ranks.stops["job is open"].over.set()
        ranks.stops[moment].wait()


@contextlib.contextmanager
def reading(url: str, service: str | None) -> Iterator[Ranks]:
    with ThreadPoolExecutor(SIZE) as pool:
        ranks = Ranks(url, service, pool)
        try:
            yield ranks
        except AssertionError:
            ranks.raise_failed()  # it tells more
            raise
        finally:
            ranks.go_on()


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(moment, marks=[] if (kind, moment) in IN_SUITE else [pytest.mark.slow])
        for moment in MOMENTS
    ]


@pytest.mark.parametrize("moment", cases("embedded"))
def test_an_embedded_node_that_is_killed_while_a_job_opens(proxy, bucket, whole, moment) -> None:
    if isinstance(moment, int):
        proxy.be(Away.HANG, after_requests=moment)
    with reading(f"s3://{bucket}/", None) as ranks:
        wait_for(moment, proxy, ranks, lambda: until(own_nodes))
        until(own_nodes).kill()
        proxy.be(Away.WELL)
        ranks.go_on()
        assert ranks.stream() == whole


@pytest.mark.parametrize("moment", cases("served"))
def test_a_service_that_is_killed_while_a_job_opens(proxy, bucket, whole, moment) -> None:
    if isinstance(moment, int):
        proxy.be(Away.HANG, after_requests=moment)
    address = free_address()
    with (
        Service("--listen", address, awaited=False) as service,
        reading(f"s3://{bucket}/", address) as ranks,
    ):
        wait_for(moment, proxy, ranks, lambda: psutil.Process(service.process.pid))
        service.kill()
        proxy.be(Away.WELL)
        service.launch()
        ranks.go_on()
        assert ranks.stream() == whole
