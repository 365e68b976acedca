"""The order of one epoch of a mixture of datasets. docs/order.md specifies it.

1. The order is a bijection of [0, N) onto the samples that the epoch's plan takes of each source.
2. In a round, all lanes have equally many samples of each source, and at any step different lanes
   are at different places of the round: so all ranks and all batches have even shares.
3. Every source is divided into the same number of lanes as the mixture, and a lane of the mixture
   reads one lane of a source at a time: a rank that stays on its lanes reads only their blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.errors import ConfigError
from dataplane.plan.counting import CountingTree
from dataplane.plan.mixture import EpochPlan, MixSegment
from dataplane.plan.order import SAMPLE_COUNT_MAX, Order, PassRead
from dataplane.plan.permute import Domain, Words, extended, key, permutations
from dataplane.plan.windows import Int64, distinct

NEVER = -SAMPLE_COUNT_MAX - 1
"""The position of a block that an epoch does not need."""

_ROUNDS_BYTES = 64 << 20
_TREES_MAX = 16
_PASSES_HELD = 4


class SourceOrder(Struct, frozen=True):
    """The shuffle of one source. If it is `balanced`, its samples are packs, numbered by
    plan/balance.py.

    Shapes:  block_rows: integer[K].
    """

    block_rows: NDArray[np.integer]
    window: int = 1
    ramp: int = 0
    balanced: bool = False


class _Rounds(Struct, frozen=True):
    """Rounds of one segment.

    Shapes:  source: int32[m, R], the source of each slot of a round before lanes are shifted.
    first: int64[m, sources], added to a slot's place to get its number among the source's slots of
    the lane.   place: int64[m, R], where step s of a round is.   shift: int64[m, lanes], by how
    much a lane is ahead.   steps: int64[m].
    """

    source: NDArray[np.int32]
    first: Int64
    place: Int64
    shift: Int64
    steps: Int64


class MixedOrder:
    """A SampleOrder over the blocks of all sources, numbered source after source. Not thread-safe,
    since it caches windows; only `block_span` may be called at any time.
    """

    def __init__(
        self, plan: EpochPlan, sources: Sequence[SourceOrder], seed: int, shuffle: bool, lanes: int
    ) -> None:
        """Raises:  ConfigError: as Order."""
        self.plan, self.sample_count = plan, plan.sample_count
        self._sources, self._seed, self._shuffle, self._lanes = sources, seed, shuffle, lanes
        self._counts = np.array([int(order.block_rows.sum(dtype=np.int64)) for order in sources])
        self._offsets = (np.cumsum(self._counts) - self._counts) % lanes
        self._blocks = np.cumsum([0, *(len(order.block_rows) for order in sources)])
        self._starts = np.array([segment.start for segment in plan.segments], np.int64)
        tail_base = [] if plan.tail is None else [plan.tail.base]
        # How many samples of each source were read before each segment, and before the tail.
        self._bases = np.array([*(segment.base for segment in plan.segments), *tail_base])
        self._round_keys = (key(seed, Domain.ROUND), key(seed, Domain.ROUND_LANES))
        self._trees: OrderedDict[tuple[int, ...], CountingTree] = OrderedDict()
        self._passes: OrderedDict[tuple[int, int], Order] = OrderedDict()
        # Create the orders of the first and the last pass over each source now: `block_span` needs
        # them, and may be called at any time.
        self._first_pass = plan.base // self._counts
        self._last_pass = (plan.base + np.maximum(plan.counts, 1) - 1) // self._counts
        self._edges = {
            (source, number): self._new_pass(source, number)
            for source in range(len(sources))
            for number in {int(self._first_pass[source]), int(self._last_pass[source])}
        }

    @property
    def block_count(self) -> int:
        """The number of blocks of all sources."""
        return int(self._blocks[-1])

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return the sample at each position: its block among those of all sources, and its row in
        that block.

        Shapes:  positions: int64[n], any order.   result: int64[n], int64[n].
        Raises:  ConfigError: a position is not in [0, N).
        """
        source, sample = self.samples_at(positions)
        number, place = np.divmod(sample, self._counts[source])
        blocks, rows = np.empty_like(source), np.empty_like(source)
        for (own_source, own_number), mine in _grouped(source, number):
            own_blocks, rows[mine] = self._pass(own_source, own_number).locate(place[mine])
            blocks[mine] = own_blocks + self._blocks[own_source]
        return blocks, rows

    def samples_at(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return the source at each position, and the number of its sample, counted over all
        passes.

        Shapes:  positions: int64[n], any order.   result: int64[n], int64[n].
        Raises:  ConfigError: a position is not in [0, N).
        """
        positions = np.asarray(positions, np.int64)
        self._check(positions)
        source, sample = np.empty_like(positions), np.empty_like(positions)
        at = self._segments_at(positions)
        for segment_number in distinct(at)[0].tolist():
            mine = np.flatnonzero(at == segment_number)
            if segment_number < len(self._starts):
                located = self._of_segment(self.plan.segments[segment_number], positions[mine])
            else:
                assert self.plan.tail is not None
                located = self.plan.tail.locate(positions[mine] - self.plan.tail.start)
            source[mine], sample[mine] = located
        return source, sample

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """Return the key from which the packs of the block at each position are drawn, if samples
        are packs. The key differs between passes over the source.

        Shapes:  positions, blocks: int64[n].   result: uint64[n].
        """
        source, sample = self.samples_at(positions)
        keys = np.empty(len(positions), np.uint64)
        for (own_source, number), mine in _grouped(source, sample // self._counts[source]):
            word = self._word_of_packs(own_source, number)
            keys[mine] = extended(word, blocks[mine] - self._blocks[own_source])
        return keys

    def keys_of_packs(self, block: int) -> list[int]:
        """Return the keys from which the packs of a block are drawn in this epoch: one for each
        pass.

        Raises:  ConfigError: no such block.
        """
        source = self._source_of(block)
        at = np.array([block - int(self._blocks[source])])
        words = [self._word_of_packs(source, number) for number in self._passes_of(source)]
        return [int(extended(word, at)[0]) for word in words]

    def positions_of(self, block: int, row: int) -> Int64:
        """Return all positions of the epoch at which this row of a block is, in ascending order.

        Shapes:  result: int64[n], which may be empty.
        Raises:  ConfigError: no such block, or no such row in it.
        """
        source = self._source_of(block)
        own, wanted = np.array([block - int(self._blocks[source])]), np.array([row])
        numbers = self._passes_of(source)
        places = [self._pass(source, number).position_of(own, wanted) for number in numbers]
        samples = np.concatenate(places) + np.array(numbers) * self._counts[source]
        within = samples - self.plan.base[source]
        samples = samples[(within >= 0) & (within < self.plan.counts[source])]
        return np.sort(self.positions_of_samples(source, samples))

    def positions_of_samples(self, source: int, samples: Int64) -> Int64:
        """Return the positions of these samples of a source: the inverse of `samples_at`.

        Shapes:  samples: int64[n], samples that the epoch reads.   result: int64[n].
        """
        positions = np.empty_like(samples)
        at = self._segments_of(source, samples)
        for segment_number in distinct(at)[0].tolist():
            mine = np.flatnonzero(at == segment_number)
            some = samples[mine]
            if segment_number < len(self._starts):
                positions[mine] = self._in_segment(self.plan.segments[segment_number], source, some)
            else:
                assert self.plan.tail is not None
                places = self.plan.tail.place_of(np.full_like(some, source), some)
                positions[mine] = self.plan.tail.start + places
        return positions

    def read_before(self, cursor: int) -> list[list[PassRead]]:
        """Implement `TracedOrder.read_before`. Whole rounds before the cursor have read consecutive
        samples of each source. Samples that the cursor's own round has read are listed one by one.
        """
        ends, begin = self.plan.base, cursor
        if cursor:
            at = int(self._segments_at(np.array([cursor - 1]))[0])
            ends, begin = self._bases[at], self.plan.sample_count
            if at < len(self._starts):
                segment = self.plan.segments[at]
                unit = segment.lanes * segment.batch
                rounds = (cursor - segment.start) // (unit * segment.round_steps)
                counts = self._tree(segment).counts(np.array([rounds * segment.round_steps]))[0]
                ends = ends + counts * unit
                begin = segment.start + rounds * unit * segment.round_steps
            elif self.plan.tail is not None:
                begin = self.plan.tail.start
        sources, samples = self.samples_at(np.arange(min(begin, cursor), cursor))
        return [
            self._read(source, int(ends[source]), np.sort(samples[sources == source]))
            for source in range(len(self._sources))
        ]

    def _read(self, source: int, end: int, others: Int64) -> list[PassRead]:
        """Return the parts of a source's passes that were read: samples up to `end`, and the
        samples `others`.
        """
        begin, count = int(self.plan.base[source]), int(self._counts[source])
        last = max(end, int(others[-1]) + 1 if len(others) else begin)
        passes = []
        for number in range(begin // count, -(-last // count)):
            start = number * count
            some = others[(others >= start) & (others < start + count)] - start
            first, stop = max(begin - start, 0), min(end - start, count)
            order = self._pass(source, number)
            if (first, stop) == (0, count):  # one pass has read the whole source
                return [PassRead(order, 0, count, some)]
            passes.append(PassRead(order, first, max(stop, first), some))
        return passes

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Return the first and the last position at which any sample of each block may be, rounded
        to whole rounds; NEVER if the epoch does not need the block.

        Shapes:  blocks: int64[n].   result: int64[n], int64[n], both inclusive.
        Raises:  ConfigError: no such block.
        """
        blocks = np.asarray(blocks, np.int64)
        first, last = np.empty_like(blocks), np.empty_like(blocks)
        sources = self._blocks.searchsorted(blocks, side="right") - 1
        for source in distinct(sources)[0].tolist():
            mine = np.flatnonzero(sources == source)
            if not 0 <= source < len(self._sources):
                raise ConfigError(f"there is no block {blocks[mine[0]]}", field="block")
            first[mine], last[mine] = self._spans(source, blocks[mine] - self._blocks[source])
        return first, last

    # -- segments --------------------------------------------------------------------------------

    def _segments_at(self, positions: Int64) -> Int64:
        """Return the index of each position's segment; the tail comes after the last."""
        at = self._starts.searchsorted(positions, side="right") - 1
        if self.plan.tail is not None:
            at[positions >= self.plan.tail.start] = len(self._starts)
        return at

    def _segments_of(self, source: int, samples: Int64) -> Int64:
        """Return the index of the segment of each sample of a source."""
        bases = np.ascontiguousarray(self._bases[:, source])
        at: Int64 = bases.searchsorted(samples, side="right") - 1
        return at

    def _of_segment(self, segment: MixSegment, positions: Int64) -> tuple[Int64, Int64]:
        slot, within = np.divmod(positions - segment.start, segment.batch)
        step, lane = np.divmod(slot, segment.lanes)
        number, place = np.divmod(step, segment.round_steps)
        numbers, at = distinct(number)
        source, index = np.empty_like(slot), np.empty_like(slot)
        width = segment.round_steps + segment.lanes + len(self._sources)
        together = max(1, _ROUNDS_BYTES // (16 * width))
        for begin in range(0, len(numbers), together):
            some = numbers[begin : begin + together]
            is_all = len(some) == len(numbers)
            mine = (
                slice(None) if is_all else np.flatnonzero((at >= begin) & (at < begin + together))
            )
            rounds, own = self._rounds(segment, some), at[mine] - begin
            moved = rounds.place[own, place[mine]] + rounds.shift[own, lane[mine]]
            steps = rounds.steps[own]
            moved -= steps * (moved >= steps)
            source[mine] = own_source = rounds.source[own, moved]
            index[mine] = moved + rounds.first[own, own_source]
        turned = (lane - self._offsets[source]) % segment.lanes
        sample = (index * segment.lanes + turned) * segment.batch + within
        return source, segment.base[source] + sample

    def _in_segment(self, segment: MixSegment, source: int, samples: Int64) -> Int64:
        """Invert `_of_segment`, for one source."""
        slot, within = np.divmod(samples - segment.base[source], segment.batch)
        index, turned = np.divmod(slot, segment.lanes)
        lane = (turned + self._offsets[source]) % segment.lanes
        number = self._round_of(segment, source, index)
        step = np.empty_like(index)
        for round_number in distinct(number)[0].tolist():
            mine = np.flatnonzero(number == round_number)
            rounds = self._rounds(segment, np.array([round_number]))
            steps = int(rounds.steps[0])
            back = np.empty(steps, np.int64)
            back[rounds.place[0, :steps]] = np.arange(steps)
            moved = index[mine] - rounds.first[0, source]
            step[mine] = back[(moved - rounds.shift[0, lane[mine]]) % steps]
        slot = (step + number * segment.round_steps) * segment.lanes + lane
        positions: Int64 = segment.start + slot * segment.batch + within
        return positions

    def _round_of(self, segment: MixSegment, source: int, index: Int64) -> Int64:
        """Return the round of each of a source's slots in a lane."""
        slots = self._tree(segment).slots_for(np.full_like(index, source), index + 1)
        numbers: Int64 = (slots - 1) // segment.round_steps
        return numbers

    def _rounds(self, segment: MixSegment, numbers: Int64) -> _Rounds:
        """Compute these rounds of a segment."""
        begin = numbers * segment.round_steps
        steps = np.minimum(segment.steps - begin, segment.round_steps)
        tree = self._tree(segment)
        before = tree.counts(np.concatenate([begin, begin + steps]))
        before, count = before[: len(begin)], before[len(begin) :] - before[: len(begin)]
        ends = np.cumsum(count, axis=1)
        source = np.zeros((len(numbers), segment.round_steps), np.int32)
        every = np.tile(np.arange(len(self._sources), dtype=np.int32), len(numbers))
        place = np.zeros((len(numbers), segment.round_steps), np.int64)
        shift = np.zeros((len(numbers), segment.lanes), np.int64)
        names = numbers + segment.first_round
        used = np.arange(segment.round_steps) < steps[:, None]
        source[used] = np.repeat(every, count.reshape(-1))
        for length in distinct(steps)[0].tolist():
            alike = np.flatnonzero(steps == length)
            keys = extended(self._round_keys[0], names[alike])
            place[alike, :length] = permutations(keys, length)
            if segment.lanes > 1:
                keys = extended(self._round_keys[1], names[alike])
                ranks = permutations(keys, segment.lanes).astype(np.int64)
                shift[alike] = ranks * length // segment.lanes
        return _Rounds(source, before - (ends - count), place, shift, steps)

    def _tree(self, segment: MixSegment) -> CountingTree:
        tree = self._trees.get(segment.shares)
        if tree is None:
            tree = self._trees[segment.shares] = CountingTree(segment.shares)
            if len(self._trees) > _TREES_MAX:
                self._trees.popitem(last=False)
        return tree

    # -- sources ---------------------------------------------------------------------------------

    def _source_of(self, block: int) -> int:
        source = int(self._blocks.searchsorted(block, side="right")) - 1
        if not 0 <= source < len(self._sources):
            raise ConfigError(f"there is no block {block}", field="block")
        return source

    def _passes_of(self, source: int) -> range:
        """Return the passes over a source that the epoch reads, wholly or in part."""
        return range(int(self._first_pass[source]), int(self._last_pass[source]) + 1)

    def _word_of_packs(self, source: int, number: int) -> int:
        """Return the word from which the pack keys of all blocks of a source are derived in one
        pass.
        """
        return key(key(self._seed, Domain.SOURCE, source), Domain.PACK, number)

    def _new_pass(self, source: int, number: int) -> Order:
        of = self._sources[source]
        seed = key(self._seed, Domain.SOURCE, source)
        return Order(
            of.block_rows, seed, self._shuffle, self._lanes, of.window, number, of.ramp,
            balanced=of.balanced,
        )  # fmt: skip

    def _pass(self, source: int, number: int) -> Order:
        """Return the order of one pass over a source."""
        order = self._edges.get((source, number)) or self._passes.get((source, number))
        if order is None:
            order = self._passes[source, number] = self._new_pass(source, number)
            if len(self._passes) > _PASSES_HELD:
                self._passes.popitem(last=False)
        return order

    def _spans(self, source: int, blocks: Int64) -> tuple[Int64, Int64]:
        """Return the spans of blocks of one source."""
        count, base = int(self._counts[source]), int(self.plan.base[source])
        end = base + int(self.plan.counts[source])
        begin, stop = int(self._first_pass[source]), int(self._last_pass[source])
        lowest, highest = self._edges[source, begin].block_span(blocks)
        lowest, highest = lowest + begin * count, highest + begin * count
        is_late = highest < base  # the block was read before the epoch began
        highest = np.where(is_late, NEVER, highest)
        if stop > begin:
            after, latest = self._edges[source, stop].block_span(blocks)
            after, latest = after + stop * count, latest + stop * count
            between = stop > begin + 1
            lowest = np.where(is_late, (begin + 1) * count if between else after, lowest)
            highest = np.where(after < end, latest, stop * count - 1 if between else highest)
        lowest, highest = np.maximum(lowest, base), np.minimum(highest, end - 1)
        needed = np.flatnonzero(lowest <= highest)
        first, last = np.full_like(blocks, NEVER), np.full_like(blocks, NEVER)
        first[needed] = self._round_bounds(source, lowest[needed])[0]
        last[needed] = self._round_bounds(source, highest[needed])[1]
        return first, last

    def _round_bounds(self, source: int, samples: Int64) -> tuple[Int64, Int64]:
        """Return the first and the last position of the round with each of these samples."""
        first = np.full_like(samples, 0 if self.plan.tail is None else self.plan.tail.start)
        last = np.full_like(samples, self.sample_count - 1)
        at = self._segments_of(source, samples)
        for segment_number in distinct(at)[0].tolist():
            if segment_number == len(self._starts):
                continue
            mine, segment = np.flatnonzero(at == segment_number), self.plan.segments[segment_number]
            unit = segment.lanes * segment.batch
            index = (samples[mine] - segment.base[source]) // unit
            begin = self._round_of(segment, source, index) * segment.round_steps
            first[mine] = segment.start + begin * unit
            last[mine] = np.minimum(first[mine] + segment.round_steps * unit, segment.stop) - 1
        return first, last

    def _check(self, positions: Int64) -> None:
        if len(positions) and (positions.min() < 0 or positions.max() >= self.sample_count):
            wrong = int(positions.min() if positions.min() < 0 else positions.max())
            raise ConfigError(
                f"there is no position {wrong}: they run from 0 to {self.sample_count - 1}",
                field="position",
            )


def _grouped(source: Int64, number: Int64) -> list[tuple[tuple[int, int], NDArray[np.intp]]]:
    """Return, for each pair of a source and a pass, the indices at which it occurs."""
    order = np.lexsort((number, source))
    sources, numbers = source[order], number[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (sources[1:] != sources[:-1]) | (numbers[1:] != numbers[:-1])
    starts = np.flatnonzero(is_new)
    parts = np.split(order, starts)[1:]
    pairs = zip(sources[starts].tolist(), numbers[starts].tolist(), strict=True)
    return list(zip(pairs, parts, strict=True))
