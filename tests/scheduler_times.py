"""Compares the times that a scheduler reports with times measured from outside.

The stages of a slab, the time that reads and decodings took, and how long a request has waited.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from dataplane.rpc import messages
from dataplane.scheduler import events
from dataplane.scheduler.dataset import Account
from dataplane.scheduler.records import SlabPhase, SlabTask

_US_A_S = 1e6


@dataclass(slots=True)
class _Seen:
    """When a task was planned, and when it entered each stage."""

    planned: float
    is_gathered: bool = False
    fetched: float = 0.0
    gathered: float = 0.0
    wanted: float = 0.0
    slotted: float = 0.0
    started: float = 0.0
    made: float = 0.0

    def stages(self, now: float) -> list[float]:
        """In seconds: the end of each is the latest of the ends up to it."""
        room = min(self.slotted, self.wanted or self.slotted)
        ends = (self.fetched, self.gathered, room, self.started, self.made, now)
        reached = itertools.accumulate((self.planned, *ends), max)
        return [b - a for a, b in itertools.pairwise([min(at, now) for at in reached])]


@dataclass(slots=True)
class Times:
    """The times of all events and effects of one scheduler."""

    now: float = 0.0
    _blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    _fetched: dict[tuple[int, int], float] = field(default_factory=dict)
    _reads: Counter[int] = field(default_factory=Counter)
    _read_at: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _tasks: dict[int, _Seen] = field(default_factory=dict)
    _keeps: dict[int, int] = field(default_factory=dict)
    _kept_at: dict[int, float] = field(default_factory=dict)
    _asked: dict[tuple[int, int], float] = field(default_factory=dict)
    done: np.ndarray = field(default_factory=lambda: np.zeros(2))
    """Seconds of reading, while a dataset is read, and of decoding."""
    told: np.ndarray = field(default_factory=lambda: np.zeros(2))
    """The same, as reported in the times of slabs."""

    def before(self, event: events.Event, now: float) -> None:
        """Record an event before the scheduler sees it."""
        for dataset_id, count in self._reads.items():
            if count:
                self.done[0] += now - self._read_at[dataset_id]
                self._read_at[dataset_id] = now
        self.now = now
        match event:
            case events.BlockFetched():
                name = self._blocks[event.key]
                self._reads[name[0]] -= 1
                self._fetched[name] = now
            case events.BlockDecoded() if event.started:
                self.done[1] += now - event.started
            case events.SlabAssembled():
                seen = self._tasks[event.number]
                seen.started, seen.made = event.started, now
                if event.number in self._keeps:
                    self._kept_at[self._keeps.pop(event.number)] = now
            case events.Requested():
                self._asked[event.stream_id, event.request_id] = now

    def effect(self, effect: events.Effect, lent: SlabTask | None) -> None:
        """What came of it; `lent` is the task of a slab that is sent.

        Raises:  AssertionError: a time is not what it was.
        """
        match effect:
            case events.Fetch():
                dataset_id = effect.dataset_id
                self._blocks[effect.key] = dataset_id, effect.block
                self._reads[dataset_id] += 1
                self._read_at[dataset_id] = self.now
            case events.AssembleSlab() | events.MakeElsewhere():
                seen = self._tasks[effect.number]
                seen.slotted = self.now
                if isinstance(effect, events.MakeElsewhere):
                    seen.wanted = seen.wanted or self.now
                if isinstance(effect, events.AssembleSlab) and effect.keep is not None:
                    self._keeps[effect.number] = effect.keep.offset
            case events.CopyKept():
                seen = self._tasks[effect.number]
                since, made = max(seen.planned, seen.gathered), self._kept_at[effect.kept.offset]
                seen.slotted = since + self.now - max(since, made)
            case events.Stalled():
                waited_s = self.waited_s(effect.stream_id, effect.request_id)
                assert effect.waited_s == waited_s, "how long it has waited"
            case events.Send(body=messages.Slab(times=times)):
                assert lent is not None
                stages = [
                    times.fetch, times.decode, times.room, times.queue, times.assemble, times.ready
                ]  # fmt: skip
                expected = np.array(self._tasks[lent.number].stages(self.now)) * _US_A_S
                assert np.abs(expected - stages).max() <= 1, "account: the stages of a slab"
                self.told += np.array([times.reading, times.decoding]) / _US_A_S

    def task(self, task: SlabTask, *, needs_blocks: bool) -> None:
        """One that is in its stream after an event; it needs none if another node makes it.

        Raises:  AssertionError: it has a stamp of another time.
        """
        seen = self._tasks.get(task.number)
        if seen is None:
            seen = self._tasks[task.number] = _Seen(self.now)
        maker = task.maker
        if maker is not None and not maker.name and not needs_blocks and not seen.wanted:
            seen.wanted = self.now
        is_gathered = needs_blocks and task.phase is SlabPhase.WAITING and not task.missing
        # Within one event, it may get its last block and lose another.
        had_all = task.phase is SlabPhase.WAITING and task.stamps.gathered_from == self.now
        if had_all or (is_gathered and not seen.is_gathered):
            at = [
                self._fetched.get((dataset.dataset_id, block), 0.0)
                for dataset, blocks in task.datasets.parts(task.plan.blocks)
                for block in blocks.tolist()
            ]
            seen.gathered, seen.fetched = self.now, max(at, default=0.0)
        stamps = task.stamps
        if is_gathered and stamps.gathered_from == self.now:
            seen.gathered = self.now  # a block that it needs went and came at once
        seen.is_gathered = is_gathered
        if is_gathered:
            assert stamps.planned == seen.planned, "when it was planned"
            assert stamps.gathered_from == seen.gathered, "when it had its blocks"
            assert stamps.fetched == seen.fetched, "when its blocks were read"

    def waited_s(self, stream_id: int, request_id: int) -> float:
        """How long that request waits."""
        return self.now - self._asked[stream_id, request_id]

    def check_end(self, accounts: list[Account]) -> None:
        """Check that work not yet reported is in the accounts; call it when no work is running.

        Raises:  AssertionError: more or less was reported than was done.
        """
        left = [account.take(self.now)[1:3] for account in accounts]
        told = self.told + np.array(left).sum(0) / _US_A_S
        assert np.abs(told - self.done).max() < 1e-3, "account: told once"
