"""Measure how well an order shuffles: the entropy of a batch's labels if the dataset is sorted by
100 labels, divided by the entropy for a permutation of all samples. `dataplane plan` shows it, and
advice depends on it.

The computation uses the order's windows, and the mean size of a sample's block. Instead of the
order's permutations, it uses permutations that need not be computed as a whole. So the computation
takes a millisecond for any dataset, and the result is deterministic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.defaults import BlockSizes, Shuffle
from dataplane.plan.permute import Domain, Words, extended, key
from dataplane.plan.windows import Int64, Windows

_LABELS = 100
# Batches are taken evenly from the epoch, `_BATCHES_MIN` or more: at most `_SAMPLES_OF_BATCH_MAX`
# samples of each batch, and about `_SAMPLES` of all batches together.
_SAMPLES_OF_BATCH_MAX = 1024
_SAMPLES = 4096
_BATCHES_MIN = 16
_ROUNDS = 3


def quality(sizes: BlockSizes, shuffle: Shuffle, draws: int) -> float:
    """Return the mean quality of batches of `draws` samples, from 0 to 1, over epoch 0 if there is
    a ramp, and over any later epoch if not.
    """
    samples, lanes, draws = sizes.samples, shuffle.lanes, min(draws, sizes.samples)
    window = min(shuffle.window, -(-samples // lanes))
    if draws < 2 or (lanes * window >= samples and not shuffle.ramp):
        return 1.0
    drawn = min(draws, _SAMPLES_OF_BATCH_MAX)
    count = max(_BATCHES_MIN, _SAMPLES // drawn)
    keys = extended(key(0, Domain.PROBE), np.arange(count))
    # Start batches at unequal distances: at equal ones, all might begin at the end of a block.
    starts = (np.arange(count) + keys / 2**64) / count * (samples - draws)
    batch = np.repeat(np.arange(count), drawn)
    keys = keys[batch]
    within = np.tile(np.arange(drawn), count)
    if draws > drawn:
        # Take samples at unequal distances: at equal ones, all might be from few lanes.
        within = _permuted(keys, within, np.full(len(batch), draws))
    places = _places(starts.astype(np.int64)[batch] + within, samples, lanes, window, shuffle.ramp)
    labels = _labels(places, keys, samples, sizes.usual_rows)
    counts = np.bincount(batch * _LABELS + labels, minlength=count * _LABELS)
    share = counts.reshape(count, _LABELS) / drawn
    entropy = -(share * np.log2(np.where(share, share, 1))).sum(axis=1).mean()
    return float(min(max(0.0, entropy) / _entropy_of_full_shuffle(drawn), 1.0))


def unshuffled_quality(sizes: BlockSizes, draws: int) -> float:
    """Return the quality of the dataset's own order."""
    samples = sizes.samples
    whole = BlockSizes(samples, 1, samples, sizes.dataset_bytes, sizes.sample_bytes, samples)
    return quality(whole, Shuffle(1, 1, 0), draws)


def _places(positions: Int64, samples: int, lanes: int, window: int, ramp: int) -> Int64:
    """Return where the sample at each position is in the sequence of all blocks.

    Shapes:  positions, result: int64[n].
    """
    offset, lane = np.divmod(positions, lanes)
    begin, end = Windows(0, 0, lanes, window, ramp, samples).bounds(lane, offset)
    keys = extended(extended(key(0, Domain.PROBE, 1), lane), begin)
    shared, longer = divmod(samples, lanes)
    first = lane * shared + np.minimum(lane, longer)
    return first + begin + _permuted(keys, offset - begin, end - begin)


def _labels(places: Int64, keys: Words, samples: int, rows: int) -> Int64:
    """Return the label of the sample at each place of a sequence of blocks that is shuffled by a
    key.

    Shapes:  places, result: int64[n].   keys: uint64[n].
    """
    blocks = max(round(samples / rows), 1)
    rows = -(-samples // blocks)
    at, row = np.divmod(places, rows)
    block = _permuted(keys, at, np.full(len(at), blocks))
    return ((block + row / rows) / blocks * _LABELS).astype(np.int64)


def _permuted(keys: Words, places: Int64, counts: Int64) -> Int64:
    """Apply a permutation of [0, count), given by a key, to each place.

    Shapes:  keys: uint64[n].   places, counts, result: int64[n]; counts below 2**53.
    """
    # Apply a bijection of all numbers with the bits of `count - 1`, until the result is in range.
    bits = np.frexp(counts - 1)[1].astype(np.uint64)
    mask, half = (np.uint64(1) << bits) - np.uint64(1), (bits + np.uint64(1)) >> np.uint64(1)
    found = places.astype(np.uint64)
    pending = np.arange(len(found))
    while len(pending):
        words, its_mask, its_half = found[pending], mask[pending], half[pending]
        for turn in range(_ROUNDS):
            word = extended(keys[pending], np.full(len(pending), turn))
            words = (words * (word | np.uint64(1)) + (word >> np.uint64(32))) & its_mask
            words ^= words >> its_half
        found[pending] = words
        pending = pending[words >= counts[pending].astype(np.uint64)]
    return found.astype(np.int64)


def _entropy_of_full_shuffle(batch: int) -> float:
    """Return the mean entropy of the labels of `batch` > 1 independent samples, in bits."""
    many = np.arange(batch + 1)
    factorial: NDArray[np.float64] = np.concatenate([[0.0], np.cumsum(np.log(many[1:]))])
    chance = factorial[-1] - factorial - factorial[::-1]
    chance += many * np.log(1 / _LABELS) + many[::-1] * np.log1p(-1 / _LABELS)
    share = many[1:] / batch
    return float(-(_LABELS * np.exp(chance[1:]) * share * np.log2(share)).sum())
