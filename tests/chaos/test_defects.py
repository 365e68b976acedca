"""A bug in Dataplane ends its process with a loud error, and no batch is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import fleet
import hostile
import hygiene
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet import Run, Service, node_processes
from sabotage import sabotage
from small_nodes import alone_and_small

from dataplane.base.background import EXIT_DEFECT

COUNT = 300
OPTIONS = {"global_batch_size": 10}
ENDS = "task failed: this process exits"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    alone_and_small(monkeypatch, tmp_path)
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DATAPLANE_LEASE_S", "3")  # a beat a second
    monkeypatch.setenv("DATAPLANE_DELIVERY_BYTES_PER_RANK", "16KiB")
    monkeypatch.setenv("DATAPLANE_SLAB_BYTES", "1KiB")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": list(range(COUNT))}), path, row_group_size=20)
    return str(path)


@pytest.mark.parametrize(
    ("target", "task"),
    [
        ("dataplane.node.heartbeat:Heartbeat._beat", "heartbeat"),
        pytest.param(
            "dataplane.node.engine:Engine._settle", "Engine._settle", marks=pytest.mark.slow
        ),  # a callback: test_background.py has it small
    ],
)
def test_an_embedded_node_with_a_defect_ends_and_the_next_one_goes_on(
    tmp_path: Path, url: str, target: str, task: str
) -> None:
    fault = sabotage(tmp_path, target)
    with Run(tmp_path / "run", url, 1, OPTIONS, environ=fault.environ) as run:
        run.go(3)
        (node,) = node_processes(run.launch)
        fault.strike()
        run.order("end")
        (line,) = run.log.wait_for(ENDS)
        assert f'task="{task}"' in line or f"task={task} " in line
        assert "Set changed size" in line
        node.wait(60)
        run.answers()
        assert run.stream() == [[i] for i in range(COUNT)]


def test_a_service_with_a_defect_ends_with_a_status_and_its_successor_goes_on(
    tmp_path: Path, url: str
) -> None:
    fault = sabotage(tmp_path, "dataplane.coordinator.front:Coordinator.tick")
    address = f"unix:{tempfile.gettempdir()}/c"
    options = {**OPTIONS, "service": address, "name": "run"}
    with (
        Service("--listen", address, environ=fault.environ) as service,
        Run(tmp_path / "run", url, 1, options) as run,
    ):
        run.go(3)
        fault.strike()
        assert service.process.wait(60) == EXIT_DEFECT
        assert service.process.stdout is not None
        service.process.stdout.close()
        service.start()
        run.finish()
        assert run.stream() == [[i] for i in range(COUNT)]
        run.kill()
        assert service.stop() == 0


def test_a_hostile_trainer_and_fuzzed_frames_end_no_process() -> None:
    """For a moment, and without a limit of time: `tests/hostile.py` runs for longer."""
    assert "slabs in 2 s" in hostile.trainers(2.0, most_s=60.0)
    assert hostile.fuzzed(400).startswith("400 frames and calls")


SCRIPT = """
import os, sys, torch
print(sys.argv[1], os.environ["OWN"], "DATAPLANE_TEST_RUN" in os.environ, flush=True)
sys.stderr.write("a word\\n")
sys.exit(int(sys.stdin.readline()))
"""


def test_what_a_test_forgets_is_found_and_killed(tmp_path):
    before = hygiene.take()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = fleet.WARM[0].run([str(script), "first"], {"OWN": "value"}, sys.stderr.fileno())
    assert process.pid in hygiene._new_processes(before)
    hygiene.kill_new(before)
    # Its parent may have been killed first, and then reports nothing.
    process.stdin.close()
    process.stdout.close()
    process._told.close()


def test_an_executable_does_what_pythons_does_and_its_process_ends_with_it(tmp_path):
    python = fleet.WARM[0].executable(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = subprocess.run([python, "-m", "this"], capture_output=True, text=True, check=True)
    assert "Beautiful" in words.stdout
    assert subprocess.run([python, "-c", "exit(3)"], check=False).returncode == 3
    pipe = subprocess.PIPE
    environ = os.environ | {"OWN": "value"}
    for ends in (7, -signal.SIGKILL):
        command = [python, "script.py", "first"]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environ, cwd=tmp_path) as run:
            assert run.stdout.readline() == b"first value True\n"
            if ends > 0:
                run.stdin.write(b"7\n")
                run.stdin.close()
            else:
                run.kill()
            assert run.wait(60) == ends
