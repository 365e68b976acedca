"""The limits of a lender for its neighbours, and the order of their turns. Pure.

Invariants of `InFlight`:
1. The bytes in flight stay within a limit, both in all and for each neighbour; but a single request
   may exceed it. The bytes of a block count from the beginning of its request. The bytes of a slab
   count once the node has given the slab, which takes no room of the arena before.
2. The requests of one neighbour begin in the order in which they arrived. Neighbours take turns.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from msgspec import Struct

from dataplane.neighbours.handshake import HANDSHAKE_S
from dataplane.security.admission import AdmissionRules

T = TypeVar("T")

_SHARE_IN_FLIGHT = 8
_SHARE_OF_NEIGHBOUR = 4


class Limits(Struct, frozen=True):
    """The limits of one lender. Times are in seconds."""

    admission: AdmissionRules = AdmissionRules(
        4096, silent_max=1024, silent_of_source_max=32, peer_max=512
    )
    """Limits on connections. A connection is silent until its proof of the key has arrived."""
    body_bytes: int = 128 << 20
    """Bytes of the bodies of slab requests, which are in memory until the node has read them."""
    body_bytes_of_neighbour: int = 32 << 20
    handshake_s: float = HANDSHAKE_S
    frame_s: float = 2.0
    """The maximum time from the first byte of a request to its last."""
    idle_s: float = 60.0
    turn_s: float = 5.0
    """How long a request waits for its turn before it is refused."""
    answer_s: float = 60.0
    """How long a request waits for the node before its connection is closed."""
    send_s: float = 5.0
    """The time for a payload and its receipt, plus a second per `slowest_bytes` of payload."""
    slowest_bytes: int = 8 << 20

    def payload_s(self, length: int) -> float:
        """Return how long a neighbour may take to receive a payload of this length."""
        return self.send_s + length / self.slowest_bytes


class BodyBytes:
    """The memory that the bodies of requests take, in all and by neighbour."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = 0
        self._bytes_of: dict[str, int] = {}

    def reserve(self, node_id: str, length: int) -> bool:
        """Reserve bytes for a neighbour until `release`. Return False if a limit forbids it."""
        used = self._bytes_of.get(node_id, 0)
        if self._bytes + length > self._limits.body_bytes:
            return False
        if used + length > self._limits.body_bytes_of_neighbour:
            return False
        self._bytes += length
        self._bytes_of[node_id] = used + length
        return True

    def release(self, node_id: str, length: int) -> None:
        """Release bytes that are no longer in memory."""
        self._bytes -= length
        self._bytes_of[node_id] -= length
        if not self._bytes_of[node_id]:
            del self._bytes_of[node_id]


class InFlight(Generic[T]):
    """The waiting requests, and the bytes of those in progress."""

    def __init__(self, arena_bytes: int) -> None:
        self._bytes_max = arena_bytes // _SHARE_IN_FLIGHT
        self._neighbour_bytes_max = self._bytes_max // _SHARE_OF_NEIGHBOUR
        self._bytes = 0
        self._bytes_of: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, T]]] = {}
        self._turns: deque[str] = deque()
        self._in_turn: set[str] = set()

    def ask(self, node_id: str, length: int, request: T) -> None:
        """Add a neighbour's request for this many bytes; `next` returns the request when it may
        begin.
        """
        self._waiting.setdefault(node_id, deque()).append((length, request))
        self._take_turn(node_id)

    def next(self) -> T | None:
        """Return the next request, and count its bytes; None if no request may begin now."""
        while self._turns:
            node_id = self._turns[0]
            waiting = self._waiting[node_id]
            length, request = waiting[0]
            used = self._bytes_of.get(node_id, 0)
            if used and used + length > self._neighbour_bytes_max:
                self._leave_turn()  # the neighbour returns when one of its requests ends
                continue
            if self._bytes and self._bytes + length > self._bytes_max:
                return None
            self._leave_turn()
            waiting.popleft()
            if waiting:
                self._take_turn(node_id)
            else:
                del self._waiting[node_id]
            self._bytes += length
            self._bytes_of[node_id] = used + length
            return request
        return None

    def ended(self, node_id: str, length: int) -> None:
        """Note that a request has ended, which `next` had returned."""
        self._bytes -= length
        self._bytes_of[node_id] -= length
        if not self._bytes_of[node_id]:
            del self._bytes_of[node_id]
        if node_id in self._waiting:
            self._take_turn(node_id)

    def _take_turn(self, node_id: str) -> None:
        if node_id not in self._in_turn:
            self._in_turn.add(node_id)
            self._turns.append(node_id)

    def _leave_turn(self) -> None:
        self._in_turn.remove(self._turns.popleft())
