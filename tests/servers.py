"""Real servers for tests: an S3 server from SeaweedFS, and rclone's as one that misbehaves.

Each runs in its own session and its own folder; both are gone when the fixture ends, and the
servers also die when the test process is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hygiene
import pytest
from awry import Awry, awry_server
from dataplane_bench import s3
from dataplane_bench.processes import free_ports, running, tool, wait_until


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running S3 server, and a client of it."""

    server: s3.S3Server
    client: Any
    _names: Iterator[int] = field(default_factory=itertools.count)

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def access_key(self) -> str:
        return self.server.access_key

    @property
    def secret_key(self) -> str:
        return self.server.secret_key

    def environment(self) -> dict[str, str]:
        """The environment variables with which a process reaches this server, and no other."""
        return self.server.environment()

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
    with (
        _folder(tmp_path_factory, "seaweed") as folder,
        s3.s3_server(folder, _environment(folder)) as server,
        _shared(server) as shared,
    ):
        yield shared


@pytest.fixture(scope="session")
def careless_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """rclone's S3 server: it answers a ranged GET with 200 and the right bytes."""
    with (
        _folder(tmp_path_factory, "rclone") as folder,
        _rclone(folder) as server,
        _shared(server) as shared,
    ):
        yield shared


@contextlib.contextmanager
def _rclone(folder: Path) -> Iterator[s3.S3Server]:
    (port,) = free_ports(1)
    access_key, secret_key = "dataplane", secrets.token_hex(16)
    served, log = folder / "served", folder / "rclone.log"
    served.mkdir()
    command = [
        *(tool("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"),
        *("--auth-key", f"{access_key},{secret_key}", "--config", "/dev/null"),
        *("--cache-dir", str(folder / "cache"), str(served)),
    ]
    with running(command, _environment(folder), log) as process:
        wait_until(s3.answers(port), process, log, s3.START_TIMEOUT_S)
        yield s3.S3Server(f"http://127.0.0.1:{port}", port, process.pid, access_key, secret_key)


@contextlib.contextmanager
def _shared(server: s3.S3Server) -> Iterator[S3Server]:
    """The server, known to outlive the test that happened to start it."""
    hygiene.SHARED_PIDS.add(server.pid)
    hygiene.SHARED_PORTS.add(server.port)
    try:
        with contextlib.closing(server.client()) as client:
            yield S3Server(server, client)
    finally:
        hygiene.SHARED_PIDS.discard(server.pid)
        hygiene.SHARED_PORTS.discard(server.port)


@contextlib.contextmanager
def _folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def only(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    """Leave no other variables for S3 in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def reach(server: Awry | S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment with which stores find this server."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    """A server without objects that misbehaves when told to, and the environment to reach it."""
    with awry_server({}) as server:
        reach(server, monkeypatch)
        yield server


@pytest.fixture
def port_of_nobody() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections and that no other process can take."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _environment(folder: Path) -> dict[str, str]:
    # The TMPDIR of now is that of the test that came first, and goes with it.
    return {**os.environ, "TMPDIR": str(folder)}
