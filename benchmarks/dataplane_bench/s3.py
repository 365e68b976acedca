"""A real S3 server on this machine, SeaweedFS, in its own processes; made to seem far away.

For TLS, `openssl` makes a certificate at run time, signed by an authority of its own: rustls, which
obstore and others use, refuses a server that shows the certificate of an authority.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.config
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
)

from dataplane.model.errors import ConfigError, StoreUnavailable
from dataplane_bench import machine
from dataplane_bench.machine import CoreIds
from dataplane_bench.model import BenchCase, DatasetPlace
from dataplane_bench.processes import ProcessEnded, free_ports, running, tool, wait_until
from dataplane_bench.trial import watch

_CERTIFICATE_DAYS = "30"
_OPENSSL_TIMEOUT_S = 60.0
_KEY_OPTIONS = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_SERVER_EXTENSIONS = "subjectAltName=IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\n"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files in PEM format: what the server shows, its key, and whom clients must trust."""

    certificate: Path
    key: Path
    authority: Path


def make_certificate(folder: Path) -> Certificate:
    """Write a new certificate into this folder.

    Raises:  FileNotFoundError: there is no openssl.  ConnectionError: it fails; with its words.
    """
    authority, authority_key = folder / "authority.pem", folder / "authority.key"
    made = Certificate(folder / "server.pem", folder / "server.key", authority)
    request, extensions = folder / "server.csr", folder / "server.ext"
    extensions.write_text(_SERVER_EXTENSIONS)
    subject = ("-subj", "/CN=127.0.0.1")
    _openssl(
        *(
            "req",
            "-x509",
            *_KEY_OPTIONS,
            "-keyout",
            authority_key,
            "-out",
            authority,
            "-days",
            _CERTIFICATE_DAYS,
        ),
        *("-subj", "/CN=dataplane bench"),
    )
    _openssl("req", *_KEY_OPTIONS, "-keyout", made.key, "-out", request, *subject)
    _openssl(
        *("x509", "-req", "-in", request, "-CA", authority, "-CAkey", authority_key),
        *(
            "-CAcreateserial",
            "-days",
            _CERTIFICATE_DAYS,
            "-extfile",
            extensions,
            "-out",
            made.certificate,
        ),
    )
    return made


def _openssl(*arguments: str | Path) -> None:
    try:
        subprocess.run(
            [tool("openssl"), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=_OPENSSL_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise ConnectionError(f"no certificate for TLS: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ConnectionError(f"no certificate for TLS within {_OPENSSL_TIMEOUT_S:g} s") from error


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


BUCKET = "bench"
_PROXY = ("-m", "dataplane_bench.workloads.latency")
_PROXY_TIMEOUT_S = 20.0
_UPLOADS = 4
_WHOLE_FILES = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=64 << 20)


class Storage:
    """A running server and what was uploaded to it. Clients talk to it at the end of a line: as far
    away as a case wants it, plain or over TLS.
    """

    def __init__(
        self, server: S3Server, authority: str, lines: contextlib.ExitStack, folder: Path
    ) -> None:
        self._server, self._authority = server, authority
        self._lines, self._folder = lines, folder
        self._endpoints: dict[tuple[float, bool], str] = {}
        self._prefixes: dict[Path, str] = {}
        self._pids = [server.pid]
        self._cores = os.sched_getaffinity(server.pid)

    def place(self, folder: Path, case: BenchCase) -> DatasetPlace:
        """Where the files of this folder are in S3, at the end of the case's line: uploaded, past
        any delay, when first asked for.

        Raises:  StoreUnavailable: the server refuses, or does not answer.
        """
        if folder not in self._prefixes:
            prefix = f"{len(self._prefixes)}-{folder.name}"
            self._upload(folder, prefix)
            self._prefixes[folder] = prefix
        return DatasetPlace(
            folder,
            f"s3://{BUCKET}/{self._prefixes[folder]}",
            self._endpoint(case.delay_ms, case.over_tls),
            self._server.access_key,
            self._server.secret_key,
            self._authority if case.over_tls else "",
        )

    def cpu_s(self) -> float:
        """CPU seconds that the server and its lines have used so far."""
        return watch.cpu_s(self._pids)

    def _endpoint(self, delay_ms: float, over_tls: bool) -> str:
        key = (delay_ms, over_tls)
        if key not in self._endpoints:
            port = self._server.tls_port if over_tls else self._server.port
            if delay_ms:
                port = self._far(port, delay_ms)
            self._endpoints[key] = f"{'https' if over_tls else 'http'}://127.0.0.1:{port}"
        return self._endpoints[key]

    def _far(self, port: int, delay_ms: float) -> int:
        """A port where the server seems far away."""
        log = self._folder / f"latency-{len(self._pids)}.log"
        command = [sys.executable, *_PROXY, str(port), str(delay_ms)]
        with machine.confined(self._cores):
            process = self._lines.enter_context(running(command, os.environ, log))
        try:
            wait_until(lambda: log.read_text().endswith("\n"), process, log, _PROXY_TIMEOUT_S)
        except ProcessEnded as error:
            raise StoreUnavailable(
                f"the delay before the S3 server does not run: {error}"
            ) from error
        self._pids.append(process.pid)
        return int(log.read_text())

    def _upload(self, folder: Path, prefix: str) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        with contextlib.closing(self._server.client()) as client:

            def upload(path: Path) -> None:
                key = f"{prefix}/{path.relative_to(folder)}"
                client.upload_file(str(path), BUCKET, key, Config=_WHOLE_FILES)

            try:
                with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="bench-upload") as pool:
                    list(pool.map(upload, files))
            except (BotoCoreError, ClientError) as error:
                raise StoreUnavailable(f"{self._server.endpoint}: {error}") from error


@contextlib.contextmanager
def s3_storage(
    folder: Path, usable: CoreIds | None = None, *, has_tls: bool = False
) -> Iterator[Storage]:
    """A server with an empty bucket, its files below `folder`, until the block ends. It runs on
    these cores, or on those of this thread.

    Raises:  ConfigError: it is not installed, or does not start.
    """
    with contextlib.ExitStack() as stack:
        below = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="s3-", dir=folder)))
        environment = {**os.environ, "TMPDIR": str(below)}
        try:
            made = make_certificate(below) if has_tls else None
            with machine.confined(usable or os.sched_getaffinity(0)):
                server = stack.enter_context(s3_server(below, environment, made))
            server.upload(BUCKET, {})
        except (FileNotFoundError, ProcessEnded, ConnectionError) as error:
            raise ConfigError(f"the S3 server of the benchmark does not run: {error}") from error
        yield Storage(server, str(made.authority) if made else "", stack, below)
