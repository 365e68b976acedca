"""Blocks that come from neighbours, and that neighbours ask for.

Invariants:
1. A block that is on its way here from a neighbour is refused to others, and a block that is read
   for a neighbour is read from the store: so no two nodes wait for each other.
2. If a neighbour is gone before it has sent a decoded block, the block is read from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from dataplane.errors import NeighbourGone
from dataplane.model import BlockForm, Region
from dataplane.node.dataset import Dataset
from dataplane.rpc.fetches import Neighbour, Outcome, SlabMaker
from dataplane.rpc.lending import Asked
from dataplane.scheduler import events
from dataplane.scheduler.dataset import BlockName


class Neighbours(Protocol):
    """The other nodes of the jobs on this node. `Neighbourhood` is these."""

    def owner_of(self, dataset: Dataset, block: int) -> Neighbour | None:
        """Whom to ask for a block; None: the store."""

    def makers(self, job_id: str, /) -> Sequence[SlabMaker]:
        """The nodes that make slabs of a job, if they are asked."""

    def give(self, number: int, region: Region) -> None:
        """Send this part of the block arena to the one who asked."""

    def only_decoded(self, number: int, length: int) -> None:
        """Say that the block is here only decoded, in so many bytes."""

    def refuse(self, number: int) -> None:
        """Say no."""


class _Nobody:
    def owner_of(self, dataset: Dataset, block: int) -> Neighbour | None: ...

    def makers(self, _job_id: str) -> Sequence[SlabMaker]:
        return ()

    def give(self, number: int, region: Region) -> None: ...

    def only_decoded(self, number: int, length: int) -> None: ...

    def refuse(self, number: int) -> None: ...


NOBODY: Neighbours = _Nobody()
"""Of a node without neighbours: nobody is asked, and nobody asks."""


class LentBlocks:
    """Those of one node. `tell` passes an event to the scheduler."""

    def __init__(self, neighbours: Neighbours, tell: Callable[[events.Event], None]) -> None:
        self._neighbours, self._tell = neighbours, tell
        self._expected: set[BlockName] = set()
        """Blocks that are on their way here from neighbours."""
        self._left_alone: set[BlockName] = set()
        """Blocks that are read from the store next."""

    def whom_to_ask(self, dataset: Dataset, effect: events.Fetch) -> Neighbour | None:
        """The neighbour that a block comes from, if it has it; None: the store."""
        name = BlockName(effect.dataset_id, effect.block)
        if effect.is_lent or name in self._left_alone:
            return None
        neighbour = self._neighbours.owner_of(dataset, effect.block)
        if neighbour is None:
            return None
        self._expected.add(name)
        return replace(neighbour, form=BlockForm.DECODED) if effect.is_decoded else neighbour

    def fetched(self, name: BlockName, found: Outcome) -> bool:
        """A read of this block has ended. Whether a neighbour owns it."""
        is_guest = name in self._expected
        self._expected.discard(name)
        self._left_alone.discard(name)
        if isinstance(found, NeighbourGone):
            self._left_alone.add(name)
        return is_guest

    def asked(self, ask: Asked, dataset: Dataset | None) -> None:
        """A neighbour asks for part of a block of this dataset."""
        count = 0 if dataset is None else dataset.manifest.block_count
        if dataset is None or ask.block >= count:
            self._neighbours.refuse(ask.number)
            return
        is_decoded = ask.form is BlockForm.DECODED
        if not is_decoded and BlockName(dataset.dataset_id, ask.block) in self._expected:
            self._neighbours.refuse(ask.number)
            return
        part = Region(ask.offset, ask.length)
        self._tell(events.NeighbourAsked(ask.number, dataset.blocks, ask.block, part, is_decoded))

    def given(self, number: int) -> None:
        """What was given for this ask is no longer read."""
        self._tell(events.SendingEnded(number))

    def effects(self) -> Mapping[type, Callable[[Any], None]]:
        """What carries out each kind of effect."""
        return {
            events.LendBlock: lambda effect: self._neighbours.give(effect.number, effect.region),
            events.OnlyDecoded: lambda effect: self._neighbours.only_decoded(
                effect.number, effect.length
            ),
            events.RefuseAsk: lambda effect: self._neighbours.refuse(effect.number),
        }
