"""Metrics of a real service that a trainer reads through."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scrapes
from awry import Awry, Mood, awry_server
from dataplane_torch import CenterCrop, DataLoader, Mixture, Pack, Source
from fleet import DATAPLANE, Service, wait_until
from pictures import drawn, encoded
from trusted import TOKEN

SMALL = ("--block-arena-bytes", "32MiB", "--slab-bytes", "64KiB", "--worker-count", "1",
         "--delivery-bytes-per-rank", "2MiB")  # fmt: skip
ROWS, GROUP, BATCH = 1600, 40, 40
MAP = "user_functions:pauses"

Scrape = Callable[[str], scrapes.Values]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(2):
        table = pa.table({"x": range(shard * ROWS // 2, (shard + 1) * ROWS // 2)})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=GROUP)
    return str(folder)


@contextlib.contextmanager
def served(folder: Path, more: Mapping[str, str], *arguments: str) -> Iterator[Service]:
    """A service that shows metrics, which loaders find."""
    name = f"{folder.name}-{os.getpid()}:7077"
    environ = {
        **more,
        "DATAPLANE_TOKEN": TOKEN,
        "DATAPLANE_STATE_DIR": str(folder / "state"),
        "DATAPLANE_CACHE_DIR": str(folder / "cache"),
        "DATAPLANE_METRICS_LISTEN": "127.0.0.1:0",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    listens = ("--listen", "127.0.0.1:0", "--service", name, *arguments, *SMALL)
    with (
        pytest.MonkeyPatch.context() as patch,
        Service(*listens, environ=environ, log=folder / "log") as service,
    ):
        patch.setenv("DATAPLANE_SERVICE", name)
        yield service


def scrape_of(service: Service) -> Scrape:
    """Read the present samples of a name."""
    address = scrapes.address_in(service)
    return lambda name: scrapes.values(scrapes.page(address, TOKEN), name)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with served(tmp_path_factory.mktemp("metrics"), {}, "--allowed-functions", MAP) as service:
        yield service


@pytest.fixture
def scrape(service: Service) -> Scrape:
    return scrape_of(service)


def test_exposed_time_is_what_a_trainer_waits_beyond_its_first_batch(
    scrape: Scrape, shards: str
) -> None:
    with DataLoader(shards, batch_size=BATCH, map=MAP, name="waits") as loader:
        waited, samples = [], 0
        for _ in range(2):
            batches = iter(loader)
            while True:
                began = time.perf_counter()
                batch = next(batches, None)
                waited.append(time.perf_counter() - began)
                if batch is None:
                    break
                samples += len(batch["x"])
        # On a busy machine, this process may lose its processor just before it reads the clock.
        least, most = 0.98 * sum(waited[1:]) - 0.2, 1.02 * sum(waited[1:])
        read = partial(scrape, "dataplane_exposed_seconds_total")
        # The end of the epoch is reported by a message that nobody waits for.
        exposed = scrapes.until(read, lambda found: sum(found.values()) > least)
        assert sum(exposed.values()) < most
        assert {key[:2] for key in exposed} == {("waits", "0")}
        assert max(exposed, key=exposed.__getitem__)[2] in ("decode", "queue")

        assert scrape("dataplane_samples_total") == {("waits", "0"): samples}
        assert samples == 2 * ROWS
        first = scrape("dataplane_first_batch_seconds")
        assert sum(first.values()) == pytest.approx(loader.statistics().first_batch.total_s)
        stages = scrape("dataplane_stage_seconds_count")
        assert {stage for _, stage in stages} >= {"fetch", "decode", "assemble", "ready"}
        assert scrape("dataplane_job_generation") == {("waits",): 1}


def test_what_belongs_to_a_job_disappears_with_it(scrape: Scrape, shards: str) -> None:
    names = (
        "dataplane_exposed_seconds_total", "dataplane_samples_total", "dataplane_steps_ahead",
        "dataplane_stage_seconds_count", "dataplane_first_batch_seconds", "dataplane_job_leases",
    )  # fmt: skip
    with DataLoader(shards, batch_size=BATCH, name="short") as loader:
        assert len(list(loader)) == ROWS // BATCH
        for name in names:
            assert any("short" in labels for labels in scrape(name)), name
    for name in names:
        scrapes.until(
            partial(scrape, name), lambda found: not any("short" in labels for labels in found)
        )


def test_a_mixture_shows_shares_asked_and_samples_got_and_packs_their_fill(
    scrape: Scrape, tmp_path: Path
) -> None:
    for name, tokens in {"short": 3, "long": 16}.items():
        table = pa.table({"tokens": pa.array([[1] * tokens] * 300, pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=50)
    weights = {"short": 0.25, "long": 0.75}
    sources = {
        name: Source(tmp_path / f"{name}.parquet", weight=weight)
        for name, weight in weights.items()
    }
    mixture = Mixture(sources, source_column="from", exhausted="cycle", length=160)
    with DataLoader(mixture, 4, pack=Pack("tokens", 16), name="mixed") as loader:
        of_long = sum(int(batch["from"].sum()) for batch in loader)
        asked = scrape("dataplane_mixture_asked_ratio")
        got = scrape("dataplane_mixture_samples_total")
        fill = scrape("dataplane_pack_fill_ratio")
    assert asked == {(name, "mixed"): pytest.approx(weight) for name, weight in weights.items()}
    share = got["long", "mixed"] / sum(got.values())
    assert of_long == 120
    assert sum(got.values()) >= 160
    assert share == pytest.approx(0.75, abs=0.02)
    assert fill == {("long", "mixed"): 1.0, ("short", "mixed"): pytest.approx(15 / 16, abs=0.01)}


def test_rows_that_others_replace_are_counted(scrape: Scrape, tmp_path: Path) -> None:
    images = [encoded(drawn(48, 48, seed=number)) for number in range(12)]
    images[3] = images[7] = b"no image"
    pq.write_table(pa.table({"jpg": images}), tmp_path / "a.parquet")
    options = {"transforms": {"jpg": [CenterCrop(32)]}, "bad_images": "replace"}
    with DataLoader(tmp_path / "a.parquet", 4, name="images", **options) as loader:
        assert sum(len(batch["jpg"]) for batch in loader) == 12
        assert scrape("dataplane_replaced_rows_total")["images",] == 2


def bounds(service: Service) -> set[str]:
    """Return the stages that bound ranks, by `dataplane status`."""
    command = [*DATAPLANE, "status", service.address, "--json"]
    status = json.loads(
        subprocess.run(command, env=service.environ, capture_output=True, check=True).stdout
    )
    return {member["bound"] for job in status["jobs"] for member in job["members"]}


@contextlib.contextmanager
def far_job(shards: str, folder: Path, name: str) -> Iterator[tuple[Awry, Service, DataLoader]]:
    """A loader over these shards in a store with moods, which a service reads one at a time."""
    bodies = {f"bucket/{path.name}": path.read_bytes() for path in Path(shards).iterdir()}
    with (
        awry_server(bodies) as server,
        served(folder, server.environment(), "--fetch-count", "1") as service,
        DataLoader("s3://bucket/", batch_size=BATCH, name=name) as loader,
    ):
        yield server, service, loader


def test_a_slow_store_is_named(shards: str, tmp_path: Path) -> None:
    with far_job(shards, tmp_path, "slow") as (server, service, loader):
        scrape, batches = scrape_of(service), iter(loader)
        next(batches)
        server.usual = Mood.SLOW
        before = len(server.seen)
        assert len(list(batches)) == ROWS // BATCH - 1
        late_s = 0.2 * (len(server.seen) - before)
        scrapes.until(
            partial(scrape, "dataplane_exposed_seconds_total"),
            lambda waits: waits["slow", "0", "fetch"] > 0.5 * late_s,
        )
        counts = scrape("dataplane_store_request_seconds_bucket")
        (slow,) = {store for _, store in counts}
        assert slow == "s3://bucket"
        late = counts["+Inf", slow] - counts["0.1", slow]
        assert late >= 1
        assert scrape("dataplane_read_bytes_total")["origin",] > 0


def test_a_hung_fetcher_is_named_while_its_trainer_waits(shards: str, tmp_path: Path) -> None:
    with far_job(shards, tmp_path, "hung") as (server, service, loader):
        scrape, batches = scrape_of(service), iter(loader)
        server.usual = Mood.SLOW
        next(batches)
        server.usual = Mood.HANG  # for the fetchers that the node starts instead
        fetchers = [
            child
            for child in psutil.Process(service.process.pid).children(recursive=True)
            if "fetcher" in child.name() + " ".join(child.cmdline())
        ]
        for fetcher in fetchers:
            fetcher.suspend()
        thread = threading.Thread(target=list, args=(batches,))
        thread.start()
        try:
            stuck = scrapes.until(partial(scrape, "dataplane_waiting_seconds"), bool)
            assert set(stuck) == {("hung", "0", "fetch")}
            wait_until(lambda: bounds(service) == {"storage"})
        finally:
            server.usual = Mood.WELL
            with server.lock:
                for connection in server.open:  # what hangs is requested again
                    connection.shutdown(socket.SHUT_RDWR)
            for fetcher in fetchers:
                with contextlib.suppress(psutil.Error):
                    fetcher.resume()
            thread.join()
        assert not scrape("dataplane_waiting_seconds")
