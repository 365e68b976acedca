"""The lender of a simulated node: who asks when, and how much is lent at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dataplane.neighbours.limits import InFlight, Limits
from dataplane.scheduler import events

if TYPE_CHECKING:
    from scheduler_cluster import SimulatedNode

Answer = events.LendBlock | events.OnlyDecoded | events.RefuseAsk


@dataclass(eq=False, slots=True)
class Turn:
    """A request for a block, at its owner."""

    asker: SimulatedNode
    effect: events.Fetch
    epoch: int
    length: int
    has_begun: bool = False
    is_over: bool = False


class SimulatedLender:
    """A request waits for its turn first, and then for the node."""

    def __init__(self, node: SimulatedNode, arena_bytes: int) -> None:
        self._node = node
        self._turns: InFlight[Turn] = InFlight(arena_bytes)

    def asked(self, turn: Turn) -> None:
        self._turns.ask(str(turn.asker.number), turn.length, turn)
        self._next()
        if not turn.has_begun:
            self._node.cluster.later(Limits().turn_s, partial(self._late, turn))

    def ended(self, turn: Turn) -> None:
        """The node refused it, or the asker has the block."""
        self._turns.ended(str(turn.asker.number), turn.length)
        self._node.cluster.later(0.0, self._next)

    def _next(self) -> None:
        while (turn := self._turns.next()) is not None:
            if turn.is_over:
                self._turns.ended(str(turn.asker.number), turn.length)
                continue
            turn.has_begun = True
            self._node.ask(turn)

    def _late(self, turn: Turn) -> None:
        if not turn.has_begun:
            turn.is_over = True
            self._node.refuse(turn)
