"""Waits that end early when the process is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine
from typing import Any

_TICK_S = 0.5


async def wait_stop(stop: asyncio.Event, seconds: float, *, is_draining: bool) -> None:
    """Wait until `stop` is set or the time has passed; during a drain, wait the whole time."""
    if is_draining:
        await asyncio.sleep(seconds)
        return
    with contextlib.suppress(TimeoutError):
        # Not wait_for: in Python 3.11 it may swallow a cancellation.
        async with asyncio.timeout(seconds):
            await stop.wait()


async def done_before(
    stop: asyncio.Event, waiting: Coroutine[Any, Any, None], meanwhile: Callable[[], None]
) -> bool:
    """Run this until it ends or `stop` is set, and return whether it ended; otherwise it is
    cancelled. `meanwhile` is called periodically.

    Raises:  every error that it raises.
    """
    task = asyncio.create_task(waiting)
    stopping = asyncio.create_task(stop.wait())
    try:
        while not task.done() and not stop.is_set():
            meanwhile()
            await asyncio.wait({task, stopping}, timeout=_TICK_S, return_when=FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.wait({task, stopping})
