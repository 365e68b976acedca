"""Decide which connections of a listening socket are closed to make room for others. Pure: the
caller has the sockets and the clock.

The same rules apply to a node's listener for trainers, a lender's for other nodes, and a
coordinator's for calls. A connection comes from a *source* that the kernel names: a process or a
host. It is *silent* until it greets: says Hello, proves that it has a key, or makes a call that is
allowed.

Invariants:
1. A source has at most `silent_of_source_max` silent connections, and all sources together have
   `silent_max`: the oldest one is closed for the newest. So a source that opens many harms only
   itself.
2. If there are too many connections, silent ones are closed: those of a source with more than its
   share (`source_max`), then others that have been silent for `grace_s`, the oldest first.
3. A connection that has greeted is closed only if no place is left, its source has more than its
   share, and no silent connection can be closed.
4. A peer has at most `peer_max` connections that have greeted.
5. The cost of an event does not depend on the number of connections.
"""

from __future__ import annotations

import enum
import itertools
import sys
from collections import Counter, OrderedDict
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

C = TypeVar("C")
Source = int | str
"""A process or a host; 0 or "" if the kernel does not name it, in which case no limit applies."""
_AT_ONCE = 16
"""When connections that have greeted must be closed, one in this many of all places is freed at
once."""


class AdmissionRules(Struct, frozen=True):
    """The limits of one listener. Times are in seconds."""

    count_max: int
    spare: int = 0
    """How many places must stay free of silent connections."""
    source_max: int = sys.maxsize
    silent_of_source_max: int = sys.maxsize
    silent_max: int = sys.maxsize
    peer_max: int = sys.maxsize
    greeting_s: float = float("inf")
    """How long a connection may be silent."""
    grace_s: float = 0.0


class Reason(enum.Enum):
    """The limit because of which a connection is closed."""

    SILENT_OF_SOURCE = enum.auto()
    SILENT = enum.auto()
    SHARE = enum.auto()
    FULL = enum.auto()


class _OfSource(Struct, eq=False):
    """The connections of one source, the oldest first."""

    silent: OrderedDict[Any, None] = field(default_factory=OrderedDict)
    greeted: OrderedDict[Any, None] = field(default_factory=OrderedDict)

    @property
    def count(self) -> int:
        return len(self.silent) + len(self.greeted)


class _Held(Struct):
    """One connection: its source, when it was accepted, and its peer once it has greeted."""

    source: Source
    since: float
    peer: Source | None = None


class Admission(Generic[C]):
    """The connections of one listener. The caller closes them."""

    def __init__(self, rules: AdmissionRules) -> None:
        self.rules = rules
        self._all: dict[C, _Held] = {}
        self._silent: OrderedDict[C, None] = OrderedDict()
        self._sources: dict[Source, _OfSource] = {}
        self._peers: Counter[Source] = Counter()
        self._over: set[Source] = set()
        """The sources that exceed one of their limits."""

    def __len__(self) -> int:
        return len(self._all)

    def source_of(self, connection: C) -> Source:
        """Return the source of a connection; 0 if the connection is unknown."""
        held = self._all.get(connection)
        return 0 if held is None else held.source

    def has_enough_silent(self, source: Source) -> bool:
        """Return whether another connection of this source would close an older one. The caller may
        refuse the new one instead, if that costs less.
        """
        of_source = self._sources.get(source) if source else None
        most = self.rules.silent_of_source_max
        return of_source is not None and len(of_source.silent) >= most

    def came(self, connection: C, source: Source, now: float) -> None:
        """Add an accepted connection; then call `makes_way`."""
        self._all[connection] = _Held(source, now)
        self._silent[connection] = None
        self._sources.setdefault(source, _OfSource()).silent[connection] = None
        self._weigh(source)

    def greeted(self, connection: C, peer: Source) -> bool:
        """Note a greeting; return False if this peer has too many connections already."""
        held = self._all.get(connection)
        if held is None or held.peer is not None:
            return True
        if peer and self._peers[peer] >= self.rules.peer_max:
            return False
        held.peer = peer
        self._peers[peer] += 1
        del self._silent[connection]
        of_source = self._sources[held.source]
        del of_source.silent[connection]
        of_source.greeted[connection] = None
        return True

    def left(self, connection: C) -> None:
        """Remove a connection, if it is known."""
        held = self._all.pop(connection, None)
        if held is None:
            return
        of_source = self._sources[held.source]
        if held.peer is None:
            del self._silent[connection], of_source.silent[connection]
        else:
            del of_source.greeted[connection]
            self._peers[held.peer] -= 1
            if not self._peers[held.peer]:
                del self._peers[held.peer]
        if not of_source.count:
            del self._sources[held.source]
        self._weigh(held.source)

    def late(self, now: float) -> list[C]:
        """Return the connections that have been silent for too long."""
        due = now - self.rules.greeting_s
        return [*itertools.takewhile(lambda silent: self._all[silent].since <= due, self._silent)]

    def makes_way(self, now: float) -> list[tuple[C, Source, Reason]]:
        """Remove the connections that must go, and return them with their sources."""
        rules, going = self.rules, list[tuple[C, Source, Reason]]()

        def go(connections: list[C], reason: Reason) -> None:
            going.extend((each, self.source_of(each), reason) for each in connections)
            for connection in connections:
                self.left(connection)

        for source in [*self._over]:
            excess = len(self._sources[source].silent) - rules.silent_of_source_max
            go(self._first(source, excess), Reason.SILENT_OF_SOURCE)
        excess = _positive(len(self._silent) - rules.silent_max)
        go([*itertools.islice(self._silent, excess)], Reason.SILENT)
        most = rules.count_max - rules.spare
        if len(self._all) <= most:
            return going
        for source in [*self._over]:
            go(self._first(source, self._sources[source].count - rules.source_max), Reason.SHARE)
        old = (s for s in self._silent if now - self._all[s].since >= rules.grace_s)
        go([*itertools.islice(old, _positive(len(self._all) - most))], Reason.FULL)
        if len(self._all) >= rules.count_max:
            left = max(1, rules.count_max // _AT_ONCE)
            for source in [*self._over]:
                of_source = self._sources[source]
                excess = _positive(min(left, of_source.count - rules.source_max))
                go([*itertools.islice(of_source.greeted, excess)], Reason.SHARE)
                left -= excess
        return going

    def _first(self, source: Source, count: int) -> list[C]:
        """Return the oldest silent connections of a source."""
        return [*itertools.islice(self._sources[source].silent, _positive(count))]

    def _weigh(self, source: Source) -> None:
        """Record whether a source is within its limits."""
        of_source = self._sources.get(source)
        if source and of_source is not None and (
            len(of_source.silent) > self.rules.silent_of_source_max
            or of_source.count > self.rules.source_max
        ):  # fmt: skip
            self._over.add(source)
        else:
            self._over.discard(source)


def _positive(count: int) -> int:
    return max(0, count)
