"""A store that is away for a while costs only time."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from away import Away, Names, Proxy, proxy_before
from fleet import Run, Service
from remote_epoch import OPTIONS
from servers import S3Server
from small_nodes import tiny_budgets

from dataplane.cli import run as run_command

AWAY, BACK = "does not answer", "answers again"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Requests hang for a second; a busy machine starts runs slowly."""
    tiny_budgets(monkeypatch, tmp_path, LINGER_S=0.2, FETCH_TIMEOUT_S=1, STALL_TIMEOUT_S=180)


def ways(*quick: Away) -> pytest.MarkDecorator:
    """All ways of being away; `make test` tries only some of them in each scene."""
    every = [way for way in Away if way is not Away.WELL]
    return pytest.mark.parametrize(
        "way", [w if w in quick else pytest.param(w, marks=pytest.mark.slow) for w in every]
    )


@ways(Away.REFUSED, Away.HANG)
def test_a_store_may_go_away_in_the_middle_of_an_epoch(tmp_path, proxy, bucket, whole, way):
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
def test_a_store_may_go_away_while_the_dataset_is_indexed(tmp_path, proxy, bucket, whole, way):
    proxy.be(way, after_requests=4)
    with Run(tmp_path / "run", f"s3://{bucket}/", 1, OPTIONS) as run:
        run.order("end")
        proxy.wait_until(way)
        run.log.wait_for(AWAY)
        proxy.be(Away.WELL)
        run.answers()
        assert run.stream() == whole


@ways(Away.REFUSED)
def test_a_store_may_be_away_before_the_first_contact(tmp_path, proxy, bucket, whole, way):
    proxy.be(way)
    with Run(tmp_path / "run", f"s3://{bucket}/", 1, OPTIONS) as run:
        run.order("end")
        run.log.wait_for(AWAY)
        proxy.be(Away.WELL)
        run.answers()
        assert run.stream() == whole


def test_status_shows_which_store_a_node_waits_for_and_since_when(
    tmp_path, proxy, bucket, whole, monkeypatch, capsys
):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))

    def stores_away(until: Callable[[list[Any]], bool]) -> list[Any]:
        while True:
            assert run_command(["status", service.address, "--json"]) == 0
            (node,) = json.loads(capsys.readouterr().out)["nodes"]
            if until(node["stores_away"]):
                return node["stores_away"]
            threading.Event().wait(0.05)

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
def test_a_store_may_go_away_before_the_first_batch(tmp_path, proxy, manifest, whole, way):
    saved = tmp_path / "all.manifest"  # so that opening the job asks the store for nothing
    saved.write_bytes(manifest.to_bytes())
    proxy.be(way)
    with Run(tmp_path / "run", str(saved), 1, OPTIONS) as run:
        run.order("end")
        run.log.wait_for(AWAY)
        proxy.be(Away.WELL)
        run.answers()
        assert run.stream() == whole


class Scene:
    """A run behind its own proxy. If `way` is None, the store's name has no address."""

    def __init__(
        self, folder: Path, server: S3Server, way: Away | None, stack: contextlib.ExitStack
    ) -> None:
        self.folder, self.way, self.stack = folder, way, stack
        folder.mkdir()
        self.proxy: Proxy = stack.enter_context(proxy_before(server.server.port))
        self.names = Names(folder)
        self.names.know(self.proxy.host)

    def run(self, url: str) -> Run:
        """One rank."""
        endpoint, within = self.proxy.endpoint, ()
        if self.way is None:
            endpoint, within = endpoint.replace(self.proxy.host, Names.HOST), self.names.within
        environ = {"AWS_ENDPOINT_URL": endpoint, "DATAPLANE_CACHE_DIR": str(self.folder / "cache")}
        folder = self.folder / self.folder.name  # it names the launch, and so the node
        run = Run(folder, url, 1, OPTIONS, environ=environ, within=within)
        return self.stack.enter_context(run)

    def leave(self) -> None:
        """Be away from now on."""
        self.proxy.be(self.way or Away.REFUSED)
        if self.way is None:
            self.names.forget()
            self.proxy.be(Away.WELL)

    def come_back(self) -> None:
        self.names.know(self.proxy.host)
        self.proxy.be(Away.WELL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [Away.REFUSED, Away.RESET, Away.UNAVAILABLE, Away.HANG, None], ids=str
)
def test_a_store_may_be_away_for_a_minute_at_any_stage(
    tmp_path, s3_server, bucket, manifest, whole, way
):
    saved = tmp_path / "all.manifest"  # so that opening the job asks the store for nothing
    saved.write_bytes(manifest.to_bytes())
    if way is None and not Names(tmp_path).works:
        pytest.skip("this user may not have a /etc/hosts of its own")
    with contextlib.ExitStack() as stack:
        training, indexing, first = (
            Scene(tmp_path / name, s3_server, way, stack)
            for name in ("training", "indexing", "first")
        )
        runs = {training: training.run(f"s3://{bucket}/")}
        runs[training].go(10)
        indexing.proxy.be(way or Away.REFUSED, after_requests=4)
        first.leave()
        training.leave()
        runs |= {indexing: indexing.run(f"s3://{bucket}/"), first: first.run(str(saved))}
        for run in runs.values():
            run.order("end")
        indexing.proxy.wait_until(way or Away.REFUSED)
        indexing.leave()
        lines = {scene: run.log.wait_for(AWAY) for scene, run in runs.items()}
        assert way is not None or "DNS" in lines[first][0]
        threading.Event().wait(60)
        for scene, run in runs.items():
            scene.come_back()
            run.answers()
            assert run.stream() == whole
            assert [len(run.log.wait_for(words)) for words in (AWAY, BACK)] == [1, 1]
