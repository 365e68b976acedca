"""Blocks that are read in one request, in the scheduler's tests."""

from __future__ import annotations

import itertools
import random

import numpy as np

from dataplane.scheduler import events
from dataplane.scheduler.dataset import BlockPlaces, Ints
from dataplane.scheduler.scheduler import Scheduler

_GAPS = (0, 0, 10, 300, 4096)
_KNOWN = 0.8
_SMALL_FETCHES, _FETCH_GROWTH_MAX = 4, 16


def drawn_places(shard: list[int], lengths: Ints) -> BlockPlaces | None:
    """The same for the same blocks, and for some of them none."""
    chance = random.Random(int(lengths.sum()))
    gaps = np.array([chance.choice(_GAPS) for _ in lengths])
    offsets = np.cumsum(lengths + gaps) - lengths
    places = BlockPlaces(np.array(shard, np.int32), offsets, lengths)
    return places if chance.random() < _KNOWN else None


class Joined:
    """The requests of one scheduler."""

    def __init__(self, scheduler: Scheduler, fetch_count: int) -> None:
        self._scheduler = scheduler
        self._requests_max = _SMALL_FETCHES * _FETCH_GROWTH_MAX * fetch_count
        self._requests: set[int] = set()
        self._request: list[int] = []
        self._dataset_id = 0

    def check(self, effect: events.Fetch) -> None:
        """blocks 6, joined 1 and 2: what is read in one request lies together, and is needed.

        Raises:  AssertionError: names the invariant.
        """
        if not effect.is_joined:
            self._dataset_id, self._request = effect.dataset_id, [effect.block]
            self._requests.add(effect.key)
            assert len(self._requests) <= self._requests_max, "more fetches than allowed at once"
            return
        first = self._request[0]
        self._request.append(effect.block)
        assert effect.dataset_id == self._dataset_id, "joined 1"
        assert self._request == [*range(first, effect.block + 1)], "joined 1"
        blocks = self._scheduler._blocks.block(effect.key).dataset
        assert blocks.places is not None
        following = itertools.islice(blocks.places.following(first), effect.block - first)
        assert effect.block in list(following), "joined 2"
        waiting = self._scheduler._tasks._waiting.of_block(blocks, effect.block)
        asks = self._scheduler._asks
        waiting = waiting or (effect.dataset_id, effect.block) in asks._waiting
        assert waiting, "blocks 6: a block that nobody needs is read"

    def ended(self, key: int) -> None:
        """The fetch of a block has ended."""
        self._requests.discard(key)
