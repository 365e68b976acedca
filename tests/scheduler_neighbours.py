"""Nodes that ask for blocks, and have some themselves, in the scheduler's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.model.records import Region
from dataplane.scheduler import events

if TYPE_CHECKING:
    from scheduler_run import Run
    from scheduler_world import Outside, World

Answer = events.LendBlock | events.OnlyDecoded | events.RefuseAsk


class Neighbours:
    """Those of one run. They ask with this chance after each act, from the first act on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.chance = 0.0
        self._asks: dict[int, events.NeighbourAsked] = {}
        self._count = 0
        self.given = self.refused = self.only_decoded = 0

    def ask_one(self) -> None:
        """A neighbour asks for a part of any block, or for one that is not there."""
        chance = self._run.chance
        world = chance.choice([*self._run.worlds.values()])
        if chance.random() >= self.chance:
            return
        block = chance.randrange(len(world.sizes))
        is_decoded = chance.random() < 0.2
        whole = world.true_bytes(block) if is_decoded else int(world.lengths[block])
        start = chance.choice([0, 0, whole // 2])
        part = Region(start, chance.choice([whole - start, max(whole - start, 1), whole + 1]))
        self._count += 1
        how = is_decoded, self._count % 2 == 0 and not is_decoded
        ask = events.NeighbourAsked(self._count, world.blocks, block, part, *how)
        self._asks[ask.number] = ask
        self._run.tell(ask)

    def answered(self, answer: Answer) -> Callable[[], events.Event] | None:
        """asks 1 and 2: an answer to an ask that waits for one; what is given is the block, and
        stays as it is. Returns the end of the sending, if it was given.
        """
        ask = self._asks.pop(answer.number)  # or it is answered twice
        world = self._run.worlds[ask.dataset.dataset_id]
        if isinstance(answer, events.RefuseAsk):
            self.refused += 1
            return None
        if isinstance(answer, events.OnlyDecoded):
            assert not ask.is_decoded, "asks 1: what was asked for"
            assert answer.length == world.true_bytes(ask.block), "asks 1: another size"
            self.only_decoded += 1
            return None
        assert answer.region.length == ask.part.length, "asks 1: another part"
        self.given += 1
        before = bytes(self._run.outside.part(answer.region))
        self._check_mark(world, ask, before)

        def sent() -> events.Event:
            assert self._run.outside.part(answer.region) == before, "asks 2: it was written"
            return events.SendingEnded(answer.number)

        return sent

    def _check_mark(self, world: World, ask: events.NeighbourAsked, found: bytes) -> None:
        whole = world.true_bytes(ask.block) if ask.is_decoded else int(world.lengths[ask.block])
        if len(found) >= 8 and ask.part.offset + ask.part.length == whole:
            mark = (ask.dataset.dataset_id << 32) + ask.block + 1
            assert found[-8:] == mark.to_bytes(8, "little"), "asks 1: another block"

    def check_end(self) -> None:
        """asks 1: every ask was answered."""
        assert not self._asks, "asks 1"
        asks = self._run.scheduler._asks
        assert not asks._waiting
        assert not asks._idle
        assert not asks._of_runs
        assert not asks._lent
        assert not asks._count
        assert not self._run.scheduler._blocks._lent_raw
        assert not self._run.scheduler._blocks._elsewhere


def bytes_of(world: World, effect: events.Fetch) -> int:
    """What is read for a fetch."""
    if effect.is_decoded:
        return effect.into.length
    return world.blocks.read_bytes(effect.block)


def elsewhere(outside: Outside, effect: events.Fetch) -> events.BlockFetched | None:
    """The end of a fetch from a neighbour that has the block only decoded, as this share of all
    does, or that is gone when it is asked for that; None if the fetch goes on.
    """
    world, chance = outside.worlds[effect.dataset_id], outside.chance
    size, share = world.true_bytes(effect.block), outside.elsewhere
    if effect.is_decoded:
        assert effect.into.length == size
        if chance.random() < 0.3:
            outside.done += [size, 0, 0]
            return events.BlockFetched(effect.key, is_away=True)
        return None
    assert effect.into.length == world.blocks.marks.raw[effect.block]
    if share and size and not effect.is_lent and chance.random() < share:
        return events.BlockFetched(effect.key, decoded_bytes=size)
    return None


def given(outside: Outside, effect: events.Fetch) -> events.BlockFetched:
    """The end of a fetch that has read a block, which a neighbour may own and have given."""
    is_asked = outside.elsewhere > 0 and not effect.is_lent
    is_guest = is_asked and outside.chance.random() < outside.elsewhere
    length = bytes_of(outside.worlds[effect.dataset_id], effect) if is_guest else 0
    outside.done += [0, 0, length]
    return events.BlockFetched(effect.key, is_guest=is_guest, neighbour_bytes=length)
