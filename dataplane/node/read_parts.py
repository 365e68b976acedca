"""A read that has several parts, and ends when all of them have ended."""

from __future__ import annotations

from dataplane.node.fetchers import Report
from dataplane.rpc import fetches


class ReadParts:
    """Counts the parts of one read. `report` is called once all have ended, with the first error,
    or with what a neighbour sent of them. Parts are reported later than they are added.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._left = 1
        self._error: fetches.Outcome = None
        self._given = 0

    def one_more(self) -> Report:
        """Add a part, and return the function that reports its end."""
        self._left += 1
        return self._ended

    def are_all(self) -> None:
        """Note that no more parts will be added."""
        self._ended(None)

    def _ended(self, found: fetches.Outcome) -> None:
        self._left -= 1
        if isinstance(found, fetches.NeighbourGave):
            self._given += found.length
        else:
            self._error = self._error or found
        if not self._left:
            given = fetches.NeighbourGave(self._given) if self._given else None
            self._report(self._error or given)


def is_all_there(found: fetches.Outcome) -> bool:
    """Whether a read with this outcome has read all bytes."""
    return found is None or isinstance(found, fetches.NeighbourGave)
