"""The side of `dataplane serve` that faces its supervisor: signals, and notices to systemd.

SIGTERM and SIGINT drain, and a second one stops at once. SIGHUP reloads, unless it comes because
the terminal of this process was closed: then it drains, too.

Source: sd_notify(3), sd_watchdog_enabled(3) of systemd
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

from dataplane.base.trace import Trace
from dataplane.commands.output import EXIT_INTERRUPTED, EXIT_OK

CANCEL_S = 3.0
_NOTICE_BYTES_MAX = 4096

_trace = Trace("serve")


class Notices:
    """Notices for the service manager that has started this process, if it listens for them.

    The variables that name the manager's socket are removed from the environment, so that no child
    of this process sends notices in its name.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_watched = watchdog_us.isdecimal() and pid in ("", str(os.getpid()))
        self._ping_s = int(watchdog_us) / 2e6 if is_watched else 0.0

    def ready(self, status: str) -> None:
        """Say that this process does its work."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that settings are being read; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that this process drains."""
        self._send("STOPPING=1", "STATUS=draining")

    def keep_pinging(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say that the event loop still runs, now and from then on twice in each period that the
        service manager allows.
        """
        if self._address and self._ping_s:
            self._send("WATCHDOG=1")
            loop.call_later(self._ping_s, self.keep_pinging, loop)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        notice = "\n".join(lines).encode()[:_NOTICE_BYTES_MAX]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(notice, self._address)
        except (OSError, ValueError) as error:
            _trace.failed("the service manager takes no notices", error=str(error))


@contextmanager
def handled_signals(
    stop: asyncio.Event, notices: Notices, reload: Callable[[], str]
) -> Iterator[list[int]]:
    """Handle signals, and yield those that end this process: the first starts a drain. The second
    cancels this task, and kills the process if that takes long: the kernel frees its memory, and
    its workers exit with it. `reload` returns what it did.
    """
    received: list[int] = []
    had_terminal = _has_terminal()
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def on_end(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            _trace.noted("draining; a second signal stops at once", by=signal.Signals(number).name)
            notices.stopping()
            stop.set()
        elif len(received) == 2:
            task.cancel()
            loop.call_later(CANCEL_S, os._exit, exit_status(received))

    def on_hangup() -> None:
        if received:
            return  # a closed terminal sends SIGHUP, and then its shell sends another one
        if had_terminal and not _has_terminal():
            on_end(signal.SIGHUP)
            return
        notices.reloading()
        notices.ready(reload())

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_end, number)
    # Under nohup, SIGHUP stays ignored.
    takes_hangups = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    if takes_hangups:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, *[signal.SIGHUP] * takes_hangups):
            loop.remove_signal_handler(number)


def exit_status(received: list[int]) -> int:
    """Return the exit status of a process that these signals have ended."""
    return EXIT_INTERRUPTED if signal.SIGINT in received else EXIT_OK


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still open."""
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
        return True
    return False
