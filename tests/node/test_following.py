"""What a node says to proposals of other weights, and to those that wait, by the invariants of
node/member.py. tests/coordinator/test_mixing.py plays it against the coordinator.
"""

from __future__ import annotations

from typing import Any

from dataplane.model.changes import EpochSteps
from dataplane.model.errors import DataStallError
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import End, Region
from dataplane.node.member import Following
from dataplane.rpc.membership import MemberVerdict, MixProposal
from dataplane.rpc.messages import Batch, Slab

START, STEPS = LedgerPosition(0, 0), EpochSteps(80, 0, 8, End.RAGGED)
NOTHING, PROPOSED = MemberVerdict("m"), MemberVerdict("m", proposal=MixProposal("r"))
SLAB = Slab(1, 5, Region(0, 0), (Batch(0, 8, 8),), b"")


def test_2_who_waits_too_long_for_the_outcome_gets_an_error_and_nothing_else() -> None:
    released: list[int] = []
    found: list[Any] = []
    following = Following((), 8, released.append, follows=True)
    send = following.sending(0, STEPS, 0, lambda number, body: found.append((number, body)))
    assert following.heard(PROPOSED, START, 0.0)
    assert not following.is_overdue(1e6, 60)
    error = DataStallError("the coordinator is away")
    for now in (100, 1000):
        send(7, SLAB)
        waits = [following.is_overdue(now + passed, 60) for passed in (0, 59, 60)]
        assert waits == [False, False, True]
        following.refuse(error)
    assert (found, released) == ([(7, error), (7, error)], [5, 5])
    send(8, SLAB)
    assert not following.heard(NOTHING, START, 0.0)
    assert (found[2:], released) == ([(8, SLAB)], [5, 5])


def test_what_a_member_says_of_itself_fits_into_a_promise() -> None:
    following = Following((), 8, lambda _: None, follows=True)
    for cursor, per_s in (((1 << 64) - 1, 0.0), (1 << 62, 1e30)):
        following.heard(PROPOSED, LedgerPosition(0, cursor), per_s)
        assert following.promise is not None
        assert cursor <= following.promise.position.cursor < 1 << 64
        following.heard(NOTHING, None, 0.0)
