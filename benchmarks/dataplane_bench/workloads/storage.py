"""The S3 side of a benchmark: a real server on this machine, made to seem far away."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from boto3.s3.transfer import TransferConfig  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from dataplane.errors import ConfigError, StoreUnavailable
from dataplane_bench.model import DatasetPlace
from dataplane_bench.processes import ProcessEnded, running, wait_until
from dataplane_bench.s3 import S3Server, s3_server

DELAY_MS = 20.0
"""What a request to a cloud's object store waits for its first byte, at best."""
BUCKET = "bench"
_PROXY = ("-m", "dataplane_bench.workloads.latency")
_PROXY_TIMEOUT_S = 20.0
_UPLOADS = 4
_WHOLE = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=64 << 20)


class Storage:
    """A running server and what was uploaded to it. Clients talk to `endpoint`, the far end."""

    def __init__(self, server: S3Server, endpoint: str) -> None:
        self._server = server
        self.endpoint = endpoint
        self._places: dict[Path, DatasetPlace] = {}

    def place(self, folder: Path) -> DatasetPlace:
        """Where the files of this folder are in S3: uploaded, past the delay, when first asked for.

        Raises:  StoreUnavailable: the server refuses, or does not answer.
        """
        if folder not in self._places:
            prefix = f"{len(self._places)}-{folder.name}"
            self._upload(folder, prefix)
            self._places[folder] = DatasetPlace(
                folder,
                f"s3://{BUCKET}/{prefix}",
                self.endpoint,
                self._server.access_key,
                self._server.secret_key,
            )
        return self._places[folder]

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
def s3_storage(folder: Path, delay_ms: float = DELAY_MS) -> Iterator[Storage]:
    """A server with an empty bucket, its files below `folder`, until the block ends.

    Raises:  ConfigError: it is not installed, or does not start.
    """
    with contextlib.ExitStack() as stack:
        below = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="s3-", dir=folder)))
        environment = {**os.environ, "TMPDIR": str(below)}
        try:
            server = stack.enter_context(s3_server(below, environment))
            server.upload(BUCKET, {})
            port = stack.enter_context(_far(server.port, delay_ms, below))
        except (FileNotFoundError, ProcessEnded, ConnectionError) as error:
            raise ConfigError(f"the S3 server of the benchmark does not run: {error}") from error
        yield Storage(server, f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def _far(port: int, delay_ms: float, folder: Path) -> Iterator[int]:
    """The port where a server at `port` seems far away."""
    log = folder / "latency.log"
    command = [sys.executable, *_PROXY, str(port), str(delay_ms)]
    with running(command, os.environ, log) as process:
        wait_until(lambda: log.read_text().endswith("\n"), process, log, _PROXY_TIMEOUT_S)
        yield int(log.read_text())
