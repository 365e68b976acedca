"""Limit how many connections with one neighbour are opened at the same time.

A lender closes connections of a host that has many of them without a proof, since it cannot know
yet who asks. A fetcher with many reads must not look like an attack.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from dataplane.neighbours.handshake import HANDSHAKE_S

OPENINGS_MAX = 4
"""For one process and address; a lender allows 32 for a host."""


class Openings:
    """The openings of one process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._of: Counter[str] = Counter()

    @contextlib.contextmanager
    def turn(self, address: str) -> Iterator[None]:
        """Wait until a connection with this address may be opened, which is done within the block.

        Raises:  TimeoutError: the others do not end.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._of[address] < OPENINGS_MAX, HANDSHAKE_S):
                raise TimeoutError
            self._of[address] += 1
        try:
            yield
        finally:
            with self._changed:
                self._of[address] -= 1
                if not self._of[address]:
                    del self._of[address]
                self._changed.notify_all()
