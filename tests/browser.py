"""A real headless browser: opens a page, lets its scripts run, and returns the result."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 250
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    # Time is virtual: it advances only when the page is idle, so no script is cut off.
    "--virtual-time-budget=30000",
    "--enable-logging=stderr",
)
_VOID = frozenset({"meta", "br", "img", "link", "hr", "input", "source", "col"})


@dataclass(slots=True)
class Element:
    """An element of a page as it is after its scripts ran."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    own_text: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join([*self.own_text, *(child.text for child in self.children)])

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    def all(self, tag: str = "", css: str = "", id: str = "") -> list[Element]:  # noqa: A002
        """Return the elements below it of this tag, class and id, as far as they are given."""
        return [
            one
            for one in self._below()
            if (not tag or one.tag == tag)
            and (not css or css in one.classes)
            and (not id or one.attributes.get("id") == id)
        ]

    def _below(self) -> Iterator[Element]:
        for child in self.children:
            yield child
            yield from child._below()


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag, attrs):
        made = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(made)
        if tag not in _VOID:
            self._open.append(made)

    def handle_startendtag(self, tag, attrs):
        self._open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        while len(self._open) > 1 and self._open.pop().tag != tag:
            pass

    def handle_data(self, text):
        self._open[-1].own_text.append(text)


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened page. `said` is the console output of the page and its scripts."""

    page: Element
    said: list[str]


def browser() -> str:
    """The path of one. Without one a test is skipped, but not where CI runs: that installs one."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    advice = f"there is no browser on this machine; any of these would do: {', '.join(NAMES)}"
    if os.environ.get("CI"):
        pytest.fail(advice, pytrace=False)
    pytest.skip(advice)


def open_page(path: Path, width: int = 1280, *, is_dark: bool = False) -> Opened:
    """Run the browser with a folder of its own, which is removed with its processes."""
    schemes = ("--blink-settings=preferredColorScheme=0",) if is_dark else ()
    # Short, since it has a Unix socket below it, whose path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="web-", ignore_cleanup_errors=True) as folder:
        command = [
            *(browser(), *OPTIONS, *schemes),
            f"--window-size={width},1000",
            f"--user-data-dir={folder}/profile",
            *("--dump-dom", path.as_uri()),
        ]
        own = {"HOME": folder, "TMPDIR": folder}
        own |= {f"XDG_{kind}_HOME": f"{folder}/{kind}" for kind in ("CONFIG", "CACHE", "DATA")}
        page, log = _output(command, os.environ | own)
    said = [line.partition("CONSOLE")[2] for line in log.splitlines() if ":CONSOLE" in line]
    builder = _Builder()
    builder.feed(page)
    return Opened(builder.root, said)


def _output(command: list[str], environment: Mapping[str, str]) -> tuple[str, str]:
    started = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        page, log = started.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
    assert started.returncode == 0, log
    return page, log


class LivePage:
    """A page that stays open, driven by Chromium's own protocol over a pipe. Use as a context."""

    def __init__(self, url: str, width: int = 1280, height: int = 1000) -> None:
        self.said: list[str] = []
        self._number, self._rest = 0, b""
        self._folder = tempfile.TemporaryDirectory(prefix="web-", ignore_cleanup_errors=True)
        options = [
            option
            for option in OPTIONS
            if "virtual-time" not in option and not option.startswith("--host-resolver")
        ]
        asks, self._asks = os.pipe()
        self._hears, hears = os.pipe()
        home = self._folder.name
        own = {"HOME": home, "TMPDIR": home}
        own |= {f"XDG_{kind}_HOME": f"{home}/{kind}" for kind in ("CONFIG", "CACHE", "DATA")}
        # It reads commands from descriptor 3 and writes to 4.
        within = f'exec "$@" 3<&{asks} 4>&{hears}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", within, "bash", browser(), *options, "--remote-debugging-pipe"),
                *(f"--window-size={width},{height}", f"--user-data-dir={home}/profile"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | own,
            pass_fds=(asks, hears),
            start_new_session=True,
        )
        os.close(asks)
        os.close(hears)
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.send("Runtime.enable")
        self.send("Page.enable")
        self.resize(width, height)
        self.send("Page.navigate", url=url)
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._asks)
        os.close(self._hears)
        self._folder.cleanup()

    def resize(self, width: int, height: int = 1000) -> None:
        """Show the page as a window of this size would, a narrow one as a phone does."""
        narrow = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=narrow,
        )  # fmt: skip

    def evaluate(self, script: str) -> Any:
        """The value of this expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of this expression once it is true; the deadline only ends a hang."""
        deadline = time.monotonic() + TIMEOUT_S
        tried = f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()"
        while not (value := self.evaluate(tried)):
            assert time.monotonic() < deadline, (script, self.said)
            threading.Event().wait(0.05)
        return value

    def screenshot(self, path: Path) -> None:
        """Write what the window shows, as PNG."""
        path.write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        )

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._asks, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.said.append(json.dumps(answer["params"]))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._hears, 1 << 20)
            assert piece, "the browser ended"
            self._rest += piece
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)
