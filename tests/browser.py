"""A real headless browser: opens a page, lets its scripts run, and returns the result."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

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
        """Those below it of this tag, class and id, as far as they are given."""
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
    told = f"there is no browser on this machine; any of these would do: {', '.join(NAMES)}"
    if os.environ.get("CI"):
        pytest.fail(told, pytrace=False)
    pytest.skip(told)


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
