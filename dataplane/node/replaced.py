"""Rows of jobs that have others in their places, since their images cannot be decoded: each is
logged once.
"""

from __future__ import annotations

from collections import OrderedDict

from dataplane.node.delivery import DeliveryArena
from dataplane.rpc import tasks
from dataplane.trace import Trace

ROWS_MAX = 1024
"""That are told of each job: one with more has a problem that lines of a log do not solve."""
_JOBS_MAX = 64


class ReplacedRows:
    """Those of the jobs of one node."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rows: OrderedDict[str, set[tuple[str, int]]] = OrderedDict()

    def note(self, delivery: DeliveryArena, result: object) -> None:
        """A slab of this delivery was made, or could not be. Another node's jobs are its own."""
        if not isinstance(result, tasks.Assembled) or not delivery.job_id:
            return
        for row in result.replaced:
            self._note(delivery.job_id, row)

    def _note(self, job_id: str, row: tasks.ReplacedRow) -> None:
        known = self._rows.setdefault(job_id, set())
        if len(self._rows) > _JOBS_MAX:
            self._rows.popitem(last=False)
        name = (row.url, row.row)
        if name in known or len(known) >= ROWS_MAX:
            return
        known.add(name)
        last = "; further rows are not told" if len(known) == ROWS_MAX else ""
        self._trace.failed(
            "row replaced", job=job_id, shard=row.url, row=row.row, instead=row.instead,
            why=row.reason + last,
        )  # fmt: skip
