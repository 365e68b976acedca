"""Background tasks of a process with an event loop, and what happens if they fail.

If a heartbeat stops, or a callback fails half-way, the process looks alive but does no work. Such a
process exits instead, at once and without cleaning up, since its state can no longer be trusted.
All its peers can handle a killed process, and a supervisor or a trainer starts it again.

Invariants:
1. If a task started here, or a thread's future watched here, ends with an exception, the process
   exits; it also exits if one of our callbacks raises. The log names the task or callback, and the
   exit status is not 0.
2. An exception in a library's callback is only logged, a few lines a minute.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import traceback
from collections.abc import Coroutine
from functools import partial
from typing import Any, NoReturn

from dataplane.base.trace import Trace

EXIT_DEFECT = 70
"""The exit status; commands use the same one if they fail because of a bug."""
_TASK = "dataplane_task"

_trace = Trace("background")


def start(name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a coroutine in the background. The caller keeps the task, and may cancel it. The
    coroutine must handle expected errors: every exception that it raises counts as a bug.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    task.add_done_callback(_look)
    return task


def watch(name: str, future: concurrent.futures.Future[None]) -> None:
    """Apply the same rules to a background job that runs in a thread."""
    loop = asyncio.get_running_loop()
    future.add_done_callback(partial(_look_from_thread, loop, name))


def end_process_on_failure() -> None:
    """Make failures on the running event loop end this process."""
    asyncio.get_running_loop().set_exception_handler(_on_failure)


def end_process(name: str, error: BaseException | None) -> NoReturn:
    """Log that the task `name` has failed, and end this process."""
    _trace.broke("task failed: this process exits", by=error, task=name, error=repr(error))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(EXIT_DEFECT)


def _look(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _tell(task.get_loop(), task.get_name(), error)


def _look_from_thread(
    loop: asyncio.AbstractEventLoop, name: str, future: concurrent.futures.Future[None]
) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(_tell, loop, name, error)


def _tell(loop: asyncio.AbstractEventLoop, name: str, error: BaseException) -> None:
    message = f"the background task {name!r} failed"
    loop.call_exception_handler({"message": message, "exception": error, _TASK: name})


def _on_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    name = context.get(_TASK)
    if name is None and error is not None and "handle" in context:
        called = _callback(context["handle"])
        if _is_of_ours(getattr(called, "__module__", "")) or _came_through_ours(error):
            name = str(getattr(called, "__qualname__", called))
    if name is None:
        _trace.failed("event loop", what=context.get("message", ""), error=repr(error))
        return
    end_process(name, error)


def _callback(handle: asyncio.Handle) -> object:
    called: object = handle._callback  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
    while isinstance(called, partial):
        called = called.func
    return called


def _came_through_ours(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(_is_of_ours(frame.f_globals.get("__name__")) for frame, _ in frames)


def _is_of_ours(module: object) -> bool:
    return str(module).startswith("dataplane.")
