"""Indexing by several processes at once, and by processes that are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from counted import Counted

from dataplane.index.indexing import index_dataset

RUN = textwrap.dedent(
    """
    import sys
    from dataplane.index.indexing import index_dataset

    def told(progress):
        print(progress.shards_done, flush=True)
        if progress.shards_done == int(sys.argv[3]):
            sys.stdin.read()

    print(index_dataset(sys.argv[1], cache_dir=sys.argv[2], progress=told).fingerprint)
    """
)


def start(dataset: Path, cache: Path, stop_at: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(dataset), str(cache), str(stop_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while process.stdout.readline().strip() != line:
        assert process.poll() is None


def test_two_processes_may_index_at_once(dataset: Path, cache: Path) -> None:
    first, second = start(dataset, cache, 5), start(dataset, cache, 5)
    for process in (first, second):
        read_until(process, "5")
    found = {process.communicate("")[0].split()[-1] for process in (first, second)}
    assert found == {index_dataset(dataset).fingerprint}
    assert first.returncode == second.returncode == 0
    assert index_dataset(dataset, cache_dir=str(cache)).fingerprint in found


def test_a_killed_run_is_resumed_and_leaves_no_temporary_file(dataset: Path, cache: Path) -> None:
    process = start(dataset, cache, 7)
    read_until(process, "7")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [path.suffix for path in cache.rglob("*.*")] == [".log"]
    counted = Counted()
    manifest = index_dataset(dataset, cache_dir=str(cache), connect=counted.connect)
    assert len(counted.names) <= 5
    assert manifest == index_dataset(dataset)
    assert sorted(path.suffix for path in cache.rglob("*.*")) == [".log", ".manifest"]
