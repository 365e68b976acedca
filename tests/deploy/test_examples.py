"""deploy/examples/train.py: ended by a notice, resumed on another number of ranks, no sample lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from fleet import Log, Service
from launching import ended, start

TRAIN = Path(__file__).parents[2] / "deploy" / "examples" / "train.py"
SMALL = ("--block-arena-bytes", "16MiB", "--worker-count", "1")
BATCH = 12


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
        log = tmp_path / "log"
        _store, first = start(warm_torch, TRAIN, log, *arguments, "1000000", **environ)
        Log(tmp_path / "ids-0").wait_for(" ", count=3)
        os.kill(first[1].pid, signal.SIGTERM)
        statuses, printed = ended(first)
        assert statuses == [75, 75], log.read_text()
        (saved,) = (line for line in printed.splitlines() if line.startswith("saved"))
        step = int(saved.partition("step=")[2])
        assert step == max(recorded(tmp_path))
        end = (*arguments, str(step + 30))
        _store, others = start(warm_torch, TRAIN, log, *end, size=3, **environ)
        statuses, printed = ended(others)
        assert statuses == [0, 0, 0], log.read_text()
        assert f"resumed step={step} ranks=3" in printed
        assert service.stop() == 0
    with DataLoader(url, global_batch_size=BATCH, shuffle=True, seed=7) as whole:
        expected: list[list[int]] = []
        while len(expected) < step + 30:
            expected += [sorted(batch["id"].tolist()) for batch in whole]
    assert recorded(tmp_path) == dict(enumerate(expected[: step + 30], 1))
