"""deploy/examples/train.py: ended by a notice, resumed on another number of ranks, no sample lost."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from fleet import ANSWER_S, Log, Service
from warm import WarmProcess, WarmPython

TRAIN = Path(__file__).parents[2] / "deploy" / "examples" / "train.py"
SMALL = ("--block-arena-bytes", "16MiB", "--worker-count", "1")
BATCH = 12


def ranks(
    python: WarmPython, size: int, arguments: list[str], environ: dict[str, str], log: Path
) -> list[WarmProcess]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    with log.open("ab") as stderr:
        for rank in range(size):
            place = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            given = {**os.environ, **environ, **place}
            started.append(python.run([str(TRAIN), *arguments], given, stderr.fileno()))
    return started


def ended(processes: list[WarmProcess]) -> tuple[list[int], str]:
    """The exit statuses, and what was printed."""
    printed, statuses = "", []
    try:
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            statuses.append(process.wait(ANSWER_S))
            printed += process.stdout.read()
        return statuses, printed
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def recorded(folder: Path) -> dict[int, list[int]]:
    """The ids of each step, of all ranks together; a step that was made twice has them twice."""
    steps: dict[int, list[int]] = {}
    for path in folder.glob("ids-*"):
        for line in path.read_text().splitlines():
            step, _, ids = line.partition(" ")
            steps.setdefault(int(step), []).extend(json.loads(ids))
    return {step: sorted(ids) for step, ids in steps.items()}


@pytest.mark.parametrize("where", [pytest.param("folder", marks=pytest.mark.slow), "s3"])
def test_a_notice_to_one_rank_ends_all_and_other_ranks_go_on(where, tmp_path, request, warm_torch):
    url = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"id": range(300)}), url, row_group_size=50)  # 25 steps an epoch
    environ = {"DATAPLANE_STATE_DIR": str(tmp_path / "state")}
    checkpoints = str(tmp_path / "checkpoints")
    if where == "s3":
        server = request.getfixturevalue("s3_server")
        environ |= server.environment()
        checkpoints = f"s3://{server.bucket()}/run-7"
    arguments = [
        url, "--checkpoints", checkpoints, "--global-batch", str(BATCH),
        "--record", str(tmp_path / "ids"), "--steps",
    ]  # fmt: skip
    with Service("--listen", "127.0.0.1:0", *SMALL, environ=environ) as service:
        environ["DATAPLANE_SERVICE"] = service.address
        first = ranks(warm_torch, 2, [*arguments, "1000000"], environ, tmp_path / "log")
        Log(tmp_path / "ids-0").wait_for(" ", count=3)
        os.kill(first[1].pid, signal.SIGTERM)
        statuses, printed = ended(first)
        assert statuses == [75, 75], (tmp_path / "log").read_text()
        (saved,) = (line for line in printed.splitlines() if line.startswith("saved"))
        step = int(saved.partition("step=")[2])
        assert step == max(recorded(tmp_path))
        end = [*arguments, str(step + 30)]
        statuses, printed = ended(ranks(warm_torch, 3, end, environ, tmp_path / "log"))
        assert statuses == [0, 0, 0], (tmp_path / "log").read_text()
        assert f"resumed step={step} ranks=3" in printed
        assert service.stop() == 0
    with DataLoader(url, global_batch_size=BATCH, shuffle=True, seed=7) as whole:
        expected: list[list[int]] = []
        while len(expected) < step + 30:
            expected += [sorted(batch["id"].tolist()) for batch in whole]
    assert recorded(tmp_path) == dict(enumerate(expected[: step + 30], 1))
