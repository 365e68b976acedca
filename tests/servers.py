"""Real servers for tests: an S3 server from SeaweedFS, and rclone's as one that misbehaves.

Each runs in its own process group and its own folder; both are gone when the fixture ends, and
the servers also die when the test process is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import hygiene
import pytest

ACCESS_KEY = "dataplane"
SECRET_KEY = "dataplane-secret"
START_TIMEOUT_S = 60.0
START_ATTEMPTS = 3
_POLL = threading.Event()
_WEED_PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running S3 server and the one identity that it knows."""

    endpoint: str
    client: Any
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    _names: Iterator[int] = field(default_factory=itertools.count)

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to reach this server, and no other."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bucket(self) -> str:
        """Create a bucket with a new name."""
        name = f"bucket-{os.getpid()}-{next(self._names)}"
        self.client.create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Write (or overwrite) objects of a bucket."""
        for key, body in objects.items():
            self.client.put_object(Bucket=bucket, Key=key, Body=body)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real S3 server for all tests: SeaweedFS, about four seconds to start."""
    for attempt in range(START_ATTEMPTS):
        ports = free_ports(len(_WEED_PORTS))
        folder = tmp_path_factory.mktemp("seaweed")
        with contextlib.ExitStack() as stack:
            stack.callback(_remove_weed_sockets, ports)
            # Somebody may take a port between our look and the server's start: try others.
            try:
                command = _weed(folder, ports)
                process = stack.enter_context(running(command, folder, _answers(ports[0])))
            except ServerDied:
                if attempt == START_ATTEMPTS - 1:
                    raise
                continue
            yield stack.enter_context(_shared(process, ports[0]))
            return


@pytest.fixture(scope="session")
def careless_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """rclone's S3 server: it answers a ranged GET with 200 and the right bytes."""
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "served").mkdir()
    (port,) = free_ports(1)
    command = [
        *(_tool("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"),
        *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", "/dev/null"),
        *("--cache-dir", str(folder / "cache"), str(folder / "served")),
    ]
    with (
        running(command, folder, _answers(port)) as process,
        _shared(process, port) as server,
    ):
        yield server


@contextlib.contextmanager
def _shared(process: subprocess.Popen[bytes], port: int) -> Iterator[S3Server]:
    """The server, known to outlive the test that happened to start it."""
    hygiene.SHARED_PIDS.add(process.pid)
    hygiene.SHARED_PORTS.add(port)
    try:
        with _boto(port) as client:
            yield S3Server(f"http://127.0.0.1:{port}", client)
    finally:
        hygiene.SHARED_PIDS.discard(process.pid)
        hygiene.SHARED_PORTS.discard(port)


class ServerDied(Exception):
    """A server ended, or did not answer, before it was ready."""


@contextlib.contextmanager
def running(
    command: Sequence[str], folder: Path, ready: Callable[[], bool]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in its own process group until the block ends; then remove its folder."""
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_dies_with_us(), *command],
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise ServerDied(f"{command[0]} is not ready (exit {process.poll()}):\n{tail}")
            _POLL.wait(0.1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago, each below 55536 (SeaweedFS adds 10000)."""
    held: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < count:
            held.append(socket.create_server(("127.0.0.1", 0)))
            port = held[-1].getsockname()[1]
            if port < 55536:
                ports.append(port)
    finally:
        for one in held:
            one.close()
    return ports


def _weed(folder: Path, ports: Sequence[int]) -> list[str]:
    store = folder / "store"
    store.mkdir()
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    # Each bucket gets volumes of its own, seven at a time unless told otherwise here.
    growth = "copy_1 = 1\ncopy_2 = 1\ncopy_3 = 1\ncopy_other = 1\n"
    (folder / "master.toml").write_text(f"[master.volume_growth]\n{growth}")
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    return [
        *(_tool("weed"), "server", f"-dir={store}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-{name}={port}" for name, port in zip(_WEED_PORTS, ports, strict=True)),
        *("-master.telemetry=false", "-master.electionTimeout=1s"),
        *("-master.volumeSizeLimitMB=256", "-volume.max=1000", "-volume.preStopSeconds=0"),
        *(f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"),
    ]


def _remove_weed_sockets(ports: Sequence[int]) -> None:
    """SeaweedFS makes gRPC sockets in /tmp whatever TMPDIR says."""
    for name, port in zip(_WEED_PORTS, ports, strict=True):
        if name.endswith(".grpc"):
            part = name.removesuffix(".port.grpc")
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


@contextlib.contextmanager
def _boto(port: int) -> Iterator[Any]:
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=botocore.config.Config(
            retries={"total_max_attempts": 10},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        ),
    )
    try:
        yield client
    finally:
        client.close()


def _answers(port: int) -> Callable[[], bool]:
    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                return True
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return refusal.code < 500
        except OSError:
            return False

    return ready


def _tool(name: str) -> str:
    """A program of this environment, else of PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: `make setup` brings it")
    return found


def _dies_with_us() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []
