"""Rows of jobs that are replaced by others, since their images cannot be decoded: each is logged
once, and reported to the coordinator.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace

from dataplane.base.trace import Trace
from dataplane.model.changes import ReplacedRow
from dataplane.model.redact import redacted, unsigned
from dataplane.node.delivery import DeliveryArena
from dataplane.rpc import tasks
from dataplane.rpc.membership import MemberProgress

ROWS_MAX = 1024
"""Rows that are reported of each job: more are a problem that lines of a log do not solve."""
_AT_ONCE = 64
_TEXT_MAX = 1024
"""Characters of another node's text: a heartbeat must be sent, whatever the text is."""
_JOBS_MAX = 64
_RowName = tuple[str, int]


class ReplacedRows:
    """The replaced rows of one node's jobs."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rows: OrderedDict[str, set[_RowName]] = OrderedDict()
        self._untold: dict[str, dict[_RowName, ReplacedRow]] = {}

    def note(self, delivery: DeliveryArena, result: object) -> None:
        """Note the replaced rows of a slab of this delivery. Jobs of other nodes are reported by
        those nodes.
        """
        is_reported = delivery.job_id and not delivery.is_for_nodes
        if isinstance(result, tasks.Assembled) and is_reported:
            for row in result.replaced:
                url, reason = redacted(unsigned(row.url)), row.reason
                told = replace(row, url=url[:_TEXT_MAX], reason=reason[:_TEXT_MAX])
                self._note(delivery.job_id, told)

    def report(self, progress: MemberProgress) -> MemberProgress:
        """Add the rows of a member's job that were not reported yet to its progress."""
        rows = list(self._untold.get(progress.job_id, {}).values())
        return replace(progress, replaced=tuple(rows[:_AT_ONCE])) if rows else progress

    def reported(self, heard: Iterable[MemberProgress]) -> None:
        """Note that the coordinator has received this progress."""
        for progress in heard:
            untold = self._untold.get(progress.job_id, {})
            for row in progress.replaced:
                untold.pop((row.url, row.row), None)
            if not untold:
                self._untold.pop(progress.job_id, None)

    def _note(self, job_id: str, row: ReplacedRow) -> None:
        known = self._rows.setdefault(job_id, set())
        if len(self._rows) > _JOBS_MAX:
            self._untold.pop(self._rows.popitem(last=False)[0], None)
        name = (row.url, row.row)
        if name in known or len(known) >= ROWS_MAX:
            return
        known.add(name)
        self._untold.setdefault(job_id, {})[name] = row
        last = "; further rows are not told" if len(known) == ROWS_MAX else ""
        self._trace.failed(
            "row replaced", job=job_id, shard=row.url, row=row.row, instead=row.instead,
            why=row.reason + last,
        )  # fmt: skip
