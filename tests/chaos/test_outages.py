"""A store that is away for a while costs a run time, and nothing else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from away import Away
from fleet import DATAPLANE, Run, Service
from remote_epoch import OPTIONS

AWAY, BACK = "does not answer", "answers again"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An arena that holds a fraction of the dataset, and requests that hang for a second."""
    for name, value in {
        "CACHE_DIR": tmp_path / "cache",
        "WORKER_COUNT": 1,
        "BLOCK_ARENA_BYTES": "1MiB",
        "DELIVERY_BYTES_PER_RANK": "64KiB",
        "SLAB_BYTES": "8KiB",
        "LINGER_S": "0.2",
        "FETCH_TIMEOUT_S": "1",
        "STALL_TIMEOUT_S": "60",
    }.items():
        monkeypatch.setenv(f"DATAPLANE_{name}", str(value))


def ways(*quick: Away) -> pytest.MarkDecorator:
    """All ways of being away; `make test` tries only some of them in each scene."""
    every = [way for way in Away if way is not Away.WELL]
    return pytest.mark.parametrize(
        "way", [w if w in quick else pytest.param(w, marks=pytest.mark.slow) for w in every]
    )


@ways(Away.REFUSED, Away.HANG)
def test_in_the_middle_of_an_epoch(tmp_path, proxy, bucket, whole, way):
    with Run(tmp_path / "run", f"s3://{bucket}/", 2, OPTIONS) as run:
        run.go(10)
        proxy.be(way)
        run.order("end")
        (line,) = run.log.wait_for(AWAY)
        assert f"s3://{bucket}" in line
        proxy.be(Away.WELL)
        run.answers()
        assert run.stream() == whole
        assert [len(run.log.wait_for(words)) for words in (AWAY, BACK)] == [1, 1]


@ways(Away.RESET)
def test_while_the_dataset_is_indexed(tmp_path, proxy, bucket, whole, way):
    proxy.be(way, after_requests=4)
    with Run(tmp_path / "run", f"s3://{bucket}/", 1, OPTIONS) as run:
        run.order("end")
        proxy.wait_until(way)
        run.log.wait_for(AWAY)
        proxy.be(Away.WELL)
        run.answers()
        assert run.stream() == whole


@ways(Away.REFUSED)
def test_before_anything_else(tmp_path, proxy, bucket, whole, way):
    proxy.be(way)
    with Run(tmp_path / "run", f"s3://{bucket}/", 1, OPTIONS) as run:
        run.order("end")
        run.log.wait_for(AWAY)
        proxy.be(Away.WELL)
        run.answers()
        assert run.stream() == whole


def test_status_shows_which_store_a_node_waits_for_and_since_when(
    tmp_path, proxy, bucket, whole, monkeypatch
):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))

    def stores_away(until: Callable[[list[Any]], bool]) -> list[Any]:
        while True:
            told = subprocess.run(
                [*DATAPLANE, "status", service.address, "--json"], capture_output=True, check=True
            )
            (node,) = json.loads(told.stdout)["nodes"]
            if until(node["stores_away"]):
                return node["stores_away"]

    with Service("--listen", "127.0.0.1:0") as service:
        options = {**OPTIONS, "service": service.address}
        with Run(tmp_path / "run", f"s3://{bucket}/", 1, options) as run:
            run.go(10)
            proxy.be(Away.REFUSED)
            run.order("end")
            (told,) = stores_away(bool)
            assert told["store"] == f"s3://{bucket}"
            assert told["away_s"] >= 0
            assert f"{proxy.endpoint} refused the connection" in told["error"]
            proxy.be(Away.WELL)
            stores_away(lambda found: not found)
            run.answers()
            assert run.stream() == whole
        assert service.stop() == 0


@ways(Away.UNAVAILABLE)
def test_while_the_first_batch_is_awaited(tmp_path, proxy, manifest, whole, way):
    saved = tmp_path / "all.manifest"  # so that opening the job asks the store for nothing
    saved.write_bytes(manifest.to_bytes())
    proxy.be(way)
    with Run(tmp_path / "run", str(saved), 1, OPTIONS) as run:
        run.order("end")
        run.log.wait_for(AWAY)
        proxy.be(Away.WELL)
        run.answers()
        assert run.stream() == whole
