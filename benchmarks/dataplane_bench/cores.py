"""Which cores an S3 server on this machine uses, and which the loaders.

A server that shares cores with the loaders slows them down as no server elsewhere would. So it gets
cores of its own where the machine has enough of them. Elsewhere its CPU time is told apart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

CORES_MIN = 8
"""Fewer are shared: what is left for the loaders would be another machine."""
_SERVER_SHARE = 4

CoreIds = set[int] | frozenset[int]


@dataclass(frozen=True, slots=True)
class Division:
    """Cores by number, as the kernel counts them. Both are all of them where they are shared."""

    loaders: CoreIds
    server: CoreIds

    @property
    def all(self) -> CoreIds:
        return self.loaders | self.server

    @property
    def are_apart(self) -> bool:
        return not self.loaders & self.server


def divided(cores: CoreIds) -> Division:
    """A quarter of the cores for the server, the last ones, where there are enough."""
    if len(cores) < CORES_MIN:
        return Division(cores, cores)
    ordered = sorted(cores)
    count = len(ordered) // _SERVER_SHARE
    return Division(frozenset(ordered[:-count]), frozenset(ordered[-count:]))


@contextlib.contextmanager
def confined(cores: CoreIds) -> Iterator[None]:
    """Until the block ends, this thread and what it starts use only these cores.

    A process that was started inside stays there.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
