"""A block to read, and the rule for blocks that may be read in one request."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dataplane.arena.memfd import Arena
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours.wire import RUN_BLOCKS_MAX
from dataplane.node.fetchers import Report
from dataplane.rpc import fetches, tasks

RUN_PARTS = 32
"""A neighbour is asked for so much of its arena at once, or one block: what it may send to one of
its neighbours."""


class BlockRead(Struct, frozen=True):
    """A block to read into a region of the block arena; `report` is called when the region is no
    longer written. The preamble is put before it, in the arena `copied_to`; without one, it is held
    for the block with this key, until `let_go`. The disk is tried first, if `is_not_kept` is given
    to report a miss, then `neighbour`, then the store.

    Shapes:  into: the length of the preamble + the length of all pieces, or that of the decoded
    block, if that is what the neighbour is asked for.
    """

    key: int
    raw: tasks.RawBlockRef
    into: Region
    report: Report
    copied_to: Arena | None
    neighbour: fetches.Neighbour | None = None
    dataset: bytes = b""
    block: int = 0
    is_not_kept: Report | None = None

    def may_follow(self, others: Sequence[BlockRead], arena_bytes: int) -> bool:
        """Whether the block may be read from the same source in one request with these, which
        precede it in the shard. Nodes have arenas of about this size.
        """
        last, own = others[-1], self.neighbour
        if self.is_not_kept is not None or last.is_not_kept is not None:
            return False
        if own is None or last.neighbour is None:
            return own is last.neighbour
        length = sum(each.into.length for each in (*others, self))
        if len(others) == RUN_BLOCKS_MAX or RUN_PARTS * length > arena_bytes:
            return False
        is_run = self.is_whole and last.is_whole and self.block == last.block + 1
        return is_run and own.node_id == last.neighbour.node_id

    @property
    def is_whole(self) -> bool:
        """Whether its own bytes, without a preamble, form one piece."""
        is_decoded = self.neighbour is not None and self.neighbour.form is BlockForm.DECODED
        return not is_decoded and len(self.raw.pieces) <= 1
