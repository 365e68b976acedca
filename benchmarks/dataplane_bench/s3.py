"""A real S3 server on this machine: SeaweedFS, in its own folder and process."""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
)

from dataplane_bench.certificates import Certificate
from dataplane_bench.processes import ProcessEnded, free_ports, running, tool, wait_until

START_TIMEOUT_S = 60.0
START_ATTEMPTS = 3
REGION = "us-east-1"
_PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)
_PORT_BELOW = 55536  # SeaweedFS adds 10000 to some
_SOCKET_FOLDER_LENGTH_MAX = 90  # the path of a Unix socket has 107 characters at most
_VOLUMES_MAX = 1000  # of all buckets: a limit, nothing is reserved


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running S3 server, and the one identity that it accepts. It speaks TLS at `tls_port`, or
    nowhere if that is 0.
    """

    endpoint: str
    port: int
    pid: int
    access_key: str
    secret_key: str
    tls_port: int = 0

    def environment(self) -> dict[str, str]:
        """The environment variables with which a process reaches this server, and no other."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def upload(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Create a bucket with these objects.

        Raises:  ConnectionError: the server refuses, or does not answer.
        """
        try:
            with contextlib.closing(self.client()) as client:
                client.create_bucket(Bucket=bucket)
                for key, body in objects.items():
                    client.put_object(Bucket=bucket, Key=key, Body=body)
        except (BotoCoreError, ClientError) as error:
            raise ConnectionError(f"{self.endpoint}: {error}") from error

    def client(self) -> Any:
        """A boto3 client of this server, which the caller closes."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=botocore.config.Config(
                retries={"total_max_attempts": 10},
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
            ),
        )


@contextlib.contextmanager
def s3_server(
    folder: Path, environment: Mapping[str, str], certificate: Certificate | None = None
) -> Iterator[S3Server]:
    """Run a server until the block ends, with its files in `folder`. It starts in a few seconds.
    With a certificate it also speaks TLS.

    Raises:  ProcessEnded: it does not start; has the end of its output.
    """
    with contextlib.ExitStack() as stack:
        yield _started(stack, folder, environment, certificate)


def _started(
    stack: contextlib.ExitStack,
    folder: Path,
    environment: Mapping[str, str],
    certificate: Certificate | None,
) -> S3Server:
    access_key, secret_key = "dataplane", secrets.token_hex(16)
    log, sockets = folder / "s3.log", folder
    if len(str(folder)) > _SOCKET_FOLDER_LENGTH_MAX:
        made = tempfile.TemporaryDirectory(prefix="s3-", dir="/tmp")
        sockets = Path(stack.enter_context(made))
    for attempt in range(START_ATTEMPTS):
        *ports, tls_port = free_ports(len(_PORTS) + 1, _PORT_BELOW)
        with contextlib.ExitStack() as trial:
            command = _command(folder, sockets, ports, access_key, secret_key)
            if certificate is not None:
                command += [f"-s3.port.https={tls_port}", f"-s3.key.file={certificate.key}"]
                command += [f"-s3.cert.file={certificate.certificate}"]
            trial.callback(_remove_sockets, ports)
            process = trial.enter_context(running(command, environment, log))
            # Another process may take a port before the server does: then try other ports.
            try:
                wait_until(answers(ports[0]), process, log, START_TIMEOUT_S)
            except ProcessEnded:
                if attempt == START_ATTEMPTS - 1:
                    raise
                continue
            stack.push(trial.pop_all())
            endpoint = f"http://127.0.0.1:{ports[0]}"
            has_tls = certificate is not None
            return S3Server(
                *(endpoint, ports[0], process.pid, access_key, secret_key),
                tls_port if has_tls else 0,
            )
    raise AssertionError("the last attempt returns or raises")


def _command(
    folder: Path, sockets: Path, ports: Sequence[int], access_key: str, secret_key: str
) -> list[str]:
    # Each attempt has its own store: a failed one may have left an incomplete store.
    store, config = tempfile.mkdtemp(prefix="s3-", dir=folder), folder / "s3.json"
    identity = {
        "name": "dataplane",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    # Each bucket has its own volumes; without this setting, SeaweedFS creates seven at a time.
    growth = "copy_1 = 1\ncopy_2 = 1\ncopy_3 = 1\ncopy_other = 1\n"
    (folder / "master.toml").write_text(f"[master.volume_growth]\n{growth}")
    config.touch(mode=0o600)
    config.write_text(json.dumps({"identities": [identity]}))
    return [
        *(tool("weed"), f"-logdir={store}", "server", f"-dir={store}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)),
        *("-master.telemetry=false", "-master.electionTimeout=1s"),
        *("-master.volumeSizeLimitMB=256", f"-volume.max={_VOLUMES_MAX}"),
        "-volume.preStopSeconds=0",
        *(f"-s3.localSocket={sockets}/s3.sock", f"-filer.localSocket={sockets}/filer.sock"),
    ]


def _remove_sockets(ports: Sequence[int]) -> None:
    """Remove SeaweedFS's gRPC sockets, which it creates in /tmp regardless of TMPDIR."""
    for name, port in zip(_PORTS, ports, strict=True):
        if name.endswith(".grpc"):
            part = name.removesuffix(".port.grpc")
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


def answers(port: int) -> Callable[[], bool]:
    """Whether an HTTP server at this port of 127.0.0.1 answers, with any status."""

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
