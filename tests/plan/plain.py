"""docs/order.md in plain Python, word for word: slow, and independent of the product."""

from __future__ import annotations

import hashlib

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
BLOCKS, WINDOW, AUGMENT = 1, 2, 3


def mix(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def key(seed, *parts):
    word = mix((seed + GAMMA) & MASK)
    for part in parts:
        word = mix(((word ^ part) + GAMMA) & MASK)
    return word


def sample_key(seed, epoch, shard, row, op):
    name = hashlib.blake2b(op.encode("utf-8"), digest_size=8).digest()
    return key(seed, AUGMENT, epoch, int.from_bytes(name, "little"), shard, row)


def permutation(keyed, length):
    bits = (length - 1).bit_length()
    hashed = [mix((keyed + index * GAMMA) & MASK) >> bits for index in range(length)]
    return sorted(range(length), key=hashed.__getitem__)


def cuts(lane, lanes, window, ramp, epoch, count):
    """Where the windows of a lane end; the last may lie beyond the lane."""
    window = min(window, -(-count // lanes))
    share = lane * GAMMA % 2**64 >> 32
    first = window if lanes * window >= count else window - (share * window >> 32)
    halves = [-(-first // 2**part) for part in range(ramp, 0, -1)] if epoch == 0 else []
    return [*halves, *range(first, count + window, window)]


def order(block_rows, seed, lanes, window, epoch, ramp=0):
    """(block, row) at every position of the epoch."""
    blocks = permutation(key(seed, BLOCKS, epoch), len(block_rows))
    samples = [(block, row) for block in blocks for row in range(block_rows[block])]
    shared, longer = divmod(len(samples), lanes)
    served = []
    for lane in range(lanes):
        start = lane * shared + min(lane, longer)
        mine = samples[start : start + shared + (lane < longer)]
        shuffled, begin = [], 0
        for number, end in enumerate(cuts(lane, lanes, window, ramp, epoch, len(samples))):
            inside, begin = mine[begin:end], end
            if inside:
                keyed = key(seed, WINDOW, epoch, lane, number)
                shuffled += [inside[place] for place in permutation(keyed, len(inside))]
        served.append(shuffled)
    return [served[position % lanes][position // lanes] for position in range(len(samples))]


def defaults(samples, blocks, decoded):
    """Lanes, window and ramp."""
    size, block, rows = -(-decoded // samples), -(-decoded // blocks), -(-samples // blocks)
    most = max(2**28, min(samples * size // 7, 36 * 2**30))
    shortest = -(-rows // 16)

    def window(lanes):
        fitting = (most // lanes - block) // (size + 4)
        return min(fitting, 2**22, 2**24 // lanes, -(-samples // lanes))

    def fits(lanes):
        return window(lanes) >= shortest and 7 * lanes <= blocks

    wanted = samples * size // 2**30
    if most < 256 * block and fits(128):
        wanted = max(wanted, 128)
    if samples <= 2**22 and samples * (size + 4) <= 2**28:
        lanes, length = 1, samples
    else:
        choices = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1536, 3072)
        lanes = max((each for each in choices if each <= wanted and fits(each)), default=1)
        length = window(lanes)
        if length < shortest:
            length = max(1, min(rows, most // (size + 4), 2**22))
    ramp = 0
    least = max(-(-4 * rows // lanes), -(-rows // 8))
    while lanes * (first := -(-length // 2**ramp)) * size > 2**25 and first >= 2 * least:
        ramp += 1
    return lanes, length, ramp
