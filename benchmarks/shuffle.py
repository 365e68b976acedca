"""How well do the default lanes and window shuffle, and what do they cost? A table of datasets.

    python benchmarks/shuffle.py [--batches N] [--json]

Each dataset is sorted by label: 100 labels, equally frequent. `entropy` is that of the labels of a
batch of 256, as a share of what a permutation of all samples has: after the first epoch, and in
epoch 0, whose first windows are short, in all of it and in its first ten batches. `reads` is what
one host reads of the dataset in an epoch, times the number of hosts: 1 if each block is read by one
host. Batches are sampled, so the size of a dataset does not matter. Exit status 1 says that a bar
was missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.order import Order

Int64 = NDArray[np.int64]

GLOBAL_BATCH = 256
LABELS = 100
RANKS_PER_HOST = 8
HOSTS = (8, 64)
READS_MAX = 1.15
_SEED = 7
_DRAWS = 400
_FIRST_BATCHES = 10


@dataclass(frozen=True, slots=True)
class Shape:
    """A dataset of equal blocks, and the least entropy that a batch should have."""

    name: str
    blocks: int
    rows: int
    sample_bytes: int
    entropy_min: float = 0.95

    @property
    def samples(self) -> int:
        return self.blocks * self.rows

    @property
    def dataset_bytes(self) -> int:
        return self.samples * self.sample_bytes


SHAPES = (
    Shape("200 k x 12 B", 50, 4000, 12),
    Shape("50 k x 4 KiB, groups of 1,000", 50, 1000, 4096),
    Shape("100 k x 4 KiB, groups of 1,000", 100, 1000, 4096, 0.85),
    Shape("5 M x 4 KiB, groups of 500", 10_000, 500, 4096),
    Shape("5 M x 4 KiB, groups of 5,000", 1000, 5000, 4096),
    Shape("1.28 M x 110 KB, blocks of 4 MiB", 33_684, 38, 110_000),
    Shape("1.28 M x 110 KB, blocks of 16 MiB", 8421, 152, 110_000),
    Shape("1.28 M x 110 KB, blocks of 64 MiB", 2098, 610, 110_000),
    Shape("1.28 M x 110 KB, groups of 1,000", 1280, 1000, 110_000, 0.85),
    Shape("10^9 x 8 KiB, blocks of 8 MiB", 976_562, 1024, 8192),
    Shape("10^9 x 8 KiB, blocks of 64 MiB", 122_070, 8192, 8192),
    Shape("10^10 x 1 KiB, blocks of 4 MiB", 2_500_000, 4000, 1024),
)


@dataclass(frozen=True, slots=True)
class ShuffleFigures:
    """One row of the table. `first_bytes` are the blocks of the first batch of epoch 0, and
    `entropy_first` is that of its first ten batches.
    """

    name: str
    lanes: int
    window: int
    ramp: int
    entropy: float
    entropy_of_epoch_0: float
    entropy_first: float
    blocks: float
    first_bytes: int
    open_bytes: int
    reads: tuple[float, ...]
    missed: tuple[str, ...]


def entropy_of(labels: Int64) -> float:
    """In bits."""
    share = np.bincount(labels, minlength=LABELS) / len(labels)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def full_entropy(samples: int) -> float:
    """Of a batch of a permutation of all samples, on average."""
    random = np.random.default_rng(_SEED)
    drawn = random.integers(0, samples, (_DRAWS, GLOBAL_BATCH))
    return float(np.mean([entropy_of(batch * LABELS // samples) for batch in drawn]))


def batch_of(order: Order, start: int) -> tuple[Int64, Int64]:
    """The blocks and the rows of a batch."""
    return order.locate(np.arange(start, start + GLOBAL_BATCH, dtype=np.int64))


def mixing_of(shape: Shape, order: Order, starts: Int64) -> tuple[float, float]:
    """The entropy of the labels of batches, in bits, and how many blocks each comes from, on
    average. Shapes:  starts: int64[n], the first position of each.
    """
    found = []
    for start in starts.tolist():
        block, row = batch_of(order, start)
        labels = (block * shape.rows + row) * LABELS // shape.samples
        found.append((entropy_of(labels), len(np.unique(block))))
    entropy, blocks = np.mean(found, axis=0).tolist()
    return entropy, blocks


def reads_of(order: Order, hosts: int) -> float:
    """What a host reads, as a multiple of its share of the dataset, on average."""
    ranks = hosts * RANKS_PER_HOST
    meeting = math.gcd(order.lanes, ranks)
    # Lane l and rank r meet where they are equal modulo `meeting`.
    served = np.zeros((hosts, meeting), np.bool_)
    rank = np.arange(ranks)
    served[rank // RANKS_PER_HOST, rank % meeting] = True
    first, last = order.block_lanes(np.arange(order.block_count))
    spans, counts = np.unique(
        np.stack([first % meeting, np.minimum(last - first, meeting - 1)]),
        axis=1, return_counts=True,
    )  # fmt: skip
    read = [
        served[:, np.arange(start, start + more + 1) % meeting].any(axis=1).sum()
        for start, more in spans.T.tolist()
    ]
    return float(np.dot(read, counts) / order.block_count)


def figures(shape: Shape, batches: int) -> ShuffleFigures:
    rows = np.full(shape.blocks, shape.rows)
    sizes = BlockSizes.of(rows, rows * shape.sample_bytes)
    shuffle = shuffle_of(sizes)
    order, begin = (
        Order(rows, _SEED, True, shuffle.lanes, shuffle.window, epoch, shuffle.ramp)
        for epoch in (1, 0)
    )
    random = np.random.default_rng(_SEED)
    starts = random.integers(0, shape.samples - GLOBAL_BATCH, batches)
    full = full_entropy(shape.samples)
    entropy, blocks = mixing_of(shape, order, starts)
    entropy /= full
    # The ramp is at the start of epoch 0, so its batches are taken evenly over the epoch.
    evenly = ((np.arange(batches) + 0.5) / batches * (shape.samples - GLOBAL_BATCH)).astype(int)
    first = np.arange(_FIRST_BATCHES) * GLOBAL_BATCH
    epoch_0, at_first = (mixing_of(shape, begin, each)[0] / full for each in (evenly, first))
    reads = tuple(reads_of(order, hosts) for hosts in HOSTS)
    missed = [f"entropy {entropy:.3f} < {shape.entropy_min}"] * (entropy < shape.entropy_min)
    for each, hosts, large in zip(reads, HOSTS, (100e9, 2e12), strict=True):
        if shape.dataset_bytes > large and each > READS_MAX:
            missed.append(f"{hosts} hosts read {each:.2f} > {READS_MAX}")
    return ShuffleFigures(
        shape.name,
        shuffle.lanes,
        shuffle.window,
        shuffle.ramp,
        entropy,
        epoch_0,
        at_first,
        blocks,
        len(np.unique(batch_of(begin, 0)[0])) * shape.rows * shape.sample_bytes,
        shuffle.lanes * sizes.open_window_bytes(shuffle.window),
        reads,
        tuple(missed),
    )


def row_of(found: ShuffleFigures) -> str:
    """As docs/order.md has it."""
    cells = (
        found.name,
        f"{found.lanes:,}",
        f"{found.window:,}",
        f"{found.ramp}",
        f"{found.entropy:.1%}",
        f"{found.entropy_of_epoch_0:.1%}",
        f"{found.entropy_first:.1%}",
        f"{found.blocks:.0f}",
        f"{found.open_bytes / (1 << 30):.2f}",
        f"{found.first_bytes / (1 << 30):.2f}",
        *(f"{each:.2f}" for each in found.reads),
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = []
    for shape in SHAPES:
        found.append(figures(shape, asked.batches))
        if not asked.json:
            print(row_of(found[-1]), *found[-1].missed, flush=True)
    if asked.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    return int(any(each.missed for each in found))


if __name__ == "__main__":
    sys.exit(main())
