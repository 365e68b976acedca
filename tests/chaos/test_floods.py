"""Peers that connect and say nothing, or far too much, keep no trainer from its epoch."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

import hostile
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet import DATAPLANE, Run
from small_nodes import alone_and_small

from dataplane.rpc import names

COUNT = 300
FLOOD = 400
OPEN_FILES = 320


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    alone_and_small(monkeypatch, tmp_path)
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": list(range(COUNT))}), path, row_group_size=20)
    return str(path)


def test_hundreds_of_idle_connections_keep_no_trainer_out(tmp_path: Path, url: str) -> None:
    log = tmp_path / "service.log"
    limited = ["sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh"]
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(
            subprocess.Popen(
                [*limited, *DATAPLANE, "serve", "--listen", "127.0.0.1:0"],
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("wb")),
                text=True,
            )
        )
        stack.callback(service.kill)
        assert service.stdout is not None
        address = service.stdout.readline().split()[-1]
        service.stdout.readline()
        host, _, port = address.rpartition(":")
        for _ in range(FLOOD):
            stack.enter_context(socket.create_connection((host, int(port)), 60))
            idle = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            idle.connect("\0" + names.served_name(os.getuid(), address))  # waits its turn
        with Run(tmp_path / "run", url, 1, {"batch_size": 10, "service": address}) as run:
            run.finish()
            assert run.stream() == [[i] for i in range(COUNT)]
        service.terminate()
        assert service.wait(60) == 0
    written = log.read_text()
    assert "Traceback" not in written
    assert len(written) < 20_000


def test_a_hostile_trainer_and_fuzzed_frames_end_no_process() -> None:
    """For a moment, and without a limit of time: `tests/hostile.py` runs for longer."""
    assert "slabs in 2 s" in hostile.trainers(2.0, most_s=60.0)
    assert hostile.fuzzed(400).startswith("400 frames and calls")
