"""Makes Ctrl-C work at once, even while a command waits for a store that does not answer.

During a blocking call into native code, Python runs no signal handlers. So the work is done in a
thread, and the main thread only waits for it. After Ctrl-C the process exits without waiting for
the thread (see `cli.main`). Nothing is lost: the index's journal stays valid after a kill at any
time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

SIGNAL_CHECK_S = 0.2
"""A wait without an end can miss a signal: one that arrives just before the main thread sleeps, or
that the kernel hands to another thread, does not wake it. So it wakes by itself, and looks."""


def interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same command, carried out in a thread while the main thread listens for Ctrl-C."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        ended: Future[Any] = Future()

        def carry_out() -> None:
            try:
                ended.set_result(command(*arguments, **named))
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                ended.set_exception(error)

        threading.Thread(target=carry_out, name="dataplane-command", daemon=True).start()
        while not ended.done():
            wait([ended], timeout=SIGNAL_CHECK_S)
        return ended.result()

    return wrapped
