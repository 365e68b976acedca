"""Run a small job under Debian's Prometheus, with the configuration and the rules of this folder.

python deploy/prometheus/observe.py, until Ctrl-C; `make observe` does it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
START_S = 60.0
_TIMES = re.compile(r"(?<=\[)(\d+)([mh])(?=\])|(?<=for: )(\d+)(m)|(?<=_interval: )(\d+)(s)")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class Prometheus:
    """A Prometheus that scrapes these addresses, `faster` than the files of this folder say: its
    intervals, and the times in its rules, are so many times shorter.
    """

    def __init__(self, folder: Path, targets: Sequence[str], token: str, faster: int = 1) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise SystemExit("prometheus is missing: apt-get install prometheus")
        folder.mkdir(exist_ok=True)
        for name in ("prometheus.yaml", "alerts.yaml"):
            text = (HERE / name).read_text(encoding="utf-8")
            (folder / name).write_text(_TIMES.sub(lambda at: _shorter(at, faster), text))
        (folder / "token").write_text(token)
        (folder / "targets.yaml").write_text(json.dumps([{"targets": list(targets)}]))
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program, f"--config.file={folder}/prometheus.yaml",
                    f"--storage.tsdb.path={folder}/series",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            until(self._is_ready, "Prometheus is not ready", self._why)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and values of an expression, now."""
        found = self._get("query", query=expr)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def firing(self) -> list[dict[str, str]]:
        """Return the labels of all alerts that fire now."""
        alerts = self._get("alerts")["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]

    def _get(self, what: str, **arguments: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready"):
            return True
        return False

    def _why(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:]


def _shorter(at: re.Match[str], faster: int) -> str:
    count, unit = next((at[n], at[n + 1]) for n in (1, 3, 5) if at[n])
    return f"{int(count) * _SECONDS[unit] * 1000 // faster}ms"


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def until(
    is_so: Callable[[], object],
    otherwise: str,
    why: Callable[[], str] = str,
    limit_s: float = START_S,
) -> None:
    """Wait until it is so.

    Raises:  SystemExit: not within the limit.
    """
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"{otherwise}: {why()}")
        threading.Event().wait(0.1)


# -- a job -----------------------------------------------------------------------------------------

_TRAINER = """
import sys, threading
from dataplane_torch import DataLoader
with DataLoader(sys.argv[1], 32, service=sys.argv[2], name="observed") as loader:
    while True:
        for batch in loader:
            threading.Event().wait(0.02)
"""
_JOB_STARTS_S = 120.0


def main() -> None:
    """Run a service, a trainer and Prometheus until Ctrl-C, and print where to look."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # its processes would outlive it
        signal.signal(ending, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="observe-")))
        token, address, metrics = (
            secrets.token_hex(24), *(f"127.0.0.1:{free_port()}" for _ in range(2))
        )  # fmt: skip
        environ = os.environ | {"DATAPLANE_TOKEN": token, "DATAPLANE_STATE_DIR": str(folder)}
        _write(folder / "shards")
        serve = [sys.executable, "-m", "dataplane", "serve", "--listen", address]
        trainer = [sys.executable, "-c", _TRAINER, str(folder / "shards"), address]
        for command in ([*serve, "--metrics-listen", metrics], trainer):
            process = subprocess.Popen(command, env=environ, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        prometheus = stack.enter_context(Prometheus(folder / "prometheus", [metrics], token, 15))
        samples = "dataplane_samples_total > 0"
        until(lambda: prometheus.query(samples), "the job does not begin", limit_s=_JOB_STARTS_S)
        exposed = "max by (job, stage) (rate(dataplane_exposed_seconds_total[1m]))"
        graph = urllib.parse.urlencode({"g0.expr": exposed, "g0.tab": 0, "g0.range_input": "10m"})
        sys.stdout.write(
            f"Prometheus:  {prometheus.url}/graph?{graph}\n"
            f"alerts:      {prometheus.url}/alerts\n"
            f"metrics:     curl -H 'Authorization: Bearer {token}' http://{metrics}/metrics\n"
            f"status:      DATAPLANE_TOKEN={token} dataplane status {address} --watch\n"
            "Ctrl-C ends all of it.\n"
        )
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _write(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for shard in range(4):
        rows = pa.table({"x": range(shard * 10_000, (shard + 1) * 10_000)})
        pq.write_table(rows, folder / f"{shard}.parquet", row_group_size=500)


if __name__ == "__main__":
    main()
