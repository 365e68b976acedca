"""Make the plans of streams, in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dataplane.base.trace import Trace
from dataplane.model.errors import DataplaneError
from dataplane.scheduler.events import Planned, PlanSteps
from dataplane.scheduler.walk import Plan


class Planner:
    """Makes plans. Call `plan(effect, report)` from the event loop, on which `report` is then
    called.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dataplane-plan")

    def plan(self, effect: PlanSteps, report: Callable[[Planned], None]) -> None:
        """Take the next plans of a walk."""
        future = self._thread.submit(effect.walk.next_plans, effect.count)
        loop = asyncio.get_running_loop()
        future.add_done_callback(
            lambda done: (
                None
                if done.cancelled() or loop.is_closed()
                else loop.call_soon_threadsafe(self._report, effect.stream_id, done, report)
            )
        )

    def _report(
        self, stream_id: int, done: Future[list[Plan]], report: Callable[[Planned], None]
    ) -> None:
        error = done.exception()
        if error is None:
            report(Planned(stream_id, done.result()))
            return
        self._trace.failed("plan", error=error)
        if not isinstance(error, DataplaneError):
            error = DataplaneError(f"planning failed: {type(error).__name__}: {error}")
        report(Planned(stream_id, error=error))

    def close(self) -> None:
        """Make no more plans."""
        self._thread.shutdown(wait=False, cancel_futures=True)
