"""Measure the cost of metrics, as a share of one processor, while tokens are read at full rate.

    python benchmarks/metrics.py cost [--seconds 10] [--json]

A service serves uncompressed tokens of a local file to one loader. The costs are measured apart,
since they are much smaller than the differences between two runs: that of a scrape, as processor
time of the service while nothing else happens in it, and that of counting a slab and of reporting
its wait, in this process. The bar is that of all together, with a scrape every 15 seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import timeit
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from dataplane_bench.scripts import Row, family_cpu_s, line_of, lists, row, run, shard, started
from dataplane_torch import DataLoader

from dataplane.base.meters import JobMeter, RankMeter
from dataplane.rpc.codec import decode, encode
from dataplane.rpc.messages import NextSlab, ToNode, Waited

TOKEN = "a-token-of-this-benchmark-alone"
TOKENS, ROWS, BATCH = 2048, 65_536, 64
SCRAPES, SCRAPE_S, CALLS = 200, 15.0, 20_000
SHARE_MAX = 0.01
STAGES_US = dict.fromkeys(("fetch", "decode", "room", "queue", "assemble", "ready"), 1234)


def cost(*, seconds: float = 10.0) -> Iterator[Row]:
    """Yield the cost of a scrape, of a slab, and of both at the rate that a loader reaches."""
    with tempfile.TemporaryDirectory() as name:
        folder, place = Path(name), f"metrics-{os.getpid()}:1"
        values = np.arange(ROWS * TOKENS, dtype=np.int32)
        body = shard(pa.table({"tokens": lists(values, TOKENS)}), "arrow", 1024)
        (folder / "tokens.arrow").write_bytes(body)
        os.environ |= {
            "DATAPLANE_TOKEN": TOKEN,
            "DATAPLANE_STATE_DIR": name,
            "DATAPLANE_CACHE_DIR": name,
            "DATAPLANE_METRICS_LISTEN": "127.0.0.1:0",
        }
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((folder / "log").open("w"))
            command = ("-m", "dataplane", "serve", "--listen", "127.0.0.1:0", "--service", place)
            service = started(stack, sys.executable, *command, stderr=log)
            for _ in range(2):
                line_of(service.stdout)
            address = (folder / "log").read_text().split("address=")[1].split()[0]
            with DataLoader(folder / "tokens.arrow", BATCH, service=place) as loader:
                slabs_per_s, rate = _read(loader, seconds)
                scrape_s = _scrape(service.pid, f"http://{address}/metrics")
    slab_s = _count_slab()
    yield row("tokens", rate, "tokens/s")
    yield row("slabs", slabs_per_s, "slabs/s")
    yield row("one scrape", scrape_s * 1e3, "CPU ms")
    yield row("one slab, in node and trainer", slab_s * 1e6, "CPU us")
    share = scrape_s / SCRAPE_S + slab_s * slabs_per_s
    yield row("metrics, at this rate", share, "processors", most=SHARE_MAX)


def _read(loader: DataLoader, seconds: float) -> tuple[float, float]:
    """Return slabs and tokens a second, after an epoch that warms up."""
    rows = sum(len(batch["tokens"]) for batch in loader)
    before, began, rows = loader.statistics(), time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        rows += sum(len(batch["tokens"]) for batch in loader)
    took_s = time.perf_counter() - began
    return loader.statistics().since(before).slabs / took_s, rows * TOKENS / took_s


def _scrape(pid: int, url: str) -> float:
    """Return the processor time of the service for one scrape, beyond its usual work."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    spent: list[float] = []
    for count in (0, SCRAPES):
        before, began = family_cpu_s(pid), time.perf_counter()
        for _ in range(count):
            with urllib.request.urlopen(request) as answer:
                answer.read()
        took_s = time.perf_counter() - began
        time.sleep(max(0.0, 3.0 - took_s))
        spent.append(family_cpu_s(pid) - before)
    return (spent[1] - spent[0]) / SCRAPES


def _count_slab() -> float:
    """Return the processor time that counting takes for one slab and the report of its wait."""
    rank = RankMeter(JobMeter())
    waits = (1, 2, 3, 4, 5, 6)

    def message(waited: Waited | None) -> ToNode:
        return decode(ToNode, encode(ToNode(1, NextSlab(1, 2, 0.3, "decode", waited))))

    def count() -> None:
        rank.samples += 64
        rank.job.slab(STAGES_US)
        rank.waited(waits, ())
        message(Waited(waits))

    with_report = timeit.timeit(count, number=CALLS, timer=time.process_time)
    without = timeit.timeit(lambda: message(None), number=CALLS, timer=time.process_time)
    return (with_report - without) / CALLS


if __name__ == "__main__":
    sys.exit(run(__doc__, cost))
