"""docs/order.md in plain Python, word for word: slow, and independent of the product."""

from __future__ import annotations

import hashlib

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
BLOCKS, WINDOW, AUGMENT = 1, 2, 3
ROUND, ROUND_LANES, SOURCE = 5, 6, 7
SHARE, SPLIT, SAMPLE = 11, 0, 1


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


def share_key(use, name, row):
    word = int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest(), "little")
    return key(0, SHARE, use, word, row)


def is_in_shares(name, row, sample=0, split_from=0, split_to=0):
    """Whether a row is in a sample and in a range of the split, in units of 2**-32; 0: all."""
    in_sample = not sample or share_key(SAMPLE, name, row) >> 32 < sample
    return in_sample and (
        not split_to or split_from <= share_key(SPLIT, name, row) >> 32 < split_to
    )


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


def order(block_rows, seed, lanes, window, epoch, ramp=0, *, balanced=False):
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
                places = permutation(keyed, len(inside))
                if balanced:
                    turns = key(seed, BALANCE, epoch), len(shuffled), -(-512 // lanes)
                    places = balanced_window(keyed, *turns, [row for _, row in inside])
                shuffled += [inside[place] for place in places]
        served.append(shuffled)
    return [served[position % lanes][position // lanes] for position in range(len(samples))]


BALANCE = 10


def balanced_window(keyed, turned, begin, together, rows):
    """Which place of a window of packs stands at each of its offsets, which begin at `begin`."""
    bits, count = (len(rows) - 1).bit_length(), range(len(rows))
    turn = [(turned + (begin + at) // together * GAMMA & MASK) >> 32 for at in count]
    drawn = [mix(keyed + at * GAMMA & MASK) >> 32 for at in count]
    share = [(row * GAMMA & MASK) >> bits for row in rows]
    by_turn = sorted(count, key=lambda at: (turn[at] << 32 | drawn[at]) >> bits)
    found = dict(zip(by_turn, sorted(count, key=share.__getitem__), strict=True))
    return [found[at] for at in count]


def numbered(packs, multiple, *, is_padded=False):
    """The packs of a block, balanced, in the order of their numbers."""
    costs = []
    for pack in packs:
        taken = [length for _, _, length, _ in pack]
        if is_padded:
            taken = [padded(max(taken), multiple)] * len(taken)
        costs.append(sum(length**2 for length in taken))
    by_cost = sorted(range(len(packs)), key=costs.__getitem__)
    by_share = sorted(range(len(packs)), key=lambda number: number * GAMMA & MASK)
    found = dict(zip(by_share, by_cost, strict=True))
    return [packs[found[number]] for number in range(len(packs))]


TOMBSTONE = 9


def substitute(seed, shard, row, count, gone):
    """The row of a block of `count` rows that stands for a row of a shard that was taken out;
    `gone` are the rows of the block that were, counted in the block.
    """
    return first_of(key(seed, TOMBSTONE, shard, row), count, set(range(count)) - set(gone))


def first_of(keyed, count, able):
    """The first number below `count` of a key's sequence that is among these."""
    while True:
        found = mix(keyed) % count
        if found in able:
            return found
        keyed = (keyed + GAMMA) & MASK


def skipping(count, cursor, batch, end, skipped=(), size=1, weights_from=0):
    """The positions of each step of `size` ranks from a cursor on, with skipped ranges of positions
    left out, if weights change last at `weights_from`.
    """
    live = [at for at in range(cursor, count) if not any(a <= at < b for a, b in skipped)]
    steps = [live[at : at + batch] for at in range(0, len(live), batch)]
    fixed = sum(at < weights_from for at in live)
    is_short = len(steps) > 1 and len(steps[-1]) < size
    if end == "ragged" and is_short and fixed <= (len(steps) - 2) * batch:
        steps[-2:] = [steps[-2] + steps[-1]]
    if end == "drop" and steps and len(steps[-1]) < batch:
        del steps[-1]
    if end == "pad" and steps:
        steps[-1] += range(count, count + batch - len(steps[-1]))
    return steps


PACK = 8


def packs(lengths, size, keyed, *, policy="best_fit", long="fragment", multiple=1, most=None):
    """The packs of a block, each a list of pieces: (row, first token, tokens, place in the pack)."""
    order = permutation(keyed, len(lengths)) if keyed is not None else range(len(lengths))
    kept, most = packed_tokens(lengths, size, long), most or max(8, size // 8)
    if policy == "wrap":
        return wrapped(kept, size, order, multiple)
    found = [[(row, part * size, size, 0)] for row in order for part in range(kept[row] // size)]
    if policy == "pad":
        return found + padded_batches(kept, size, order, multiple, most)
    room, used, since = {}, {}, {}
    for row in sorted(order, key=lambda row: -padded(kept[row] % size, multiple)):
        rest = kept[row] % size
        taken = padded(rest, multiple)
        if not rest:
            continue
        able = [pack for pack in room if room[pack] >= taken and used[pack] < most]
        pack = min(able, key=lambda pack: (room[pack], since[pack]), default=len(found))
        if pack == len(found):
            found.append([])
            room[pack], used[pack] = size, 0
        found[pack].append((row, kept[row] - rest, rest, size - room[pack]))
        room[pack] -= taken
        used[pack] += 1
        since[pack] = sum(used.values())
    return found


def packed_tokens(lengths, size, long):
    """How many tokens of each document are packed."""
    if long == "truncate":
        return [min(length, size) for length in lengths]
    if long == "drop":
        return [length if length <= size else 0 for length in lengths]
    return list(lengths)


def without(made, kept, gone, multiple, policy):
    """Packs without some documents, `gone`: {row: key}; `kept` are the tokens that are packed of
    each document of the block.
    """
    left = {row: tokens for row, tokens in enumerate(kept) if tokens and row not in gone}
    other = {}
    for row in gone:
        if kept[row]:
            least = min(kept[row], max(left.values()))
            able = {one for one, tokens in left.items() if tokens >= least}
            other[row] = first_of(gone[row], len(kept), able)
    found = []
    for pack in made:
        changed = []
        for row, begin, tokens, place in pack:
            now = other.get(row, row)
            if kept[now] >= kept[row]:
                changed.append((now, begin, tokens, place))
            else:
                changed.append((now, 0, min(tokens, kept[now]), place))
        if policy == "pad":
            width = max(padded(tokens, multiple) for _, _, tokens, _ in changed)
            changed = [(*each[:3], at * width) for at, each in enumerate(changed)]
        found.append(changed)
    return found


def padded(length, multiple):
    return -(-length // multiple) * multiple


def padded_batches(kept, size, order, multiple, most):
    def width(row):
        return padded(kept[row] % size, multiple)

    found, left = (
        [],
        sorted((row for row in order if kept[row] % size), key=lambda row: -width(row)),
    )
    while left:
        rows = left[: min(size // width(left[0]), most)]
        pieces = enumerate((row, kept[row] % size) for row in rows)
        found.append([(row, kept[row] - n, n, at * width(rows[0])) for at, (row, n) in pieces])
        left = left[len(rows) :]
    return found


def wrapped(kept, size, order, multiple):
    tokens = [
        (row, token if token < kept[row] else None)
        for row in order
        for token in range(padded(kept[row], multiple))
    ]
    found = []
    for start in range(0, len(tokens) - size + 1, size):
        pieces = {}
        for place, (row, token) in enumerate(tokens[start : start + size]):
            first = pieces.setdefault(row, [token, 0, place])
            first[1] += token is not None
        found.append([(row, *piece) for row, piece in pieces.items()])
    return found


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


def steps(served, shard_blocks, batch, end, cursor=0, size=1):
    """The (shard, row in the shard) of each step of `size` ranks from the cursor on, of the (block,
    row) `served` at each position, for shards that have blocks of so many rows.
    """
    names = []
    for shard, blocks in enumerate(shard_blocks):
        for at, rows in enumerate(blocks):
            names.append([(shard, sum(blocks[:at]) + row) for row in range(rows)])
    found = skipping(len(served), cursor, batch, end, (), size)
    rows = [[served[position % len(served)] for position in step] for step in found]
    return [[names[block][row] for block, row in step] for step in rows]


def tree(shares):
    """(weight, number, left, right) of the root; leaves have no children."""
    nodes = [(share, source, None, None) for source, share in enumerate(shares) if share]
    number = len(shares)
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[:2])
        small, large, *nodes = nodes
        both = (small, large) if small[0] == large[0] else (large, small)
        nodes.append((small[0] + large[0], number, *both))
        number += 1
    return nodes[0]


def counts(node, slots):
    """{source: how many of the first slots it has}."""
    weight, number, left, right = node
    if left is None:
        return {number: slots}
    mine = -(-slots * left[0] // weight)
    return counts(left, mine) | counts(right, slots - mine)


def segment(seed, sizes, shares, steps, lanes, batch, round_steps, number, base):
    """(source, sample) at every position of a segment whose first round has this number."""
    served, whole = [], tree(shares)
    for begin in range(0, steps, round_steps):
        length = min(round_steps, steps - begin)
        before, after = counts(whole, begin), counts(whole, begin + length)
        slots = [
            (source, index)
            for source in sorted(before)
            for index in range(before[source], after[source])
        ]
        places = permutation(key(seed, ROUND, number), length)
        ranks = permutation(key(seed, ROUND_LANES, number), lanes)
        for place in places:
            for lane, rank in enumerate(ranks):
                source, index = slots[(place + rank * length // lanes) % length]
                slot = index * lanes + (lane - sum(sizes[:source])) % lanes
                served += [(source, base[source] + slot * batch + one) for one in range(batch)]
        number += 1
    return served


def dealt(left, base):
    """(source, sample) at every position of a tail."""
    by_left = sorted(range(len(left)), key=lambda source: (-left[source], source))
    turns = range(max(left))
    return [(at, base[at] + turn) for turn in turns for at in by_left if left[at] > turn]


def mixture(
    seed, sizes, shares, passes, lanes, exhausted, length=0, batch=1, round_steps=1024, epoch=0,
    changes=(),
):  # fmt: skip
    """(source, sample) at every position of an epoch. `changes`: (epoch, position, shares)."""
    base, number = [0] * len(sizes), 0
    most = [size * times or 2**62 for size, times in zip(sizes, passes, strict=True)]
    deals = exhausted == "renormalise" and not length
    for each in range(epoch + 1):
        served, used = [], [0] * len(sizes)
        pending = [change[1:] for change in changes if change[0] == each]
        while pending and pending[0][0] == 0:
            shares, *pending = [pending[0][1], *pending[1:]]
        for width in [lanes] if deals or batch > 1 else [lanes, 1]:
            unit = width * batch
            while True:
                now = [share * (limit - mine >= unit)
                       for share, limit, mine in zip(shares, most, used, strict=True)]  # fmt: skip
                if not any(now) or (exhausted == "stop" and now != list(shares)):
                    break
                whole, steps, why = tree(now), 0, ""
                while not why:
                    pending = pending if pending and pending[0][1] != shares else pending[1:]
                    at, has = len(served) + steps * unit, counts(whole, steps)
                    then = counts(whole, steps + 1)
                    is_whole = all(
                        used[one] + has[one] * unit >= min(sizes[one], most[one]) for one in has
                    )
                    if pending and at >= pending[0][0] and steps % round_steps == 0:
                        why = "change"
                    elif at + unit > length if length else exhausted == "cycle" and is_whole:
                        why = "end"
                    elif any(used[one] + then[one] * unit > most[one] for one in has):
                        why = "exhausted"
                    else:
                        steps += 1
                start = [a + b for a, b in zip(base, used, strict=True)]
                served += segment(seed, sizes, now, steps, width, batch, round_steps, number, start)
                number += -(-steps // round_steps)
                for one, count in counts(whole, steps).items():
                    used[one] += count * unit
                if why == "change":
                    shares, *pending = [pending[0][1], *pending[1:]]
                elif why == "end":
                    break
        if deals and batch == 1:
            left = [(limit - mine) * (share > 0)
                    for share, limit, mine in zip(shares, most, used, strict=True)]  # fmt: skip
            start = [a + b for a, b in zip(base, used, strict=True)]
            served += dealt(left, start)
            used = [a + b for a, b in zip(used, left, strict=True)]
        base = [a + b for a, b in zip(base, used, strict=True)]
        shares = pending[-1][1] if pending else shares
    return served
