"""Blocks that come from neighbours, and that neighbours request.

Invariants:
1. A block that is being fetched from a neighbour is refused to others, and a block that is read for
   a neighbour is read from the store: so no two nodes wait for each other.
2. If a neighbour is gone before it has sent a decoded block, the block is read from the store.
3. The blocks of a requested run are decided one by one. The run has one answer, when each of them
   is decided, and all blocks sent for it are freed at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.errors import NeighbourGone
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours import wire
from dataplane.node.dataset import Dataset
from dataplane.rpc.fetches import Neighbour, Outcome, SlabMaker
from dataplane.rpc.lending import Asked, Request
from dataplane.scheduler import events
from dataplane.scheduler.dataset import BlockName


class Neighbours(Protocol):
    """The other nodes of the jobs on this node. `KnownNeighbours` implements it."""

    def owner_of(self, dataset: Dataset, block: int, jobs: Iterable[str], /) -> Neighbour | None:
        """Return the node from which to request a block of a dataset that these jobs read here;
        None if this node owns it, or knows no neighbours.
        """

    def makers(self, job_id: str, /) -> Sequence[SlabMaker]:
        """The nodes that make slabs of a job, if they are asked."""

    def give(self, number: int, regions: Sequence[Region], ends: Sequence[int] = ()) -> None:
        """Send these parts of the block arena to the one who asked: one, or those of the blocks of
        a run that have ended as wire.GIVEN_WHOLE.
        """

    def only_decoded(self, number: int, length: int) -> None:
        """Say that the block is here only decoded, in so many bytes."""

    def refuse(self, number: int) -> None:
        """Say no."""


class _Nobody:
    def owner_of(self, dataset: Dataset, block: int, _jobs: object) -> Neighbour | None: ...

    def makers(self, _job_id: str) -> Sequence[SlabMaker]:
        return ()

    def give(self, number: int, regions: Sequence[Region], ends: Sequence[int] = ()) -> None: ...

    def only_decoded(self, number: int, length: int) -> None: ...

    def refuse(self, number: int) -> None: ...


NOBODY: Neighbours = _Nobody()
"""The neighbours of a node that has none."""


class _Run(Struct, eq=False):
    """A run that is asked for with this number: how each of its blocks has ended, how many have
    not, and what is given of it.
    """

    number: int
    ends: list[int]
    left: int
    regions: dict[int, Region]


class LentBlocks:
    """The lent blocks of one node. `tell` passes an event to the scheduler."""

    def __init__(self, neighbours: Neighbours, tell: Callable[[events.Event], None]) -> None:
        self._neighbours, self._tell = neighbours, tell
        self._expected: set[BlockName] = set()
        """Blocks that are on their way here from neighbours."""
        self._left_alone: set[BlockName] = set()
        """Blocks that are read from the store next."""
        self._runs: dict[int, _Run] = {}
        """The runs that wait for their answer, by the number of each block that has none."""
        self._given: dict[int, tuple[int, ...]] = {}
        """The numbers of the blocks that were given for a run, by its number."""

    def source_of(
        self, dataset: Dataset, effect: events.Fetch, jobs: Iterable[str]
    ) -> Neighbour | None:
        """Return the neighbour that a block of these jobs comes from, if it has it; None for the
        store.
        """
        name = BlockName(effect.dataset_id, effect.block)
        if effect.is_lent or name in self._left_alone:
            return None
        neighbour = self._neighbours.owner_of(dataset, effect.block, jobs)
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
        """A neighbour asks for part of a block of this dataset, or for several blocks."""
        request = ask.request
        last = request.block + request.count - 1
        if dataset is None or last >= dataset.manifest.block_count:
            self._neighbours.refuse(ask.number)
        elif request.count > 1:
            self._asked_run(ask.number, request, dataset)
        elif request.form is BlockForm.DECODED or not self._is_expected(dataset, request.block):
            part = Region(request.offset, request.length)
            self._ask_scheduler(request, dataset, ask.number, request.block, part)
        else:
            self._neighbours.refuse(ask.number)

    def given(self, number: int) -> None:
        """Note that the bytes sent for this request are no longer read."""
        for each in self._given.pop(number, (number,)):
            self._tell(events.SendingEnded(each))

    def _is_expected(self, dataset: Dataset, block: int) -> bool:
        return BlockName(dataset.dataset_id, block) in self._expected

    def _ask_scheduler(
        self, request: Request, dataset: Dataset, number: int, block: int, part: Region
    ) -> None:
        how = request.form is BlockForm.DECODED, request.count > 1
        self._tell(events.NeighbourAsked(number, dataset.blocks, block, part, *how))

    def _asked_run(self, first: int, request: Request, dataset: Dataset) -> None:
        blocks = range(request.block, request.block + request.count)
        shards = dataset.manifest.block_shard
        lengths = [dataset.blocks.read_bytes(block) for block in blocks]
        # Only the shard of the first block was checked for what may be lent.
        is_one_shard = shards.item(blocks[0]) == shards.item(blocks[-1])
        if not is_one_shard or request.form is not BlockForm.RAW or sum(lengths) != request.length:
            self._neighbours.refuse(first)
            return
        run = _Run(first, [wire.NOT_GIVEN] * request.count, request.count, {})
        numbers = range(first, first + request.count)
        self._runs.update(dict.fromkeys(numbers, run))
        for number, block, length in zip(numbers, blocks, lengths, strict=True):
            if self._is_expected(dataset, block):
                self._end(run, number, wire.NOT_GIVEN)
            else:
                self._ask_scheduler(request, dataset, number, block, Region(0, length))

    def lend(self, effect: events.LendBlock) -> None:
        """Carry out a loan."""
        run = self._runs.get(effect.number)
        if run is None:
            self._neighbours.give(effect.number, (effect.region,))
            return
        run.regions[effect.number] = effect.region
        self._end(run, effect.number, wire.GIVEN_WHOLE)

    def say_decoded(self, effect: events.OnlyDecoded) -> None:
        """Answer with the size of the decoded block, which is all that is here."""
        run = self._runs.get(effect.number)
        if run is None:
            self._neighbours.only_decoded(effect.number, effect.length)
        else:
            self._end(run, effect.number, effect.length)

    def say_no(self, effect: events.RefuseAsk) -> None:
        """Answer a request with a refusal."""
        run = self._runs.get(effect.number)
        if run is None:
            self._neighbours.refuse(effect.number)
        else:
            self._end(run, effect.number, wire.NOT_GIVEN)

    def _end(self, run: _Run, number: int, end: int) -> None:
        """A block of a run has its answer."""
        del self._runs[number]
        run.ends[number - run.number] = end
        run.left -= 1
        if run.left:
            return
        if all(each == wire.NOT_GIVEN for each in run.ends):
            self._neighbours.refuse(run.number)
            return
        given = sorted(run.regions)
        self._given[run.number] = tuple(given)
        self._neighbours.give(run.number, [run.regions[each] for each in given], run.ends)
