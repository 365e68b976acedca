"""The live page: in a real browser beside a real service and job, who sees it, and what it costs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scrapes
from browser import LivePage
from dataplane_torch import DataLoader
from fleet import Service, free_address
from trusted import TOKEN, TRUSTED

from dataplane.metrics.server import MetricsServer
from dataplane.metrics.table import Reading
from dataplane.model.config import JobSpec
from dataplane.model.errors import AccessDenied, PeerLost
from dataplane.model.records import Topology
from dataplane.page import server
from dataplane.page.figures import CELLS_MAX, NODES_MAX, fleet
from dataplane.page.server import WATCHERS_MAX, Page
from dataplane.rpc.membership import JobStatus, MemberStatus, NodeStatus, StatusResponse

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>'"
WAITS_WHILE_SILENT = """
[[0, 0, ""], [5, 5, ""], [10, 10, ""], [40, 10, "silent"], [45, 10, "silent"]].map(
    ([time, waited_s, problem]) => waiting({job: "w"}, {name: "0", waited_s}, {time, problem})
).slice(-2).join()
"""
FREED = "[[100, 0.01], [100, 0.5], [7, 0.95]].map(([rate, part]) => freed(rate, part)[0]).join()"
DONE = "document.querySelector('#jobs dd')?.textContent"


def test_a_browser_shows_a_job_live_and_outlives_a_restart_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"x": range(1600)}), tmp_path / "x.parquet", row_group_size=40)
    address, page = free_address(), free_address()
    environ = {
        "DATAPLANE_TOKEN": TOKEN,
        "DATAPLANE_STATE_DIR": str(tmp_path / "state"),
        "DATAPLANE_CACHE_DIR": str(tmp_path / "cache"),
        "DATAPLANE_METRICS_LISTEN": page,
    }
    monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)
    small = ("--block-arena-bytes", "32MiB", "--slab-bytes", "64KiB", "--worker-count", "1")
    with (
        Service("--listen", address, *small, environ=environ, log=tmp_path / "log") as service,
        LivePage(f"http://somebody:{TOKEN}@{page}/") as browser,
    ):
        browser.until("document.getElementById('none').hidden === false")
        url = str(tmp_path / "x.parquet")
        with DataLoader(url, batch_size=8, service=address, name=HOSTILE) as loader:
            batches = iter(loader)
            next(batches)
            before = browser.until(DONE)
            assert browser.evaluate("document.querySelector('#jobs h2').textContent") == HOSTILE
            for _ in range(150):
                next(batches)
            browser.until(f"{DONE} !== {json.dumps(before)}")
            browser.until("document.querySelector('#own dd').textContent[0] === '1'")  # its worker
            assert "free data would give" in browser.evaluate(
                "document.querySelector('#jobs dl').textContent"
            )
            browser.resize(360)
            assert browser.evaluate("document.documentElement.scrollWidth") <= 360
            browser.evaluate("document.forms.step.elements.step.value = '7'")
            browser.evaluate("document.forms.step.requestSubmit()")
            command = browser.evaluate("document.querySelector('#answer code').textContent")
            assert command.startswith(f"dataplane trace --join {address} --step 7 '<script>")
            (status,) = json.loads(scrapes.page(page, TOKEN, path="/status.json"))["jobs"]
            command = [sys.executable, "-m", "dataplane", "status", address, "--json"]
            of_command = json.loads(subprocess.check_output(command, env=service.environ))
            assert status.keys() == of_command["jobs"][0].keys()
            assert status["job_id"] == HOSTILE
        assert browser.evaluate("document.title") == "Dataplane"
        assert browser.evaluate("document.querySelectorAll('script, img').length") == 1
        assert browser.evaluate(WAITS_WHILE_SILENT) == "1,1"
        assert browser.evaluate(FREED) == "no more,up to 200,at least 10 x"
        service.kill()
        browser.until("document.getElementById('live').textContent.startsWith('connection lost')")
        service.start()
        browser.until("document.getElementById('live').textContent.startsWith('live')")
        assert browser.said == []


class Coordinator:
    """The coordinator of 512 ranks on 64 hosts, which may refuse."""

    def __init__(self) -> None:
        self.calls, self.error = 0, None

    async def status(self, _):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return many()


def many() -> StatusResponse:
    members = [
        MemberStatus(
            f"m{rank}", Topology(dp_rank=rank, dp_size=512, rank=rank, world_size=512),
            f"n{rank // 8}", "joined", 1, 0, 10.0, float(rank), 9.0, "fetch" if rank > 9 else "queue",
        )
        for rank in range(512)
    ]  # fmt: skip
    job = JobStatus("x" * 500, "s3://b/", JobSpec("f", 0), "d", 1, "running", 1, 512, (), members)
    nodes = tuple(NodeStatus(f"n{n}", f"host-{n}", n, "1", 0.5) for n in range(64))
    return StatusResponse("1", "c", (job,), nodes, 64, 1)


def test_events_of_many_ranks_are_sums_by_host_and_small() -> None:
    figures = fleet(many())
    (job,) = figures.jobs
    assert job.is_by_host
    assert len(job.cells) == 64 <= CELLS_MAX
    assert (job.cells[3].name, job.cells[3].ranks, job.cells[3].waited_s) == ("host-3", 8, 31.0)
    assert job.worst.name == "511"
    assert job.median.name == "256"
    assert job.rate == 5120
    assert job.bounds == {"fetch": 502, "queue": 10}
    assert len(figures.nodes) == NODES_MAX
    assert figures.node_count == 64
    assert len(msgspec.json.encode(figures)) < 32 << 10


def opened(address: str, path: str, header: str):
    request = urllib.request.Request(f"http://{address}{path}", headers={"Authorization": header})
    return urllib.request.urlopen(request, timeout=60)


def event(answer) -> dict:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the stream ended"
    return json.loads(line.removeprefix(b"data: "))


def shown(do, *readings: Reading) -> None:
    """Call `do` in a thread with the address of a page, and its coordinator."""

    async def main() -> None:
        coordinator = Coordinator()
        with contextlib.closing(MetricsServer("127.0.0.1:0", TRUSTED)) as server:
            server.add(lambda: readings)
            address = server.start()
            Page(server, coordinator, "head:7077")
            await asyncio.to_thread(do, address, coordinator)

    asyncio.run(main())


def test_only_who_has_the_token_sees_the_page_and_it_may_load_nothing() -> None:
    def check(address, _) -> None:
        for path in ("/", "/events", "/status.json"):
            for header in ("", "Basic !", "Basic " + base64.b64encode(b"x:wrong").decode()):
                with pytest.raises(urllib.error.HTTPError, match="401") as caught:
                    opened(address, path, header)
                with caught.value as answer:
                    assert "Basic" in answer.headers.get_all("WWW-Authenticate")[1]
        basic = "Basic " + base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
        for header in (basic, f"Bearer {TOKEN}"):
            with opened(address, "/", header) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert b"http" not in answer.read().replace(b"http-equiv", b"")
        assert policy.startswith("default-src 'none'; connect-src 'self'; ")
        assert "unsafe" not in policy

    shown(check)


def test_all_browsers_share_one_event_a_second_and_there_are_not_too_many() -> None:
    def check(address, coordinator) -> None:
        bearer = f"Bearer {TOKEN}"
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(opened(address, "/events", bearer)) for _ in range(WATCHERS_MAX)
            ]
            # The first takes nothing: others go on.
            times = [[event(stream)["time"] for _ in range(3)] for stream in streams[1:]]
            assert len({time for own in times for time in own}) <= coordinator.calls < 30
            with pytest.raises(urllib.error.HTTPError, match="503") as caught:
                opened(address, "/events", bearer)
            with caught.value as answer:
                assert b"16 browsers watch already" in answer.read()
            assert "process_open_fds" in scrapes.page(address, TOKEN)

    shown(check)


def test_without_the_coordinator_the_node_is_shown_and_why() -> None:
    def check(address, coordinator) -> None:
        with opened(address, "/events", f"Bearer {TOKEN}") as stream:
            assert event(stream)["problem"] == ""
            coordinator.error = PeerLost("the coordinator does not answer", peer="head")
            while not (facts := event(stream))["problem"]:
                pass
            assert facts["problem"] == "the coordinator does not answer"
            assert facts["fleet"]["jobs"][0]["ranks"] == 512
            assert facts["node"]["processes"] == {"worker": 3}
            coordinator.error = None
            while event(stream)["problem"]:
                pass
            coordinator.error = AccessDenied("its token may not read the status")
            while not event(stream)["problem"]:
                pass
            calls = coordinator.calls
            assert "may not" in event(stream)["problem"]
            assert coordinator.calls == calls

    shown(
        check,
        Reading("dataplane_arena_limit_bytes", 1),
        Reading("dataplane_loop_holds_total", 0),
        Reading("dataplane_processes", 3, ("worker",)),
    )


def test_a_stream_ends_so_that_its_credentials_are_checked_again(monkeypatch) -> None:
    monkeypatch.setattr(server, "STREAM_S", 0.2)

    def check(address, _) -> None:
        with opened(address, "/events", f"Bearer {TOKEN}") as stream:
            assert 1 <= stream.read().count(b"data: ") <= 3  # and the end

    shown(check)
