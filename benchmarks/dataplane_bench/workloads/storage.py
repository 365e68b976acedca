"""The S3 side of a benchmark: a real server on this machine, made to seem far away."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError

from dataplane.model.errors import ConfigError, StoreUnavailable
from dataplane_bench import certificates, cores
from dataplane_bench.cores import CoreIds
from dataplane_bench.model import BenchCase, DatasetPlace
from dataplane_bench.processes import ProcessEnded, running, wait_until
from dataplane_bench.s3 import S3Server, s3_server
from dataplane_bench.trial import watch

BUCKET = "bench"
_PROXY = ("-m", "dataplane_bench.workloads.latency")
_PROXY_TIMEOUT_S = 20.0
_UPLOADS = 4
_WHOLE = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=64 << 20)


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
        with cores.confined(self._cores):
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
                client.upload_file(str(path), BUCKET, key, Config=_WHOLE)

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
            made = certificates.make(below) if has_tls else None
            with cores.confined(usable or os.sched_getaffinity(0)):
                server = stack.enter_context(s3_server(below, environment, made))
            server.upload(BUCKET, {})
        except (FileNotFoundError, ProcessEnded, ConnectionError) as error:
            raise ConfigError(f"the S3 server of the benchmark does not run: {error}") from error
        yield Storage(server, str(made.authority) if made else "", stack, below)
