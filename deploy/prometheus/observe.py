"""Run a small job under Debian's Prometheus, with the configuration and the rules of this folder.

python deploy/prometheus/observe.py, until Ctrl-C; `make observe` does it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
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
        until(self._is_ready, "Prometheus is not ready", self._why)

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


def until(is_so: Callable[[], object], otherwise: str, why: Callable[[], str] = str) -> None:
    """Wait until it is so.

    Raises:  SystemExit: not within START_S.
    """
    deadline = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"{otherwise}: {why()}")
        threading.Event().wait(0.1)
