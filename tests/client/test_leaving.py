"""A trainer that stops reports its position and leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dataplane.client.stream import SlabStream
from dataplane.rpc.messages import CloseJob, CloseStream


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_the_end_of_a_process_that_holds_batches_leaves_the_job_with_its_place(fake, name) -> None:
    node = fake()
    code = (
        "import sys\n"
        "from fake_node import open_job\n"
        "from dataplane.client.endpoint import Served\n"
        "from dataplane.client.session import Session\n"
        "from dataplane.client.stream import SlabStream\n"
        "stream = SlabStream(Session(Served('host:1', sys.argv[1]), open_job()), 3, 8)\n"
        "held = stream.batches_from(0)\n"
        "stream.consumed = 12\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: node.seen[-1] == "gone")
    assert node.seen[-2] == CloseJob("job", 3, 12, holds_slabs=True)


def test_a_stream_that_is_left_reports_its_progress(fake, session) -> None:
    node = fake()
    stream = SlabStream(session(), 0, 0)
    stream.batches_from(0)
    stream.consumed = 4
    stream.close()
    wait_until(lambda: [o.cursor for o in node.seen if isinstance(o, CloseStream)] == [4])
