"""Formats leave no thread behind: one of Arrow's that needs Python's lock when the interpreter ends
takes the process with it ("terminate called without an active exception", exit status 134).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_DECODE_ALL = """
import os, sys
sys.path.insert(0, {tests!r})
import pyarrow as pa
import pyarrow.json, pyarrow.parquet
from shards import *
from dataplane.formats import registry
table = pa.table({{"x": list(range(1000)), "s": [str(i) for i in range(1000)]}})
shards = {{
    "parquet": parquet_bytes(table, row_group_size=300),
    "arrow": arrow_bytes(table),
    "arrow file": arrow_bytes(table, file=True),
    "jsonl": json_lines(table.to_pylist()),
    "jsonl gz": zipped(json_lines(table.to_pylist())),
    "tfrecord": tfrecord_bytes([example_bytes({{"a": ("int64_list", [1])}})]),
    "tar": tar_bytes([("a.txt", b"x")]),
}}
before = len(os.listdir("/proc/self/task"))
for name, content in shards.items():
    decoded(registry.by_name(name.split()[0]), content)
    print(name, len(os.listdir("/proc/self/task")) - before)
"""


def test_no_format_starts_a_thread_that_may_outlive_the_interpreter() -> None:
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", _DECODE_ALL.format(tests=tests)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    threads = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(threads) == 7
    assert set(threads.values()) == {"0"}, threads
