"""How a trainer starts its node."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from fake_node import open_job
from msgspec import structs
from servers import S3Server
from shards import arrow_bytes

from dataplane.client.endpoint import Embedded
from dataplane.client.session import Session
from dataplane.client.stream import SlabStream
from dataplane.rpc.messages import DatasetSource

TRAINER = """
import socket, sys
from dataplane.client.launch import start_node
from dataplane.rpc.messages import DatasetSource

node = "import socket, sys; assert socket.socket(fileno=int(sys.argv[2])).getsockname() == ''"
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    started = start_node(listener, (sys.executable, "-c", node), DatasetSource(("a.parquet",)))
    sys.exit(started.process.wait())
"""


@pytest.mark.parametrize("closed", ["", "<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_node_gets_its_listener_also_from_a_trainer_without_standard_streams(closed):
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, TRAINER]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("given", [[], ["--help"], ["--listener-fd"], ["--stderr-fd", "2"]])
def test_a_node_without_a_listener_says_who_starts_it(given: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "dataplane.node", *given]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 2
    assert "`dataplane serve`" in done.stderr
    assert "Traceback" not in done.stderr


_NOTED = """
import os, sys
from dataplane.node import __main__ as node
serve = node._embedded
async def served(*given):
    status = await serve(*given)
    path = %r
    with open(path + ".new", "w") as noted:
        noted.write("\\n".join(sys.modules))
    os.replace(path + ".new", path)
    return status
node._embedded = served
sys.exit(node.main())
"""
# Most take 3 to 50 ms of CPU, and a start takes 300.
_HEAVY = {
    *("argparse", "email", "importlib.metadata", "multiprocessing", "shutil", "tomllib"),
    *("aiohttp", "click", "fsspec", "grpc", "obstore", "PIL", "torch", "yaml", "zipfile"),
    *("pyarrow.compute", "pyarrow.dataset", "pyarrow.fs", "pyarrow.parquet"),
    *("dataplane.node.fork_server", "dataplane.fetcher.process", "dataplane.worker.worker"),
    *("dataplane.transforms.condition", "dataplane.transforms.where"),
}


@pytest.mark.skipif(
    int(np.__version__.partition(".")[0]) < 2 or int(pa.__version__.partition(".")[0]) < 22,
    reason="older packages import more of Python and of themselves",
)
@pytest.mark.parametrize("is_remote", [False, True])
def test_an_embedded_node_serves_a_dataset_without_heavy_modules(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, *, is_remote: bool
) -> None:
    shards = {f"{n}.arrow": arrow_bytes(pa.table({"id": range(n, n + 64)})) for n in range(2)}
    url, noted = str(tmp_path / "shards"), tmp_path / "modules"
    if is_remote:
        for name, value in s3_server.environment().items():
            monkeypatch.setenv(name, value)
        bucket = s3_server.bucket()
        s3_server.put(bucket, shards)
        url = f"s3://{bucket}/"
    else:
        Path(url).mkdir()
        for name, content in shards.items():
            (Path(url) / name).write_bytes(content)
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DATAPLANE_LINGER_S", "0.1")
    command = (sys.executable, "-P", "-c", _NOTED % str(noted))
    job = structs.replace(open_job(), source=DatasetSource((url,)))
    session = Session(Embedded(f"test-{tmp_path}", command), job)
    stream = SlabStream(session, 0, 0)
    assert stream.batches_from(0)
    stream.close()
    session.close()
    deadline = time.monotonic() + 60
    while not noted.exists() and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    modules = set(noted.read_text().split("\n"))
    assert "dataplane.node.server" in modules
    # The node itself reads the shards that the scout has not.
    reading = {"email", "obstore"} if is_remote else set()
    assert sorted(modules & (_HEAVY - reading)) == []
