"""How well an order shuffles: the entropy of a batch's labels if the dataset is sorted by 100
labels, divided by that of a permutation of all samples. `dataplane plan` shows it, and the advice
of a job depends on it.

Windows are those of the order, and blocks have the size of the block in which a sample usually is.
Permutations are replaced by others that need not be computed as a whole, so this takes a
millisecond for any dataset, and always gives the same result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.defaults import BlockSizes, Shuffle
from dataplane.plan.permute import Domain, Words, extended, key
from dataplane.plan.windows import Int64, Windows

_LABELS = 100
# Batches are examined evenly over the epoch: so many samples of each, and of all together.
_SAMPLES_OF_BATCH_MAX = 1024
_SAMPLES = 4096
_BATCHES_MIN = 16
_ROUNDS = 3


def quality(sizes: BlockSizes, shuffle: Shuffle, draws: int) -> float:
    """The quality of batches of `draws` samples, from 0 to 1, on average over an epoch: over epoch
    0 if there is a ramp, over a later one if it is 0.
    """
    samples, lanes, draws = sizes.samples, shuffle.lanes, min(draws, sizes.samples)
    window = min(shuffle.window, -(-samples // lanes))
    if draws < 2 or (lanes * window >= samples and not shuffle.ramp):
        return 1.0
    drawn = min(draws, _SAMPLES_OF_BATCH_MAX)
    count = max(_BATCHES_MIN, _SAMPLES // drawn)
    keys = extended(key(0, Domain.PROBE), np.arange(count))
    # Not at equal distances, at which all might begin at the end of a block.
    starts = (np.arange(count) + keys / 2**64) / count * (samples - draws)
    batch = np.repeat(np.arange(count), drawn)
    keys = keys[batch]
    within = np.tile(np.arange(drawn), count)
    if draws > drawn:
        # Samples at any distance: at equal ones they might be of few lanes.
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
    """Return where in the sequence of all blocks the sample at each position is.

    Shapes:  positions, result: int64[n].
    """
    offset, lane = np.divmod(positions, lanes)
    begin, end = Windows(0, 0, lanes, window, ramp, samples).bounds(lane, offset)
    keys = extended(extended(key(0, Domain.PROBE, 1), lane), begin)
    shared, longer = divmod(samples, lanes)
    first = lane * shared + np.minimum(lane, longer)
    return first + begin + _permuted(keys, offset - begin, end - begin)


def _labels(places: Int64, keys: Words, samples: int, rows: int) -> Int64:
    """The label of the sample at each place of the sequence of blocks, whose order a key gives.

    Shapes:  places, result: int64[n].   keys: uint64[n].
    """
    blocks = max(round(samples / rows), 1)
    rows = -(-samples // blocks)
    at, row = np.divmod(places, rows)
    block = _permuted(keys, at, np.full(len(at), blocks))
    return ((block + row / rows) / blocks * _LABELS).astype(np.int64)


def _permuted(keys: Words, places: Int64, counts: Int64) -> Int64:
    """Return where a permutation of [0, count), given by a key, puts each place.

    Shapes:  keys: uint64[n].   places, counts, result: int64[n]; counts below 2**53.
    """
    # A bijection of the numbers with as many bits, again and again until the result is in range.
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
    """The average entropy of the labels of `batch` > 1 independent samples, in bits."""
    many = np.arange(batch + 1)
    factorial: NDArray[np.float64] = np.concatenate([[0.0], np.cumsum(np.log(many[1:]))])
    chance = factorial[-1] - factorial - factorial[::-1]
    chance += many * np.log(1 / _LABELS) + many[::-1] * np.log1p(-1 / _LABELS)
    share = many[1:] / batch
    return float(-(_LABELS * np.exp(chance[1:]) * share * np.log2(share)).sum())
