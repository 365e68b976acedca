"""`dataplane doctor` over runs that are bound by one thing each, with real nodes."""

from __future__ import annotations

import io
import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_bench.processes import running, wait_until
from fleet import Service, own_nodes
from PIL import Image
from servers import reach
from trusted import TOKEN

from dataplane.cli import run
from dataplane.client import launch
from dataplane.commands import doctor_checks, doctor_run
from dataplane.model.config import JobSpec
from dataplane.model.records import Topology
from dataplane.rpc.membership import (
    JobStatus,
    MemberStatus,
    NodeReads,
    NodeStatus,
    StatusResponse,
    StoreOutage,
)

LATENCY_MS = 250  # all other stages take less, on any machine
SMALL = (
    "--block-arena-bytes",
    "64MiB",
    "--delivery-bytes-per-rank",
    "8MiB",
    "--slab-bytes",
    "64KiB",
)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DATAPLANE_LINGER_S", "0.2")


def examined(capsys, *arguments: str) -> dict:
    assert run(["doctor", *SMALL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def table(rows: int, width: int) -> pa.Table:
    values = np.random.default_rng(0).integers(0, 9, rows * width, dtype=np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), width)
    return pa.table({"i": pa.array(range(rows)), "x": column})


@pytest.fixture
def environments(monkeypatch):
    """(this process's environment, its node's) while the trial runs."""
    seen, real = [], doctor_run.run_trial
    # The environment of a fork is not where others look for it.
    monkeypatch.setattr(launch, "_executed", launch._executed.__wrapped__)

    def run_and_look(*arguments):
        done = real(*arguments)
        (node,) = [process.environ() for process in own_nodes()]
        seen.append((dict(os.environ), node))
        return done

    monkeypatch.setattr(doctor_run, "run_trial", run_and_look)
    return seen


def test_a_loop_with_long_steps_is_bound_by_itself(capsys, tmp_path, environments):
    before = dict(os.environ)
    pq.write_table(table(2_000, 64), tmp_path / "a.parquet")
    asked = ("--batch-size", "100", "--step-ms", "100", "--seconds", "2")
    found = examined(capsys, str(tmp_path), *asked)
    assert found["bound"]["stage"] == "consumer"
    assert found["bound"]["samples_per_s_without"] > found["bound"]["samples_per_s"]
    assert found["statistics"]["consumed_s"] > 0.9 * found["statistics"]["waited_s"]
    assert [one["name"] for one in found["checks"]][:2] == ["processors", "memory"]
    ranks = next(one for one in found["checks"] if one["name"] == "ranks")
    assert ranks["found"] == "no launcher: a single process"
    ((ours, of_node),) = environments
    assert ours == before == dict(os.environ), "flags are for the node, not for this process"
    assert of_node["DATAPLANE_SLAB_BYTES"] == str(64 << 10)


def test_storage_that_answers_late_bounds_a_run_with_few_reads_at_a_time(
    s3_server, monkeypatch, capsys, tmp_path
):
    sink = io.BytesIO()
    pq.write_table(table(20, 64), sink)
    bucket = s3_server.bucket()
    # Each block in a shard of its own: neighbours would be read in one request.
    s3_server.put(bucket, {f"{number:03}.parquet": sink.getvalue() for number in range(100)})
    log = tmp_path / "latency.log"
    far = ["-m", "dataplane_bench.workloads.latency", str(s3_server.server.port), str(LATENCY_MS)]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with running([sys.executable, *far], environment, log) as process:
        wait_until(lambda: log.read_text().endswith("\n"), process, log, 20.0)
        reach(s3_server, monkeypatch)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{int(log.read_text())}")
        asked = ("--batch-size", "20", "--seconds", "1", "--fetch-count", "1", "--lanes", "1")
        found = examined(capsys, f"s3://{bucket}/", *asked)
    assert found["bound"]["stage"] == "storage"
    assert found["statistics"]["read_bytes"] > 0
    assert any(line.startswith("fetch_count 4") for line in found["advice"])
    storage = next(one for one in found["checks"] if one["name"] == "storage")
    assert storage["found"].startswith("remote")
    assert_its_first_batch_is_explained(found)


def assert_its_first_batch_is_explained(found):
    told, seen = found["first_batch"], found["statistics"]["first_batch"]
    stages = told["stages_s"]
    assert list(stages)[:4] == ["node", "connect", "index", "plan"]
    # A listing is a request, which may have begun while the node started.
    assert stages["node"] + stages["connect"] + stages["index"] >= LATENCY_MS / 1e3
    assert seen["index_s"] == stages["index"], "what the run's own node took, and nothing else"
    assert min(stages["node"], seen["node_s"], seen["plan_s"]) > 0
    assert sum(stages.values()) == pytest.approx(told["total_s"])
    longest = max(stages, key=stages.__getitem__).replace("_", " ")
    assert told["advice"].startswith(f"The first batch waited most for {longest} (")


def test_images_take_longer_to_assemble_than_to_decode(capsys, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (400, 400, 3), dtype=np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "JPEG", quality=95)
    pq.write_table(pa.table({"jpg": [sink.getvalue()] * 64}), tmp_path / "a.parquet")
    transform = "jpg=RandomResizedCrop(64), RandomHorizontalFlip(), ToLayout('CHW')"
    asked = ("--batch-size", "8", "--seconds", "1", "--transform", transform)
    found = examined(capsys, str(tmp_path), *asked)
    assert found["statistics"]["assembling_s"] > found["statistics"]["decoding_s"]


def test_output_for_people_is_text_and_wrong_use_says_what_is_allowed(capsys, tmp_path):
    pq.write_table(table(500, 8), tmp_path / "a.parquet")
    assert run(["doctor", str(tmp_path), "--steps", "20", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "This run is bound by" in shown
    assert "The first batch waited most for" in shown
    assert "What would help:" in shown
    asked = ("--steps", "20", "--columns", "x", "--stack", "y=i:float32", "--json")
    assert run(["doctor", str(tmp_path), *asked, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] >= 20
    assert run(["doctor", str(tmp_path), "--stack", "y"]) == 2
    assert "age,price" in capsys.readouterr().err
    for wrong in ("jpg", "jpg=Spin(3)", "jpg=Resize(1", "jpg=CenterCrop(x)"):
        assert run(["doctor", str(tmp_path), "--transform", wrong]) == 2
        assert "RandomResizedCrop" in capsys.readouterr().err


def test_its_examples_stand_in_the_help(capsys):
    assert run(["doctor", "--help"]) == 0
    assert "dataplane doctor s3://bucket/train/ --batch-size 256" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["never", "deny"])
def test_without_huge_pages_for_shared_memory_doctor_says_how_to_allow_them(mode):
    found = doctor_checks.huge_pages(mode)
    assert mode in found.found
    assert "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in found.advice
    assert not doctor_checks.huge_pages("advise").advice


def status_of(
    epoch: int, cursor: int, waited_s: float, bound: str, **node: object
) -> StatusResponse:
    member = MemberStatus(
        "m", Topology(), "n", "joined", epoch, cursor, stall_s=waited_s, bound=bound
    )
    job = JobStatus(
        "job", "s3://b", JobSpec("f" * 32), "d", 1, "running", 100, 1, members=(member,),
        epoch=epoch, cursor=cursor, member_count=1,
    )  # fmt: skip
    of_node = {"last_seen_s": 1.0, "reads": NodeReads(read_bytes=cursor)} | node
    return StatusResponse("0", "c", (job,), (NodeStatus("n", "host", 7, "0.1.0", **of_node),))


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (status_of(0, 10, 1.0, "storage"), status_of(0, 20, 5.0, "storage"),
         "1 of 1 ranks wait for storage, rank 0 80% of the time"),
        (status_of(0, 10, 1.0, "storage"), status_of(0, 10, 6.0, "storage"), "no byte came"),
        (status_of(0, 90, 9.0, "decode"), status_of(1, 5, 2.0, "decode"),
         "wait for decode, rank 0 40% of the time"),
        (status_of(0, 10, 1.0, "consumer"), status_of(0, 20, 4.0, "consumer"), ""),
        (status_of(0, 10, 1.0, "storage"), status_of(0, 20, 1.1, "storage"), ""),
        (status_of(0, 10, 0.0, ""), status_of(0, 20, 0.0, "", last_seen_s=60.0),
         "was last seen 60 s ago, on host host, process 7"),
        (status_of(0, 10, 0.0, "storage"),
         status_of(0, 10, 5.0, "storage", stores_away=(StoreOutage("s3://b", 12.0, "HTTP 500"),)),
         "s3://b has not answered for 12 s: HTTP 500"),
    ],
)  # fmt: skip
def test_a_running_service_is_named_by_what_is_wrong_with_it(before, now, words):
    wrong = [check.found for check in doctor_checks.compared(before, now, 5.0) if check.advice]
    assert any(words in found for found in wrong) if words else not wrong
    if "S" not in words and "no byte" not in words:
        assert not any("no byte came" in found for found in wrong)


def test_a_service_without_jobs_has_nothing_wrong(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)
    with Service(
        "--listen", "127.0.0.1:0", "--coordinator", "--state-dir", str(tmp_path)
    ) as service:
        asked = ["doctor", "--join", service.address, "--seconds", "0.1", "--json"]
        assert run(asked) == 0
        assert json.loads(capsys.readouterr().out) == {"checks": []}
    assert run(["doctor"]) == 2
    assert "--join for a running service" in capsys.readouterr().err
