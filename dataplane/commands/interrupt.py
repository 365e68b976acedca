"""Ctrl-C at once, also while a command waits for a store that does not answer.

A blocking call into native code lets Python's signal handlers wait until it returns. The work is
therefore done in a thread, and the main thread only waits for it; after a Ctrl-C the process ends
without waiting for the thread (see `cli.main`). Nothing is lost: an index's journal is written so
that a kill at any time leaves it right.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


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
        return ended.result()

    return wrapped
